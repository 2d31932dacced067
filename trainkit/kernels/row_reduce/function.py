"""Row maximum and minimum with their gradients."""

from typing import Any

from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.kernels.launch import HAS_TRITON, KernelFunction, runs_kernel
from trainkit.kernels.row_reduce.reference import row_max_reference, row_min_reference

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
