"""Each module with its own weights and settings, on few rows, before anything takes its place.

A plan is proved on a replica, so it holds for what a module's class and settings decide. What a
checkpoint brings besides (a buffer, a scale that begins at one) shows on the module itself only.
Here every module that gets kernels runs as it is and as it will be, in evaluation mode, on the few
tokens that a replica's modules were called with: outputs and gradients in fp64, and in its own
dtype. The gradients are those of inputs and of vectors; a matrix's is a product of what these have
seen. The outermost one that is swapped stands for what is in it; of experts four
run. What gives other numbers stays plain. What cannot run here, since its weights are in parts,
packed or on the meta device, is as it was proved by kind, and the report says how many are.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig, PreTrainedModel

from trainkit.auto_class import FAILURES
from trainkit.evaluation_mode import changed, evaluation_mode
from trainkit.kernels.contract import hair
from trainkit.kernels.launch import by_reference
from trainkit.models.linears import is_packed
from trainkit.models.proof.compare import Wide, furthest, gradients_of, tensors_of
from trainkit.models.proof.gates import expert_routes
from trainkit.parallel.parameters import is_whole

MOST_WEIGHTS = {"cpu": 4e8, "cuda": 2e10}
"""Of a model; of a larger one a part is taken, evenly: two cores run 1e8 in a second."""

_CLOSE = 1e-9
"""In fp64, of a whole layer."""

_FEW = 4
_STACK = 3
"""The dimensions of the weights of experts."""

_Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class OwnProof:
    """What came of it.

    Attributes:
        error: the largest in fp64.
        refused: the names of those that gave other numbers, with the reason.
    """

    error: float = 0.0
    num: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def left_out(self, model: nn.Module) -> set[nn.Module]:
        return {each for name in self.refused for each in model.get_submodule(name).modules()}

    def __str__(self) -> str:
        parts = []
        if self.num:
            parts.append(f"{self.num} with their own weights, to {self.error:.0e}")
        parts += [f"{number} by kind ({reason})" for reason, number in self.by_kind.items()]
        return ", ".join(parts)


def recordable(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
    """A module's arguments without caches, which a second run would find filled."""

    def kept(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach()
        return value if isinstance(value, bool | int | float | str) else None

    return tree_map(kept, (tuple(args), dict(kwargs)))


def prove_instances(
    model: nn.Module,
    calls: Mapping[nn.Module, _Call | None],
    swaps: Mapping[nn.Module, type[nn.Module]],
    attention: str,
) -> OwnProof:
    """Run every module that is to be swapped."""
    found, start = OwnProof(), time.perf_counter()
    chosen = [(name, m, call) for name, m in _outermost(model, swaps) if (call := calls.get(m))]
    device = next((each.device.type for _, m, _ in chosen for each in m.parameters()), "cpu")
    total = sum(each.numel() for _, m, _ in chosen for each in m.parameters())
    step = max(1, math.ceil(total / MOST_WEIGHTS.get(device, 4e8)))
    with _as_recorded(model, attention), evaluation_mode(model):
        for number, (name, module, call) in enumerate(chosen):
            if number % step:
                found.by_kind[f"one of {step}"] += 1
                continue
            reason = _why_not_here(module)
            if reason is None:
                try:
                    error, where = _compare(module, call, swaps)
                except FAILURES as failed:
                    reason = f"it fails by itself: {type(failed).__name__}"
                else:
                    found.num += 1
                    if where:
                        found.refused[name] = f"off by {error:.0e} with its own weights, at {where}"
                    else:
                        found.error = max(found.error, error)
            if reason is not None:
                found.by_kind[reason] += 1
    found.seconds = time.perf_counter() - start
    return found


def _outermost(
    module: nn.Module, swaps: Mapping[nn.Module, Any], name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Swapped modules that no other one stands for: a layer with experts is run part by part."""
    own = [each for each in module.parameters(recurse=False) if each.dim() == _STACK]
    stacks = any(each.dim() == _STACK for each in module.parameters())
    if module in swaps and not isinstance(module, PreTrainedModel) and bool(own) == stacks:
        yield name, module
        return
    for key, child in module.named_children():
        yield from _outermost(child, swaps, f"{name}.{key}" if name else key)


def _why_not_here(module: nn.Module) -> str | None:
    for parameter in module.parameters():
        if not is_whole(parameter):
            return "weights in parts or nowhere"
        if (
            is_packed(parameter)
            or not parameter.is_floating_point()
            or parameter.element_size() < 2
        ):
            return "packed weights"
    return None


@contextmanager
def _as_recorded(model: nn.Module, attention: str) -> Iterator[None]:
    """Attention and experts run as they did when the calls were recorded."""
    wanted = {"_attn_implementation": attention, "_experts_implementation": "eager"}
    configs = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    # Innermost first, and so last on the way back: a model's passes its attention on to its parts'.
    with changed(
        (config, key, value)
        for config in reversed(configs.values())
        for key, value in wanted.items()
        if isinstance(config, PreTrainedConfig) and getattr(config, key, None) is not None
    ):
        yield


def _compare(
    module: nn.Module, call: _Call, swaps: Mapping[nn.Module, type[nn.Module]]
) -> tuple[float, str]:
    """The largest error in fp64, and where one is too large, in fp64 or in its own dtype."""
    stacks = {n: p for n, p in module.named_parameters(recurse=False) if p.dim() == _STACK}
    kinds = [(each, "__class__", swaps[each]) for each in module.modules() if each in swaps]
    with ExitStack() as stack:
        weights = {name: each.detach() for name, each in module.named_parameters()}
        if stacks:  # with their biases
            names = [name for name, _ in module.named_parameters(recurse=False)]
            call = stack.enter_context(_few_experts(module, call, weights, names))
        exact = {
            name: each.double().requires_grad_(each.dim() < 2) for name, each in weights.items()
        }
        wide = tree_map(lambda each: _cast(each, torch.float64), call)
        with Wide(), by_reference(torch.float64):
            truth = _run(module, wide, exact)
            with changed(kinds):
                ours = _run(module, wide, exact)
        error, where = furthest(truth, ours)
        if not error < _CLOSE:
            return error, where
        dtype = next((each.dtype for each in weights.values()), torch.float32)
        own = tree_map(lambda each: _cast(each, dtype), call)
        plain_rounded = _run(module, own, weights)
        with changed(kinds):
            rounded = _run(module, own, weights)
        for name, found in rounded.items():
            allowed = 4 * _distance(plain_rounded[name], truth[name]) + hair(dtype, worst=False)
            far = _distance(found, truth[name])
            if not far <= allowed:
                return far, f"{name} in {dtype}".replace("torch.", "")
    return error, ""


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _distance(found: Tensor | None, truth: Tensor | None) -> float:
    if found is None or truth is None:
        return 0.0 if found is truth else math.inf
    size = truth.norm().item() or 1.0
    return (found.double() - truth).norm().item() / size


@contextmanager
def _few_experts(
    module: nn.Module, call: _Call, weights: dict[str, Tensor], names: list[str]
) -> Iterator[_Call]:
    """Within, the module has four experts, and ``weights`` theirs; with a call of these."""
    total = weights[names[0]].shape[0]
    x, *rest = (each for each in (*call[0], *call[1].values()) if isinstance(each, Tensor))
    places = torch.linspace(0, total - 1, min(_FEW, total), device=x.device).long()
    for name in names:
        weights[name] = weights[name][places]
    counts = [key for key, each in vars(module).items() if type(each) is int and each == total]
    args: tuple[Any, ...] = (x[: len(x) // total * len(places)],)  # sorted by expert
    if rest:
        top_k = min(rest[0].shape[-1], _FEW, len(places))
        routes = next(expert_routes(len(places), top_k, x.device))
        x = x.repeat(-(-len(routes) // len(x)), 1)[: len(routes)]
        shares = torch.linspace(0.2, 0.8, routes.numel(), device=x.device, dtype=torch.float64)
        args = (x, routes, shares.view(routes.shape))
    with changed((module, key, len(places)) for key in counts):
        yield args, {}


def _run(module: nn.Module, call: _Call, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Outputs, and gradients of the inputs and of the weights that want one."""
    inputs: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
            inputs.append(value.detach().clone().requires_grad_())
            return inputs[-1]
        return value

    args = tuple(map(leaf, call[0]))
    kwargs = {k: each if "mask" in k else leaf(each) for k, each in call[1].items()}
    outputs = tensors_of(functional_call(module, dict(weights), args, kwargs))
    wanted = {f"d input {number}": each for number, each in enumerate(inputs)}
    wanted |= {f"d {name}": each for name, each in weights.items() if each.requires_grad}
    gradients = gradients_of(outputs, list(wanted.values()))
    found: dict[str, Any] = {f"output {n}": each.detach() for n, each in enumerate(outputs)}
    return {**found, **dict(zip(wanted, gradients, strict=True))}
