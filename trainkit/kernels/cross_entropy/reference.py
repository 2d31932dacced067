"""Cross entropy in plain torch, with the options of the kernel."""

import torch
from torch import Tensor


def token_losses_reference(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Loss of each row of logits (N, V), at least fp32; 0 where the label is ignored.

    ``(1 - e) * nll + e * mean over V of -log p + z_loss * logsumexp^2``, on
    ``softcap * tanh(logits / softcap)`` if a softcap is given.
    """
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        values = softcap * torch.tanh(values / softcap)
    trained = labels != ignore_index
    target = labels.where(trained, 0).unsqueeze(-1).long()
    lse = torch.logsumexp(values, dim=-1)
    loss = lse - values.gather(-1, target).squeeze(-1)
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (lse - values.mean(-1))
    if z_loss:
        loss = loss + z_loss * lse.square()
    return loss.where(trained, torch.zeros_like(loss))


def cross_entropy_reference(
    logits: Tensor,
    labels: Tensor,
    *,
    num_items: Tensor | int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """``sum of the token losses / num_items``; 0 with zero gradients when num_items is 0.

    Source: ``fixed_cross_entropy`` of transformers 5.23, which returns NaN in that last case.
    """
    rows, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    losses = token_losses_reference(
        rows,
        labels,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
    )
    if num_items is None:
        num_items = (labels != ignore_index).sum()
    count = torch.as_tensor(num_items, device=losses.device).to(losses.dtype).reshape(())
    return losses.sum() * torch.where(count > 0, 1.0 / count, 0.0)
