"""Which groups of layers run in fp8: as much time as possible for as much loss as allowed.

Of all sets of groups whose increases add up to no more than the budget the one is taken that saves
most time. It is then measured together, and less or more is allowed until that uses the budget.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainkit.models.fp8.budget import Increase, Probe
from trainkit.models.fp8.groups import Candidates, Group, group_layers
from trainkit.models.fp8.savings import Saving
from trainkit.options.model import ALL, Fp8Options

BOTH = "fp8"
BACKWARD = "backward in fp8"
FORWARD = "forward in fp8"
PLAIN = "16 bits"

_MEASUREMENTS = 8
"""Of groups together, at most."""
_SHARES = 2000
"""Of a budget: how finely costs are added up."""

_DIRECTIONS = {
    BOTH: (True, True),
    BACKWARD: (False, True),
    FORWARD: (True, False),
    PLAIN: (False, False),
}


@dataclass(frozen=True)
class ChosenGroup:
    """One group and how it runs.

    Attributes:
        group: for people.
        layers: names.
        loss_increase: what its forward products cost, in nats; None where that was not measured.
        forward_ms: saved in a micro-batch by forward products in fp8.
        backward_ms: by backward ones.
        runs: ``fp8``, ``backward in fp8``, ``forward in fp8`` or ``16 bits``.
        reason: why not all of it is in fp8; empty where it is.
    """

    group: str
    layers: tuple[str, ...]
    loss_increase: float | None
    forward_ms: float
    backward_ms: float
    runs: str
    reason: str = ""

    @property
    def saved_ms(self) -> float:
        forward, backward = _DIRECTIONS[self.runs]
        return self.forward_ms * forward + self.backward_ms * backward

    @property
    def most_ms(self) -> float:
        """What fp8 could save in it."""
        return max(self.forward_ms, 0.0) + max(self.backward_ms, 0.0)


@dataclass(frozen=True)
class Fp8Choice:
    """Which products run in fp8, what that saves and what it costs; as ``kernels.json`` has it.

    Attributes:
        policy: the options that it was made by.
        groups: all of them.
        kept: why other linear layers keep 16 bits, and how many.
        timing: how the milliseconds are known.
        loss: of the plain model, in nats; None where nothing was measured.
        num_tokens: that it was measured on.
        loss_increase: of all that was chosen together: expected.
        seen_increase: the same on the very text, noisier.
    """

    policy: Mapping[str, Any]
    groups: tuple[ChosenGroup, ...]
    kept: Mapping[str, int]
    timing: str
    loss: float | None = None
    num_tokens: int = 0
    loss_increase: float | None = None
    seen_increase: float | None = None

    @property
    def directions(self) -> dict[str, tuple[bool, bool]]:
        """Layers with products in fp8: forward and backward."""
        return {
            name: _DIRECTIONS[group.runs]
            for group in self.groups
            for name in group.layers
            if group.runs != PLAIN
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        plain = asdict(self)
        return {
            **plain,
            "groups": [{**asdict(group), "layers": list(group.layers)} for group in self.groups],
            "saved_ms": sum(group.saved_ms for group in self.groups),
            "most_ms": sum(group.most_ms for group in self.groups),
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Fp8Choice":
        """Back from plain values."""
        known = {name: plain[name] for name in cls.__dataclass_fields__}
        groups = tuple(
            ChosenGroup(**{**group, "layers": tuple(group["layers"])}) for group in plain["groups"]
        )
        return cls(**{**known, "groups": groups})

    def describe(self) -> list[str]:
        """A few lines for the console."""
        counts = {
            runs: sum(len(group.layers) for group in self.groups if group.runs == runs)
            for runs in _DIRECTIONS
        }
        text = ", ".join(f"{number} {runs}" for runs, number in counts.items() if number)
        saved, most = (
            sum(getattr(group, name) for group in self.groups) for name in ("saved_ms", "most_ms")
        )
        kept = "; ".join(f"{number} {reason}" for reason, number in self.kept.items())
        lines = [
            f"fp8: of {sum(counts.values())} layers {text}"
            + (f" (others keep 16 bits: {kept})" if kept else ""),
            f"  saves {saved:.3g} of {most:.3g} ms a micro-batch ({self.timing})",
        ]
        if self.loss is not None and self.loss_increase is not None:
            share = self.loss_increase / max(self.loss, 1e-9)
            lines.append(
                f"  costs {self.loss_increase:.4f} nats before training, {share:.2%} of the loss "
                f"{self.loss:.4f} on {self.num_tokens} tokens (budget "
                f"{self.policy['loss_budget']:.2%})"
            )
        return lines


def choose(
    candidates: Candidates,
    options: Fp8Options,
    savings: Mapping[str, Saving],
    timing: str,
    probe: Probe | None,
    *,
    frozen: bool = False,
) -> Fp8Choice:
    """Make the choice.

    Args:
        candidates: the layers.
        options: with the budget.
        savings: per layer.
        timing: how those are known.
        probe: has begun; None where no budget limits the choice.
        frozen: a weight is kept either in fp8, for both directions, or in 16 bits.
    """
    groups = [_timed(group, savings, frozen) for group in group_layers(candidates.layers)]
    choice = Fp8Choice(options.model_dump(), tuple(groups), dict(candidates.kept), timing)
    if probe is None or options.loss_budget == ALL:
        return replace(choice, groups=tuple(_taken(group, frozen) for group in groups))
    measured = [
        replace(group, loss_increase=probe.increase(group.layers).expected) for group in groups
    ]
    limit = float(options.loss_budget) * probe.loss
    labels, together = _within(measured, limit, probe.increase)
    return replace(
        choice,
        groups=tuple(
            _taken(group, frozen) if group.group in labels else _left(group) for group in measured
        ),
        loss=probe.loss,
        num_tokens=probe.num_tokens,
        loss_increase=together.expected,
        seen_increase=together.seen,
    )


def _timed(group: Group, savings: Mapping[str, Saving], frozen: bool) -> ChosenGroup:
    found = [savings[name] for name in group.layers]
    forward, backward = sum(one.forward for one in found), sum(one.backward for one in found)
    made = ChosenGroup(group.label, group.layers, None, forward, backward, PLAIN)
    gains = forward + (min(backward, 0.0) if frozen else 0.0) > 0
    return made if gains else replace(made, reason="would not be faster")


def _taken(group: ChosenGroup, frozen: bool) -> ChosenGroup:
    """With everything in fp8 that gains."""
    if frozen:
        return _left(group) if group.reason else replace(group, runs=BOTH)
    faster = (group.forward_ms > 0, group.backward_ms > 0)
    runs = next(name for name, directions in _DIRECTIONS.items() if directions == faster)
    return replace(group, runs=runs, reason="" if runs == BOTH else "would not be faster")


def _left(group: ChosenGroup) -> ChosenGroup:
    """Without its forward product in fp8."""
    reason = group.reason or "not within the budget"
    runs = PLAIN if group.backward_ms <= 0 else BACKWARD
    return replace(group, runs=runs, reason=reason)


def _within(
    groups: Sequence[ChosenGroup],
    limit: float,
    measure: Callable[[Iterable[str]], Increase],
) -> tuple[set[str], Increase]:
    """The labels of the groups to take, and what they cost together."""
    able = [group for group in groups if not group.reason and _cost(group) < math.inf]
    best: tuple[set[str], Increase] = set(), Increase(0.0, 0.0)
    # Sums of what groups cost one by one: one that fits together, and one that does not.
    fits, over = -1.0, math.inf
    allowed = limit
    for _ in range(_MEASUREMENTS):
        taken = _most_time(able, allowed)
        alone = sum(map(_cost, taken))
        if not taken or alone <= fits:
            break
        together = measure([name for group in taken for name in group.layers])
        if together.expected <= limit:
            fits, best = alone, ({group.group for group in taken}, together)
        else:
            over = min(over, alone)
        allowed = alone * limit / together.expected if together.expected > 0 else 2 * alone
        if not max(fits, 0.0) < allowed < over:
            allowed = (max(fits, 0.0) + min(over, 2 * alone)) / 2
    return best


def _cost(group: ChosenGroup) -> float:
    cost = math.inf if group.loss_increase is None else group.loss_increase
    return math.inf if math.isnan(cost) else cost


def _most_time(groups: Sequence[ChosenGroup], allowed: float) -> list[ChosenGroup]:
    """Those that save most time, of all sets whose costs add up to no more than what is allowed.

    A knapsack, solved for costs rounded to a share of what is allowed; of equals the cheapest.
    """
    if allowed <= 0:
        return [group for group in groups if _cost(group) == 0]
    # What each number of shares can save, the costs, and by which groups.
    best: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())] * (_SHARES + 1)
    for index, group in enumerate(groups):
        cost, gain = _cost(group), group.forward_ms
        if cost > allowed:
            continue
        needed = round(cost / allowed * _SHARES)
        with_it = [
            (saved + gain, spared - cost, (*taken, index))
            for saved, spared, taken in best[: len(best) - needed]
        ]
        best[needed:] = map(max, best[needed:], with_it)
    return [groups[index] for index in best[-1][2]]
