"""Proof at start that rows which ranks share are computed as whole ones.

A small batch goes through the model twice: each rank with all of it, and each with its part. Logits
and loss must agree up to what rounding explains, which is measured: whole rows go through once more
with the result of every module moved by a rounding. Shapes: B rows, S tokens, T tokens compared.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from trainkit.errors import ModelError
from trainkit.evaluation_mode import evaluation_mode
from trainkit.models.attention.choice import NAME
from trainkit.models.attention.packable import state_of
from trainkit.models.attention.proof import allowed, distance, has_experts, rounded, roundings
from trainkit.models.loss import take_counts
from trainkit.options.data import IGNORE_INDEX
from trainkit.parallel.rows import RowSplit

_ROWS = 2
_TOKENS = 24
"""Of each rank."""

_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that are others for long rows, which a part does not know to be one."""


def refuse_unsplittable(
    model: PreTrainedModel, split: RowSplit, *, attention: str, takes_num_items: bool
) -> None:
    text: Any = model.config.get_text_config()
    kind = model.config.model_type
    reason = None
    if attention != NAME:
        reason = f"{kind} attends with {attention}, and ranks exchange tokens in trainkit's own"
    elif (state := state_of(model, split=True)) is not None:
        reason = f"{state}, which carries state from token to token, and so from part to part"
    elif not takes_num_items:
        reason = f"{kind} returns the mean loss of what it is given, and a part has its own number"
    elif getattr(text, "output_router_logits", False):
        reason = f"the routers' loss of {kind} is a mean over whole rows"
    elif found := _BY_LENGTH.intersection(_rope_types(text)):
        reason = f"the {min(found)} rotary embedding of {kind} depends on the length of the row"
    if reason is not None:
        raise ModelError(
            f"rows cannot be split over ranks: {reason}", where="parallel.sequence", fix="remove it"
        )
    split.refuse_heads(text.num_attention_heads)


def row_test(model: nn.Module, split: RowSplit, *, vocab_size: int, dtype: torch.dtype) -> float:
    """Compare parts of rows with whole rows; all ranks call it together."""
    device = next(model.parameters()).device
    eps, floor = roundings(dtype, device)
    with evaluation_mode(model), torch.no_grad():
        batch = _batch(split, vocab_size)
        whole = _run(model, batch, device)
        with rounded(model, eps):
            moved = _run(model, batch, device)
        with split.at_work():
            logits, loss = _run(model, split.part(batch), device)
        torch.distributed.all_reduce(loss, group=split.group)
        found = split.whole(logits), loss
    take_counts(model.modules(), training=False)  # nobody evaluated
    experts = has_experts(model)
    far = [_apart(found, whole, experts), _apart(moved, whole, experts)]
    for name, error, noise in zip(("logits", "loss"), *far, strict=True):
        limit = allowed(noise, eps, floor)
        if not error <= limit:
            raise ModelError(
                f"the {name} of rows that {split.size} ranks share differ by {error:.2e} from "
                f"those of whole rows, where rounding explains {limit:.2e}",
                where="parallel.sequence",
                fix="remove it, and report this with the model's name",
            )
    return far[0][0]


def _batch(split: RowSplit, vocab_size: int) -> dict[str, Tensor]:
    """Random rows, the second one padded; some labels everywhere, none in the padding."""
    generator = torch.Generator().manual_seed(0)
    length = _TOKENS * split.size
    tokens = torch.randint(0, vocab_size, (_ROWS, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, length - 5 :] = 0
    trained = (torch.rand(tokens.shape, generator=generator) < 0.5) & mask.bool()
    positions = torch.arange(length).expand(tokens.shape)
    return {
        "input_ids": tokens,
        "labels": torch.where(trained, tokens, IGNORE_INDEX),
        "position_ids": positions,
        "attention_mask": mask,
    }


def _run(
    model: nn.Module, batch: Mapping[str, Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Logits of (B, S, V), and a loss: the sum over this part by a number for all."""
    given = {name: value.to(device) for name, value in batch.items()}
    labels = {name: given.pop(name) for name in ("labels", "shift_labels") if name in given}
    logits = model(**given, use_cache=False).logits
    number = torch.tensor(_ROWS * _TOKENS, device=device)
    loss = model(**given, **labels, num_items_in_batch=number, use_cache=False).loss
    return logits.float(), loss.detach().float().reshape(1)


def _apart(
    found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], experts: bool
) -> tuple[float, float]:
    """How far logits and loss are apart, relative to their size; the last tokens are padding."""
    logits, wanted = (
        torch.cat((each[0][0], each[0][1, : each[0].shape[1] - 5])) for each in (found, truth)
    )
    loss = ((found[1] - truth[1]).abs() / truth[1].abs()).item()
    return distance(logits, wanted, experts), loss


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    pending: list[Any] = [
        getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")
    ]
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            pending += [value for value in each.values() if isinstance(value, Mapping)]
            yield str(each.get("rope_type", each.get("type")))
