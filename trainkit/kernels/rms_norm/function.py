"""RMSNorm and add + RMSNorm with their gradients."""

from typing import Any

from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.kernels.launch import HAS_TRITON, KernelFunction, runs_kernel
from trainkit.kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference

if HAS_TRITON:
    from trainkit.kernels.rms_norm import kernel


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0, cast: str = "llama"
) -> Tensor:
    """Root-mean-square normalisation over the last axis.

    Args:
        x: (..., H), any strides.
        weight: (H,).
        eps: added to the mean square.
        offset: added to the weight (gemma: 1).
        cast: where Hugging Face's module rounds. "llama": the normalised row is rounded to x's
            dtype, then multiplied by the weight in the wider of the two dtypes. "gemma": all in
            fp32, rounded once to x's dtype.

    Returns:
        y, shaped as x.

    Raises:
        ValueError: the weight does not fit x, or the cast is unknown.
    """
    _check(x, weight, cast)
    if not runs_kernel(x, weight) or not 0 < x.shape[-1] <= kernel.MAX_HIDDEN:
        return rms_norm_reference(x, weight, eps, offset=offset, cast=cast)
    return _RMSNorm.apply(x, weight, (eps, offset, cast == "gemma"))


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: str = "llama",
) -> tuple[Tensor, Tensor]:
    """``s = x + residual`` and its RMSNorm, in one pass.

    The sum is rounded to its dtype before it is normalised, exactly as two separate modules would.

    Args:
        x: (..., H), any strides.
        residual: shaped as x.
        weight: (H,).
        eps: added to the mean square.
        offset: added to the weight (gemma: 1).
        cast: see `rms_norm`.

    Returns:
        (rms_norm(s), s), both shaped as x.

    Raises:
        ValueError: shapes do not fit, or the cast is unknown.
    """
    _check(x, weight, cast)
    if x.shape != residual.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} differ in shape")
    if not runs_kernel(x, residual, weight) or not 0 < x.shape[-1] <= kernel.MAX_HIDDEN:
        return add_rms_norm_reference(x, residual, weight, eps, offset=offset, cast=cast)
    return _AddRMSNorm.apply(x, residual, weight, (eps, offset, cast == "gemma"))


def _check(x: Tensor, weight: Tensor, cast: str) -> None:
    if weight.dim() != 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit rows of {x.shape[-1]}")
    if cast not in ("llama", "gemma"):
        raise ValueError(f"cast is {cast!r}; it must be 'llama' or 'gemma'")


class _RMSNorm(KernelFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, settings: tuple[float, float, bool]) -> Tensor:
        y, _, rstd = kernel.launch_forward(x, None, weight.contiguous(), *settings)
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = settings[1]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        want_dx, want_dw = ctx.needs_input_grad[:2]
        dx, dw = kernel.launch_backward(
            x, weight.contiguous(), rstd, dy, None, ctx.offset, want_dx, want_dw
        )
        return dx, dw, None


class _AddRMSNorm(KernelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        settings: tuple[float, float, bool],
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        y, total, rstd = kernel.launch_forward(x, residual, weight.contiguous(), *settings)
        ctx.save_for_backward(total, weight, rstd)
        ctx.offset = settings[1]
        ctx.dtypes = None if x.dtype is residual.dtype else (x.dtype, residual.dtype)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, rstd = ctx.saved_tensors
        want_x, want_residual, want_dw = ctx.needs_input_grad[:3]
        if dy is None:  # only the sum was used
            dsum, dw = dtotal, None
        else:
            dsum, dw = kernel.launch_backward(
                total,
                weight.contiguous(),
                rstd,
                dy,
                dtotal,
                ctx.offset,
                want_x or want_residual,
                want_dw,
            )
        if dsum is None:
            return None, None, dw, None
        # Both branches get the same tensor: none of our ops writes into a gradient it was given.
        dx = dresidual = dsum
        if ctx.dtypes is not None:
            x_dtype, residual_dtype = ctx.dtypes
            dx, dresidual = dsum.to(x_dtype), dsum.to(residual_dtype)
        return dx if want_x else None, dresidual if want_residual else None, dw, None
