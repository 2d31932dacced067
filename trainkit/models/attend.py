"""The attention function of every layer.

An unpacked batch runs on SDPA, cuDNN's kernel first where it is the fastest; a packed one on what
`trainkit.models.attention` chose: the mask that arrives says which. Grouped key and value heads are
never repeated. Shapes: B batch, S sequence, D head size.
"""

import functools
import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trainkit.errors import ModelError
from trainkit.models.document_masks import causal_mask, document_mask

varlen_attn: Any
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

_MAX_FLASH_HEAD_SIZE = 256

_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def flash_obstacle(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why varlen attention cannot run, or None."""
    if device.type != "cuda":
        return f"varlen attention needs a GPU, this is {device.type}"
    if varlen_attn is None:
        return f"torch {torch.__version__} has no varlen attention (2.10 has)"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen attention has no kernel for {dtype}"
    if head_size > _MAX_FLASH_HEAD_SIZE:
        return f"varlen attention ends at head size {_MAX_FLASH_HEAD_SIZE}, this is {head_size}"
    return None


@functools.cache
def prefers_cudnn(device_index: int) -> bool:
    """Whether cuDNN's attention beats flash attention: measured so on Hopper (1.5 times)."""
    return torch.cuda.get_device_capability(device_index)[0] == 9


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention hook.

    Args:
        module: the attention layer.
        query: (B, heads, S, D).
        key: (B, key heads, S, D); key heads divide heads and are not repeated.
        value: as ``key``.
        attention_mask: what `install`'s hook or `make_mask` decided.
        dropout: of the attention probabilities.
        scaling: of the scores; D ** -0.5 when None.
        is_causal: None asks the layer.
        sliding_window: how many tokens a token sees, itself included.
        cu_seq_lens_q: (documents + 1,) int32, bounds of the documents in the flattened batch.
        max_length_q: of the longest document.
        softcap: must be None; no fast kernel has it.
        others: what the model passes along for other implementations.

    Returns:
        (B, S, heads, D), and no weights.
    """
    del others
    if softcap is not None:
        raise ModelError(
            "trainkit's attention has no soft cap on the scores",
            where="model.attn_implementation",
            fix="set it to eager or flex_attention",
        )
    batch_size, _, length, _ = query.shape
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    if isinstance(attention_mask, BlockMask):
        if window is None and not dropout:
            return flex_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling
            )
        attention_mask = None
    if attention_mask is not None and not attention_mask.numel():
        attention_mask = None

    if cu_seq_lens_q is not None:
        dtype = _compute_dtype(query)
        obstacle = flash_obstacle(query.device, dtype, query.shape[-1])
        if attention_mask is None and not dropout and obstacle is None:
            longest = length if max_length_q is None else max_length_q
            states = (query.to(dtype), key.to(dtype), value.to(dtype))
            return _varlen(*states, cu_seq_lens_q, longest, window, scaling), None
        if attention_mask is None:
            attention_mask = document_mask(cu_seq_lens_q, batch_size, length)
        if window is not None:
            attention_mask = attention_mask & causal_mask(length, query.device, window)
    elif attention_mask is None and window is not None and key.shape[2] == length:
        # `make_mask` and the hook leave the window to this function.
        attention_mask = causal_mask(length, query.device, window)[None, None]

    with _fastest_first(query, attention_mask):
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
        )


def _compute_dtype(query: Tensor) -> torch.dtype:
    """Autocast's dtype where autocast is on (rotary embeddings leave float32), else the query's."""
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    return query.dtype


def _fastest_first(query: Tensor, mask: Tensor | None) -> AbstractContextManager[Any]:
    if mask is not None or not query.is_cuda or torch.compiler.is_compiling():
        return nullcontext()
    if not prefers_cudnn(query.get_device()):
        return nullcontext()
    return sdpa_kernel(_CUDNN_FIRST, set_priority=True)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Causal flash attention within each document; (B, heads, S, D) in, (B, S, heads, D) out."""
    batch_size, _, length, head_size = query.shape
    flat = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    options = _varlen_options(window, scaling, query.shape[1] != key.shape[1])
    output = varlen_attn(*flat, cu_seqlens, cu_seqlens, longest, longest, **options)
    return output.view(batch_size, length, -1, head_size)


@functools.cache
def _varlen_options(window: int | None, scaling: float | None, grouped: bool) -> dict[str, Any]:
    """Keywords of `varlen_attn` for causal attention; their names differ between releases."""
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": scaling}
    if "window_size" in names:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise ModelError(
            f"torch {torch.__version__} has no varlen attention with a sliding window",
            fix="use a newer torch, or set data.packing to false",
        )
    if "enable_gqa" in names:
        options["enable_gqa"] = grouped
    return options
