"""Row maximum and minimum with their gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.kernels.launch import HAS_TRITON, KernelFunction, runs_kernel

# -- Row maximum and minimum in plain torch, with the tie rule torch leaves open ------------------


def row_max_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values, indices) of the largest element over the last axis; NaN wins, then the first."""
    indices = _first_index(x, largest=True)
    return x.gather(-1, indices.unsqueeze(-1)).squeeze(-1), indices


def row_min_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values, indices) of the smallest element over the last axis; NaN wins, then the first."""
    indices = _first_index(x, largest=False)
    return x.gather(-1, indices.unsqueeze(-1)).squeeze(-1), indices


def _first_index(x: Tensor, *, largest: bool) -> Tensor:
    extreme = (x.amax if largest else x.amin)(dim=-1, keepdim=True)  # NaN propagates
    hit = torch.where(extreme.isnan(), x.isnan(), x == extreme)
    columns = torch.arange(x.shape[-1], device=x.device)
    return torch.where(hit, columns, x.shape[-1]).amin(dim=-1)


if HAS_TRITON:
    from trainkit.kernels.row_reduce import kernel


def row_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest element of each row.

    A NaN counts as larger than any number; the lowest index wins among equals (torch.max leaves
    that open).

    Args:
        x: (..., D), D >= 1, any strides.

    Returns:
        (values, indices), both (...), indices int64 and without gradient.

    Raises:
        ValueError: rows are empty.
    """
    _check(x)
    return _RowExtreme.apply(x, False) if runs_kernel(x) else row_max_reference(x)


def row_min(x: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest element of each row; NaN and ties as in `row_max`.

    Args:
        x: (..., D), D >= 1, any strides.

    Returns:
        (values, indices), both (...), indices int64 and without gradient.

    Raises:
        ValueError: rows are empty.
    """
    _check(x)
    return _RowExtreme.apply(x, True) if runs_kernel(x) else row_min_reference(x)


def _check(x: Tensor) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"a row of {tuple(x.shape)} has no elements to choose from")


class _RowExtreme(KernelFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, minimum: bool) -> tuple[Tensor, Tensor]:
        values, indices = kernel.launch_forward(x, minimum)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.width = x.shape[-1]
        return values, indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return kernel.launch_backward(indices, dy, ctx.width), None
