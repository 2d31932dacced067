"""RMSNorms with a gate: which variant a module of two inputs is, and the kernel in its place.

Shapes: B batch, S sequence, H hidden, D head size.
"""

import copy
import functools
import inspect
import itertools
import re
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from trainkit import kernels
from trainkit.models.proof.compare import (
    EXACT,
    Truth,
    decisions,
    draw,
    share_of_other_bits,
    why_not,
)
from trainkit.models.proof.forward import Finding, KernelForward
from trainkit.models.proof.norms import CASTS, EPSILONS, Cast

_ARGUMENTS = ["hidden_states", "gate"]
_NUM_COLUMNS = re.compile(r"\*\w+, (\w+) = hidden_states\.shape\n")
_KEEPS_SHAPE = {"forward", "to", "silu", "super"}


class GatedNormSettings(NamedTuple):
    """What a gated norm computes, as ``kernels.gated_rms_norm`` takes it.

    Attributes:
        weight: the name of the weight.
        epsilon: of the attribute that holds it, or the number.
    """

    weight: str
    epsilon: str | float
    group: int
    gate_first: bool
    activation: str
    cast: Cast = "gemma"

    def run(self, module: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
        """The kernel in the module's place."""
        weight, eps, *_ = self
        eps = getattr(module, eps) if isinstance(eps, str) else eps
        options = self._asdict()
        del options["weight"], options["epsilon"]
        return kernels.gated_rms_norm(x, gate, getattr(module, weight), eps, **options)


class GatedNorm(KernelForward):
    """``gated_rms_norm``."""

    uses = ("gated_rms_norm",)
    made: ClassVar[GatedNormSettings]

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise the last axis of (B, S, H), (B, S, heads, D) or (rows, D), and gate it."""
        if gate is None or hidden_states.shape != gate.shape or self.decodes(hidden_states):
            plain: Tensor = super().forward(hidden_states, gate)
            return plain
        return self.made.run(self, hidden_states, gate)


def find_gated_norm(module: nn.Module, x: Tensor, gate: Tensor, result: Tensor) -> Finding | None:
    """What a module without children is that was called with two tensors.

    Returns:
        None for what neither is such a norm nor is called one.
    """
    is_called_norm = "norm" in type(module).__name__.lower()

    def refused(reason: str, error: float | None = None) -> Finding | None:
        """Of what is no norm by name, nothing is said."""
        return Finding("gated_rms_norm", "refused", reason, error) if is_called_norm else None

    shapes = [tuple(each.shape) for each in module.parameters()]
    if x.shape != result.shape or x.shape != gate.shape or shapes != [(x.shape[-1],)]:
        return refused("its shapes are not a gated norm's")
    if list(inspect.signature(type(module).forward).parameters) != ["self", *_ARGUMENTS]:
        return refused(f"its arguments are not {_ARGUMENTS}")
    module = copy.deepcopy(module).cpu().double()
    middle = (2, *x.shape[2:]) if x.dim() > 2 else x.shape[1:]
    scales = (1.0, 2e-3, 30.0)
    inputs = [
        torch.cat([draw(2, *middle, seed=seed + i, scale=s) for i, s in enumerate(scales)])
        for seed in (0, 3)
    ]
    truth = Truth(module, inputs, module.parameters())
    if truth.error:
        return refused(truth.error[1])
    (weight,) = (name for name, _ in module.named_parameters())
    own = {k: v for k, v in vars(module).items() if isinstance(v, float) and 0 <= v < 0.1}
    hidden = x.shape[-1]
    numbers = {v for v in vars(module).values() if type(v) is int and v > 0 and not hidden % v}
    groups = dict.fromkeys([hidden, *numbers, *(hidden // each for each in numbers)])
    nearest = float("inf")
    for eps, *rest in itertools.product(
        dict.fromkeys([*own.values(), *EPSILONS]), groups, (False, True), ("silu", "sigmoid")
    ):
        made = GatedNormSettings(weight, eps, *rest)
        error = truth.against(functools.partial(made.run, module))[0]
        nearest = min(nearest, error)
        if error < EXACT:
            break
    else:
        return refused(f"no variant fits, the nearest is off by {nearest:.0e}")
    ours = functools.partial(made.run, module)
    if no := why_not(module, ours, inputs, (), _decisions(module)):
        return refused(no, error)
    low = copy.deepcopy(module).to(torch.bfloat16)
    x16 = [draw(64, *middle, seed=seed).to(torch.bfloat16) for seed in (5, 6)]
    shares = {
        cast: share_of_other_bits(low, functools.partial(made._replace(cast=cast).run, low), x16)
        for cast in CASTS
    }
    cast = min(shares, key=lambda each: shares[each])
    made = made._replace(
        cast=cast, epsilon=next((name for name, value in own.items() if value == eps), eps)
    )
    detail = f"{cast} rounding, eps {eps:g}, {made.activation} gate "
    detail += "before it" if made.gate_first else "behind it"
    detail += f", groups of {made.group}" if made.group != hidden else ""
    settings = {"made": made}
    return Finding("gated_rms_norm", "on", detail, error, shares[cast], GatedNorm, settings)


def _decisions(module: nn.Module) -> list[str]:
    """What it decides by, except the gate being there and the number of columns."""
    harmless = {"gate is not None"}
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        source = ""
    before, *after = _NUM_COLUMNS.split(source)
    if after and set(re.findall(r"(\w+)\(", before)) <= _KEEPS_SHAPE and "[" not in before:
        own = (name for name, each in vars(module).items() if isinstance(each, int))
        harmless |= {f"{after[0]} // self.{name}" for name in own}
    return [each for each in decisions(module) if each not in harmless]
