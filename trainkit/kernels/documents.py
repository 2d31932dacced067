"""Where packed documents lie, for kernels that keep them apart; made once for a batch."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

CHUNK = 64
"""Tokens of a document that are taken together."""

Table = TypeVar("Table")
_TABLES = WeakTensorKeyDictionary()


def _once(make: Callable[[Tensor, int], Table], cu_seqlens: Tensor, num_tokens: int) -> Table:
    """What ``make`` answers; made again only if the tensor was written to."""
    kept = _TABLES.setdefault(cu_seqlens, {})
    key = (num_tokens, cu_seqlens._version)
    if kept.get(make, (None,))[0] != key:
        kept[make] = (key, make(cu_seqlens, num_tokens))
    table: Table = kept[make][1]
    return table


def first_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """(T,) int32: where the document of each token begins; the host does not wait."""
    return _once(_first_tokens, cu_seqlens, num_tokens)


def _first_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    return cu_seqlens[document].to(torch.int32)


def chunk_table(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Where the chunks of all documents lie; made on the device, so that the host never waits.

    Args:
        cu_seqlens: (N + 1,) int32, where documents begin and end.
        num_tokens: T.

    Returns:
        (chunks, 2) int32, the first token of a chunk and of what follows its document; the rows
        that are left over are empty. And (N + 1,), the number of each document's first chunk.
    """
    return _once(_chunk_table, cu_seqlens, num_tokens)


def _chunk_table(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    lengths = cu_seqlens.diff()
    offsets = torch.zeros_like(cu_seqlens)
    offsets[1:] = ((lengths + CHUNK - 1) // CHUNK).cumsum(0)
    numbers = torch.arange(
        num_tokens // CHUNK + len(lengths), device=cu_seqlens.device, dtype=cu_seqlens.dtype
    )
    document = torch.searchsorted(offsets, numbers, right=True, out_int32=True) - 1
    is_one = document < len(lengths)
    document = document.clamp(max=len(lengths) - 1)
    start = cu_seqlens[document] + (numbers - offsets[document]) * CHUNK
    end = torch.minimum(cu_seqlens[document + 1], start + CHUNK)
    return torch.stack([start, torch.where(is_one, end, start)], 1), offsets
