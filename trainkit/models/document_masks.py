"""The masks of trainkit's attention: documents of a packed batch, padding, windows.

Nothing here makes the host wait for the device. Shapes: B batch, S sequence.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.masking_utils import sdpa_mask


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **settings: Any,
) -> Tensor | None:
    """Transformers' mask hook: none where causality is enough, else SDPA's.

    In training a padding mask is not needed: padding comes after the tokens, so no token sees it,
    and its own outputs have no label. That the padding is on the right is asserted on the device.

    Args:
        batch_size: B.
        q_length: rows of the mask.
        kv_length: its columns.
        attention_mask: (B, kv_length), bool, true for tokens.
        allow_is_causal_skip: whether plain causality may be left to the attention function.
        settings: passed on to transformers' ``sdpa_mask``.
    """
    if (
        torch.is_grad_enabled()
        and allow_is_causal_skip
        and attention_mask is not None
        and attention_mask.shape[-1] == q_length == kv_length
    ):
        padding_last = (attention_mask[:, 1:] <= attention_mask[:, :-1]).all()
        torch._assert_async(
            padding_last, "trainkit's attention trains on right-padded rows only; these are not"
        )
        return None
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        **settings,
    )


@functools.lru_cache(maxsize=64)
def no_mask(device: torch.device) -> Tensor:
    """Stands for "causality is enough". transformers passes four-dimensional masks on unread."""
    return torch.empty((0, 0, 0, 0), dtype=torch.bool, device=device)


def _document_numbers(cu_seqlens: Tensor, batch_size: int, length: int) -> Tensor:
    """(B, S): which document each token belongs to, counted over the flattened batch."""
    tokens = torch.arange(batch_size * length, device=cu_seqlens.device)
    return torch.bucketize(tokens, cu_seqlens[1:-1], right=True).view(batch_size, length)


def document_mask(cu_seqlens: Tensor, batch_size: int, length: int) -> Tensor:
    """(B, 1, S, S), true where a token may look: its own document, up to itself."""
    numbers = _document_numbers(cu_seqlens, batch_size, length)
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    return same.logical_and_(causal_mask(length, cu_seqlens.device))


def causal_mask(length: int, device: torch.device, window: int | None = None) -> Tensor:
    """(S, S), true on and below the diagonal, at most ``window`` wide."""
    mask = torch.ones((length, length), dtype=torch.bool, device=device).tril_()
    return mask if window is None else mask.triu_(1 - window)


def document_blocks(cu_seqlens: Tensor, batch_size: int, length: int) -> BlockMask:
    """The same mask for flex attention, which skips blocks in which nobody looks at anything."""
    numbers = _document_numbers(cu_seqlens, batch_size, length)

    def may_look(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        del h
        return (numbers[b, q] == numbers[b, kv]) & (kv <= q)

    return create_block_mask(may_look, batch_size, None, length, length, device=cu_seqlens.device)
