"""Quantising rows to e4m3, and transposing codes. M rows, K columns of up to three parts.

A program quantises one row: the largest magnitude first, then the codes; the second read comes from
the cache, and a row that fits one block is read once. Magnitudes are compared as the integers that
their bits are, where infinity and NaN are larger than any number and do not get lost.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.fp8.reference import FP8
from trainkit.kernels.launch import INTERPRETING, Kernel, next_power_of_2

MAX_PARTS = 3


@triton.jit
def _read(x_ptr, factor_ptr, cols, WIDTH: tl.constexpr, HAS_FACTOR: tl.constexpr):
    mask = cols < WIDTH
    x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        x = x * tl.load(factor_ptr + cols, mask=mask, other=0.0)
    return x


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _largest(
    best, x_ptr, factor_ptr, WIDTH: tl.constexpr, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr
):
    for start in range(0, WIDTH, BLOCK):
        x = _read(x_ptr, factor_ptr, start + tl.arange(0, BLOCK), WIDTH, HAS_FACTOR)
        best = tl.maximum(best, _magnitude(x))
    return best


@triton.jit
def _write(
    codes_ptr,
    x_ptr,
    factor_ptr,
    inverse,
    WIDTH: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for start in range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = _read(x_ptr, factor_ptr, cols, WIDTH, HAS_FACTOR)
        # Where the row is not finite the inverse is 0, and its scale says so.
        x = tl.where(inverse == 0.0, 0.0, x * inverse)
        tl.store(codes_ptr + cols, x.to(tl.float8e4nv), mask=cols < WIDTH)


@triton.jit
def _scale(largest):
    """(scale, 1 / scale) as powers of two, from the bits of the largest magnitude."""
    # 448 = 1.75 * 2^8: a mantissa above 1.75 carries into the exponent.
    exponent = tl.maximum((largest + 0x1FFFFF) >> 23, 9)
    is_finite = largest < 0x7F800000
    scale = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    inverse = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite, scale, float("nan")), tl.where(is_finite, inverse, 0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    factor0_ptr,
    factor1_ptr,
    factor2_ptr,
    codes_ptr,
    scales_ptr,
    stride0,
    stride1,
    stride2,
    num_rows,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x0_ptr += row * stride0
    x1_ptr += row * stride1
    x2_ptr += row * stride2
    codes_ptr += row * (WIDTH0 + WIDTH1 + WIDTH2)
    cols = tl.arange(0, BLOCK)
    if WIDTH1 == 0 and WIDTH0 <= BLOCK:
        x = _read(x0_ptr, factor0_ptr, cols, WIDTH0, HAS_FACTOR)
        scale, inverse = _scale(tl.max(_magnitude(x), axis=0))
        x = tl.where(inverse == 0.0, 0.0, x * inverse)
        tl.store(codes_ptr + cols, x.to(tl.float8e4nv), mask=cols < WIDTH0)
    else:
        best = tl.zeros([BLOCK], dtype=tl.int32)
        best = _largest(best, x0_ptr, factor0_ptr, WIDTH0, HAS_FACTOR, BLOCK)
        best = _largest(best, x1_ptr, factor1_ptr, WIDTH1, HAS_FACTOR, BLOCK)
        best = _largest(best, x2_ptr, factor2_ptr, WIDTH2, HAS_FACTOR, BLOCK)
        scale, inverse = _scale(tl.max(best, axis=0))
        _write(codes_ptr, x0_ptr, factor0_ptr, inverse, WIDTH0, HAS_FACTOR, BLOCK)
        _write(codes_ptr + WIDTH0, x1_ptr, factor1_ptr, inverse, WIDTH1, HAS_FACTOR, BLOCK)
        _write(codes_ptr + WIDTH0 + WIDTH1, x2_ptr, factor2_ptr, inverse, WIDTH2, HAS_FACTOR, BLOCK)
    tl.store(scales_ptr + row, scale)


@triton.jit(do_not_specialize=["num_rows"])
def _transpose(
    codes_ptr,
    out_ptr,
    out_stride,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    blocks: tl.constexpr = (WIDTH + BLOCK_COLS - 1) // BLOCK_COLS
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    row_mask, col_mask = rows < num_rows, cols < WIDTH
    mask = row_mask[:, None] & col_mask[None, :]
    codes = tl.load(codes_ptr + rows[:, None] * WIDTH + cols[None, :], mask=mask, other=0)
    mask = col_mask[:, None] & row_mask[None, :]
    tl.store(out_ptr + cols[:, None] * out_stride + rows[None, :], tl.trans(codes), mask=mask)


QUANTIZE = Kernel(_quantize)
TRANSPOSE = Kernel(_transpose)


def launch_quantize(
    parts: Sequence[Tensor], factors: Sequence[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """(codes (M, sum of K), scales (M, 1)) of at most three parts (M, K), unit column strides."""
    num_rows = parts[0].shape[0]
    widths = [part.shape[1] for part in parts]
    codes = torch.empty((num_rows, sum(widths)), dtype=FP8, device=parts[0].device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=parts[0].device)
    if not num_rows:
        return codes, scales
    missing = MAX_PARTS - len(parts)
    read = [*parts, *[parts[0]] * missing]
    by = [*(factors or [parts[0]] * len(parts)), *[parts[0]] * missing]
    single = len(parts) == 1 and widths[0] <= 8192
    block = next_power_of_2(widths[0]) if single else 4096
    if INTERPRETING:
        block = next_power_of_2(max(widths))
    QUANTIZE.launch(
        num_rows,
        (*read, *by, codes, scales),
        tuple(part.stride(0) for part in read),
        (num_rows,),
        (*widths, *[0] * missing, factors is not None, block),
        4 if block <= 2048 else 8,
    )
    return codes, scales


def launch_transpose(parts: Sequence[Tensor]) -> Tensor:
    """(K, sum of N) contiguous, of contiguous codes (N, K) each."""
    width = parts[0].shape[1]
    total = sum(part.shape[0] for part in parts)
    out = torch.empty((width, total), dtype=torch.uint8, device=parts[0].device)
    block_rows, block_cols = (256, 256) if INTERPRETING else (128, 64)
    start = 0
    for part in parts:
        num_rows = part.shape[0]
        place = out[:, start : start + num_rows]
        start += num_rows
        programs = -(-num_rows // block_rows) * -(-width // block_cols)
        if programs:
            TRANSPOSE.launch(
                programs,
                (part.view(torch.uint8), place),
                (total,),
                (num_rows,),
                (width, block_rows, block_cols),
                4,
            )
    return out.view(FP8)
