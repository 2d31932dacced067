"""Gradients as they arrive in the backward pass: averaged over ranks, measured, and watched.

A parameter that steps in the backward pass knows nothing of the gradients that are still to come.
So nothing is clipped, and a gradient that is NaN or infinite holds back its own step and all that
follow; those before it were taken with sound gradients. The run then ends as it always does.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from trainkit.kernels.adamw.function import add_square_sum_


def on_gradient(parameter: torch.Tensor, method: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call a method with a parameter whenever its gradient is complete.

    The hook does not keep the method's owner alive: Python's garbage collector cannot look into
    hooks, so an optimizer that one holds would never be freed, nor would its masters and states.

    Args:
        parameter: a leaf.
        method: of an object.
    """
    known = weakref.WeakMethod(method)

    def arrived(parameter: torch.Tensor) -> None:
        method = known()
        if method is not None:
            method(parameter)

    return parameter.register_post_accumulate_grad_hook(arrived)


class Arrivals:
    """What is known of a step's gradients when they are gone.

    Args:
        device: of the gradients.
        num_ranks: processes over which gradients are averaged here, since no wrapper does.
    """

    def __init__(self, device: torch.device, num_ranks: int = 1) -> None:
        self._num_ranks = num_ranks
        self._squares = torch.zeros((), device=device)
        self._is_bad = torch.zeros((), device=device)

    def block(self, is_bad: torch.Tensor) -> None:
        """Let no step be taken where ``is_bad``, 0-d on the device, is true."""
        self._is_bad = torch.maximum(self._is_bad, is_bad.float())

    def take(self, gradient: torch.Tensor) -> None:
        """Average a gradient over the ranks, in place, and take its norm."""
        if self._num_ranks > 1:
            torch.distributed.all_reduce(gradient.div_(self._num_ranks))
        add_square_sum_(gradient, self._squares, self._is_bad)

    @property
    def held(self) -> torch.Tensor:
        """0-d, on the device: 1 where no further step may be taken."""
        return self._is_bad

    def lets_step(self, optimizer: Any) -> bool:
        """Whether the next step may be taken; torch's fused optimizers ask the device themselves.

        Args:
            optimizer: whose step comes next.
        """
        if self._is_bad.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf, optimizer.grad_scale = self._is_bad, None
            return True
        return not bool(self._is_bad)

    def norm(self) -> torch.Tensor:
        """Of all gradients of the step; fp32, 0-d."""
        return self._squares.sqrt()

    def end_step(self) -> None:
        """Forget this step's."""
        self._squares = torch.zeros_like(self._squares)
        self._is_bad = torch.zeros_like(self._is_bad)
