"""Causal depthwise convolution and silu in one pass.

T tokens of all documents end to end, C channels, W <= 4 taps; token t reads tokens t - W + 1 .. t
of its own document. A program walks over ROWS tokens of CHANNELS channels and keeps the last ones
in registers, so that each element is read and written once. Backward computes c again from x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.launch import INTERPRETING, Kernel, next_power_of_2

ROWS, CHANNELS, AT_ONCE = (8, 32, 4) if INTERPRETING else (64, 512, 4)
WARPS = 4


@triton.jit
def _weights(weight_ptr, cols, known, W: tl.constexpr, BACK: tl.constexpr):
    """What a token ``BACK`` tokens ago counts, fp32; zero beyond the taps."""
    if BACK < W:
        return tl.load(weight_ptr + cols * W + (W - 1 - BACK), mask=known, other=0.0).to(tl.float32)
    return tl.zeros(cols.shape, tl.float32)


@triton.jit
def _row(ptr, row, stride, cols, mask):
    return tl.load(ptr + tl.cast(row, tl.int64) * stride + cols, mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def _younger(age, one, two, three):
    """What of the tokens one, two and three back counts for a token with ``age`` before it."""
    one = tl.where(age >= 1, one, 0.0)
    two = tl.where(age >= 2, two, 0.0)
    return one, two, tl.where(age >= 3, three, 0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _forward(
    x_ptr, weight_ptr, bias_ptr, first_ptr, y_ptr, x_stride, num_tokens,
    C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    begin = tl.program_id(0) // blocks * ROWS
    cols = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    known = cols < C
    w0 = _weights(weight_ptr, cols, known, W, 0)
    w1 = _weights(weight_ptr, cols, known, W, 1)
    w2 = _weights(weight_ptr, cols, known, W, 2)
    w3 = _weights(weight_ptr, cols, known, W, 3)
    bias = tl.zeros((CHANNELS,), tl.float32)
    if BIAS:
        bias += tl.load(bias_ptr + cols, mask=known, other=0.0).to(tl.float32)
    x1 = _row(x_ptr, begin - 1, x_stride, cols, known & (begin >= 1))
    x2 = _row(x_ptr, begin - 2, x_stride, cols, known & (begin >= 2))
    x3 = _row(x_ptr, begin - 3, x_stride, cols, known & (begin >= 3))
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    for start in range(begin, begin + ROWS, AT_ONCE):
        rows, ages = (), ()
        for number in tl.static_range(AT_ONCE):  # loads of several rows are on their way at once
            row = start + number
            is_row = row < num_tokens
            rows = rows + (_row(x_ptr, row, x_stride, cols, known & is_row),)  # noqa: RUF005
            ages = ages + (row - tl.load(first_ptr + row, mask=is_row, other=0),)  # noqa: RUF005
        for number in tl.static_range(AT_ONCE):
            row, age, x0 = start + number, ages[number], rows[number]
            if age < 3:  # a document begins
                x1, x2, x3 = _younger(age, x1, x2, x3)
            c = bias + w0 * x0
            c += w1 * x1
            c += w2 * x2
            c += w3 * x3
            if SILU:
                c = c.to(dtype).to(tl.float32)  # as the plain model rounds between the two
                c *= tl.sigmoid(c)
            at = y_ptr + tl.cast(row, tl.int64) * C + cols
            tl.store(at, c.to(dtype), mask=known & (row < num_tokens))
            x3, x2, x1 = x2, x1, x0


@triton.jit(do_not_specialize=["num_tokens"])
def _backward(
    x_ptr, weight_ptr, bias_ptr, first_ptr, dy_ptr, dx_ptr, partial_ptr,
    x_stride, dy_stride, num_tokens,
    C: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    WANT_DW: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """dx; and of each program the sums for dw (W rows of C) and the bias (one more)."""
    blocks: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    part = tl.program_id(0) // blocks
    begin = part * ROWS
    cols = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    known = cols < C
    w0 = _weights(weight_ptr, cols, known, W, 0)
    w1 = _weights(weight_ptr, cols, known, W, 1)
    w2 = _weights(weight_ptr, cols, known, W, 2)
    w3 = _weights(weight_ptr, cols, known, W, 3)
    none = tl.zeros((CHANNELS,), tl.float32)
    bias = none
    if BIAS:
        bias += tl.load(bias_ptr + cols, mask=known, other=0.0).to(tl.float32)
    x1 = _row(x_ptr, begin - 1, x_stride, cols, known & (begin >= 1))
    x2 = _row(x_ptr, begin - 2, x_stride, cols, known & (begin >= 2))
    x3 = _row(x_ptr, begin - 3, x_stride, cols, known & (begin >= 3))
    d1, d2, d3 = none, none, none  # dx of the tokens before, as far as it is known
    s0, s1, s2, s3, total = none, none, none, none, none
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for start in range(begin, begin + ROWS + 3, AT_ONCE):  # the last three give to those before
        rows, gradients, ages = (), (), ()
        for number in tl.static_range(AT_ONCE):
            row = start + number
            is_row = row < num_tokens
            first = tl.load(first_ptr + row, mask=is_row, other=2147483647)
            rows = rows + (_row(x_ptr, row, x_stride, cols, known & is_row),)  # noqa: RUF005
            dy = _row(dy_ptr, row, dy_stride, cols, known & is_row)
            gradients = gradients + (dy,)  # noqa: RUF005
            ages = ages + (row - first,)  # noqa: RUF005
        for number in tl.static_range(AT_ONCE):
            row, age, x0, dc = start + number, ages[number], rows[number], gradients[number]
            if age < 3:
                x1, x2, x3 = _younger(age, x1, x2, x3)
            if SILU:
                c = bias + w0 * x0
                c += w1 * x1
                c += w2 * x2
                c += w3 * x3
                c = c.to(dtype).to(tl.float32)
                share = tl.sigmoid(c)
                dc *= share * (1.0 + c * (1.0 - share))
            if WANT_DW:  # noqa: SIM102 -- one is a constant
                if start < begin + ROWS:
                    s0 += dc * x0
                    s1 += dc * x1
                    s2 += dc * x2
                    s3 += dc * x3
                    total += dc
            g1, g2, g3 = w1 * dc, w2 * dc, w3 * dc
            if age < 3:
                g1, g2, g3 = _younger(age, g1, g2, g3)
            d1 += g1
            d2 += g2
            d3 += g3
            done = row - 3
            at = dx_ptr + tl.cast(done, tl.int64) * C + cols
            is_own = (done >= begin) & (done < begin + ROWS) & (done < num_tokens)
            tl.store(at, d3.to(dx_ptr.dtype.element_ty), mask=known & is_own)
            d3, d2, d1 = d2, d1, w0 * dc
            x3, x2, x1 = x2, x1, x0
    if WANT_DW:
        to = partial_ptr + part.to(tl.int64) * ((W + 1) * C) + cols
        tl.store(to + (W - 1) * C, s0, mask=known)
        if W > 1:
            tl.store(to + (W - 2) * C, s1, mask=known)
        if W > 2:
            tl.store(to + (W - 3) * C, s2, mask=known)
        if W > 3:
            tl.store(to, s3, mask=known)
        tl.store(to + W * C, total, mask=known)


FORWARD, BACKWARD = Kernel(_forward), Kernel(_backward)


def _grid(num_tokens: int, channels: int) -> tuple[int, int, int]:
    """Parts of the tokens, blocks of the channels, the channels of a block."""
    width = min(CHANNELS, next_power_of_2(channels))
    return -(-num_tokens // ROWS), -(-channels // width), width


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor, silu: bool) -> Tensor:
    num_tokens, channels = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts, blocks, width = _grid(num_tokens, channels)
    FORWARD.launch(
        parts * blocks,
        (x, weight, weight if bias is None else bias, first, y),
        (x.stride(0),),
        (num_tokens,),
        (channels, weight.shape[1], bias is not None, silu, ROWS, width, AT_ONCE),
        WARPS,
    )
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
    num_tokens, channels = x.shape
    taps = weight.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts, blocks, width = _grid(num_tokens, channels)
    partial = torch.empty(
        (parts if want_dw else 1, taps + 1, channels), dtype=torch.float32, device=x.device
    )
    BACKWARD.launch(
        parts * blocks,
        (x, weight, weight if bias is None else bias, first, dy, dx, partial),
        (x.stride(0), dy.stride(0)),
        (num_tokens,),
        (channels, taps, bias is not None, silu, want_dw, ROWS, width, AT_ONCE),
        WARPS,
    )
    if not want_dw:
        return dx, None, None
    sums = partial.sum(0)
    return dx, sums[:taps].T.to(weight.dtype), None if bias is None else sums[taps].to(bias.dtype)
