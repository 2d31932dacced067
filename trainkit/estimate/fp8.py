"""Which products a run takes in fp8, before it has measured them. No torch.

A run measures on its own data what each group of layers loses, and on its GPU what it gains
(`trainkit.models.fp8`). Here is what runs on SmolLM2 took within the default budget, by role and
by budget, and the sizes from which products gained on an H200.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainkit.estimate.plan import Plan
from trainkit.estimate.shape import ModelShape
from trainkit.options.fp8 import ALL, Fp8Options

TAKEN: Mapping[str, float] = {
    "q_proj": 0.02,
    "k_proj": 0.02,
    "v_proj": 0.0,
    "o_proj": 0.3,
    "gate_proj": 0.93,
    "up_proj": 0.53,
    "down_proj": 0.85,
    "qkv_proj": 0.01,
    "gate_up_proj": 0.73,
}
"""Share of a role's layers whose forward products the default budget took, the mean of full
fine-tuning and a frozen base, which differ in ``o_proj`` and ``down_proj``. Of packed roles the
mean of their parts."""

BY_BUDGET = (
    (0.0, 0.0),
    (0.0005, 0.07),
    (0.002, 0.26),
    (0.003, 0.37),
    (0.004, 0.48),
    (0.005, 0.58),
    (0.006, 0.67),
    (0.008, 0.81),
    (0.01, 0.90),
    (0.015, 1.0),
)
"""Share of all forward products by budget; the last is where it would be whole."""

GAINS_FORWARD, GAINS_BACKWARD = 430, 620
"""From which inputs x outputs / (inputs + outputs) on a product is faster in fp8: what it saves
grows with the product of its sizes, what quantising takes with their sum. 896 x 896 gained forward
only, 896 x 4864 both ways, and 576 x 1536 nothing."""


@dataclass(frozen=True)
class Shares:
    """What of a model's linear layers runs in fp8.

    Attributes:
        forward: of their numbers, whose forward products do, and which a frozen base has in fp8.
        backward: whose backward products do.
        in_16_bits: roles that take no part: skipped, too narrow, or no faster.
    """

    forward: float
    backward: float
    in_16_bits: frozenset[str] = frozenset()


def within_budget(plan: Plan, options: Fp8Options) -> Plan:
    """A plan with the products in fp8 that a run of these options is expected to choose."""
    found = shares_of(options, plan.shape)
    return replace(
        plan,
        fp8=found.forward,
        fp8_backward=found.backward,
        fp8_head=options.head == "fp8" and options.loss_budget != 0,
        in_16_bits=found.in_16_bits,
    )


def shares_of(options: Fp8Options, shape: ModelShape) -> Shares:
    """The shares that a run of these options is expected to choose.

    Args:
        options: the recipe's.
        shape: of the whole model.
    """
    linears = shape.linears()
    gains = {role: _together(role, linears) for role in linears}
    out = frozenset(
        role
        for role, sizes in linears.items()
        if role in options.skip or not _fits(sizes, options) or gains[role] < GAINS_FORWARD
    )
    everywhere = 1 - _skipped_layers(options.skip, shape.layers) / shape.layers
    total = shape.layer_matrices
    forward = backward = 0.0
    for role, (inputs, outputs) in linears.items():
        if role in out:
            continue
        numbers = inputs * outputs
        backward += numbers * (gains[role] >= GAINS_BACKWARD)
        forward += numbers * _taken(role, options.loss_budget)
    return Shares(everywhere * forward / total, everywhere * backward / total, out)


def _fits(sizes: Sequence[int], options: Fp8Options) -> bool:
    return min(sizes) >= options.min_size and not any(size % 16 for size in sizes)


def _skipped_layers(skip: Sequence[str], layers: int) -> int:
    """How many decoder layers are named: by their number, behind the name of the list."""
    return sum(f"layers.{number}" in skip for number in range(layers))


def _together(role: str, linears: Mapping[str, tuple[int, int]]) -> float:
    """Of the layers that read the same input, whose rows are quantised once."""
    roles = ("q_proj", "k_proj", "v_proj") if role in ("q_proj", "k_proj", "v_proj") else (role,)
    inputs = linears[role][0]
    outputs = sum(linears[each][1] for each in roles)
    return inputs * outputs / (inputs + outputs)


def _taken(role: str, budget: float | str) -> float:
    if budget == ALL:
        return 1.0
    whole = _at(float(budget))
    return min(TAKEN[role] * whole / _at(Fp8Options().loss_budget), 1.0) if whole < 1 else 1.0


def _at(budget: float | str) -> float:
    for (less, low), (more, high) in itertools.pairwise(BY_BUDGET):
        if float(budget) <= more:
            return low + (high - low) * (float(budget) - less) / (more - less)
    return 1.0
