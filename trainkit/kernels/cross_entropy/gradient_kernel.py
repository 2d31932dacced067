"""The second pass over a row: its gradient, in 16 bits, in e4m3, or in both. V columns.

In e4m3 a row has a scale of its own, known before its first number is: no gradient is larger than
the label's or that of the largest other logit. What it is multiplied by afterwards then lies in
another operand; the output layer's product wants that anyway.
"""

import triton
import triton.language as tl

from trainkit.kernels.fp8.kernel import _codes, _magnitude
from trainkit.kernels.fp8.kernel import _scale as _code_scale
from trainkit.kernels.launch import INTERPRETING

ON_GPU = tl.constexpr(not INTERPRETING)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _cap(x, SOFTCAP: tl.constexpr):
    # softcap * tanh(x / softcap), tanh(y) = 2 sigmoid(2y) - 1
    if SOFTCAP > 0.0:
        x = SOFTCAP * (2.0 / (1.0 + tl.exp(-2.0 / SOFTCAP * x)) - 1.0)
    return x


@triton.jit
def _opaque(x):
    # Hides from the compiler that x is known: it would keep the widened copy of a row in registers
    # (and spill) instead of widening 16-bit values again. There is no assembler to run on a CPU.
    if ON_GPU:  # noqa: SIM102
        if x.dtype.primitive_bitwidth == 16:
            x = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
            )
    return x


@triton.jit
def _columns(NUM: tl.constexpr, GROUP: tl.constexpr):
    # Groups of 16 bytes, one lane each: reductions along the second axis stay inside a thread.
    return tl.arange(0, NUM // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _gradient(
    x, cols, label, top, factors, SMOOTHING: tl.constexpr, SOFTCAP: tl.constexpr, NUM: tl.constexpr
):
    factor, floor, label_gradient = factors
    value = _cap(x, SOFTCAP)
    gradient = tl.exp2(value * LOG2E - top) * factor
    if SMOOTHING > 0.0:
        gradient = gradient - floor
    if (label >= 0) & (label < NUM):
        gradient = tl.where(cols == label, label_gradient, gradient)
    if SOFTCAP > 0.0:
        slope = value / SOFTCAP
        gradient = gradient * (1.0 - slope * slope)
    return gradient


@triton.jit
def _gradient_factors(
    top, sum_others, total, scale, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, V: tl.constexpr
):
    """d loss / d x_j = p_j (1 + 2 z lse) - e / V, and 1 - e less for the label."""
    weight = scale
    if Z_LOSS > 0.0:
        weight = scale * (1.0 + 2.0 * Z_LOSS * (top * LN2 + tl.log(total)))
    factor = weight / total
    floor = scale * (SMOOTHING / V)
    # p - 1 = -sum_others / total
    label_gradient = (weight - scale) - sum_others * factor
    if SMOOTHING > 0.0:
        label_gradient += scale * SMOOTHING - floor
    return factor, floor, label_gradient


@triton.jit
def _row_scale(factors, others_top, top, trained):
    """(scale, 1 / scale) of a row's codes: powers of two."""
    factor, floor, label_gradient = factors
    largest = tl.exp2(others_top - top) * factor
    # Smoothing takes the same off all of them; a soft cap only makes them smaller.
    largest = tl.maximum(tl.abs(largest - floor), tl.abs(floor))
    bits = tl.maximum(_magnitude(largest.to(tl.float32)), _magnitude(label_gradient.to(tl.float32)))
    return _code_scale(tl.where(trained, bits, 0), False)


@triton.jit
def _store(
    drow_ptr,
    codes_ptr,
    at,
    gradient,
    inverse,
    mask,
    WANT_GRAD: tl.constexpr,
    WANT_CODES: tl.constexpr,
):
    if WANT_GRAD:
        narrow = gradient.to(drow_ptr.dtype.element_ty)
        tl.store(drow_ptr + at, narrow, mask=mask, eviction_policy="evict_first")
    if WANT_CODES:
        tl.store(codes_ptr + at, _codes(gradient.to(tl.float32), inverse), mask=mask)


@triton.jit
def _write_gradient(
    row_ptr,
    drow_ptr,
    codes_ptr,
    kept,
    label,
    top,
    factors,
    inverse,
    num_streamed,
    trained,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STREAMED: tl.constexpr,
    STAGES: tl.constexpr,
    WANT_GRAD: tl.constexpr,
    WANT_CODES: tl.constexpr,
):
    """Pass 2, last tile first; zeros for a row that is not trained."""
    KEPT_START: tl.constexpr = NUM_STREAMED * BLOCK
    cols = _columns(BLOCK, GROUP)
    kept_at, kept_mask = KEPT_START + cols, cols < V - KEPT_START
    if trained:
        x = _opaque(kept).to(WIDE)
        gradient = _gradient(x, cols, label - KEPT_START, top, factors, SMOOTHING, SOFTCAP, BLOCK)
        _store(drow_ptr, codes_ptr, kept_at, gradient, inverse, kept_mask, WANT_GRAD, WANT_CODES)
    else:
        zeros = tl.zeros([BLOCK // GROUP, GROUP], dtype=WIDE)
        _store(drow_ptr, codes_ptr, kept_at, zeros, inverse, kept_mask, WANT_GRAD, WANT_CODES)
        for index in tl.range(0, NUM_STREAMED, num_stages=1):
            at = index * BLOCK + cols
            _store(drow_ptr, codes_ptr, at, zeros, inverse, None, WANT_GRAD, WANT_CODES)
    for reverse in tl.range(0, num_streamed, num_stages=STAGES):
        start = (NUM_STREAMED - 1 - reverse) * BLOCK
        again = tl.load(row_ptr + start + cols, eviction_policy="evict_first").to(WIDE)
        streamed = _gradient(again, cols, label - start, top, factors, SMOOTHING, SOFTCAP, BLOCK)
        at = start + cols
        _store(drow_ptr, codes_ptr, at, streamed, inverse, None, WANT_GRAD, WANT_CODES)
