"""AdamW on 16-bit weights with moments in 8 bits, or in fp32. N numbers, 256 to a scale.

Bytes a perfect step moves for each number: weight, gradient and two codes read, 6; weight and codes
written, 4. In fp32 nothing is kept but in registers. What is decided on the device, the clip factor
and the verdict that holds a step back, is read from memory, so the host waits for nothing.

Codes are computed, not looked up: of 256 values in a table each thread would fetch its own. In a
decade that ends at S the values lie at S (0.1 + 0.9 (j + 0.5) / n), j below n = 2**d, and their
numbers follow one another through all decades: k = n + j. So d and j are the exponent and the
mantissa of k. Below the first of a decade the last of the one below is nearer up to 0.2 steps past
the boundary: there a step is a fifth as wide.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.adamw_8bit.reference import GROUP, SMALLEST_SCALE
from trainkit.kernels.launch import Kernel

ROWS, WARPS = 4, 4
"""Eight numbers a thread: 16 bytes of weights and of gradients each."""

SMALLEST = tl.constexpr(SMALLEST_SCALE)
_LOG2_10 = tl.constexpr(3.321928094887362)


@triton.jit
def _decode(codes, SIGNED: tl.constexpr):
    TOP: tl.constexpr = 6 if SIGNED else 7  # exponent of the k of the last decade
    whole = codes.to(tl.int32)
    number = tl.abs(whole - 127) if SIGNED else whole + 1
    bits = (number.to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
    decade = (bits >> 23) - (127 + TOP)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    value = (0.9 * mantissa - 0.8) * tl.exp2(decade.to(tl.float32) * _LOG2_10)
    value = tl.where(decade > 0, 1.0, value)
    value = tl.where(number < (1 if SIGNED else 2), 0.0, value)
    return tl.where(whole < 127, -value, value) if SIGNED else value


@triton.jit
def _encode(x, scale, SIGNED: tl.constexpr):
    """The codes that are nearest to x / scale; none but that of 0 is 0 without a sign."""
    TOP: tl.constexpr = 6 if SIGNED else 7
    FIRST: tl.constexpr = 0 if SIGNED else 1  # the exponent in the first decade
    SIZE: tl.constexpr = 0.9 * 10.0 ** (FIRST - TOP) / 2**FIRST  # of a step there
    share = tl.abs(x) * tl.where(scale > SMALLEST, 1 / scale, 0.0)
    per_share = tl.full(share.shape, 1 / SIZE, tl.float32)
    steps = tl.full(share.shape, 2**FIRST, tl.float32)
    for decade in tl.static_range(FIRST + 1, TOP + 1):
        # A step is 5 times as wide as in the decade below.
        is_above = share >= 10.0 ** (decade - TOP - 1) + 0.2 * SIZE * 5.0 ** (decade - FIRST)
        per_share = tl.where(is_above, 1 / (SIZE * 5.0 ** (decade - FIRST)), per_share)
        steps = tl.where(is_above, 2.0**decade, steps)
    place = tl.minimum(share * per_share + steps * (8 / 9), 2 * steps - 0.5)
    # Rounded to the nearest integer, half a step lower, by the addition: it has no bits below 1.
    number = (place + 8388607.5).to(tl.int32, bitcast=True) & 0xFF
    number = tl.where(share > 1 - 0.225 * 2.0**-TOP, 2 << TOP, number)
    if SIGNED:
        number = tl.where(share < 0.5 * 0.55e-6, 0, number)
        return tl.where(x < 0, 127 - tl.minimum(number, 127), 127 + number)
    return tl.where(share > 0, tl.maximum(number, 2) - 1, 0)


@triton.jit
def _noise(seed, row, ROWS: tl.constexpr):
    """(ROWS, 256) of 16 bits each: a call of Philox gives eight."""
    counter = row * 32 + tl.arange(0, 32)[None, :]
    a, b, c, d = tl.randint4x(seed, counter)
    words = tl.join(tl.join(a, c), tl.join(b, d)).to(tl.uint32)
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (ROWS, 256))


@triton.jit(
    do_not_specialize=[
        "numel", "low", "high", "keep", "step_size", "root_scale", "eps", "new_first",
        "old_second", "new_second",
    ]
)  # fmt: skip
def _step(
    weight_ptr,
    gradient_ptr,
    first_ptr,
    second_ptr,
    first_scale_ptr,
    second_scale_ptr,
    factor_ptr,
    held_ptr,
    numel,
    low,
    high,
    keep,
    step_size,
    root_scale,
    eps,
    new_first,
    old_second,
    new_second,
    QUANTIZED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    at = row.to(tl.int64) * 256 + tl.arange(0, 256)[None, :]
    mask = (at < numel) | IS_WHOLE
    held = tl.load(held_ptr).to(tl.float32) != 0
    taken = mask & (held == 0)
    has_row = (row * 256 < numel) | IS_WHOLE
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gradient_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if QUANTIZED:
        first_scale = tl.load(first_scale_ptr + row, mask=has_row, other=0.0)
        second_scale = tl.load(second_scale_ptr + row, mask=has_row, other=0.0)
        first = tl.load(first_ptr + at, mask=mask, other=127)
        second = tl.load(second_ptr + at, mask=mask, other=0)
        first = _decode(first, True) * first_scale
        second = _decode(second, False) * second_scale
    else:
        first = tl.load(first_ptr + at, mask=mask, other=0.0)
        second = tl.load(second_ptr + at, mask=mask, other=0.0)

    g *= tl.load(factor_ptr)
    first += (g - first) * new_first
    second = second * old_second + g * g * new_second
    weight = weight * keep - step_size * first / (tl.sqrt(second) * root_scale + eps)

    if weight_ptr.dtype.element_ty == tl.bfloat16:
        bits = weight.to(tl.uint32, bitcast=True)
        is_finite = (bits & 0x7F800000) != 0x7F800000
        seed = (high.to(tl.int64) << 31) | low.to(tl.int64)
        bits += tl.where(is_finite, _noise(seed, row, ROWS), 0)
        rounded = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        tl.store(weight_ptr + at, rounded, mask=taken)
    else:
        tl.store(weight_ptr + at, weight.to(weight_ptr.dtype.element_ty), mask=taken)
    if QUANTIZED:
        has_row = has_row & (held == 0)
        first_scale = tl.max(tl.abs(first), axis=1, keep_dims=True)
        second_scale = tl.max(second, axis=1, keep_dims=True)
        tl.store(first_ptr + at, _encode(first, first_scale, True).to(tl.uint8), mask=taken)
        tl.store(second_ptr + at, _encode(second, second_scale, False).to(tl.uint8), mask=taken)
        tl.store(first_scale_ptr + row, first_scale, mask=has_row)
        tl.store(second_scale_ptr + row, second_scale, mask=has_row)
    else:
        tl.store(first_ptr + at, first, mask=taken)
        tl.store(second_ptr + at, second, mask=taken)


STEP = Kernel(_step)


def launch_step(
    weight: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | None,
    factor: Tensor,
    held: Tensor,
    seed: int,
    numbers: Sequence[float],
) -> None:
    """Update weight, moments and scales in place; see ``function.adamw_8bit_``.

    Args:
        weight: (N,), on the device.
        gradient: (N,).
        moments: codes or fp32 numbers, (N,) each; also in memory that host and device share.
        scales: (N / 256,) each; None of moments in fp32.
        factor: 0-d fp32.
        held: 0-d.
        seed: below 2**62.
        numbers: the step's, as the kernel names them.
    """
    numel, low, high = weight.numel(), seed & 0x7FFFFFFF, seed >> 31
    pointers = (weight, gradient, *moments, *(scales or moments), factor, held)
    free = (numel, low, high, *numbers)
    programs, rest = divmod(numel, ROWS * GROUP)
    constants = (scales is not None, not rest, ROWS)
    STEP.launch(programs + bool(rest), pointers, (), free, constants, WARPS)
