"""Rotary position embedding in plain torch: Hugging Face's arithmetic, rounding for rounding."""

import torch
from torch import Tensor


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
