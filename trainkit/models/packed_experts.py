"""Experts of a frozen base in 4 or 8 bits: codes instead of each stack, read when it is used.

A stack's parameter keeps its name and holds bitsandbytes' nf4 codes, or codes in int8 or e4m3 with
a scale for each row; how they are read lies next to it, on the module. The kernel of experts reads
a stack in its forward pass and again in its backward pass. Whatever else runs (Hugging Face's loop,
peft's adapters) finds the weights as they were while the module runs, and runs again in the
backward pass: no copy in 16 bits lives between the two.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainkit.auto_class import ROUTERS
from trainkit.evaluation_mode import changed
from trainkit.kernels.experts.function import Packed
from trainkit.kernels.fp8.function import fp8_quantize, read_codes
from trainkit.models.frozen import outside_linears
from trainkit.models.linears import (
    expert_parameters,
    packed_kind,
    prepare_for_training,
    read_nf4,
    skipped_layers,
)
from trainkit.models.swap import subclass_of
from trainkit.options.model import LoraOptions

_STATES = "_packed_stacks"
"""On a module: how the codes of each of its stacks are read."""


def quantize_with_experts(
    model: Any, device: torch.device, lora: LoraOptions, kept: Collection[str] = ()
) -> None:
    """Pack a loaded model's linear layers and experts, layer by layer, in place.

    Args:
        model: with plain weights, on the host.
        device: where the codes go.
        lora: nf4 or int8, what else stays as it is, and whether the head does not.
        kept: the last names of modules that stay as they are, as routers and the head do.
    """
    from transformers.quantizers.base import _assign_is_quantized

    _assign_is_quantized(model)  # some classes have a branch for codes
    kind: Any = packed_kind(str(lora.quantize))
    head = None if lora.quantize_head else model.get_output_embeddings()
    stay = {*kept, *ROUTERS, *outside_linears(model), *skipped_layers(model, lora.quantize_skip)}
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if type(module) is not nn.Linear or module is head or last in stay or name in stay:
            continue
        packed = kind.pack(module, device, model.dtype)
        packed.bias = module.bias
        setattr(model.get_submodule(parent), last, packed)
    pack_experts(model, kind.name, device, stay)
    prepare_for_training(model)
    model.is_loaded_in_4bit = kind.name == "nf4"  # peft then takes the layers for what they are
    model.is_loaded_in_8bit = kind.name == "int8"


@dataclass
class RowState:
    """How codes of a byte, (rows, columns), are read as a stack.

    Attributes:
        kind: int8, or fp8: e4m3, as uint8.
        scales: (rows, 1) fp32; of fp8 powers of two.
    """

    kind: str
    scales: Tensor
    shape: torch.Size
    dtype: torch.dtype


def _codes(kind: str, weight: Tensor) -> tuple[Tensor, Any]:
    """Of a stack on its device: what is stored, and how it is read."""
    if kind == "nf4":
        from bitsandbytes.functional import quantize_4bit

        options: dict[str, Any] = {"compress_statistics": True, "quant_storage": weight.dtype}
        return quantize_4bit(weight.contiguous(), blocksize=64, quant_type="nf4", **options)
    rows = weight.reshape(-1, weight.shape[2])
    if kind == "int8":  # each row from fp16, as bitsandbytes rounds a linear layer's
        from bitsandbytes.functional import int8_vectorwise_quant

        codes, largest, _ = int8_vectorwise_quant(rows.half())
        scales = largest[:, None] / 127
    else:
        codes, scales = fp8_quantize(rows)
        codes = codes.view(torch.uint8)
    return codes, RowState(kind, scales, weight.shape, weight.dtype)


def pack_experts(
    model: Any, kind: str, device: torch.device, kept: Collection[str] = ()
) -> tuple[str, ...]:
    """Keep a loaded model's experts as codes, stack by stack, in place.

    Returns:
        What else is to stay as it is: the last names of routers, where there are experts.
    """
    stacks = expert_parameters(model)
    for name, parameter in stacks.items():
        owner, _, key = name.rpartition(".")
        if {owner, owner.rpartition(".")[2]}.isdisjoint(kept):
            codes, state = _codes(kind, parameter.detach().to(device, model.dtype))
            put_codes(model.get_submodule(owner), key, codes, state)
    read_where_they_run(model)
    return tuple(ROUTERS) if stacks else ()


def put_codes(module: nn.Module, name: str, codes: Tensor, state: Any) -> None:
    parameter: Any = nn.Parameter(codes, requires_grad=False)
    parameter.quant_state = state  # counted as what it stands for
    setattr(module, name, parameter)
    vars(module).setdefault(_STATES, {})[name] = state


def states_of(module: nn.Module) -> dict[str, Any]:
    """How the codes of a module's stacks are read, by the stacks' names; empty for none."""
    found: dict[str, Any] = vars(module).get(_STATES, {})
    return found


def stack_of(module: nn.Module, name: str) -> Tensor | Packed:
    stack: Tensor = getattr(module, name)
    state = states_of(module).get(name)
    if state is None:
        return stack
    return Packed(stack, tuple(state.shape), lambda codes, dtype: _read(codes, state, dtype))


def _read(codes: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    if not isinstance(state, RowState):
        return read_nf4(codes, state, dtype)
    return read_codes(codes, state.scales, dtype).view(state.shape)


def with_shapes(model: nn.Module) -> AbstractContextManager[None]:
    """Within, packed stacks have the shapes that they stand for: adapters are made by those."""

    def empty(stored: Tensor, state: Any) -> nn.Parameter:
        one = torch.empty((), dtype=state.dtype, device=stored.device)
        return nn.Parameter(one.expand(state.shape), requires_grad=False)

    return changed(
        (module, name, empty(getattr(module, name), state))
        for module in model.modules()
        for name, state in states_of(module).items()
    )


class _ReadsCodes(nn.Module):
    """In front of experts, or of what peft has put around them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plain = super().forward
        if not _unread(self):
            return plain(*args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            with _unpacked(self):
                return plain(*args, **kwargs)

        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _unread(layer: Any) -> dict[tuple[Any, str], Any]:
    """The stacks that are codes just now; none where an outer module has read them."""
    while not states_of(layer):
        layer = layer.base_layer
    stacks = {(layer, name): getattr(layer, name) for name in states_of(layer)}
    return {at: each for at, each in stacks.items() if each.dim() == 2}


def _unpacked(layer: Any) -> AbstractContextManager[None]:
    def weight(stored: Tensor, state: Any) -> nn.Parameter:
        return nn.Parameter(_read(stored, state, state.dtype), requires_grad=False)

    return changed(
        (inner, name, weight(stored, states_of(inner)[name]))
        for (inner, name), stored in _unread(layer).items()
    )


def read_where_they_run(model: nn.Module) -> None:
    """Have the outermost module around packed experts read them; behind `attach`."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent = modules[name.rpartition(".")[0]]
        if not name.endswith("base_layer") or not hasattr(parent, "parameter_name"):
            inner: Any = module
            while hasattr(inner, "parameter_name"):
                inner = inner.base_layer
            if states_of(inner) and not isinstance(module, _ReadsCodes):
                module.__class__ = subclass_of(type(module), _ReadsCodes)
