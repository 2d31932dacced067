"""Rows of a student's and a teacher's logits: divergence, figures, gradient. V columns.

One program a row. The first pass finds what normalises, the second sums what is measured, and a
third one, where the gradient needs these sums, writes it over the student's logits.
"""

import triton
import triton.language as tl

from trainkit.kernels.cross_entropy.gradient_kernel import _cap

FORWARD, REVERSE, MIXED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _values(row_ptr, cols, mask, SOFTCAP: tl.constexpr, WIDE: tl.constexpr):
    x = _cap(tl.load(row_ptr + cols, mask=mask, other=0.0).to(WIDE), SOFTCAP)
    return tl.where(mask, x, -float("inf"))


@triton.jit
def _add(sums, tops, x, HEAT: tl.constexpr):
    """Sums of exp((x - top) / HEAT), column by column, with another block; nothing waits for it."""
    larger = tl.maximum(tops, x)
    # Where nothing has come yet both are -inf, whose difference would be NaN.
    base = tl.where(larger > -float("inf"), larger, 0.0)
    return sums * tl.exp((tops - base) / HEAT) + tl.exp((x - base) / HEAT), larger


@triton.jit
def _normaliser(sums, tops, HEAT: tl.constexpr):
    """(the largest, the logarithm of the sum of exp(x / HEAT)) of all columns."""
    top = tl.max(tops, 0)
    return top, top / HEAT + tl.log(tl.sum(sums * tl.exp((tops - top) / HEAT), 0))


@triton.jit
def _mixture(log_s, log_t, SHARE: tl.constexpr):
    """log(SHARE p_t + (1 - SHARE) p_s); a probability of zero only leaves the other."""
    larger = tl.maximum(log_s, log_t)
    sums = SHARE * tl.exp(log_t - larger) + (1.0 - SHARE) * tl.exp(log_s - larger)
    return larger + tl.log(sums)


@triton.jit
def _write_gradient(
    row_ptr,
    cols,
    x,
    parts,
    log_s,
    log_t,
    inner,
    label,
    SCALE: tl.constexpr,
    KIND: tl.constexpr,
    HEAT: tl.constexpr,
    SHARE: tl.constexpr,
    SFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    V: tl.constexpr,
):
    lse, trained = parts
    p = tl.exp(log_s)
    if KIND == FORWARD:
        gradient = p - tl.exp(log_t)
    elif KIND == REVERSE:
        gradient = p * (log_s - log_t - inner)
    else:
        gradient = (1.0 - SHARE) * p * (log_s - _mixture(log_s, log_t, SHARE) - inner)
    gradient *= (1.0 - SFT) / HEAT  # of columns that one model lacks it is zero
    if SFT > 0.0:
        gradient += SFT * (tl.exp(x - lse) - tl.where(cols == label, 1.0, 0.0))
    if SOFTCAP > 0.0:
        gradient *= 1.0 - (x / SOFTCAP) * (x / SOFTCAP)
    gradient = tl.where(trained, gradient * SCALE, 0.0)
    tl.store(row_ptr + cols, gradient.to(row_ptr.dtype.element_ty), mask=cols < V)


@triton.jit(do_not_specialize=["ignore_index"])
def divergence_rows(
    student_ptr,
    teacher_ptr,
    labels_ptr,
    losses_ptr,
    figures_ptr,
    student_stride,
    teacher_stride,
    ignore_index,
    SCALE: tl.constexpr,
    KIND: tl.constexpr,
    HEAT: tl.constexpr,
    SHARE: tl.constexpr,
    SFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
    WANT_GRAD: tl.constexpr,
    V: tl.constexpr,
    COMMON: tl.constexpr,
    OWN_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    student, teacher = student_ptr + row * student_stride, teacher_ptr + row * teacher_stride
    WIDE: tl.constexpr = losses_ptr.dtype.element_ty
    label = tl.load(labels_ptr + row)
    trained = label != ignore_index
    label = tl.where(trained, label, 0)
    # Before a reduction, at which all threads wait: the gradient is written over this number.
    target = _cap(tl.load(student + label).to(WIDE), SOFTCAP)
    cols = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], dtype=WIDE)
    lowest = tl.full([BLOCK], -float("inf"), dtype=WIDE)
    s_tops, t_tops, heated_tops = lowest, lowest, lowest
    s_sums, t_sums, heated_sums = zeros, zeros, zeros
    for start in range(0, V, BLOCK):
        at = start + cols
        x = _values(student, at, at < V, SOFTCAP, WIDE)
        y = _values(teacher, at, at < COMMON, TEACHER_SOFTCAP, WIDE)
        s_sums, s_tops = _add(s_sums, s_tops, x, 1.0)
        t_sums, t_tops = _add(t_sums, t_tops, y, HEAT)
        if OWN_SUM:
            heated = tl.where(at < COMMON, x, -float("inf"))
            heated_sums, heated_tops = _add(heated_sums, heated_tops, heated, HEAT)
    s_top, lse = _normaliser(s_sums, s_tops, 1.0)
    t_top, t_lse = _normaliser(t_sums, t_tops, HEAT)
    s_lse = lse
    if OWN_SUM:
        _, s_lse = _normaliser(heated_sums, heated_tops, HEAT)
    parts = lse, trained

    apart, own, sure, right = zeros, zeros, zeros, tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, V, BLOCK):
        at = start + cols
        common = at < COMMON
        x = _values(student, at, at < V, SOFTCAP, WIDE)
        y = _values(teacher, at, common, TEACHER_SOFTCAP, WIDE)
        right = tl.maximum(right, ((x == s_top) & (y == t_top)).to(tl.int32))
        log_s = tl.where(common, x / HEAT - s_lse, -1e4)
        log_t = tl.where(common, y / HEAT - t_lse, -1e4)
        p, q = tl.exp(log_s), tl.exp(log_t)
        sure += q * log_t
        if KIND == FORWARD:
            apart += q * (log_t - log_s)
        elif KIND == REVERSE:
            own += p * (log_s - log_t)
        else:
            log_m = _mixture(log_s, log_t, SHARE)
            own += p * (log_s - log_m)
            apart += SHARE * q * (log_t - log_m)
        if WANT_GRAD and KIND == FORWARD:
            _write_gradient(
                student, at, x, parts, log_s, log_t, 0.0, label,
                SCALE, KIND, HEAT, SHARE, SFT, SOFTCAP, V,
            )  # fmt: skip
    inner, divergence = tl.sum(own, 0), tl.sum(apart, 0)
    if KIND == REVERSE:
        divergence = inner
    if KIND == MIXED:
        divergence += (1.0 - SHARE) * inner
    cross_entropy = lse - target
    loss = (1.0 - SFT) * divergence + SFT * cross_entropy
    tl.store(losses_ptr + row, tl.where(trained, loss, 0.0))
    tl.store(figures_ptr + row * 4, tl.where(trained, divergence, 0.0))
    tl.store(figures_ptr + row * 4 + 1, tl.where(trained, cross_entropy, 0.0))
    agrees = tl.max(right, 0).to(WIDE)
    tl.store(figures_ptr + row * 4 + 2, tl.where(trained, agrees, 0.0))
    tl.store(figures_ptr + row * 4 + 3, tl.where(trained, -tl.sum(sure, 0), 0.0))
    if WANT_GRAD and KIND != FORWARD:
        for start in range(0, V, BLOCK):
            at = start + cols
            common = at < COMMON
            x = _values(student, at, at < V, SOFTCAP, WIDE)
            y = _values(teacher, at, common, TEACHER_SOFTCAP, WIDE)
            log_s = tl.where(common, x / HEAT - s_lse, -1e4)
            log_t = tl.where(common, y / HEAT - t_lse, -1e4)
            _write_gradient(
                student, at, x, parts, log_s, log_t, inner, label,
                SCALE, KIND, HEAT, SHARE, SFT, SOFTCAP, V,
            )  # fmt: skip
