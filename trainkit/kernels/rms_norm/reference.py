"""RMSNorm in plain torch: Hugging Face's arithmetic, rounding for rounding."""

import torch
from torch import Tensor


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
