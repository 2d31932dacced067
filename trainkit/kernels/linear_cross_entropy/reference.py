"""What linear cross entropy means, in plain torch.

N rows, H hidden, V vocabulary.
"""

import torch
from torch import Tensor


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
    """The loss from the full logits, differentiable by autograd; the truth in tests.

    Args:
        hidden: (..., H).
        weight: (V, H).
        labels: (...), aligned with the rows of ``hidden``.
        bias: (V,).
        num_items: what the sum is divided by; the number of trained labels when None.
        ignore_index: the label of rows that are not trained.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        label_smoothing: share of the target spread evenly over the vocabulary.
        z_loss: weight of the squared log-partition.

    Returns:
        A scalar: fp64 for fp64 inputs, else fp32.
    """
    logits = torch.nn.functional.linear(hidden.flatten(0, -2), weight, bias)
    logits = logits.to(accumulation_dtype(logits.dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    labels = labels.flatten()
    trained = labels != ignore_index
    lse = torch.logsumexp(logits, -1)
    target = logits.gather(-1, labels.where(trained, 0)[:, None])[:, 0]
    losses = lse - (1 - label_smoothing) * target - label_smoothing * logits.mean(-1)
    losses = losses + z_loss * lse.square()
    total = losses.where(trained, 0).sum()
    return total / denominator(trained.sum() if num_items is None else num_items, total)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which losses and weight gradients are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def denominator(num_items: Tensor | int, like: Tensor) -> Tensor:
    """``num_items`` as a 0-d tensor beside ``like``; 1 in place of 0: no label means loss 0."""
    if not isinstance(num_items, Tensor):  # a fill on the device, not a copy from the host
        return like.new_full((), num_items or 1)
    items = num_items.to(device=like.device, dtype=like.dtype)
    return items.where(items != 0, 1)


def cross_entropy_chunk_reference(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int,
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
    grad_scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Losses of the rows of a chunk; the logits become their gradient, in place.

    Args:
        logits: (N, V), overwritten when ``grad_scale`` is not None.
        labels: (N,).
        ignore_index: see `linear_cross_entropy_reference`.
        softcap: likewise.
        label_smoothing: likewise.
        z_loss: likewise.
        grad_scale: factor on the gradient of the sum of losses; None computes no gradient.

    Returns:
        The losses and whether the largest logit is the label's (bool), both (N,).
    """
    wide = logits.to(accumulation_dtype(logits.dtype))
    slope = None
    if softcap is not None:
        bent = torch.tanh(wide / softcap)
        wide, slope = softcap * bent, 1 - bent.square()
    trained = labels != ignore_index
    safe = labels.where(trained, 0)[:, None]
    lse = torch.logsumexp(wide, -1)
    losses = lse - (1 - label_smoothing) * wide.gather(-1, safe)[:, 0]
    losses = losses - label_smoothing * wide.mean(-1) + z_loss * lse.square()
    correct = (wide.argmax(-1) == labels) & trained
    if grad_scale is not None:
        grad = torch.exp(wide - lse[:, None]) * (1 + 2 * z_loss * lse)[:, None]
        grad -= label_smoothing / wide.shape[-1]
        grad.scatter_add_(-1, safe, grad.new_full(safe.shape, label_smoothing - 1))
        if slope is not None:
            grad *= slope
        logits.copy_(grad.mul_(grad_scale).where(trained[:, None], 0))
    return losses.where(trained, 0), correct
