"""The loss of every token by itself, with a gradient, from the head or from logits.

The model's own forward runs under whatever wraps it, so the hooks of DDP and ZeRO-3 do as well.

B batch, S sequence, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

from trainkit.models.loss.loss_head import IGNORE_INDEX, takes_loss_from_head

_CHUNK_ELEMENTS = 1 << 26
"""Logits widened to fp32 at a time: 256 MiB."""


def token_losses(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """What preference objectives are made of: the negative log-probability of each label.

    A router's auxiliary loss is not in it.

    Args:
        model: a causal language model, patched or plain, under any wrapper.
        inputs: of its forward; ``labels`` (B, S) are not shifted, ``IGNORE_INDEX`` where a token
            does not count; ``num_trained_tokens``, those that do, saves a patched model the others.

    Returns:
        (B, S) in fp32 (fp64 for fp64): at each place the loss of the next token; 0 where that one
        has no label, so also in the last place. The patched model keeps no logits for it.
    """
    given = dict(inputs)
    if takes_loss_from_head(model):
        losses: torch.Tensor = model(**given, token_losses=True)["loss"]
        return losses
    labels = given.pop("labels")
    given.pop("num_trained_tokens", None)
    logits = model(**given)["logits"]
    return pad(losses_of_logits(logits[:, :-1], labels[:, 1:]), (0, 1))


def losses_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """The loss of each target, (B, S) in fp32 (fp64 for fp64).

    Args:
        logits: (B, S, V).
        targets: (B, S), each the label of the token that its logits predict.
        label_smoothing: share of the target spread evenly over the vocabulary.
    """
    rows = logits.flatten(0, 1)
    wanted = targets.flatten().to(rows.device)
    chunk = max(1, _CHUNK_ELEMENTS // rows.shape[1])
    wide = torch.promote_types(rows.dtype, torch.float32)
    losses = [
        cross_entropy(
            part.to(wide),
            chosen,
            reduction="none",
            ignore_index=IGNORE_INDEX,
            label_smoothing=label_smoothing,
        )
        for part, chosen in zip(rows.split(chunk), wanted.split(chunk), strict=True)
    ]
    return torch.cat(losses).view(targets.shape).to(targets.device)
