"""Linear layer and cross entropy in one op, without the logits of all tokens at once.

M rows of ``hidden``, K of them computed, N in a chunk; H hidden, V vocabulary.

The rows go through in chunks: one matrix product makes a chunk's logits, the cross-entropy kernel
turns them into losses and, in place, into their gradient, and two products take that to the hidden
states and to the weight, which sums in fp32. The gradient in the chunk is that of the plain sum of
losses, so its entries are of order one: fp16 does not underflow, and everything the caller
multiplies by (1 / num_items, the loss scale, the incoming gradient) enters once, in the backward
pass, where the fp32 gradients are rounded to their final dtype. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from trainkit.kernels.cross_entropy.function import (
    LossOptions,
    cross_entropy_chunk,
    cross_entropy_reference,
    token_losses_reference,
)
from trainkit.kernels.fp8.trained import Directions
from trainkit.kernels.launch import device_of, is_on_gpu
from trainkit.kernels.linear_cross_entropy.products import (
    ROWS_MULTIPLE,
    add_product,
    inverse,
    logits_buffer,
    products_of,
    scaled,
    scaled_in_place,
)
from trainkit.kernels.linear_cross_entropy.teacher import Teacher


class CountedLoss(NamedTuple):
    """A loss and what came up on the way; only ``loss`` has a gradient.

    ``num_correct`` and ``num_trained`` are 0-d int64. ``row_losses`` has the shape of the labels:
    each row's own loss in fp32 (fp64 for fp64), not divided by anything, 0 where not trained.
    """

    loss: Tensor
    num_correct: Tensor
    num_trained: Tensor
    row_losses: Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    num_items: Tensor | int | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_trained: int | None = None,
    chunk_tokens: int | None = None,
    keeps_gradient: bool = True,
    in_fp8: Directions | None = None,
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T + bias`` against ``labels``.

    Gradients are computed on the forward pass and only for the inputs that need them; without a
    gradient to compute, only losses are. A second backward pass through the same graph is right.

    Args:
        hidden: (..., H).
        weight: (V, H).
        labels: (...), aligned with the rows of ``hidden`` (no shift happens here).
        bias: (V,).
        num_items: the loss is the sum over trained labels divided by this; by their number when
            None. An int, or a 0-d tensor on the device.
        ignore_index: the label of rows that are not trained.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        label_smoothing: share of the target spread evenly over the vocabulary.
        z_loss: weight of the squared log-partition, divided like the loss.
        num_trained: at least as many as there are trained labels, known on the host (the collator
            counts them). With it only the trained rows are computed, rounded up to
            ``ROWS_MULTIPLE``; without it, on a GPU, all rows are, because counting there would make
            the host wait. A number that is too small is a device-side assertion.
        chunk_tokens: rows whose logits exist at a time; None takes `Products.chunk_tokens`.
        keeps_gradient: false leaves one backward pass: it rounds the weight's fp32 gradient in its
            own place, instead of next to it.
        in_fp8: whether the logits, and the hidden states' gradient, are products in fp8; the
            weight's gradient never is.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs). Without a trained label it is 0, and its gradients
        are zeros.
    """
    return linear_cross_entropy_counted(
        hidden,
        weight,
        labels,
        bias=bias,
        num_items=num_items,
        num_trained=num_trained,
        chunk_tokens=chunk_tokens,
        keeps_gradient=keeps_gradient,
        in_fp8=in_fp8,
        ignore_index=ignore_index,
        softcap=softcap,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    ).loss


@torch.compiler.disable(reason="a loop over chunks in one buffer is nothing to trace")
def linear_cross_entropy_counted(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    num_items: Tensor | int | None = None,
    num_trained: int | None = None,
    chunk_tokens: int | None = None,
    keeps_gradient: bool = True,
    in_fp8: Directions | None = None,
    **loss: Any,
) -> CountedLoss:
    """As `linear_cross_entropy`, with token counts and row losses, which cost next to nothing.

    ``loss``: values of `LossOptions`.
    """
    check_shapes(hidden, weight, labels, bias, chunk_tokens)
    labels = labels.reshape(-1)
    settings = settings_of(
        hidden,
        weight,
        labels,
        LossOptions(**loss),
        num_trained=num_trained,
        chunk_tokens=chunk_tokens,
        keeps_gradient=keeps_gradient,
        in_fp8=in_fp8,
    )
    return CountedLoss(*with_gradients(hidden, weight, bias, labels, num_items, settings))


@dataclass(frozen=True)
class Settings:
    """What a call was asked for, without its tensors."""

    compute_dtype: torch.dtype
    loss: LossOptions
    num_trained: int | None
    chunk_tokens: int | None
    wants_gradients: bool
    in_fp8: Directions | None
    keeps_gradient: bool = True
    teacher: Teacher | None = None
    """The loss is the divergence from its logits, not from labels."""


def settings_of(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss: LossOptions,
    *,
    num_trained: int | None,
    **options: Any,
) -> Settings:
    """Of a call with these labels (M,); without a GPU to wait for, they are counted here."""
    if num_trained is None and not is_on_gpu(labels):
        num_trained = int(torch.count_nonzero(labels != loss.ignore_index))
    return Settings(
        compute_dtype=compute_dtype_of(hidden, weight),
        loss=loss,
        num_trained=num_trained,
        wants_gradients=torch.is_grad_enabled(),
        **options,
    )


def compute_dtype_of(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What the products are computed in: autocast's dtype, where it applies, else the inputs'."""
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight is {weight.dtype}")
    return hidden.dtype


def check_shapes(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk_tokens: int | None
) -> None:
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight {tuple(weight.shape)} does not fit hidden states of {hidden.shape[-1]}"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels {tuple(labels.shape)} do not fit hidden states {tuple(hidden.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit {weight.shape[0]} logits")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; it must be at least 1")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        num_items: Tensor | int | None,
        settings: Settings,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wants = [settings.wants_gradients and wanted for wanted in ctx.needs_input_grad[:3]]
        with torch.autocast(hidden.device.type, enabled=False), device_of(hidden):
            result = compute(hidden, weight, bias, labels, settings, wants)
        per_item = inverse(result.num_trained if num_items is None else num_items, result.total)
        ctx.save_for_backward(
            result.dhidden, result.dweight, result.dbias, result.slots, per_item / result.grad_scale
        )
        ctx.like = (hidden.shape, hidden.dtype, weight.dtype, bias is not None and bias.dtype)
        ctx.keeps_gradient = settings.keeps_gradient
        row_losses = result.row_losses.view(hidden.shape[:-1])
        ctx.mark_non_differentiable(result.num_correct, result.num_trained, row_losses)
        return result.total * per_item, result.num_correct, result.num_trained, row_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        dhidden, dweight, dbias, slots, factor = ctx.saved_tensors
        hidden_shape, hidden_dtype, weight_dtype, bias_dtype = ctx.like
        scale = grad_output * factor
        if dhidden is not None:
            dhidden = scaled(dhidden, scale, hidden_dtype)
            if slots is not None:
                dhidden = dhidden.index_select(0, slots)
            dhidden = dhidden.view(hidden_shape)
        if dweight is not None:
            round_weight = scaled if ctx.keeps_gradient else scaled_in_place
            dweight = round_weight(dweight, scale, weight_dtype)
        if dbias is not None:
            dbias = scaled(dbias, scale, bias_dtype)
        return dhidden, dweight, dbias, None, None, None


with_gradients = _LinearCrossEntropy.apply


class Result(NamedTuple):
    """``total`` is the plain sum of losses, the gradients are ``grad_scale`` times those of it.

    ``dhidden`` has the computed rows, and behind them, where there are ``slots``, one of zeros.
    Against a teacher ``num_correct`` is the sums of its figures.
    """

    total: Tensor
    num_correct: Tensor
    num_trained: Tensor
    row_losses: Tensor
    dhidden: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    slots: Tensor | None
    grad_scale: Tensor | float


def compute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    settings: Settings,
    wants: Sequence[bool],
    factors: Tensor | None = None,
) -> Result:
    """Losses, and the gradients that hidden, weight and bias want of their plain sum, by chunks.

    With ``factors`` (M,) the gradients are of the sum of the losses times them.
    """
    want_dhidden, want_dweight, want_dbias = wants
    dtype = settings.compute_dtype
    wide = torch.promote_types(dtype, torch.float32)
    rows = hidden.reshape(-1, hidden.shape[-1])
    num_trained = torch.count_nonzero(labels != settings.loss.ignore_index)
    labels, chosen, slots = keep_trained(labels, num_trained, settings)
    rows = (rows if chosen is None else rows.index_select(0, chosen)).to(dtype)
    products = products_of(weight, bias, dtype, settings.in_fp8)
    num_rows, vocab_size = rows.shape[0], weight.shape[0]

    grad_scale: Tensor | float = grad_scale_of(dtype)
    scales = None
    if factors is not None:
        placed = in_places(factors.to(wide), slots, num_rows + 1)
        grad_scale = grad_scale / _power_of_2(placed)
        scales = placed * grad_scale
    # One row more than computed: untrained rows take their loss and their gradient of 0 from it.
    losses = rows.new_zeros(num_rows + 1, dtype=wide)
    dhidden, dweight, dbias = _gradients(rows, weight, products.gradient_dtype, wants)
    teacher = settings.teacher
    counts = scales is None and teacher is None
    correct = labels.new_empty(num_rows, dtype=torch.int32) if counts else None

    limit = products.chunk_tokens(trained=want_dweight)
    if teacher is not None:
        limit = teacher.chunk_tokens(limit, rows.shape[1], trained=want_dweight)
    chunk = chunk_rows(num_rows, settings.chunk_tokens or limit)
    if teacher is not None:
        teacher.begin(dtype, chosen, num_rows, chunk)
    buffer = logits_buffer(rows, chunk, vocab_size)
    for start in range(0, num_rows, max(chunk, 1)):
        part = slice(start, min(start + chunk, num_rows))
        logits = buffer[: part.stop - start, :vocab_size]
        products.write_logits(logits, rows[part])
        has_codes = want_dhidden and teacher is None
        codes = products.gradient_codes(len(logits)) if has_codes else None
        scale = grad_scale if scales is None else scales[part]
        want_grad = want_dweight or want_dbias or (want_dhidden and codes is None)
        given = (logits, labels[part], losses[part], scale, settings.loss)
        if teacher is not None:
            teacher.compare(part, *given, want_grad=want_grad)
        else:
            right = None if correct is None else correct[part]
            cross_entropy_chunk(*given, want_grad=want_grad, correct_out=right, codes_out=codes)
        if dhidden is not None:
            products.write_gradient(dhidden[part], logits, codes)
        if dweight is not None:
            add_product(dweight, logits.t(), rows[part], add=start > 0)
        if dbias is not None:
            dbias += logits.sum(0, dtype=wide)
    if dhidden is not None and slots is None:
        dhidden = dhidden[:num_rows]
    counted = num_trained if correct is None else torch.count_nonzero(correct)
    return Result(
        losses[:num_rows].sum(),
        counted if teacher is None else teacher.figures.sum(0),
        num_trained,
        losses[:num_rows] if slots is None else losses.index_select(0, slots),
        dhidden,
        dweight,
        dbias,
        slots,
        grad_scale,
    )


def _gradients(
    rows: Tensor, weight: Tensor, dtype: torch.dtype, wants: Sequence[bool]
) -> list[Tensor | None]:
    """Memory for those of hidden (K + 1, H), whose last row is zeros, weight (V, H), bias (V,)."""
    num_rows, wide = len(rows), torch.promote_types(rows.dtype, torch.float32)
    made = torch.empty_like if num_rows else torch.zeros_like  # the first chunk fills it
    dhidden = rows.new_empty((num_rows + 1, rows.shape[1]), dtype=dtype) if wants[0] else None
    if dhidden is not None:
        dhidden[num_rows].zero_()
    dweight = made(weight, dtype=wide) if wants[1] else None
    dbias = rows.new_zeros(len(weight), dtype=wide) if wants[2] else None
    return [dhidden, dweight, dbias]


def keep_trained(
    labels: Tensor, num_trained: Tensor, settings: Settings
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The trained rows in order, filled up with ignored ones to a size the host knows.

    Returns:
        The labels (K,) of these, which of the M rows they are, and for each of the M its place
        among the K, or K where it has none; None for both when all rows are kept.
    """
    num_rows = labels.shape[0]
    if settings.num_trained is None:
        return labels, None, None
    kept = -(-settings.num_trained // ROWS_MULTIPLE) * ROWS_MULTIPLE
    if kept >= num_rows:
        return labels, None, None
    torch._assert_async(num_trained <= kept, "linear_cross_entropy: num_trained is too small")
    trained = labels != settings.loss.ignore_index
    slots = torch.where(trained, trained.cumsum(0) - 1, kept)
    everyone = torch.arange(num_rows, device=labels.device)
    chosen = everyone.new_zeros(kept + 1).scatter_(0, slots, everyone)[:kept]
    labels = torch.where(everyone[:kept] < num_trained, labels[chosen], settings.loss.ignore_index)
    return labels, chosen, slots


def in_places(factors: Tensor, slots: Tensor | None, size: int) -> Tensor:
    """The factors (size,) of the rows that were computed; the last place is the untrained rows'."""
    if slots is None:
        return factors
    placed = factors.new_zeros(size).scatter_(0, slots, factors)
    placed[size - 1] = 0
    return placed


def _power_of_2(factors: Tensor) -> Tensor:
    """About the largest factor: it stays out of the products, so that small ones do not underflow.

    A power of two, so that a factor which 16 bits hold exactly still is after the division.
    """
    if not len(factors):
        return factors.new_ones(())
    return torch.ldexp(factors.new_ones(()), torch.frexp(factors.abs().amax()).exponent)


def grad_scale_of(dtype: torch.dtype) -> float:
    """Lifts a chunk's gradients over fp16's smallest number; the largest one stays near 1e3."""
    return 1024.0 if dtype == torch.float16 else 1.0


def chunk_rows(num_rows: int, limit: int) -> int:
    """The chunk size: at most the limit, and as equal as multiples of ``ROWS_MULTIPLE`` allow."""
    if num_rows <= limit:
        return num_rows
    num_chunks = -(-num_rows // limit)
    return min(-(-num_rows // (num_chunks * ROWS_MULTIPLE)) * ROWS_MULTIPLE, limit)


# -- What linear cross entropy means, in plain torch ----------------------------------------------


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    num_items: Tensor | int | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The loss from the full logits, differentiable by autograd; the truth in tests."""
    options = LossOptions(ignore_index, label_smoothing, softcap, z_loss)
    logits = linear(hidden, weight, bias)
    return cross_entropy_reference(logits, labels, num_items=num_items, **options._asdict())


def linear_token_losses_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Tensor:
    """Each row's loss from the full logits; see `linear_cross_entropy_reference`."""
    logits = linear(hidden, weight, bias).flatten(0, -2)
    options = LossOptions(ignore_index, softcap=softcap)
    return token_losses_reference(logits, labels.flatten(), options).view(labels.shape)
