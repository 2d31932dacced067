"""The rotary kernel: queries and keys in one launch, forward and backward.

B batch, S sequence, T = B * S tokens, D head size, R rotary size (R <= D; the rest passes through).
The bytes are one read and one write of q and k. A program turns a tile of tokens and heads; half a
row of cos and sin serves all its heads (the other half repeats the first in every family). No
head count is padded to a power of two: 14 query and 2 key heads are 8 groups of 2.
The backward pass is the same rotation with sin negated: the transpose, not the inverse, because
attention scaling may be folded into cos and sin.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.launch import (
    INTERPRETING,
    Kernel,
    largest_power_of_2_dividing,
    next_power_of_2,
    remembered,
)


@triton.jit
def _load(ptr, mask):
    # What was read stays in the cache in place of what was written: up to 2% faster, measured.
    return tl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def _turn(
    src_ptr,
    dst_ptr,
    src_rows,
    dst_rows,
    head_stride,
    first_head,
    token_mask,
    cos,
    sin,
    INTERLEAVED: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    dtype: tl.constexpr = dst_ptr.dtype.element_ty
    HALF: tl.constexpr = R // 2
    heads = first_head + tl.arange(0, HEADS)
    src = src_ptr + src_rows[:, None, None] + (heads * head_stride)[None, :, None]
    dst = dst_ptr + dst_rows[:, None, None] + (heads * D)[None, :, None]
    cos = cos[:, None, :]
    sin = sin[:, None, :]
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_HALF)
        mask = token_mask[:, None, None] & (cols < R)[None, None, :]
        pairs = _load(src + cols[None, None, :], mask).to(cos.dtype)
        first, second = tl.split(tl.reshape(pairs, [BLOCK_T, HEADS, BLOCK_HALF, 2]))
        turned = tl.join(first * cos - second * sin, second * cos + first * sin)
        turned = tl.reshape(turned, [BLOCK_T, HEADS, 2 * BLOCK_HALF])
        tl.store(dst + cols[None, None, :], turned.to(dtype), mask=mask)
    else:
        cols = tl.arange(0, BLOCK_HALF)
        mask = token_mask[:, None, None] & (cols < HALF)[None, None, :]
        first = _load(src + cols[None, None, :], mask).to(cos.dtype)
        second = _load(src + HALF + cols[None, None, :], mask).to(cos.dtype)
        tl.store(dst + cols[None, None, :], (first * cos - second * sin).to(dtype), mask=mask)
        tl.store(
            dst + HALF + cols[None, None, :], (second * cos + first * sin).to(dtype), mask=mask
        )
    if R < D:
        cols = R + tl.arange(0, BLOCK_REST)
        mask = token_mask[:, None, None] & (cols < D)[None, None, :]
        tl.store(dst + cols[None, None, :], _load(src + cols[None, None, :], mask), mask=mask)


@triton.jit
def _load_angles(
    cos_ptr,
    sin_ptr,
    rows,
    token_mask,
    WIDE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_HALF)
    at = rows[:, None] + cols[None, :]
    mask = token_mask[:, None] & (cols < HALF)[None, :]
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0).to(WIDE)
    return cos, tl.load(sin_ptr + at, mask=mask, other=0.0).to(WIDE)


@triton.jit(do_not_specialize=["num_tokens", "seq_len"])
def _rope(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    q_batch_stride,
    q_head_stride,
    q_seq_stride,
    k_batch_stride,
    k_head_stride,
    k_seq_stride,
    cos_batch_stride,
    cos_seq_stride,
    num_tokens,
    seq_len,
    BACKWARD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    WIDE: tl.constexpr = tl.float64 if q_ptr.dtype.element_ty == tl.float64 else tl.float32
    Q_GROUPS: tl.constexpr = Q_HEADS // HEADS
    GROUPS: tl.constexpr = (Q_HEADS + K_HEADS) // HEADS
    group = tl.program_id(0) % GROUPS
    tokens = (tl.program_id(0) // GROUPS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = tokens < num_tokens
    batch = tokens // seq_len
    position = tokens % seq_len

    angles = batch * cos_batch_stride + position * cos_seq_stride
    cos, sin = _load_angles(cos_ptr, sin_ptr, angles, token_mask, WIDE, R // 2, BLOCK_HALF)
    if BACKWARD:
        sin = -sin

    if group < Q_GROUPS:
        _turn(
            q_ptr,
            q_out_ptr,
            batch * q_batch_stride + position * q_seq_stride,
            tokens * (Q_HEADS * D),
            q_head_stride,
            group * HEADS,
            token_mask,
            cos,
            sin,
            INTERLEAVED,
            R,
            D,
            HEADS,
            BLOCK_HALF,
            BLOCK_REST,
            BLOCK_T,
        )
    else:
        _turn(
            k_ptr,
            k_out_ptr,
            batch * k_batch_stride + position * k_seq_stride,
            tokens * (K_HEADS * D),
            k_head_stride,
            (group - Q_GROUPS) * HEADS,
            token_mask,
            cos,
            sin,
            INTERLEAVED,
            R,
            D,
            HEADS,
            BLOCK_HALF,
            BLOCK_REST,
            BLOCK_T,
        )


ROPE = Kernel(_rope)


@remembered
def config(q_heads: int, k_heads: int, head_dim: int, rotary_dim: int) -> tuple[int, ...]:
    """(HEADS, BLOCK_HALF, BLOCK_REST, BLOCK_T, num_warps) by shape."""
    half = next_power_of_2(rotary_dim // 2)
    rest = next_power_of_2(max(1, head_dim - rotary_dim))
    shared = largest_power_of_2_dividing(math.gcd(q_heads, k_heads))
    if INTERPRETING:
        return shared, half, rest, max(1, 2**16 // (shared * half)), 4
    heads = min(2, shared)
    return heads, half, rest, max(1, 512 // (heads * half)), 1


def launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, backward: bool, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate q and k (B, heads, S, D), any strides.

    Returns:
        Tensors of q's and k's shape over (B, S, heads, D)-contiguous memory: what the projection
        before and the attention after both expect.
    """
    batch, q_heads, seq_len, head_dim = q.shape
    k_heads = k.shape[1]
    q, q_strides = _dense(q)
    k, k_strides = _dense(k)
    cos, (angle_stride, angle_step, _) = _dense(cos)
    sin, sin_strides = _dense(sin)
    q_out, k_out = _position_major(q, q_strides), _position_major(k, k_strides)
    angle_rows, _, rotary_dim = cos.shape
    if (angle_stride, angle_step, 1) != sin_strides:
        cos, sin = cos.contiguous(), sin.contiguous()
        angle_stride, angle_step, _ = cos.stride()
    if angle_rows == 1:
        angle_stride = 0
    tokens = batch * seq_len
    if tokens:
        heads, half, rest, block_t, warps = config(q_heads, k_heads, head_dim, rotary_dim)
        groups = (q_heads + k_heads) // heads
        ROPE.launch(
            -(-tokens // block_t) * groups,
            (q, k, cos, sin, q_out, k_out),
            (*q_strides[:3], *k_strides[:3], angle_stride, angle_step),
            (tokens, seq_len),
            (
                backward,
                interleaved,
                rotary_dim,
                head_dim,
                q_heads,
                k_heads,
                heads,
                half,
                rest,
                block_t,
            ),
            warps,
        )
    return q_out, k_out


def _dense(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The tensor with unit column stride, and its strides."""
    strides = tensor.stride()
    if strides[-1] == 1:
        return tensor, strides
    tensor = tensor.contiguous()
    return tensor, tensor.stride()


def _position_major(like: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Uninitialised memory of shape (B, heads, S, D) that lies as (B, S, heads, D)."""
    _, heads, seq_len, head_dim = like.shape
    width = heads * head_dim
    wanted = (seq_len * width, head_dim, width, 1)
    if strides == wanted:
        return torch.empty_like(like)
    return torch.empty_strided(like.shape, wanted, dtype=like.dtype, device=like.device)
