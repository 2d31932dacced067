"""Gated feed-forward blocks: down(act(gate(x)) * up(x)), with the gate in one kernel.

Shapes: B batch, S sequence, H hidden, F feed-forward.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit import kernels
from trainkit.models.proof.compare import (
    EXACT,
    Truth,
    draw,
    why_not,
)
from trainkit.models.proof.forward import Finding, KernelForward
from trainkit.models.shared_input import apply_feed_forward, apply_linears

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
}


class SplitMLP(KernelForward):
    """``down(act(gate(x)) * up(x))`` with the gate in one kernel.

    Attributes:
        linears: the names of gate, up and down.
        activation: "silu" or "gelu_tanh".
    """

    uses = ("swiglu",)

    linears: ClassVar[tuple[str, ...]]
    activation: ClassVar[str] = "silu"

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """The gated activation of two (B, S, F) tensors."""
        return kernels.swiglu(gate, up)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        if self.decodes(x):
            return super().forward(x)
        gate, up, down = (getattr(self, name) for name in self.linears)
        y = apply_feed_forward(x, gate, up, down, tanh_gelu=self.activation != "silu")
        if y is not None:
            return y
        return down(self.gate(*apply_linears(x, (gate, up))))


class GeluMLP(SplitMLP):
    """As ``SplitMLP`` with the tanh GELU."""

    uses = ("geglu_tanh",)
    activation = "gelu_tanh"

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """The tanh-GELU gate of two (B, S, F) tensors."""
        return kernels.geglu_tanh(gate, up)


class PackedMLP(KernelForward):
    """``swiglu_packed`` on one projection that gives gate and up.

    Attributes:
        linears: the names of the packed one and of down.
        order: which half comes first.
    """

    uses = ("swiglu_packed",)

    linears: ClassVar[tuple[str, ...]]
    order: ClassVar[str] = "gate_up"

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        if self.decodes(x):
            return super().forward(x)
        packed, down = (getattr(self, name) for name in self.linears)
        return down(kernels.swiglu_packed(packed(x), order=self.order))


_Form = tuple[str, ...]
"""How gate and up are given, then the names of the linears."""


def find_gate(module: nn.Module, x: Tensor, result: Any) -> Finding | None:
    """What a module of two or three linear layers is; None for what has another shape.

    Args:
        module: in fp64; not kept, not changed.
        x: an input of it.
        result: what it gave.
    """
    forms = list(_forms(module))
    if not forms or not isinstance(result, Tensor) or x.shape != result.shape:
        return None
    lead = (2, 2) if x.dim() == 3 else (4,)
    scales = (1.0, 1e-3, 30.0)
    inputs = [
        torch.cat([draw(*lead, x.shape[-1], seed=i, scale=s) for i, s in enumerate(scales)]).to(x)
    ]
    parameters = list(module.parameters())
    truth = Truth(module, inputs, parameters)
    if truth.error:
        return Finding("swiglu", "refused", truth.error[1])
    nearest = float("inf")
    ran = [name for name in ("silu", "gelu") if name in truth.used]  # else it is written out
    candidates = [name for name in ACTIVATIONS if not ran or name.partition("_")[0] in ran]
    for form, name in itertools.product(forms, candidates):

        def ours(x: Tensor, form: _Form = form, name: str = name) -> Tensor:
            return _gated(module, form, name, x)

        error = truth.against(ours)[0]
        nearest = min(nearest, error)
        if error < EXACT:
            break
    else:
        return Finding("swiglu", "refused", f"no gate fits, the nearest is off by {nearest:.0e}")
    if reason := why_not(module, ours, inputs):
        return Finding("swiglu", "refused", reason, error)
    kind, *linears = form
    detail = f"{name}(gate) * up, {kind.replace('_', ', then ')}"
    forward: type[KernelForward] | None = None
    settings: dict[str, Any] = {"linears": tuple(linears)}
    if kind == "split":
        forward = {"silu": SplitMLP, "gelu_tanh": GeluMLP}.get(name)
    elif name == "silu" and kind != "interleaved":
        forward, settings["order"] = PackedMLP, kind
    if forward is None:
        return Finding("swiglu", "no kernel", f"{detail}: trainkit has no kernel for it", error)
    return Finding("swiglu", "on", detail, error, None, forward, settings)


def _forms(module: nn.Module) -> Iterator[_Form]:
    """Every way in which its linear layers could be gate, up and down."""
    linears = {name: each for name, each in module.named_children() if type(each) is nn.Linear}
    inside = {id(parameter) for each in linears.values() for parameter in each.parameters()}
    if any(id(each) not in inside for each in module.parameters()):
        return
    if len(linears) == 3:
        for gate, up, down in itertools.permutations(linears):
            first, second, last = (linears[each] for each in (gate, up, down))
            if first.weight.shape == second.weight.shape == last.weight.shape[::-1]:
                yield "split", gate, up, down
    elif len(linears) == 2:
        for packed, down in itertools.permutations(linears):
            if linears[packed].out_features == 2 * linears[down].in_features:
                for kind in ("gate_up", "up_gate", "interleaved"):
                    yield kind, packed, down


def _gated(module: nn.Module, form: _Form, activation: str, x: Tensor) -> Tensor:
    """What a module would be in plain torch."""
    kind, *linears = form
    *inner, down = (getattr(module, name) for name in linears)
    if kind == "split":
        gate, up = (each(x) for each in inner)
    else:
        packed = inner[0](x)
        gate, up = packed.chunk(2, -1)
        if kind == "interleaved":
            gate, up = packed[..., ::2], packed[..., 1::2]
        elif kind == "up_gate":
            gate, up = up, gate
    return down(ACTIVATIONS[activation](gate) * up)
