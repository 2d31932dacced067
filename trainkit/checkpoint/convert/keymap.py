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

import numpy as np
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
        (tensor,) = tensors
        return list(tensor.split(self.sizes, dim=0))

    def inverse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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
        return [self._apply(tensor, self.order) for tensor in tensors]

    def inverse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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
        pairs = zip(self.parts, tensors, strict=True)
        return [result for part, tensor in pairs for result in part.forward([tensor])]

    def inverse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(self.parts, tensors, strict=True)
        return [result for part, tensor in pairs for result in part.inverse([tensor])]


@dataclass(frozen=True)
class Then:
    """One transform after another."""

    first: Transform
    second: Transform

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.second.forward(self.first.forward(tensors))

    def inverse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.first.inverse(self.second.inverse(tensors))


@dataclass(frozen=True)
class Inverse:
    """A transform the other way round."""

    of: Transform

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.of.inverse(tensors)

    def inverse(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self.of.forward(tensors)


@dataclass(frozen=True)
class Rule:
    """Some tensors of the source and what they become.

    Attributes:
        source: names; ``{layer}`` stands for the layer's number, in all of them or in none.
        target: names, with ``{layer}`` likewise.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    transform: Transform = Copy()

    @property
    def is_per_layer(self) -> bool:
        """Whether the rule is applied once a layer."""
        return LAYER in self.source[0]

    def inverted(self) -> "Rule":
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
    """The conversion of one format's weights into another's."""

    name: str
    rules: tuple[Rule, ...]
    left: tuple[Left, ...] = ()

    def inverted(self) -> "Keymap":
        rules = tuple(rule.inverted() for rule in self.rules)
        return replace(self, name=f"inverse of {self.name}", rules=rules, left=())

    def steps(self, num_layers: int, names: Iterable[str]) -> list[Step]:
        """Match the table against the tensors that are there."""
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


# -- GLM's partial rotary embedding written as a full one, bit for bit ----------------------------
# GLM rotates the first ``rotary_dim`` dimensions of a head in pairs ``(2j, 2j+1)`` by the angle
# ``position * theta ** (-2j / rotary_dim)`` and leaves the rest alone. Qwen2 rotates all
# ``head_dim`` dimensions in pairs ``(j, head_dim/2 + j)``. Reordering the rows of q and k (even
# rows first, then odd ones) turns the one pairing into the other; it cancels in the product of q
# and k. What remains is to give Qwen2 GLM's frequencies for the first pairs and frequency zero
# for the others.
#
# ``longrope`` can say that: it divides each default frequency by its own factor. The base is
# chosen so that the first factors are 1 up to rounding: with base ``theta **
# (head_dim/rotary_dim)`` the default frequencies *are* GLM's, so a program that ignores the
# factors still computes nearly the same function (the other pairs then turn by less than
# ``1/theta`` a position). The factors make up for the rounding: each is moved by at most one unit
# in the last place until the frequency that float32 arithmetic yields is GLM's own. The other
# factors push the frequency to about 1e-30, whose rotation over any position is the identity in
# every float format.


_STILL = 1e30
_ROUNDING = 1e-5  # how far from 1 the factor of a turning pair may lie; float32 needs 1e-6


def interleaved_to_half_order(head_dim: int) -> tuple[int, ...]:
    """Where each row of a head comes from: the even dimensions, then the odd ones."""
    return (*range(0, head_dim, 2), *range(1, head_dim, 2))


def wavelengths(base: float, dim: int) -> torch.Tensor:
    """``base ** (2j / dim)`` for ``j < dim/2`` in float32, as transformers computes it."""
    return base ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float) / dim)


def full_base(theta: float, head_dim: int, rotary_dim: int) -> float:
    """The base whose default frequencies over ``head_dim`` start with GLM's over ``rotary_dim``."""
    ratio = head_dim / rotary_dim
    return theta**ratio if ratio != 2 else theta * theta  # exact where theta is a whole number


def longrope_factors(theta: float, head_dim: int, rotary_dim: int) -> list[float]:
    """The factor of each of the ``head_dim/2`` pairs.

    Raises:
        CheckpointError: no float32 factor gives GLM's frequency exactly, as for one in thirty of
            random bases from 1e4 to 1e8; or the base is beyond float32.
    """
    goal = 1.0 / wavelengths(theta, rotary_dim)
    full = wavelengths(full_base(theta, head_dim, rotary_dim), head_dim)
    pairs = rotary_dim // 2
    ideal = (wavelengths(theta, rotary_dim).double() / full[:pairs].double()).float().numpy()
    factors: list[float] = []
    for pair in range(pairs):
        up, down = np.float32(np.inf), np.float32(0)
        tries = (ideal[pair], np.nextafter(ideal[pair], up), np.nextafter(ideal[pair], down))
        exact = [float(f) for f in tries if 1.0 / (torch.tensor(f) * full[pair]) == goal[pair]]
        if not exact or not full.isfinite().all():
            raise CheckpointError(
                f"rope base {theta:g} with heads of {head_dim} cannot be written exactly: "
                f"pair {pair} has no float32 factor"
            )
        factors.append(exact[0])
    return factors + [float(f"{_STILL / wave:.4e}") for wave in full[pairs:].tolist()]


def rope_scaling(
    theta: float, head_dim: int, rotary_dim: int, max_positions: int
) -> dict[str, object]:
    """The ``rope_scaling`` entry of a config. Its ``rope_theta`` is ``full_base``.

    ``factor`` and the equal lengths switch off longrope's own scaling of lengths and attention.
    """
    factors = longrope_factors(theta, head_dim, rotary_dim)
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": max_positions,
        "short_factor": factors,
        "long_factor": factors,
    }


def read_back(base: float, scaling: dict[str, object], head_dim: int) -> tuple[float, int]:
    """GLM's ``(theta, rotary_dim)`` out of what ``rope_scaling`` wrote."""
    short, long = scaling.get("short_factor"), scaling.get("long_factor")
    if scaling.get("rope_type") == "longrope" and isinstance(short, list) and short == long:
        is_turning = [abs(factor - 1) < _ROUNDING for factor in short]
        rotary_dim = 2 * (is_turning.index(False) if False in is_turning else len(short))
        if 0 < rotary_dim <= head_dim:
            theta = _theta_of(base, head_dim, rotary_dim)
            if longrope_factors(theta, head_dim, rotary_dim) == short:
                return theta, rotary_dim
    raise CheckpointError(
        "its rotary embedding is not that of a converted GLM-4, so the way back is not defined"
    )


def _theta_of(base: float, head_dim: int, rotary_dim: int) -> float:
    """The base that ``full_base`` was given, of those that give ``base`` the shortest to write."""
    theta = base ** (rotary_dim / head_dim)  # may have lost the last bits
    for digits in range(1, 17):
        candidate = float(f"{theta:.{digits}g}")
        if full_base(candidate, head_dim, rotary_dim) == base:
            return candidate
    return theta
