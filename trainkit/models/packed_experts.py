"""Experts of a frozen base in 4 or 8 bits: codes instead of each stack, read when it is used.

A stack's parameter keeps its name and holds bitsandbytes' nf4 codes, or codes in e4m3 with a scale
for each row; how they are read lies next to it, on the module. The kernel of experts reads a stack
in its forward pass and again in its backward pass. Whatever else runs (Hugging Face's loop, peft's
adapters) finds the weights as they were while the module runs, and runs again in the backward pass:
no copy in 16 bits lives between the two.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainkit.auto_class import ROUTERS
from trainkit.evaluation_mode import changed
from trainkit.kernels.experts.function import Packed
from trainkit.kernels.fp8.function import fp8_quantize
from trainkit.kernels.fp8.linear import Fp8Weight
from trainkit.models.frozen import outside_linears
from trainkit.models.linears import (
    expert_parameters,
    prepare_for_training,
    read_nf4,
    skipped_layers,
)
from trainkit.models.swap import subclass_of
from trainkit.options.model import LoraOptions

_STATES = "_packed_stacks"
"""On a module: how the codes of each of its stacks are read."""


def quantize_to_nf4(
    model: Any,
    device: torch.device,
    dtype: torch.dtype,
    kept: Collection[str] = (),
    lora: LoraOptions | None = None,
) -> None:
    """Pack a loaded model's linear layers and experts, layer by layer, in place.

    Args:
        model: with plain weights, on the host.
        device: where the codes go.
        dtype: that the weights are read in.
        kept: the last names of modules that stay as they are, as routers and the head do.
        lora: what else stays as it is, and whether the head does not.
    """
    import bitsandbytes as bnb
    from transformers.quantizers.base import _assign_is_quantized

    _assign_is_quantized(model)  # some classes have a branch for codes
    lora = lora or LoraOptions()
    head = None if lora.quantize_head else model.get_output_embeddings()
    stay = {*kept, *ROUTERS, *outside_linears(model), *skipped_layers(model, lora.quantize_skip)}
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if type(module) is not nn.Linear or module is head or last in stay or name in stay:
            continue
        packed = bnb.nn.Linear4bit(
            module.in_features, module.out_features, module.bias is not None, dtype,
            compress_statistics=True, quant_type="nf4", quant_storage=dtype, device="meta",
        )  # fmt: skip
        codes = bnb.nn.Params4bit(
            module.weight.detach().to(dtype), requires_grad=False, compress_statistics=True,
            quant_type="nf4", quant_storage=dtype, module=packed,
        )  # fmt: skip
        packed.weight, packed.bias = codes.to(device), module.bias
        setattr(model.get_submodule(parent), last, packed)
    for name, parameter in list(expert_parameters(model).items()):
        owner, _, key = name.rpartition(".")
        if owner in stay:
            continue
        weight = parameter.detach().to(device=device, dtype=dtype).contiguous()
        codes, state = bnb.functional.quantize_4bit(
            weight, blocksize=64, compress_statistics=True, quant_type="nf4", quant_storage=dtype
        )
        put_codes(model.get_submodule(owner), key, codes, state)
    read_where_they_run(model)
    prepare_for_training(model)
    model.is_loaded_in_4bit = True  # peft's adapters then take the layers for what they are


@dataclass
class Fp8State:
    """How codes in e4m3, uint8 (rows, columns), are read as a stack.

    Attributes:
        scales: (rows, 1) fp32, powers of two.
    """

    kind: ClassVar[str] = "fp8"

    scales: Tensor
    shape: torch.Size
    dtype: torch.dtype


def experts_to_fp8(
    model: nn.Module, device: torch.device, kept: Collection[str] = ()
) -> tuple[str, ...]:
    """Keep a loaded model's experts in e4m3, stack by stack, in place.

    Returns:
        What else is to stay as it is: the last names of routers, where there are experts.
    """
    stacks = expert_parameters(model)
    for name, parameter in stacks.items():
        owner, _, key = name.rpartition(".")
        if not {owner, owner.rpartition(".")[2]}.isdisjoint(kept):
            continue
        weight = parameter.detach().to(device)
        codes, scales = fp8_quantize(weight.reshape(-1, weight.shape[2]))
        state = Fp8State(scales, weight.shape, weight.dtype)
        put_codes(model.get_submodule(owner), key, codes.view(torch.uint8), state)
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
    if isinstance(state, Fp8State):
        return Fp8Weight(state.scales)(codes, dtype).view(state.shape)
    return read_nf4(codes, state, dtype)


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
    for name, module in list(model.named_modules()):
        parent = model.get_submodule(name.rpartition(".")[0]) if name else module
        if not name.endswith("base_layer") or not hasattr(parent, "parameter_name"):
            inner: Any = module
            while hasattr(inner, "parameter_name"):
                inner = inner.base_layer
            if states_of(inner) and not isinstance(module, _ReadsCodes):
                module.__class__ = subclass_of(type(module), _ReadsCodes)
