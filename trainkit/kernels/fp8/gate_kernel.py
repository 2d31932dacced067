"""The gate of a feed-forward block whose result and gradients leave it in e4m3. M rows, F columns.

A program holds a row in registers: its scale is known only when all of it is. So h and the
gradients of gate and up are never in memory in 16 bits. Operands
are in bf16; bytes a perfect kernel moves: forward 5 MF, backward 9 MF.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.fp8.kernel import _codes, _magnitude, _scale
from trainkit.kernels.fp8.reference import FP8
from trainkit.kernels.launch import INTERPRETING, Kernel, next_power_of_2, remembered
from trainkit.kernels.swiglu.kernel import _PLAIN, _gelu_argument, _quick_sigmoid

MAX_WIDTH = 32768
"""Columns, padded, that a program holds."""


@triton.jit
def _share(gate, TANH_GELU: tl.constexpr):
    """What the activation multiplies its input by."""
    return _quick_sigmoid(_gelu_argument(gate) if TANH_GELU else gate)


@triton.jit
def _read(ptr, cols, WIDTH: tl.constexpr):
    # Read once: it may leave the cache, where the factors stay.
    x = tl.load(ptr + cols, mask=cols < WIDTH, other=0.0, eviction_policy="evict_first")
    return x.to(tl.float32)


@triton.jit
def _gated(gate, up, share):
    """h in fp32, rounded to bf16 where Hugging Face's modules round."""
    activated = (gate * share).to(tl.bfloat16).to(tl.float32)
    return (activated * up).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _forward_piece(gate_ptr, up_ptr, cols, WIDTH: tl.constexpr, TANH_GELU: tl.constexpr):
    gate, up = _read(gate_ptr, cols, WIDTH), _read(up_ptr, cols, WIDTH)
    return _gated(gate, up, _share(gate, TANH_GELU))


@triton.jit
def _put_codes(ptr, x, inverse, cols, WIDTH: tl.constexpr):
    tl.store(ptr + cols, _codes(x, inverse), mask=cols < WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_rows(
    gate_ptr,
    up_ptr,
    codes_ptr,
    scales_ptr,
    gate_stride,
    up_stride,
    num_rows,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    BLOCK0: tl.constexpr,
    BLOCK1: tl.constexpr,
    TANH_GELU: tl.constexpr,
):
    """Codes (M, F) of h and their scales (M,)."""
    row = tl.program_id(0).to(tl.int64)
    gate_ptr += row * gate_stride
    up_ptr += row * up_stride
    codes_ptr += row * (WIDTH0 + WIDTH1)
    cols0, cols1 = tl.arange(0, BLOCK0), tl.arange(0, BLOCK1)
    h0 = _forward_piece(gate_ptr, up_ptr, cols0, WIDTH0, TANH_GELU)
    largest = tl.max(_magnitude(h0), axis=0)
    if WIDTH1 > 0:
        h1 = _forward_piece(gate_ptr + WIDTH0, up_ptr + WIDTH0, cols1, WIDTH1, TANH_GELU)
        largest = tl.maximum(largest, tl.max(_magnitude(h1), axis=0))
    scale, inverse = _scale(largest, True)
    tl.store(scales_ptr + row, scale)
    _put_codes(codes_ptr, h0, inverse, cols0, WIDTH0)
    if WIDTH1 > 0:
        _put_codes(codes_ptr + WIDTH0, h1, inverse, cols1, WIDTH1)


@triton.jit
def _pair(high, low):
    """Two numbers, rounded to bf16, in one register."""
    if _PLAIN:
        high = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        low = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return high | low
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _high(pair):
    return ((pair >> 16) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _low(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _times(x, factor_ptr, cols, WIDTH: tl.constexpr):
    return x * tl.load(factor_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _backward_piece(
    gate_ptr,
    up_ptr,
    dh_ptr,
    factor_gate_ptr,
    factor_up_ptr,
    h_codes_ptr,
    h_inverse,
    cols,
    WIDTH: tl.constexpr,
    TANH_GELU: tl.constexpr,
):
    """dgate and dup times their factors, rounded, as a pair; the codes of h are written.

    The factors are powers of two, so it does not matter that they come before the rounding.
    """
    gate = _read(gate_ptr, cols, WIDTH)
    up = _read(up_ptr, cols, WIDTH)
    dh = _read(dh_ptr, cols, WIDTH)
    share = _share(gate, TANH_GELU)
    _put_codes(h_codes_ptr, _gated(gate, up, share), h_inverse, cols, WIDTH)
    rest = 1.0 - share
    if TANH_GELU:
        rest *= 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * gate * gate)
    activated = gate * share
    slope = tl.fma(activated, rest, share)
    dgate = _times(dh * up * slope, factor_gate_ptr, cols, WIDTH)
    return _pair(dgate, _times(dh * activated, factor_up_ptr, cols, WIDTH))


@triton.jit
def _largest_of(pair):
    return tl.max(tl.maximum(_magnitude(_high(pair)), _magnitude(_low(pair))), axis=0)


@triton.jit
def _put_pair(codes_ptr, pair, inverse, cols, total, WIDTH: tl.constexpr):
    _put_codes(codes_ptr, _high(pair), inverse, cols, WIDTH)
    _put_codes(codes_ptr + total, _low(pair), inverse, cols, WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_rows_back(
    gate_ptr,
    up_ptr,
    dh_ptr,
    factor_gate_ptr,
    factor_up_ptr,
    h_scales_ptr,
    codes_ptr,
    scales_ptr,
    h_codes_ptr,
    gate_stride,
    up_stride,
    dh_stride,
    num_rows,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    BLOCK0: tl.constexpr,
    BLOCK1: tl.constexpr,
    TANH_GELU: tl.constexpr,
):
    """Codes (M, 2F) and scales (M,) of [dgate, dup] times their factors; codes of h (M, F)."""
    total: tl.constexpr = WIDTH0 + WIDTH1
    row = tl.program_id(0).to(tl.int64)
    gate_ptr += row * gate_stride
    up_ptr += row * up_stride
    dh_ptr += row * dh_stride
    h_codes_ptr += row * total
    codes_ptr += row * (2 * total)
    h_scale = tl.load(h_scales_ptr + row)
    # NaN where h had a number that is none, and codes of 0, as the forward pass has them.
    h_inverse = tl.where(h_scale == h_scale, tl.div_rn(1.0, h_scale), 0.0)
    cols0, cols1 = tl.arange(0, BLOCK0), tl.arange(0, BLOCK1)
    pair0 = _backward_piece(
        gate_ptr,
        up_ptr,
        dh_ptr,
        factor_gate_ptr,
        factor_up_ptr,
        h_codes_ptr,
        h_inverse,
        cols0,
        WIDTH0,
        TANH_GELU,
    )
    largest = _largest_of(pair0)
    if WIDTH1 > 0:
        pair1 = _backward_piece(
            gate_ptr + WIDTH0,
            up_ptr + WIDTH0,
            dh_ptr + WIDTH0,
            factor_gate_ptr + WIDTH0,
            factor_up_ptr + WIDTH0,
            h_codes_ptr + WIDTH0,
            h_inverse,
            cols1,
            WIDTH1,
            TANH_GELU,
        )
        largest = tl.maximum(largest, _largest_of(pair1))
    scale, inverse = _scale(largest, False)
    tl.store(scales_ptr + row, scale)
    _put_pair(codes_ptr, pair0, inverse, cols0, total, WIDTH0)
    if WIDTH1 > 0:
        _put_pair(codes_ptr + WIDTH0, pair1, inverse, cols1, total, WIDTH1)


GATE_ROWS = Kernel(_gate_rows)
GATE_ROWS_BACK = Kernel(_gate_rows_back)


@remembered
def pieces(width: int) -> tuple[int, int, int, int]:
    """(WIDTH0, WIDTH1, BLOCK0, BLOCK1): a row whole, or in two pieces that idle fewer lanes."""
    padded = next_power_of_2(width)
    if width >= padded * 7 // 8 or padded < 2048:
        return width, 0, padded, 1
    half = padded // 2
    return half, width - half, half, next_power_of_2(width - half)


def _warps(width: int, most: int) -> int:
    return max(4, min(most, next_power_of_2(width) // 1024))


def launch_gate(gate: Tensor, up: Tensor, tanh_gelu: bool) -> tuple[Tensor, Tensor]:
    """(codes (M, F), scales (M, 1)) of h, of gate and up (M, F) with unit column strides."""
    num_rows, width = gate.shape
    codes = torch.empty((num_rows, width), dtype=FP8, device=gate.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=gate.device)
    if num_rows:
        GATE_ROWS.launch(
            num_rows,
            (gate, up, codes, scales),
            (gate.stride(0), up.stride(0)),
            (num_rows,),
            (*pieces(width), tanh_gelu),
            4 if INTERPRETING else _warps(width, 16),
        )
    return codes, scales


def launch_gate_back(
    gate: Tensor,
    up: Tensor,
    dh: Tensor,
    factors: Sequence[Tensor],
    h_scales: Tensor,
    tanh_gelu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes (M, 2F), scales (M, 1), codes of h (M, F)); factors (F,) of gate and up."""
    num_rows, width = gate.shape
    codes = torch.empty((num_rows, 2 * width), dtype=FP8, device=gate.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=gate.device)
    h_codes = torch.empty((num_rows, width), dtype=FP8, device=gate.device)
    if num_rows:
        GATE_ROWS_BACK.launch(
            num_rows,
            (gate, up, dh, *factors, h_scales, codes, scales, h_codes),
            (gate.stride(0), up.stride(0), dh.stride(0)),
            (num_rows,),
            (*pieces(width), tanh_gelu),
            4 if INTERPRETING else _warps(width, 32),
        )
    return codes, scales, h_codes
