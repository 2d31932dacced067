"""Rows that several ranks share (Ulysses): each has a part of the tokens, and attends for all.

Everything but attention looks at one token at a time, so a rank does it for its part of each row.
Around attention the ranks of a group exchange: before it, each gets all tokens of some of the
heads, after it, its tokens of all heads again. Positions and masks are those of whole rows. The
loss is a sum over tokens: a rank's part of it is one more part of the step's, as from another row,
so engines add up gradients over these ranks as over any others.

Shapes: B rows, S tokens of a row, n ranks of a group, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from trainkit.errors import ModelError, TrainkitError
from trainkit.options.data import IGNORE_INDEX

_KEPT = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})
"""What says where documents begin and end in whole rows, as attention sees them."""


@dataclass(frozen=True, eq=False)
class RowSplit:
    """One group of ranks that share rows."""

    rank: int
    size: int
    group: Any = field(repr=False)

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]]) -> RowSplit:
        """Make the groups; every process calls it, with all of them."""
        group, _ = distributed.new_subgroups_by_enumeration([list(each) for each in groups])
        return cls(distributed.get_rank(group), distributed.get_world_size(group), group)

    def part(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a batch.

        The batch's (B, S) tensors are on the host; S is a multiple of n, padded on the right.

        Args:
            batch: of a collator, on the host: (B, S) tensors, S a multiple of n, padded on the
                right.

        Returns:
            (B, S / n) tensors: ``input_ids`` and ``labels``; ``position_ids`` in the whole row;
            ``shift_labels`` and ``source_ids`` of the next token. ``num_trained_tokens`` of the
            part. No ``attention_mask``: no token looks at the padding behind it.
        """
        found = dict(batch)
        tokens = found["input_ids"]
        length = tokens.shape[1]
        if length % self.size:
            raise TrainkitError(
                f"rows of {length} tokens cannot be split over {self.size} ranks",
                where="parallel.sequence",
                fix="set data.max_length to a multiple of it",
            )
        _drop_padding_mask(found)
        if found.get("position_ids") is None:
            found["position_ids"] = torch.arange(length).expand(tokens.shape)
        if "labels" in found:
            found["shift_labels"] = next_tokens(found["labels"], IGNORE_INDEX)
        if "source_ids" in found:
            found["source_ids"] = next_tokens(found["source_ids"], -1)
        for name, value in found.items():
            if name in _KEPT or not isinstance(value, Tensor):
                continue
            if value.shape != tokens.shape:
                raise TrainkitError(
                    f"`{name}` of a batch has the shape {tuple(value.shape)}, and rows are "
                    f"{tuple(tokens.shape)}: it cannot be split",
                    where="parallel.sequence",
                    fix="remove parallel.sequence",
                )
            found[name] = value.chunk(self.size, dim=1)[self.rank].contiguous()
        if "num_trained_tokens" in found:
            found["num_trained_tokens"] = int((found["shift_labels"] != IGNORE_INDEX).sum())
        return found

    def to_heads(self, states: Tensor) -> Tensor:
        """(B, H, S / n, D) to (B, H / n, S, D); the group calls it together.

        Heads are repeated where there are too few: two ranks then attend with the same keys.
        """
        repeats = math.lcm(states.shape[1], self.size) // states.shape[1]
        if repeats > 1:
            states = states.repeat_interleave(repeats, dim=1)
        rows, heads, tokens, width = states.shape
        parts = states.view(rows, self.size, heads // self.size, tokens, width)
        received: Tensor = _Exchange.apply(parts.movedim(1, 0), self.group)
        return received.movedim(0, 2).flatten(2, 3)

    def to_tokens(self, states: Tensor) -> Tensor:
        """(B, S, H / n, D) to (B, S / n, H, D); the group calls it together."""
        rows, tokens, heads, width = states.shape
        parts = states.reshape(rows, self.size, tokens // self.size, heads, width)
        received: Tensor = _Exchange.apply(parts.movedim(1, 0), self.group)
        return received.movedim(0, 2).flatten(2, 3)

    def own_heads(self, values: Tensor) -> Tensor:
        """(H,) to the (H / n,) of the heads that this rank attends with."""
        return values.chunk(self.size)[self.rank]

    def refuse_heads(self, num_heads: int) -> None:
        """Stop where query heads cannot be dealt out evenly."""
        if num_heads % self.size:
            fitting = [n for n in range(2, num_heads + 1) if num_heads % n == 0]
            raise ModelError(
                f"attention with {num_heads} heads cannot be shared by {self.size} ranks",
                where="parallel.sequence",
                fix=f"set it to one of {', '.join(map(str, fitting))}",
            )

    def whole(self, part: Tensor) -> Tensor:
        """(B, S / n, ...) of each rank to (B, S, ...) on all of them; no gradient."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        distributed.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within, what goes through a model are parts of rows."""
        token = _at_work.set(self)
        try:
            yield
        finally:
            _at_work.reset(token)


_at_work: ContextVar[RowSplit | None] = ContextVar("row_split", default=None)


def row_split() -> RowSplit | None:
    """How the rows that go through the model now are split; None where they are whole."""
    return _at_work.get()


def next_tokens(values: Tensor, fill: int) -> Tensor:
    """(B, S) of tokens to (B, S) of the token after each; ``fill`` after the last."""
    return pad(values[:, 1:], (0, 1), value=fill)


class _Exchange(torch.autograd.Function):
    """Part i of the first dimension goes to rank i, and part i of the result came from there."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sent = gradients[0].contiguous()
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=ctx.group)
        return received, None


def _drop_padding_mask(batch: dict[str, Any]) -> None:
    mask = batch.pop("attention_mask", None)
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise TrainkitError(
            "rows that are padded on the left cannot be split", where="parallel.sequence"
        )
