"""Weight conversions as data: a table of rules, each with its inverse.

A rule says which source tensors make which target tensors and how. Applied to a set of names, a
keymap yields steps; a name that no rule takes, or that a rule misses, is an error that lists it.
The transforms work on weights, biases and LoRA's ``lora_B`` alike, because all of them have the
layer's output features as rows; they work on meta tensors too, which is how shapes are planned.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from trainkit.errors import CheckpointError

LAYER = "{layer}"
_MAX_NAMED = 12


class Transform(Protocol):
    """A bijection between lists of tensors."""

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """From source tensors to target tensors."""

    def inverse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """From target tensors back to source tensors."""


@dataclass(frozen=True)
class Copy:
    """The tensor as it is."""

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same tensors."""
        return list(tensors)

    inverse = forward


@dataclass(frozen=True)
class SplitRows:
    """One tensor into consecutive blocks of rows.

    Attributes:
        sizes: rows of each block; together all rows.
    """

    sizes: tuple[int, ...]

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One tensor to ``len(sizes)``."""
        (tensor,) = tensors
        return list(tensor.split(self.sizes, dim=0))

    def inverse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``len(sizes)`` tensors to one."""
        if tuple(tensor.shape[0] for tensor in tensors) != self.sizes:
            raise ValueError(f"rows {[t.shape[0] for t in tensors]} instead of {self.sizes}")
        return [torch.cat(list(tensors), dim=0)]


@dataclass(frozen=True)
class PermuteHeadRows:
    """The rows of each attention head in another order.

    Attributes:
        order: row ``order[i]`` of a head becomes its row ``i``.
    """

    order: tuple[int, ...]

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Permute."""
        return [self._apply(tensor, self.order) for tensor in tensors]

    def inverse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Permute back."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return [self._apply(tensor, back) for tensor in tensors]

    def _apply(self, tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        heads = tensor.unflatten(0, (-1, len(self.order)))
        index = torch.tensor(order, device=tensor.device)
        return heads.index_select(1, index).flatten(0, 1)


@dataclass(frozen=True)
class Each:
    """The i-th tensor through the i-th transform."""

    parts: tuple[Transform, ...]

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Forward each."""
        pairs = zip(self.parts, tensors, strict=True)
        return [result for part, tensor in pairs for result in part.forward([tensor])]

    def inverse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Inverse each."""
        pairs = zip(self.parts, tensors, strict=True)
        return [result for part, tensor in pairs for result in part.inverse([tensor])]


@dataclass(frozen=True)
class Then:
    """One transform after another."""

    first: Transform
    second: Transform

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """First, then second."""
        return self.second.forward(self.first.forward(tensors))

    def inverse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Undo second, then first."""
        return self.first.inverse(self.second.inverse(tensors))


@dataclass(frozen=True)
class Inverse:
    """A transform the other way round."""

    of: Transform

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inner inverse."""
        return self.of.inverse(tensors)

    def inverse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inner forward."""
        return self.of.forward(tensors)


@dataclass(frozen=True)
class Rule:
    """Some tensors of the source and what they become.

    Attributes:
        source: names; ``{layer}`` stands for the layer's number, in all of them or in none.
        target: names, with ``{layer}`` likewise.
        transform: from the source list to the target list.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    transform: Transform = Copy()

    @property
    def is_per_layer(self) -> bool:
        """Whether the rule is applied once a layer."""
        return LAYER in self.source[0]

    def inverted(self) -> "Rule":
        """The rule from target to source."""
        return Rule(self.target, self.source, Inverse(self.transform))

    def at(self, layer: int | None) -> "Step":
        """The rule with its layer filled in; None for a rule that is not per layer."""
        source, target = self.source, self.target
        if layer is not None:
            source = tuple(name.replace(LAYER, str(layer)) for name in source)
            target = tuple(name.replace(LAYER, str(layer)) for name in target)
        return Step(source, target, self.transform)


@dataclass(frozen=True)
class Left:
    """Source tensors that the target does not need; they are kept in the conversion's record.

    Attributes:
        pattern: a regular expression on the whole name.
        reason: why the target does without.
    """

    pattern: str
    reason: str


@dataclass(frozen=True)
class Step:
    """One rule applied to concrete names."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    transform: Transform


@dataclass(frozen=True)
class Keymap:
    """The conversion of one format's weights into another's.

    Attributes:
        name: for messages.
        rules: the table.
        left: what is left out, with reasons.
    """

    name: str
    rules: tuple[Rule, ...]
    left: tuple[Left, ...] = ()

    def inverted(self) -> "Keymap":
        """The conversion back."""
        rules = tuple(rule.inverted() for rule in self.rules)
        return replace(self, name=f"inverse of {self.name}", rules=rules, left=())

    def steps(self, num_layers: int, names: Iterable[str]) -> list[Step]:
        """Match the table against the tensors that are there.

        Args:
            num_layers: how often the per-layer rules apply.
            names: the source's tensors.

        Returns:
            Steps in the order of the table, layer by layer.

        Raises:
            CheckpointError: lists the names without a rule and those that a rule misses.
        """
        steps = self.all_steps(num_layers)
        present = {name for name in names if self.left_reason(name) is None}
        wanted = {name for step in steps for name in step.source}
        problems = []
        if missing := sorted(wanted - present):
            problems.append(f"missing {_some(missing)}")
        if unknown := sorted(present - wanted):
            problems.append(f"without a rule {_some(unknown)}")
        if problems:
            raise CheckpointError(
                f"the tensors do not fit {self.name}: " + "; ".join(problems),
                fix="check that config.json and the weights belong together",
            )
        return steps

    def left_reason(self, name: str) -> str | None:
        """Why a tensor is left out, or None if it is not."""
        return next((left.reason for left in self.left if re.fullmatch(left.pattern, name)), None)

    def all_steps(self, num_layers: int) -> list[Step]:
        """The steps of a complete source, in the order of the table, layer by layer."""
        per_layer = [rule for rule in self.rules if rule.is_per_layer]
        layers = [rule.at(layer) for layer in range(num_layers) for rule in per_layer]
        start = self.rules.index(per_layer[0]) if per_layer else len(self.rules)
        before = [rule.at(None) for rule in self.rules[:start]]
        after = [rule.at(None) for rule in self.rules[start:] if not rule.is_per_layer]
        return before + layers + after


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"({len(names)}) " + ", ".join(names[:_MAX_NAMED]) + more
