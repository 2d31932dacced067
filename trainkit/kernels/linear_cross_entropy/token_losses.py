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

from trainkit.kernels.cross_entropy.function import LossOptions
from trainkit.kernels.fp8.trained import Directions
from trainkit.kernels.launch import device_of
from trainkit.kernels.linear_cross_entropy.function import (
    Settings,
    check_shapes,
    compute,
    grad_scale_of,
    in_places,
    settings_of,
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
    """
    check_shapes(hidden, weight, labels, bias, chunk_tokens)
    flat = labels.reshape(-1)
    loss = LossOptions(ignore_index, softcap=softcap)
    options: dict[str, Any] = {"chunk_tokens": chunk_tokens, "in_fp8": in_fp8}
    settings = settings_of(hidden, weight, flat, loss, num_trained=num_trained, **options)
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
            wants = (ctx.is_frozen and want_dhidden, False, False)
            made = compute(hidden, weight, bias, labels, settings, wants)
        ctx.settings, ctx.like = settings, (hidden.shape, hidden.dtype)
        kept = (made.dhidden, made.slots) if ctx.is_frozen else (hidden, weight, bias, labels)
        ctx.save_for_backward(*kept)
        return made.row_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        shape, dtype = ctx.like
        dweight = dbias = None
        if ctx.is_frozen:
            dhidden, slots = ctx.saved_tensors
            factors = grad_output / grad_scale_of(ctx.settings.compute_dtype)
            factors = in_places(factors, slots, len(dhidden)).unsqueeze(-1)
            dhidden = torch.mul(dhidden, factors, out=torch.empty_like(dhidden, dtype=dtype))
        else:  # from logits that are made again
            hidden, weight, bias, labels = ctx.saved_tensors
            wants = ctx.needs_input_grad[:3]
            with torch.autocast(hidden.device.type, enabled=False), device_of(hidden):
                made = compute(hidden, weight, bias, labels, ctx.settings, wants, grad_output)
            found = (made.dhidden, made.dweight, made.dbias)
            dhidden, dweight, dbias = (
                None if each is None else (each / made.grad_scale).to(like.dtype)
                for each, like in zip(found, (hidden, weight, bias), strict=True)
            )
            slots = made.slots
        if dhidden is not None:
            dhidden = dhidden if slots is None else dhidden.index_select(0, slots)
            dhidden = dhidden.view(shape)
        return dhidden, dweight, dbias, None, None
