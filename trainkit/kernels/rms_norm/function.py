"""RMSNorm and LayerNorm, each also of a sum, with their gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

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


def layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *, offset: float = 0.0
) -> Tensor:
    """``torch.nn.functional.layer_norm`` over the last axis, rounded once to x's dtype.

    Weights of another dtype than x's, which torch does not take on a GPU, count as they are.
    """
    wide = torch.promote_types(x.dtype, weight.dtype)
    weight = weight if offset == 0.0 else weight + offset
    y = functional.layer_norm(
        x.to(wide), x.shape[-1:], weight.to(wide), None if bias is None else bias.to(wide), eps
    )
    return y.to(x.dtype)


def add_layer_norm_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``s = x + residual`` (rounded), then ``(layer_norm(s), s)``."""
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps, offset=offset), total


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
    """
    _check(x, weight, cast)
    if not runs_kernel(x, weight) or not 0 < x.shape[-1] <= kernel.MAX_HIDDEN:
        return rms_norm_reference(x, weight, eps, offset=offset, cast=cast)
    made: list[Tensor] | None = [] if fp8_rows and _takes_codes(x, weight) else None
    y = _Norm.apply(x, None, weight, None, (eps, offset, cast == "gemma", False), made)
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
    """
    _check(x, weight, cast, residual=residual)
    if not runs_kernel(x, residual, weight) or not 0 < x.shape[-1] <= kernel.MAX_HIDDEN:
        return add_rms_norm_reference(x, residual, weight, eps, offset=offset, cast=cast)
    made: list[Tensor] | None = [] if fp8_rows and _takes_codes(x, residual, weight) else None
    settings = (eps, offset, cast == "gemma", False)
    y, total = _Norm.apply(x, residual, weight, None, settings, made)
    if made:
        carry_rows(y, *made)
    return y, total


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *, offset: float = 0.0
) -> Tensor:
    """Layer normalisation over the last axis; computed in fp32, rounded once to x's dtype.

    Args:
        x: (..., H), any strides.
        weight: (H,).
        bias: (H,), or None.
        eps: added to the variance.
        offset: added to the weight (nemotron: 1).

    Returns:
        y, shaped as x.
    """
    _check(x, weight, bias=bias)
    vectors = (weight,) if bias is None else (weight, bias)
    if not runs_kernel(x, *vectors) or not 0 < x.shape[-1] <= kernel.MAX_HIDDEN:
        return layer_norm_reference(x, weight, bias, eps, offset=offset)
    y: Tensor = _Norm.apply(x, None, weight, bias, (eps, offset, True, True), None)
    return y


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``s = x + residual``, rounded to its dtype, and its layer normalisation, in one pass.

    Args:
        x: (..., H), any strides.
        residual: shaped as x.
        weight: (H,).
        bias: (H,), or None.
        eps: added to the variance.
        offset: added to the weight (nemotron: 1).

    Returns:
        (layer_norm(s), s), both shaped as x.
    """
    _check(x, weight, bias=bias, residual=residual)
    vectors = (weight,) if bias is None else (weight, bias)
    if not runs_kernel(x, residual, *vectors) or not 0 < x.shape[-1] <= kernel.MAX_HIDDEN:
        return add_layer_norm_reference(x, residual, weight, bias, eps, offset=offset)
    y, total = _Norm.apply(x, residual, weight, bias, (eps, offset, True, True), None)
    return y, total


def _takes_codes(*tensors: Tensor) -> bool:
    """Whether y is in the 16 bits that its readers compute in, on a device that knows e4m3."""
    same = all(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
    return same and why_no_fp8(tensors[0].device) is None


def _check(
    x: Tensor,
    weight: Tensor,
    cast: str = "gemma",
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    for name, vector in (("weight", weight), ("bias", weight if bias is None else bias)):
        if vector.dim() != 1 or x.shape[-1] != vector.shape[0]:
            raise ValueError(f"{name} {tuple(vector.shape)} does not fit rows of {x.shape[-1]}")
    if residual is not None and x.shape != residual.shape:
        raise ValueError(f"x {tuple(x.shape)} and residual {tuple(residual.shape)} differ in shape")
    if cast not in ("llama", "gemma"):
        raise ValueError(f"cast is {cast!r}; it must be 'llama' or 'gemma'")


class _Norm(KernelFunction):
    """y, and the sum where there is a residual."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        settings: tuple[float, float, bool, bool],
        made: list[Tensor] | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        y, total, rstd = kernel.launch_forward(
            x,
            residual,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            *settings,
            made,
        )
        ctx.save_for_backward(total, weight, rstd)
        ctx.settings = settings
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.dtypes = x.dtype, x.dtype if residual is None else residual.dtype
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        total, weight, rstd = ctx.saved_tensors
        want_x, want_residual, want_dw, want_db = ctx.needs_input_grad[:4]
        dsum, dw, db = dtotal, None, None
        if dy is not None:  # else only the sum was used
            dsum, dw, db = kernel.launch_backward(
                total,
                weight.contiguous(),
                rstd,
                dy,
                dtotal,
                ctx.settings[1],
                ctx.settings[3],
                ctx.bias_dtype is not None,
                want_x or want_residual,
                want_dw or want_db,
            )
        # Both branches get the same tensor: none of our ops writes into a gradient it was given.
        dx = dresidual = dsum
        if dsum is not None and ctx.dtypes[0] is not ctx.dtypes[1]:
            dx, dresidual = (dsum.to(dtype) for dtype in ctx.dtypes)
        if db is not None and want_db:
            db = db.to(ctx.bias_dtype)
        return (
            dx if want_x else None,
            dresidual if want_residual else None,
            dw if want_dw else None,
            db if want_db else None,
            None,
            None,
        )
