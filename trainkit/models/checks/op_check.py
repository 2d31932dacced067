"""Calls of ops, taken from a model as it runs, measured against their references.

A recorded call brings the model's own shapes, strides, dtypes and options; what it must satisfy is
the contract of every op (``trainkit.kernels.contract``).
"""

import dataclasses
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trainkit import kernels
from trainkit.errors import PatchError
from trainkit.kernels import contract, ops
from trainkit.kernels.contract import OpCase, OpError, OpSpec
from trainkit.kernels.launch import runs_kernel
from trainkit.kernels.linear_cross_entropy.function import CountedLoss
from trainkit.models.loss import loss_head

_PLACES: dict[str, tuple[ModuleType, str]] = {
    "linear_cross_entropy": (loss_head, "linear_cross_entropy_counted")
}
"""Where the forwards look an op up, if not under its own name in ``trainkit.kernels``."""

_TIMED_CALLS = 5


@dataclass(frozen=True)
class Call:
    """One call of an op as the model made it.

    Args:
        spec: the op's, with the very function that the model called.
        tensors: the tensor arguments by parameter name, detached.
        case: the other arguments, and which tensors wanted a gradient.
    """

    spec: OpSpec
    tensors: dict[str, Tensor]
    case: OpCase

    @property
    def ran_kernel(self) -> bool:
        """Whether these tensors run the Triton kernel, and not the reference."""
        return runs_kernel(*(each for each in self.tensors.values() if each.is_floating_point()))

    @property
    def dtype(self) -> torch.dtype:
        """Of the first tensor, which is what the op computes on."""
        return next(iter(self.tensors.values())).dtype

    @property
    def device(self) -> torch.device:
        """Of the first tensor."""
        return next(iter(self.tensors.values())).device

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in self.tensors.items())
        return f"{self.spec.name}({shapes})"


@contextmanager
def recorded(names: Sequence[str]) -> Iterator[list[Call]]:
    """Within, the first call of each op with each combination of shapes is kept."""
    calls: list[Call] = []
    seen: set[object] = set()

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            shapes = tuple(tuple(arg.shape) for arg in args if isinstance(arg, Tensor))
            if (name, shapes) not in seen:
                seen.add((name, shapes))
                calls.append(_bind(name, function, args, options))
            return function(*args, **options)

        return call

    places = {name: _PLACES.get(name, (kernels, name)) for name in names}
    before = {name: getattr(*place) for name, place in places.items()}
    for name, function in before.items():
        setattr(*places[name], recording(name, function))
    try:
        yield calls
    finally:
        for name, function in before.items():
            setattr(*places[name], function)


def errors_of(call: Call) -> list[OpError]:
    """The call's errors by the contract of its op."""
    return contract.measure(call.spec, call.case, call.dtype, call.device)


def speedup_of(call: Call) -> float:
    """The reference's time over the kernel's, forward and backward."""
    return _seconds(call, call.spec.reference) / _seconds(call, call.spec.function)


def _bind(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> Call:
    """The call with its arguments by name; options that only steer a kernel are left out."""
    spec = ops.OPS.get(name)
    if spec is None:
        raise PatchError(
            f"the op {name} has no spec, so nothing can check it",
            fix="register it in trainkit/kernels/ops.py",
        )
    bound = inspect.signature(spec.function).bind(*args, **options).arguments
    known = inspect.signature(spec.reference).parameters
    given = {key: value for key, value in bound.items() if key in known}
    tensors = {
        key: value.detach().clone() if value.dim() == 0 else value.detach()
        for key, value in given.items()
        if isinstance(value, Tensor)
    }
    case = OpCase(
        label="as the model calls it",
        inputs=lambda draw: tensors,
        grads=tuple(key for key in tensors if given[key].requires_grad),
        options={key: value for key, value in given.items() if key not in tensors},
    )

    def without_counts(**arguments: Any) -> Any:
        found = function(**arguments)
        return found.loss if isinstance(found, CountedLoss) else found

    return Call(dataclasses.replace(spec, function=without_counts), tensors, case)


def _seconds(call: Call, function: Callable[..., Any]) -> float:
    """The best of a few calls with their backward passes, by a clock around the waiting device."""
    best = float("inf")
    for _ in range(_TIMED_CALLS):
        _wait(call.device)
        start = time.perf_counter()
        contract.run(function, call.case, call.tensors, torch.ones_like)
        _wait(call.device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
