"""Rotary position embedding with its gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.kernels.launch import HAS_TRITON, KernelFunction, runs_kernel

# -- Rotary position embedding in plain torch: Hugging Face's arithmetic, rounding for rounding


def apply_rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate q and k (B, heads, S, D) by cos and sin (B or 1, S, R), R <= D.

    Source: ``apply_rotary_pos_emb`` of llama (half rotation), phi3 (partial) and glm (interleaved,
    partial) in transformers 5.23.
    """
    rotary_dim = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleaved:
        cos = cos[..., : rotary_dim // 2].repeat_interleave(2, dim=-1)
        sin = sin[..., : rotary_dim // 2].repeat_interleave(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        if interleaved:
            quarter = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
        else:
            first, second = turned.chunk(2, dim=-1)
            quarter = torch.cat((-second, first), dim=-1)
        turned = (turned * cos + quarter * sin).to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    return rotate(q), rotate(k)


if HAS_TRITON:
    from trainkit.kernels.rope import kernel


def apply_rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions, computed in fp32 and rounded once.

    Args:
        q: (B, q heads, S, D), any strides.
        k: (B, k heads, S, D), any strides.
        cos: (B or 1, S, R), R <= D even; columns from R on pass through. The second half of a row
            repeats the first, as in every Hugging Face model. A constant: it gets no gradient.
        sin: as cos.
        interleaved: rotate the pairs (2j, 2j + 1), as glm does, instead of (j, j + R/2).

    Returns:
        (q, k) rotated, in the dtypes given. Where the kernel runs they are transposed views of
        (B, S, heads, D)-contiguous memory.
    """
    _check(q, k, cos, sin)
    if not runs_kernel(q, k, cos, sin):
        return apply_rope_reference(q, k, cos, sin, interleaved=interleaved)
    return _Rope.apply(q, k, cos, sin, interleaved)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    batch, _, seq_len, head_dim = q.shape
    k_batch, _, k_len, k_dim = k.shape
    angles = cos.shape
    fits = (
        (k_batch, k_len, k_dim) == (batch, seq_len, head_dim)
        and angles == sin.shape
        and len(angles) == 3
        and angles[0] in (1, batch)
        and angles[1] == seq_len
        and angles[2] <= head_dim
        and angles[2] % 2 == 0
    )
    if not fits:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)} and sin "
            f"{tuple(sin.shape)} do not fit: want (B, heads, S, D) and (B or 1, S, R), R <= D even"
        )


class _Rope(KernelFunction):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return kernel.launch(q, k, cos, sin, backward=False, interleaved=interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dq, dk = kernel.launch(dq, dk, cos, sin, backward=True, interleaved=ctx.interleaved)
        want_q, want_k = ctx.needs_input_grad[:2]
        return dq if want_q else None, dk if want_k else None, None, None, None
