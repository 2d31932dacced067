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

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.launch import (
    INTERPRETING,
    Kernel,
    next_power_of_2,
    num_multiprocessors,
    remembered,
)

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
def _log1p(x):
    # Exact for small x: the rounding of 1 + x cancels in the quotient.
    w = 1.0 + x
    return tl.where(w == 1.0, x, tl.log(w) * (x / tl.where(w == 1.0, 1.0, w - 1.0)))


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
def _gradient(
    x,
    cols,
    label,
    top,
    factor,
    floor,
    label_gradient,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM: tl.constexpr,
):
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


@triton.jit(do_not_specialize=["num_rows", "num_programs", "ignore_index", "scale_value"])
def _cross_entropy(
    logits_ptr,
    dlogits_ptr,
    labels_ptr,
    losses_ptr,
    correct_ptr,
    scale_ptr,
    grad_output_ptr,
    logits_stride,
    dlogits_stride,
    num_rows,
    num_programs,
    ignore_index,
    scale_value,
    SCALE_IS_TENSOR: tl.constexpr,
    HAS_GRAD_OUTPUT: tl.constexpr,
    SKIP_UNIT_GRAD_OUTPUT: tl.constexpr,
    WANT_LOSS: tl.constexpr,
    WANT_CORRECT: tl.constexpr,
    WANT_GRAD: tl.constexpr,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    Z_LOSS: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STREAMED: tl.constexpr,
    KEPT: tl.constexpr,
    STAGES: tl.constexpr,
):
    WIDE: tl.constexpr = tl.float64 if logits_ptr.dtype.element_ty == tl.float64 else tl.float32
    GROUP: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    dtype: tl.constexpr = dlogits_ptr.dtype.element_ty
    kept_start: tl.constexpr = NUM_STREAMED * BLOCK

    scale = tl.load(scale_ptr).to(WIDE) if SCALE_IS_TENSOR else scale_value
    if HAS_GRAD_OUTPUT:
        grad_output = tl.load(grad_output_ptr).to(WIDE)
        if SKIP_UNIT_GRAD_OUTPUT:  # noqa: SIM102 (a constexpr and a tensor)
            if grad_output == 1.0:
                return
        scale = scale * grad_output

    cols = _columns(BLOCK, GROUP)
    kept_cols = _columns(KEPT, GROUP)
    kept_mask = kept_cols < V - kept_start
    row = tl.program_id(0).to(tl.int64)
    row_logits_ptr = logits_ptr + row * logits_stride
    next_label = tl.load(labels_ptr + row).to(tl.int32)
    next_kept = tl.load(
        row_logits_ptr + kept_start + kept_cols, mask=kept_mask, other=-float("inf")
    )
    for _ in tl.range(tl.program_id(0), num_rows, num_programs, num_stages=1):
        label = next_label
        kept = next_kept
        row_dlogits_ptr = dlogits_ptr + row * dlogits_stride
        # A label that names no column must not read out of bounds: its row becomes NaN, loudly.
        known = (label >= 0) & (label < V)
        label_logit = tl.load(row_logits_ptr + label, mask=known, other=float("nan")).to(WIDE)
        label_logit = _cap(label_logit, SOFTCAP)

        # Pass 1. Each lane keeps a running maximum and sum of its groups, both on the scale of
        # log2: exp(x) = 2^(x LOG2E) is one fused multiply-add and one instruction for 2^.
        lane_top = tl.full([BLOCK // GROUP], -3.0e38, dtype=WIDE)
        lane_sum = tl.zeros([BLOCK // GROUP], dtype=WIDE)
        lane_total = tl.zeros([BLOCK // GROUP], dtype=WIDE)
        # A row that is not trained has no tiles to read.
        num_streamed = tl.where(label == ignore_index, 0, NUM_STREAMED)
        for index in tl.range(0, num_streamed, num_stages=STAGES):
            start = index * BLOCK
            x = tl.load(row_logits_ptr + start + cols, eviction_policy="evict_last").to(WIDE)
            x = _cap(x, SOFTCAP)
            if SMOOTHING > 0.0:
                lane_total += tl.sum(x, axis=1)
            x = _others(x, cols, label - start, BLOCK)
            higher = tl.maximum(lane_top, tl.max(x, axis=1) * LOG2E)
            powers = tl.exp2(x * LOG2E - higher[:, None])
            lane_sum = lane_sum * tl.exp2(lane_top - higher) + tl.sum(powers, axis=1)
            lane_top = higher
        others = _kept_others(kept, kept_cols, label, kept_start, WIDE, SOFTCAP, V, KEPT)
        others_top = tl.max(tl.max(others, axis=1), axis=0) * LOG2E
        if NUM_STREAMED > 0:
            others_top = tl.maximum(others_top, tl.max(lane_top, axis=0))
        top = tl.maximum(others_top, label_logit * LOG2E)
        others = _kept_others(kept, kept_cols, label, kept_start, WIDE, SOFTCAP, V, KEPT)
        sum_others = tl.sum(tl.sum(tl.exp2(others * LOG2E - top), axis=1), axis=0)
        if NUM_STREAMED > 0:
            sum_others += tl.sum(lane_sum * tl.exp2(lane_top - top), axis=0)
        above = label_logit * LOG2E - top
        label_power = tl.exp2(above)
        total = sum_others + label_power

        # The next row's first reads travel while this row's gradient is made.
        this_row = row
        this_logits_ptr = row_logits_ptr
        row += num_programs
        row_logits_ptr = logits_ptr + row * logits_stride
        more = row < num_rows
        next_label = tl.load(labels_ptr + row, mask=more, other=0).to(tl.int32)
        next_kept = tl.load(
            row_logits_ptr + kept_start + kept_cols,
            mask=kept_cols < tl.where(more, V - kept_start, 0),
            other=-float("inf"),
        )

        trained = label != ignore_index
        if WANT_LOSS:
            # With p near 1, log1p of the others' share; with p near 0 the share may overflow.
            share = sum_others / tl.where(label_power > 1e-30, label_power, 1.0)
            nll = tl.where(label_power > 1e-30, _log1p(share), tl.log(total) - above * LN2)
            loss = nll
            if SMOOTHING > 0.0:
                value = _cap(_opaque(kept).to(WIDE), SOFTCAP)
                mean = tl.sum(tl.sum(tl.where(kept_mask, value, 0.0), axis=1), axis=0)
                mean = (mean + tl.sum(lane_total, axis=0)) / V
                loss = (1.0 - SMOOTHING) * nll + SMOOTHING * (nll + label_logit - mean)
            if Z_LOSS > 0.0:
                lse = nll + label_logit
                loss += Z_LOSS * lse * lse
            loss = tl.where(trained, loss, 0.0)
            tl.store(losses_ptr + this_row, loss.to(losses_ptr.dtype.element_ty))
        if WANT_CORRECT:
            correct = trained & (label_logit * LOG2E >= others_top)
            tl.store(correct_ptr + this_row, correct.to(correct_ptr.dtype.element_ty))

        # Pass 2. d loss / d x_j = p_j (1 + 2 z lse) - e / V, and 1 - e less for the label.
        if WANT_GRAD:
            weight = scale
            if Z_LOSS > 0.0:
                weight = scale * (1.0 + 2.0 * Z_LOSS * (top * LN2 + tl.log(total)))
            factor = weight / total
            floor = scale * (SMOOTHING / V)
            # p - 1 = -sum_others / total
            label_gradient = (weight - scale) - sum_others * factor
            if SMOOTHING > 0.0:
                label_gradient += scale * SMOOTHING - floor
            if trained:
                gradient = _gradient(
                    _opaque(kept).to(WIDE),
                    kept_cols,
                    label - kept_start,
                    top,
                    factor,
                    floor,
                    label_gradient,
                    SMOOTHING,
                    SOFTCAP,
                    KEPT,
                )
                tl.store(
                    row_dlogits_ptr + kept_start + kept_cols, gradient.to(dtype), mask=kept_mask
                )
            else:
                zeros = tl.zeros([KEPT // GROUP, GROUP], dtype=dtype)
                tl.store(row_dlogits_ptr + kept_start + kept_cols, zeros, mask=kept_mask)
                for index in tl.range(0, NUM_STREAMED, num_stages=1):
                    empty = tl.zeros([BLOCK // GROUP, GROUP], dtype=dtype)
                    tl.store(row_dlogits_ptr + index * BLOCK + cols, empty)
            for reverse in tl.range(0, num_streamed, num_stages=STAGES):
                start = (NUM_STREAMED - 1 - reverse) * BLOCK
                again = tl.load(this_logits_ptr + start + cols, eviction_policy="evict_first")
                streamed_gradient = _gradient(
                    again.to(WIDE),
                    cols,
                    label - start,
                    top,
                    factor,
                    floor,
                    label_gradient,
                    SMOOTHING,
                    SOFTCAP,
                    BLOCK,
                )
                tl.store(
                    row_dlogits_ptr + start + cols,
                    streamed_gradient.to(dtype),
                    eviction_policy="evict_first",
                )


@triton.jit(do_not_specialize=["num_rows", "ignore_index"])
def _count_scale(
    labels_ptr, scale_ptr, num_rows, ignore_index, GIVEN: tl.constexpr, BLOCK: tl.constexpr
):
    """scale = 1 / number of trained labels (or 1 / the given number), 0 when there is none."""
    dtype: tl.constexpr = scale_ptr.dtype.element_ty
    if GIVEN:
        count = tl.load(labels_ptr).to(dtype)
    else:
        lanes = tl.zeros([BLOCK], dtype=tl.int32)
        for start in range(0, num_rows, BLOCK):
            at = start + tl.arange(0, BLOCK)
            label = tl.load(labels_ptr + at, mask=at < num_rows, other=0)
            lanes += ((label != ignore_index) & (at < num_rows)).to(tl.int32)
        count = tl.sum(lanes, axis=0).to(dtype)
    tl.store(scale_ptr, tl.where(count > 0, 1.0 / tl.where(count > 0, count, 1.0), 0.0))


@triton.jit(do_not_specialize=["num_rows", "scale_value"])
def _sum_losses(
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


CROSS_ENTROPY = Kernel(_cross_entropy)
COUNT_SCALE = Kernel(_count_scale)
SUM_LOSSES = Kernel(_sum_losses)


@dataclass(frozen=True)
class LossOptions:
    """What the loss is, apart from its inputs; hashable, part of the kernel's signature."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0


@remembered
def config(vocab: int, element_size: int) -> tuple[int, int, int, int, int, int]:
    """(BLOCK, NUM_STREAMED, KEPT, num_warps, STAGES, programs per multiprocessor) by row length."""
    block = next_power_of_2(max(16, vocab))
    if INTERPRETING:
        kept = min(block, 4096)
        return kept, -(-vocab // kept) - 1, kept, 4, 1, 2
    if block * element_size <= 16384:
        return block, 0, block, 4, 1, 4
    if block * element_size <= 65536:
        return block, 0, block, 32, 1, 1
    block = 32768 // element_size
    return block, -(-vocab // block) - 1, block, 32, 4, 1


def launch(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions,
    *,
    scale: Tensor | float,
    losses: Tensor | None = None,
    dlogits: Tensor | None = None,
    correct: Tensor | None = None,
    grad_output: Tensor | None = None,
    skip_unit_grad_output: bool = False,
) -> None:
    """Losses and gradients of the rows of logits (N, V), each only where an output is given.

    Args:
        logits: (N, V), unit column stride.
        labels: (N,), contiguous.
        options: the loss.
        scale: factor of the gradients (not of the losses), a number or a 0-d tensor.
        losses: (N,) receives the losses.
        dlogits: (N, V), unit column stride, receives the gradients; may be logits itself.
        correct: (N,) receives 1 where no other column exceeds the label's.
        grad_output: 0-d, a further factor of the gradients.
        skip_unit_grad_output: do nothing at all when grad_output is 1, decided on the device.
    """
    num_rows, vocab = logits.shape
    if not num_rows:
        return
    block, streamed, kept, warps, stages, per_multiprocessor = config(vocab, logits.element_size())
    programs = min(num_rows, num_multiprocessors(logits) * per_multiprocessor)
    on_device = isinstance(scale, Tensor)
    out = logits if dlogits is None else dlogits
    filler = labels
    CROSS_ENTROPY.launch(
        (programs,),
        (
            logits,
            out,
            labels,
            filler if losses is None else losses,
            filler if correct is None else correct,
            scale if isinstance(scale, Tensor) else filler,
            filler if grad_output is None else grad_output,
        ),
        (logits.stride(0), out.stride(0)),
        (num_rows, programs, options.ignore_index, 0.0 if on_device else float(scale)),
        (
            on_device,
            grad_output is not None,
            skip_unit_grad_output,
            losses is not None,
            correct is not None,
            dlogits is not None,
            options.label_smoothing,
            options.softcap or 0.0,
            options.z_loss,
            vocab,
            block,
            streamed,
            kept,
            stages,
        ),
        num_warps=warps,
        num_stages=stages,
    )


def launch_scale(
    labels: Tensor, num_items: Tensor | None, ignore_index: int, like: Tensor
) -> Tensor:
    """1 / num_items, or 1 / the number of labels that are not ignored; 0 instead of infinity."""
    scale = like.new_empty((), dtype=_wide(like.dtype))
    source = labels if num_items is None else num_items
    COUNT_SCALE.launch(
        (1,),
        (source, scale),
        (),
        (labels.shape[0], ignore_index),
        (num_items is not None, 2048),
        num_warps=8,
    )
    return scale


def launch_sum(losses: Tensor, scale: Tensor | float) -> Tensor:
    """The sum of the losses (N,) times the scale, in a fixed order."""
    loss = losses.new_empty(())
    on_device = isinstance(scale, Tensor)
    SUM_LOSSES.launch(
        (1,),
        (losses, scale if isinstance(scale, Tensor) else losses, loss),
        (),
        (losses.shape[0], 0.0 if on_device else float(scale)),
        (on_device, 2048),
        num_warps=8,
    )
    return loss


def loss_dtype(logits: Tensor) -> torch.dtype:
    """The dtype losses are kept in: fp64 for fp64 logits, else fp32."""
    return _wide(logits.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
