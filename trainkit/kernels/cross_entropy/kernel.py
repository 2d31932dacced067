"""The cross-entropy kernel. N rows, V columns.

A perfect kernel reads the logits once and writes the gradient once; a row of a large vocabulary
(300 kB) fits no register file, so most of it is read twice: NUM_STREAMED tiles, the second time
backwards, over what the L2 cache saw last. One program a multiprocessor walks over the rows, so
that few rows compete for the cache. The end of a row (KEPT columns) stays in registers between the
passes, and the next row's is fetched while the gradient of this one is made.

The sum over the other tokens is kept apart from the label's own term, so that ``p - 1`` and the
loss of a token the model is sure of come out of a sum of small numbers, not of a difference of
nearly equal ones.
"""

import triton
import triton.language as tl

from trainkit.kernels.cross_entropy.gradient_kernel import (
    LN2,
    LOG2E,
    _cap,
    _columns,
    _gradient_factors,
    _opaque,
    _row_scale,
    _write_gradient,
)

COUNT_BLOCK = tl.constexpr(8192)

# Where the factor of the gradients comes from.
SCALE_IS_A_NUMBER = tl.constexpr(0)
SCALE_IS_A_TENSOR = tl.constexpr(1)
ONE_OVER_NUM_ITEMS = tl.constexpr(2)
ONE_OVER_TRAINED = tl.constexpr(3)
SCALE_A_ROW = tl.constexpr(4)


@triton.jit
def _log1p(x):
    # Exact for small x: the rounding of 1 + x cancels in the quotient.
    w = 1.0 + x
    return tl.where(w == 1.0, x, tl.log(w) * (x / tl.where(w == 1.0, 1.0, w - 1.0)))


@triton.jit
def _others(x, cols, label, NUM: tl.constexpr):
    # The label's column counts apart. Few tiles hold it, and the branch is cheaper than a select.
    if (label >= 0) & (label < NUM):
        x = tl.where(cols == label, -float("inf"), x)
    return x


@triton.jit
def _kept_others(
    tile,
    cols,
    label,
    start,
    WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    V: tl.constexpr,
    NUM: tl.constexpr,
):
    others = _others(_cap(_opaque(tile).to(WIDE), SOFTCAP), cols, label - start, NUM)
    if SOFTCAP > 0.0:  # of the -inf that stands for no column
        others = tl.where(cols < V - start, others, -float("inf"))
    return others


@triton.jit
def _fetch(
    logits_ptr,
    labels_ptr,
    row,
    num_rows,
    logits_stride,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT_START: tl.constexpr,
):
    """A row's label and its last tile; nothing past the last row."""
    cols = _columns(BLOCK, GROUP)
    label = tl.load(labels_ptr + row, mask=row < num_rows, other=0).to(tl.int32)
    num_cols = tl.where(row < num_rows, V - KEPT_START, 0)
    tile = logits_ptr + row * logits_stride + KEPT_START + cols
    return label, tl.load(tile, mask=cols < num_cols, other=-float("inf"))


@triton.jit
def _statistics(
    row_ptr,
    kept,
    label,
    label_power_of_2,
    num_streamed,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT_START: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Pass 1: the largest other logit, the largest, the sum of the others' powers, the mean.

    Each lane keeps a running maximum and sum of its groups, both on the scale of log2:
    exp(x) = 2^(x LOG2E) is one fused multiply-add and one instruction for 2^.
    """
    cols = _columns(BLOCK, GROUP)
    lane_top = tl.full([BLOCK // GROUP], -3.0e38, dtype=WIDE)
    lane_sum = tl.zeros([BLOCK // GROUP], dtype=WIDE)
    lane_total = tl.zeros([BLOCK // GROUP], dtype=WIDE)
    for index in tl.range(0, num_streamed, num_stages=STAGES):
        start = index * BLOCK
        x = tl.load(row_ptr + start + cols, eviction_policy="evict_last").to(WIDE)
        x = _cap(x, SOFTCAP)
        if SMOOTHING > 0.0:
            lane_total += tl.sum(x, axis=1)
        x = _others(x, cols, label - start, BLOCK)
        higher = tl.maximum(lane_top, tl.max(x, axis=1) * LOG2E)
        powers = tl.exp2(x * LOG2E - higher[:, None])
        lane_sum = lane_sum * tl.exp2(lane_top - higher) + tl.sum(powers, axis=1)
        lane_top = higher
    others = _kept_others(kept, cols, label, KEPT_START, WIDE, SOFTCAP, V, BLOCK)
    higher = tl.maximum(lane_top, tl.max(others, axis=1) * LOG2E)
    others_top = tl.max(higher, axis=0)
    top = tl.maximum(others_top, label_power_of_2)
    others = _kept_others(kept, cols, label, KEPT_START, WIDE, SOFTCAP, V, BLOCK)
    lane_sum = lane_sum * tl.exp2(lane_top - top)
    lane_sum += tl.sum(tl.exp2(others * LOG2E - top), axis=1)
    if SMOOTHING > 0.0:
        value = _cap(_opaque(kept).to(WIDE), SOFTCAP)
        lane_total += tl.sum(tl.where(cols < V - KEPT_START, value, 0.0), axis=1)
    return others_top, top, tl.sum(lane_sum, axis=0), tl.sum(lane_total, axis=0) / V


@triton.jit
def _loss(label_logit, above, sum_others, mean, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr):
    # With p near 1, log1p of the others' share; with p near 0 the share may overflow.
    label_power = tl.exp2(above)
    share = sum_others / tl.where(label_power > 1e-30, label_power, 1.0)
    far = tl.log(sum_others + label_power) - above * LN2
    nll = tl.where(label_power > 1e-30, _log1p(share), far)
    loss = nll
    if SMOOTHING > 0.0:
        loss = (1.0 - SMOOTHING) * nll + SMOOTHING * (nll + label_logit - mean)
    if Z_LOSS > 0.0:
        lse = nll + label_logit
        loss += Z_LOSS * lse * lse
    return loss


@triton.jit
def _scale_of_loss(
    scale_ptr,
    num_items_ptr,
    labels_ptr,
    scale_value,
    num_rows,
    ignore_index,
    WIDE: tl.constexpr,
    SCALE: tl.constexpr,
):
    """The factor of the gradients; one that is made here is left in scale_ptr for what follows."""
    if SCALE == SCALE_IS_A_NUMBER:
        scale = scale_value
    elif SCALE == SCALE_IS_A_TENSOR:
        scale = tl.load(scale_ptr).to(WIDE)
    elif SCALE == SCALE_A_ROW:
        scale = 1.0
    else:
        if SCALE == ONE_OVER_NUM_ITEMS:
            count = tl.load(num_items_ptr).to(WIDE)
        else:
            count = _num_trained(labels_ptr, num_rows, ignore_index).to(WIDE)
        scale = tl.where(count > 0, 1.0 / tl.where(count > 0, count, 1.0), 0.0)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
    return scale


@triton.jit
def _num_trained(labels_ptr, num_rows, ignore_index):
    # Every program counts: the labels lie in the cache, and a separate launch would take longer.
    lanes = tl.zeros([COUNT_BLOCK], dtype=tl.int32)
    for start in range(0, num_rows, COUNT_BLOCK):
        at = start + tl.arange(0, COUNT_BLOCK)
        label = tl.load(labels_ptr + at, mask=at < num_rows, other=0)
        lanes += ((label != ignore_index) & (at < num_rows)).to(tl.int32)
    return tl.sum(lanes, axis=0)


@triton.jit(do_not_specialize=["num_rows", "num_programs", "ignore_index", "scale_value"])
def cross_entropy_rows(
    logits_ptr,
    dlogits_ptr,
    labels_ptr,
    losses_ptr,
    correct_ptr,
    scale_ptr,
    num_items_ptr,
    grad_output_ptr,
    codes_ptr,
    code_scales_ptr,
    logits_stride,
    dlogits_stride,
    codes_stride,
    num_rows,
    num_programs,
    ignore_index,
    scale_value,
    SCALE: tl.constexpr,
    HAS_GRAD_OUTPUT: tl.constexpr,
    SKIP_UNIT_GRAD_OUTPUT: tl.constexpr,
    WANT_LOSS: tl.constexpr,
    WANT_CORRECT: tl.constexpr,
    WANT_GRAD: tl.constexpr,
    WANT_CODES: tl.constexpr,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    Z_LOSS: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STREAMED: tl.constexpr,
    STAGES: tl.constexpr,
):
    WIDE: tl.constexpr = tl.float64 if logits_ptr.dtype.element_ty == tl.float64 else tl.float32
    GROUP: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    KEPT_START: tl.constexpr = NUM_STREAMED * BLOCK
    if HAS_GRAD_OUTPUT:
        grad_output = tl.load(grad_output_ptr).to(WIDE)
        if SKIP_UNIT_GRAD_OUTPUT:  # noqa: SIM102 (a constexpr and a tensor)
            if grad_output == 1.0:
                return
    scale = _scale_of_loss(
        scale_ptr, num_items_ptr, labels_ptr, scale_value, num_rows, ignore_index, WIDE, SCALE
    )
    if HAS_GRAD_OUTPUT:
        scale = scale * grad_output
    row = tl.program_id(0).to(tl.int64)
    label, kept = _fetch(
        logits_ptr, labels_ptr, row, num_rows, logits_stride, GROUP, V, BLOCK, KEPT_START
    )
    for _ in tl.range(tl.program_id(0), num_rows, num_programs, num_stages=1):
        row_ptr = logits_ptr + row * logits_stride
        # A label that names no column must not read out of bounds: its row becomes NaN, loudly.
        known = (label >= 0) & (label < V)
        label_logit = tl.load(row_ptr + label, mask=known, other=float("nan")).to(WIDE)
        label_logit = _cap(label_logit, SOFTCAP)
        trained = label != ignore_index
        num_streamed = tl.where(trained, NUM_STREAMED, 0)  # else there is nothing to read
        others_top, top, sum_others, mean = _statistics(
            row_ptr, kept, label, label_logit * LOG2E, num_streamed,
            WIDE, GROUP, SMOOTHING, SOFTCAP, V, BLOCK, KEPT_START, STAGES,
        )  # fmt: skip
        above = label_logit * LOG2E - top
        # The next row's first reads travel while this row's gradient is made.
        next_row = row + num_programs
        next_label, next_kept = _fetch(
            logits_ptr, labels_ptr, next_row, num_rows, logits_stride, GROUP, V, BLOCK, KEPT_START
        )
        if WANT_LOSS:
            loss = _loss(label_logit, above, sum_others, mean, SMOOTHING, Z_LOSS)
            loss = tl.where(trained, loss, 0.0)
            tl.store(losses_ptr + row, loss.to(losses_ptr.dtype.element_ty))
        if WANT_CORRECT:
            correct = trained & (label_logit * LOG2E >= others_top)
            tl.store(correct_ptr + row, correct.to(correct_ptr.dtype.element_ty))
        if WANT_GRAD or WANT_CODES:
            total = sum_others + tl.exp2(above)
            row_scale = scale
            if SCALE == SCALE_A_ROW:
                row_scale = tl.load(scale_ptr + row).to(WIDE)
            factors = _gradient_factors(top, sum_others, total, row_scale, SMOOTHING, Z_LOSS, V)
            inverse = 1.0
            if WANT_CODES:
                code_scale, inverse = _row_scale(factors, others_top, top, trained)
                tl.store(code_scales_ptr + row, code_scale)
            _write_gradient(
                row_ptr, dlogits_ptr + row * dlogits_stride, codes_ptr + row * codes_stride,
                kept, label, top, factors, inverse, num_streamed, trained,
                WIDE, GROUP, SMOOTHING, SOFTCAP, V, BLOCK, NUM_STREAMED, STAGES,
                WANT_GRAD, WANT_CODES,
            )  # fmt: skip
        row, label, kept = next_row, next_label, next_kept


@triton.jit(do_not_specialize=["num_rows", "scale_value"])
def sum_losses(
    losses_ptr,
    scale_ptr,
    loss_ptr,
    num_rows,
    scale_value,
    SCALE_IS_TENSOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lanes = tl.zeros([BLOCK], dtype=losses_ptr.dtype.element_ty)
    for start in range(0, num_rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        lanes += tl.load(losses_ptr + at, mask=at < num_rows, other=0.0)
    scale = tl.load(scale_ptr) if SCALE_IS_TENSOR else scale_value
    tl.store(loss_ptr, (tl.sum(lanes, axis=0) * scale).to(loss_ptr.dtype.element_ty))
