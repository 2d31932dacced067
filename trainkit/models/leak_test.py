"""Proof at start that packed documents do not see one another.

One document of a packed batch is replaced by other tokens; the logits of every other document must
stay the very same numbers, and its own must not.

Where products are cut by content (experts take the rows that are routed to them), other tokens make
other shapes of products, and so another last bit. How much that is, the plain model shows on rows
of one document each, which cannot see one another: packed documents may move by no more.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn

from trainkit.errors import TrainkitError
from trainkit.evaluation_mode import evaluation_mode
from trainkit.parallel.rows import RowSplit

ROW = 64
LENGTHS = ((24, 17, 9), (31, 19))
"""Documents of two packed rows of `ROW`; both end in padding."""

_DRAWS = 16
_SLACK = 4.0
"""On the largest of `_DRAWS` changes, against the largest of two: twice for the draw, and twice
because a logit behind the next power of two rounds in steps twice as large."""

_FIX = "set data.packing to false; or model.attn_implementation to auto, where it is not"


def leak_test(
    model: nn.Module,
    *,
    attention: str,
    vocab_size: int,
    seed: int = 0,
    split: RowSplit | None = None,
) -> float:
    """Change single documents of a packed batch and watch the others' logits.

    Runs three forward passes over 128 tokens in evaluation mode, without gradients; 32 more where a
    logit moved, to see how the plain model rounds.

    Returns:
        The largest change of a logit of the changed documents, which shows the test could see one.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), _row_length(split))
    tokens = torch.randint(0, vocab_size, shape, generator=generator)
    others = torch.randint(0, vocab_size, shape, generator=generator)
    documents = _documents()
    seen = allowed = 0.0
    moves: list[tuple[float, int, int, float]] = []
    with evaluation_mode(model):
        before = _logits(model, tokens, device, split)
        for changed in (documents[0], documents[2]):  # the first and the last of a row
            row, start, stop = changed
            replaced = tokens.clone()
            replaced[row, start:stop] = others[row, start:stop]
            moved = (_logits(model, replaced, device, split) - before).abs().amax(-1)
            own = moved[row, start:stop].max().item()
            seen = max(seen, own)
            for number, (row, start, stop) in enumerate(documents):
                if (row, start, stop) != changed:
                    change = moved[row, start:stop].max().item()
                    moves.append((change, documents.index(changed), number, own))
        # The ranks of a sharded model run it together.
        if _on_any_rank(any(move[0] != 0.0 for move in moves), device):
            allowed = _SLACK * _rounding(model, vocab_size, device, split, generator)
    for change, changed_number, number, own in moves:
        if not change <= allowed:
            raise TrainkitError(
                f"packed documents leak: changing document {changed_number} moved the logits of "
                f"document {number} by {change:.3g} (its own moved by {own:.3g}; rounding would "
                f"explain {allowed:.3g})",
                where=f"attention {attention}",
                fix=_FIX,
            )
    if not seen > 0.0:
        raise TrainkitError(
            "the leak test saw no change where it made one; the model ignores its input",
            where=f"attention {attention}",
        )
    return seen


def image_leak_test(
    model: nn.Module, batch: dict[str, Any], *, token_id: int, attention: str
) -> float | None:
    """Change the last image of a packed batch, and watch the logits of every other document.

    Returns:
        The largest change of a logit of the image's own document; None where there is no other.
    """
    bounds = batch["cu_seq_lens_q"].tolist()
    given = {name: value for name, value in batch.items() if name not in ("labels", "source_ids")}
    last = int((batch["input_ids"].flatten() == token_id).nonzero().max())
    number = next(place for place, end in enumerate(bounds[1:]) if last < end)
    own = slice(bounds[number], bounds[number + 1])
    changed = dict(given)
    changed["pixel_values"] = pixels = batch["pixel_values"].clone()
    # Patches and images are end to end; tiles have an axis of rows before theirs.
    final = pixels[:, -1] if pixels.dim() == 5 else pixels[-1]
    final.neg_().add_(0.5)
    with evaluation_mode(model), torch.no_grad():
        before, after = (
            model(**each, use_cache=False).logits.flatten(0, 1).float() for each in (given, changed)
        )
    moved = (after - before).abs().amax(-1)
    seen = float(moved[own].max())
    moved[own] = 0.0
    others = float(moved.max())
    if others > 0.0 or not seen > 0.0:
        what = f"moved the logits of others by {others:.3g}" if seen > 0.0 else "is seen by nobody"
        raise TrainkitError(
            f"packed documents leak: the image of document {number} {what}",
            where=f"attention {attention}",
            fix=_FIX,
        )
    return seen if len(bounds) > 2 else None


def _rounding(
    model: nn.Module,
    vocab_size: int,
    device: torch.device,
    split: RowSplit | None,
    generator: torch.Generator,
) -> float:
    """How much a row's logits move by rounding when another row of its batch has other tokens."""
    largest = 0.0
    for _ in range(_DRAWS):
        rows = torch.randint(0, vocab_size, (3, _row_length(split)), generator=generator)
        logits = [_logits(model, rows[[0, other]], device, split, ())[0] for other in (1, 2)]
        largest = max(largest, (logits[0] - logits[1]).abs().max().item())
    return largest


def _on_any_rank(value: bool, device: torch.device) -> bool:
    if not (distributed.is_available() and distributed.is_initialized()):
        return value
    found = torch.tensor(float(value), device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return bool(found.item())


def _documents() -> list[tuple[int, int, int]]:
    """(row, start, stop) of every document."""
    found = []
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            found.append((row, start, start + length))
            start += length
    return found


def packed_inputs(lengths: Sequence[Sequence[int]], row_length: int) -> dict[str, Any]:
    """What a packing collator says about rows of documents.

    The padding of a row is one more document.

    Returns:
        ``position_ids`` (B, row_length), boundaries (documents + 1,) int32 over the flattened
        batch, and the length of the longest document.
    """
    all_lengths: list[int] = []
    for row in lengths:
        tail = row_length - sum(row)
        all_lengths += [*row, tail] if tail else row
    positions = torch.cat([torch.arange(length) for length in all_lengths])
    bounds = torch.tensor([0, *all_lengths]).cumsum(0, dtype=torch.int32)
    return {
        "position_ids": positions.view(len(lengths), row_length),
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(all_lengths),
        "max_length_k": max(all_lengths),
    }


def on(device: torch.device, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def _row_length(split: RowSplit | None) -> int:
    parts = 1 if split is None else split.size
    return -(-ROW // parts) * parts


def _logits(
    model: nn.Module,
    tokens: Tensor,
    device: torch.device,
    split: RowSplit | None,
    lengths: Sequence[Sequence[int]] = LENGTHS,
) -> Tensor:
    """Of rows packed with documents of these lengths; without lengths, of rows that are not."""
    batch: dict[str, Any] = {"input_ids": tokens}
    if lengths:
        batch |= packed_inputs(lengths, _row_length(split))
    if split is not None:
        batch = split.part(batch)
    with torch.no_grad(), nullcontext() if split is None else split.at_work():
        logits: Tensor = model(**on(device, batch), use_cache=False).logits.float()
    return logits if split is None else split.whole(logits)
