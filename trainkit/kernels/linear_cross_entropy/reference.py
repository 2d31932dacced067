"""What linear cross entropy means, in plain torch."""

from torch import Tensor
from torch.nn.functional import linear

from trainkit.kernels.cross_entropy.reference import (
    cross_entropy_reference,
    token_losses_reference,
)


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
        num_items: see `cross_entropy_reference`.
        ignore_index: likewise.
        softcap: likewise.
        label_smoothing: likewise.
        z_loss: likewise.

    Returns:
        A scalar: fp64 for fp64 inputs, else fp32.
    """
    return cross_entropy_reference(
        linear(hidden, weight, bias),
        labels,
        num_items=num_items,
        ignore_index=ignore_index,
        softcap=softcap,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )


def linear_token_losses_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> Tensor:
    """Each row's loss from the full logits; see `linear_cross_entropy_reference`.

    Returns:
        (...), 0 where a row is not trained.
    """
    logits = linear(hidden, weight, bias)
    losses = token_losses_reference(
        logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, softcap=softcap
    )
    return losses.view(labels.shape)
