"""The loss of every token by itself, with a gradient: what preference objectives are made of.

The sum of log-probabilities of an answer, a ratio to a reference model, a weight a token: each is a
function of the tokens' own losses, known only after all of them. A row's gradient by its hidden
state is that of its own loss times one factor, so with a frozen head it is made on the forward
pass, as in `linear_cross_entropy`, and the backward pass multiplies. The weight's gradient is a sum
over rows with these factors: where it is wanted, the backward pass makes each chunk's logits once
more; nothing of their size is kept.

M rows of ``hidden``, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.kernels.cross_entropy.function import cross_entropy_chunk
from trainkit.kernels.fp8.trained import Directions
from trainkit.kernels.launch import device_of, is_on_gpu
from trainkit.kernels.linear_cross_entropy.function import (
    Settings,
    check_shapes,
    chunk_rows,
    compute,
    compute_dtype_of,
    grad_scale_of,
    keep_trained,
)
from trainkit.kernels.linear_cross_entropy.products import (
    Products,
    add_product,
    logits_buffer,
    products_of,
)


@torch.compiler.disable(reason="a loop over chunks in one buffer is nothing to trace")
def linear_token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    num_trained: int | None = None,
    chunk_tokens: int | None = None,
    in_fp8: Directions | None = None,
) -> Tensor:
    """Cross entropy of each row of ``hidden @ weight.T + bias`` against its label.

    Without a gradient for the weight there is one product over the vocabulary for the losses and
    one for the hidden states' gradient; with it there are two and two; without any, one.

    Args:
        hidden: (..., H).
        weight: (V, H).
        labels: (...), aligned with the rows of ``hidden`` (no shift happens here).
        bias: (V,).
        ignore_index: the label of rows that are not trained.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        num_trained: as for `linear_cross_entropy`: only so many rows are computed.
        chunk_tokens: rows whose logits exist at a time; None takes `Products.chunk_tokens`.
        in_fp8: as for `linear_cross_entropy`.

    Returns:
        (...), the negative log-probabilities in fp32 (fp64 for fp64); 0, without a gradient, where
        a row is not trained.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_shapes(hidden, weight, labels, bias, chunk_tokens)
    flat = labels.reshape(-1)
    if num_trained is None and not is_on_gpu(flat):
        num_trained = int(torch.count_nonzero(flat != ignore_index))
    settings = Settings(
        compute_dtype=compute_dtype_of(hidden, weight),
        ignore_index=ignore_index,
        softcap=softcap,
        num_trained=num_trained,
        chunk_tokens=chunk_tokens,
        wants_gradients=torch.is_grad_enabled(),
        in_fp8=in_fp8,
    )
    losses: Tensor = _TokenLosses.apply(hidden, weight, bias, flat, settings)
    return losses.view(labels.shape)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        settings: Settings,
    ) -> Tensor:
        want_dhidden, *trained = ctx.needs_input_grad[:3]
        ctx.is_frozen = settings.wants_gradients and not any(trained)
        with torch.autocast(hidden.device.type, enabled=False), device_of(hidden):
            made = compute(
                hidden,
                weight,
                bias,
                labels,
                settings,
                want_dhidden=ctx.is_frozen and want_dhidden,
                want_dweight=False,
                want_dbias=False,
            )
        ctx.settings, ctx.like = settings, (hidden.shape, hidden.dtype)
        kept = (made.dhidden, made.slots) if ctx.is_frozen else (hidden, weight, bias, labels)
        ctx.save_for_backward(*kept)
        return made.row_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.is_frozen:
            return *_second_pass(ctx, grad_output), None, None
        dhidden, slots = ctx.saved_tensors
        shape, dtype = ctx.like
        factors = grad_output / grad_scale_of(ctx.settings.compute_dtype)
        factors = _in_places(factors, slots, len(dhidden)).unsqueeze(-1)
        dhidden = torch.mul(dhidden, factors, out=torch.empty_like(dhidden, dtype=dtype))
        if slots is not None:
            dhidden = dhidden.index_select(0, slots)
        return dhidden.view(shape), None, None, None, None


def _in_places(factors: Tensor, slots: Tensor | None, size: int) -> Tensor:
    """The factors (size,) of the rows that were computed; the last place is the untrained rows'."""
    if slots is None:
        return factors
    placed = factors.new_zeros(size).scatter_(0, slots, factors)
    placed[size - 1] = 0
    return placed


def _second_pass(
    ctx: Any, grad_output: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden states, weight and bias, from logits that are made again."""
    hidden, weight, bias, labels = ctx.saved_tensors
    want_dhidden, want_dweight, want_dbias = ctx.needs_input_grad[:3]
    settings: Settings = ctx.settings
    dtype = settings.compute_dtype
    wide = torch.promote_types(dtype, torch.float32)
    dhidden = dweight = dbias = None
    with torch.autocast(hidden.device.type, enabled=False), device_of(hidden):
        rows = hidden.reshape(-1, hidden.shape[-1])
        num_trained = torch.count_nonzero(labels != settings.ignore_index)
        rows, labels, slots = keep_trained(rows, labels, num_trained, settings)
        rows, num_rows = rows.to(dtype), len(rows)
        products = products_of(weight, bias, dtype, settings.in_fp8)
        factors = _in_places(grad_output.to(wide), slots, num_rows + 1)
        size = _power_of_2(factors) / grad_scale_of(dtype)
        scales = factors / size
        if want_dhidden:
            dhidden = rows.new_empty((num_rows + 1, rows.shape[1]), dtype=products.gradient_dtype)
            dhidden[num_rows].zero_()
        if want_dweight:
            dweight = torch.zeros_like(weight, dtype=wide)
        if want_dbias:
            dbias = rows.new_zeros(len(weight), dtype=wide)
        unused = rows.new_empty(num_rows, dtype=wide)
        limit = settings.chunk_tokens or products.chunk_tokens(trained=want_dweight)
        for part, logits in _chunks(rows, products, len(weight), limit):
            codes = products.gradient_codes(len(logits)) if want_dhidden else None
            cross_entropy_chunk(
                logits,
                labels[part],
                unused[part],
                scales[part],
                want_grad=want_dweight or want_dbias or codes is None,
                codes_out=codes,
                ignore_index=settings.ignore_index,
                softcap=settings.softcap,
            )
            if dhidden is not None:
                products.write_gradient(dhidden[part], logits, codes)
            if dweight is not None:
                add_product(dweight, logits.t(), rows[part], add=True)
            if dbias is not None:
                dbias += logits.sum(0, dtype=wide)
        if dhidden is not None:
            dhidden = (dhidden * size).to(hidden.dtype)
            dhidden = dhidden[:num_rows] if slots is None else dhidden.index_select(0, slots)
            dhidden = dhidden.view(hidden.shape)
        if dweight is not None:
            dweight = (dweight * size).to(weight.dtype)
        if dbias is not None:
            dbias = (dbias * size).to(bias.dtype)
    return dhidden, dweight, dbias


def _power_of_2(factors: Tensor) -> Tensor:
    """About the largest factor: it stays out of the products, so that small ones do not underflow.

    A power of two, so that a factor which 16 bits hold exactly still is after the division.
    """
    if not len(factors):
        return factors.new_ones(())
    exponent = torch.frexp(factors.abs().amax()).exponent
    return torch.ldexp(factors.new_ones(()), exponent)


def _chunks(rows: Tensor, products: Products, vocab_size: int, limit: int) -> Any:
    """Which rows, and their logits (rows, V) in a buffer that the next chunk writes again."""
    chunk = chunk_rows(len(rows), limit)
    buffer = logits_buffer(rows, chunk, vocab_size)
    for start in range(0, len(rows), max(chunk, 1)):
        part = slice(start, min(start + chunk, len(rows)))
        logits = buffer[: part.stop - start, :vocab_size]
        products.write_logits(logits, rows[part])
        yield part, logits
