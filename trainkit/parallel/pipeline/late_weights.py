"""The weights' part of a backward pass, put off: ``zbv`` fills with it the time others wait.

torch.distributed.pipelining can split a backward pass itself. It walks over autograd's graph in
Python for each stage and micro-batch, and then asks for the weights' gradients group by group,
which takes the host longer than the device computes; before 2.13 the gradients are wrong where a
function has several outputs. Here the backward pass is an ordinary one, in which linear maps keep
what their weights' gradients are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class LateWeights:
    """Products that are not formed yet."""

    def __init__(self) -> None:
        self._waiting: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []

    def put(self, weight: nn.Parameter, given: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep what makes a weight's gradient.

        Args:
            weight: (O, I).
            given: (..., I), what the linear map was given.
            gradient: (..., O), of what it returned.
        """
        self._waiting.append((weight, given, gradient))

    def take(self) -> Callable[[], None]:
        """What forms the products that were put here since the last call, and adds them up."""
        waiting, self._waiting = self._waiting, []

        def form() -> None:
            for weight, given, gradient in waiting:
                left, right = gradient.flatten(0, -2).mT, given.flatten(0, -2).to(gradient.dtype)
                if weight.grad is None:
                    weight.grad = (left @ right).to(weight.dtype)
                elif weight.dtype == left.dtype:
                    weight.grad.addmm_(left, right)
                else:
                    weight.grad += left @ right
            waiting.clear()

        return form

    @contextmanager
    def of(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Have linear maps whose weights are trained put their products here."""
        maps = [
            each
            for each in dict.fromkeys(modules)
            if type(each) is nn.Linear and each.weight.requires_grad
        ]
        for each in maps:
            each.__class__, each.__dict__["late_weights"] = _Linear, self
        try:
            yield
        finally:
            for each in maps:
                each.__class__ = nn.Linear
                del each.__dict__["late_weights"]


class _Linear(nn.Linear):
    """What a linear map is meanwhile."""

    late_weights: LateWeights

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Product.apply(given, self.weight, self.bias, self.late_weights)
        return found


class _Product(torch.autograd.Function):
    """``given @ weight.T + bias``, whose weight gets its gradient elsewhere."""

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        weight: nn.Parameter,
        bias: torch.Tensor | None,
        late: LateWeights,
    ) -> torch.Tensor:
        ctx.save_for_backward(given)
        ctx.weight, ctx.late = weight, late
        return nn.functional.linear(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (given,) = ctx.saved_tensors
        ctx.late.put(ctx.weight, given, gradient)
        wants_given, _, wants_bias, _ = ctx.needs_input_grad
        back = (gradient @ ctx.weight.to(gradient.dtype)).to(given.dtype) if wants_given else None
        bias = gradient.flatten(0, -2).sum(0).to(ctx.weight.dtype) if wants_bias else None
        return back, None, bias, None
