"""RMSNorm and add + RMSNorm with their gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.kernels.fp8.function import why_no_fp8
from trainkit.kernels.fp8.linear import carry_rows
from trainkit.kernels.launch import HAS_TRITON, KernelFunction, runs_kernel

# -- RMSNorm in plain torch: Hugging Face's arithmetic, rounding for rounding ---------------------


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0, cast: str = "llama"
) -> Tensor:
    """RMSNorm over the last axis, as Hugging Face's eager modules compute it.

    Source: LlamaRMSNorm and GemmaRMSNorm of transformers 5.23. The llama cast rounds the normalised
    row to x's dtype before the weight multiplies it; the gemma cast stays in fp32 up to the end.
    fp64 inputs stay fp64.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    normal = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "gemma":
        return (normal * (offset + weight.to(wide))).to(x.dtype)
    scale = weight if offset == 0.0 else offset + weight
    return scale * normal.to(x.dtype)


def add_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: str = "llama",
) -> tuple[Tensor, Tensor]:
    """``s = x + residual`` (rounded), then ``(rms_norm(s), s)``."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset=offset, cast=cast), total


if HAS_TRITON:
    from trainkit.kernels.rms_norm import kernel


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: str = "llama",
    fp8_rows: bool = False,
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
        fp8_rows: let y carry its rows in e4m3 as well (`kernels.fp8.linear.take_rows`), where the
            kernel runs.

    Returns:
        y, shaped as x.

    Raises:
        ValueError: the weight does not fit x, or the cast is unknown.
    """
    _check(x, weight, cast)
    if not runs_kernel(x, weight) or not 0 < x.shape[-1] <= kernel.MAX_HIDDEN:
        return rms_norm_reference(x, weight, eps, offset=offset, cast=cast)
    made: list[Tensor] | None = [] if fp8_rows and _takes_codes(x, weight) else None
    y = _RMSNorm.apply(x, weight, (eps, offset, cast == "gemma"), made)
    if made:
        carry_rows(y, *made)
    return y


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    cast: str = "llama",
    fp8_rows: bool = False,
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
        fp8_rows: see `rms_norm`.

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
    made: list[Tensor] | None = [] if fp8_rows and _takes_codes(x, residual, weight) else None
    settings = (eps, offset, cast == "gemma")
    y, total = _AddRMSNorm.apply(x, residual, weight, settings, made)
    if made:
        carry_rows(y, *made)
    return y, total


def _takes_codes(*tensors: Tensor) -> bool:
    """Whether y is in the 16 bits that its readers compute in, on a device that knows e4m3."""
    same = all(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
    return same and why_no_fp8(tensors[0].device) is None


def _check(x: Tensor, weight: Tensor, cast: str) -> None:
    if weight.dim() != 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit rows of {x.shape[-1]}")
    if cast not in ("llama", "gemma"):
        raise ValueError(f"cast is {cast!r}; it must be 'llama' or 'gemma'")


class _RMSNorm(KernelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        settings: tuple[float, float, bool],
        made: list[Tensor] | None,
    ) -> Tensor:
        y, _, rstd = kernel.launch_forward(x, None, weight.contiguous(), *settings, made)
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
        return dx, dw, None, None


class _AddRMSNorm(KernelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        settings: tuple[float, float, bool],
        made: list[Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        y, total, rstd = kernel.launch_forward(x, residual, weight.contiguous(), *settings, made)
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
            return None, None, dw, None, None
        # Both branches get the same tensor: none of our ops writes into a gradient it was given.
        dx = dresidual = dsum
        if ctx.dtypes is not None:
            x_dtype, residual_dtype = ctx.dtypes
            dx, dresidual = dsum.to(x_dtype), dsum.to(residual_dtype)
        return dx if want_x else None, dresidual if want_residual else None, dw, None, None
