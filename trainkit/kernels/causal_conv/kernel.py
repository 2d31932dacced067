"""Causal depthwise convolution and silu in one pass.

T tokens of all documents end to end, C channels, W taps; token t reads tokens t - W + 1 .. t of its
own document. A program takes a tile of tokens and channels. Backward computes c again from x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.launch import INTERPRETING, device_of, next_power_of_2

TOKENS, CHANNELS = 64, 64


@triton.jit
def _taps(x_ptr, weight_ptr, bias, rows, first, cols, inside, x_stride, W: tl.constexpr):
    """c of the given tokens, fp32; ``first`` is where their documents begin."""
    c = tl.zeros((rows.shape[0], cols.shape[0]), tl.float32) + bias[None, :]
    for tap in tl.static_range(W):
        back = rows - tap
        mask = (back >= first)[:, None] & inside
        at = x_ptr + back.to(tl.int64)[:, None] * x_stride + cols[None, :]
        weight = tl.load(weight_ptr + cols * W + (W - 1 - tap), mask=cols >= 0).to(tl.float32)
        c += weight[None, :] * tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return c


@triton.jit
def _forward(
    x_ptr, weight_ptr, bias_ptr, first_ptr, y_ptr, x_stride, num_tokens,
    C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    rows = tl.program_id(0) // blocks * TOKENS + tl.arange(0, TOKENS)
    cols = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    inside = (rows < num_tokens)[:, None] & (cols < C)[None, :]
    cols = tl.minimum(cols, C - 1)
    first = tl.load(first_ptr + rows, mask=rows < num_tokens, other=0)
    bias = tl.load(bias_ptr + cols).to(tl.float32) if BIAS else tl.zeros((CHANNELS,), tl.float32)
    c = _taps(x_ptr, weight_ptr, bias, rows, first, cols, inside, x_stride, W)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if SILU:
        c = c.to(dtype).to(tl.float32)  # as the plain model rounds between the two
        c *= tl.sigmoid(c)
    at = y_ptr + rows.to(tl.int64)[:, None] * C + cols[None, :]
    tl.store(at, c.to(dtype), mask=inside)


@triton.jit
def _slope(c, dtype: tl.constexpr, SILU: tl.constexpr):
    if SILU:
        c = c.to(dtype).to(tl.float32)
        share = tl.sigmoid(c)
        return share * (1.0 + c * (1.0 - share))
    return tl.full(c.shape, 1.0, tl.float32)


@triton.jit
def _backward(
    x_ptr, weight_ptr, bias_ptr, first_ptr, dy_ptr, dx_ptr, partial_ptr,
    x_stride, dy_stride, num_tokens,
    C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    WANT_DW: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx; and of each tile the sums for dw (W rows of C) and the bias (one more)."""
    blocks: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    tile = tl.program_id(0) // blocks
    rows = tile * TOKENS + tl.arange(0, TOKENS)
    cols = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    known = cols < C
    cols = tl.minimum(cols, C - 1)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    bias = tl.load(bias_ptr + cols).to(tl.float32) if BIAS else tl.zeros((CHANNELS,), tl.float32)
    dx = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(W):
        later = rows + tap
        # A later token reads this one if its document began no later than here.
        first = tl.load(first_ptr + later, mask=later < num_tokens, other=2147483647)
        inside = (first <= rows)[:, None] & known[None, :]
        c = _taps(x_ptr, weight_ptr, bias, later, first, cols, inside, x_stride, W)
        at = dy_ptr + later.to(tl.int64)[:, None] * dy_stride + cols[None, :]
        dc = tl.load(at, mask=inside, other=0.0).to(tl.float32) * _slope(c, dtype, SILU)
        weight = tl.load(weight_ptr + cols * W + (W - 1 - tap)).to(tl.float32)
        dx += weight[None, :] * dc
        if WANT_DW and tap == 0:
            to = partial_ptr + tile.to(tl.int64) * ((W + 1) * C) + cols
            for number in tl.static_range(W):
                back = rows - number
                mask = (back >= first)[:, None] & inside
                at = x_ptr + back.to(tl.int64)[:, None] * x_stride + cols[None, :]
                x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                tl.store(to + (W - 1 - number) * C, tl.sum(dc * x, axis=0), mask=known)
            tl.store(to + W * C, tl.sum(dc, axis=0), mask=known)
    inside = (rows < num_tokens)[:, None] & known[None, :]
    at = dx_ptr + rows.to(tl.int64)[:, None] * C + cols[None, :]
    tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def _tile() -> tuple[int, int]:
    return (16, 32) if INTERPRETING else (TOKENS, CHANNELS)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor, silu: bool) -> Tensor:
    """y (T, C)."""
    num_tokens, channels = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, width = _tile()
    width = min(width, next_power_of_2(channels))
    with device_of(x):
        _forward[(-(-num_tokens // tokens) * -(-channels // width),)](
            x, weight, weight if bias is None else bias, first, y, x.stride(0), num_tokens,
            channels, weight.shape[1], bias is not None, silu, tokens, width, num_warps=4,
        )  # fmt: skip
    return y


def backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    first: Tensor,
    dy: Tensor,
    silu: bool,
    want_dw: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx, dweight, dbias."""
    num_tokens, channels = x.shape
    taps = weight.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, width = _tile()
    width = min(width, next_power_of_2(channels))
    tiles = -(-num_tokens // tokens)
    partial = torch.empty(
        (tiles if want_dw else 1, taps + 1, channels), dtype=torch.float32, device=x.device
    )
    with device_of(x):
        _backward[(tiles * -(-channels // width),)](
            x, weight, weight if bias is None else bias, first, dy, dx, partial,
            x.stride(0), dy.stride(0), num_tokens,
            channels, taps, bias is not None, silu, want_dw, tokens, width, num_warps=4,
        )  # fmt: skip
    if not want_dw:
        return dx, None, None
    sums = partial.sum(0)
    return dx, sums[:taps].T.to(weight.dtype), None if bias is None else sums[taps].to(bias.dtype)
