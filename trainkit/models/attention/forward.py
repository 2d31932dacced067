"""The attention function of every layer.

The mask that arrives says what to compute: a `Pattern` runs on the fastest engine that serves the
layer (SDPA's causal kernel, varlen, flex, blocks), a dense mask on SDPA. Whatever a layer passes is
served or refused by name, never dropped. Grouped key and value heads are not repeated where a
kernel takes them as they are.

Attention document by document and block by block, where no fast kernel runs, serves every causal
pattern, soft caps, sinks and dropout, on any device and in any dtype. Scores (or masks) of `BLOCK`
queries at most are held at a time. Shapes: B batch, H heads, S sequence, D head size, C queries of
a block, K its keys.
"""

import functools
import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from trainkit.errors import ModelError
from trainkit.kernels.autocast import compute_dtype
from trainkit.models.attention.pattern import Pattern
from trainkit.parallel.rows import RowSplit, row_split

varlen_attn: Any
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

_MAX_FLASH_HEAD_SIZE = 256
_HEAD_SIZE_STEP = 8
_AMPERE = (8, 0)

_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

NO_INFLUENCE = frozenset(
    {
        *("sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        *("position_ids", "position_embeddings", "cache_position", "past_key_values", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("num_items_in_batch", "logits_to_keep", "labels", "shift_labels", "deterministic"),
    }
)
"""What layers pass along that changes nothing here: the mask already holds window and documents,
positions are in the states, and the rest is for other parts of the model."""


def flash_obstacle(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why varlen attention cannot run, or None."""
    if device.type != "cuda":
        return f"varlen attention needs a GPU, this is {device.type}"
    if varlen_attn is None:
        return f"torch {torch.__version__} has no varlen attention (2.10 has)"
    if torch.version.hip is not None:
        return "varlen attention is proved on NVIDIA's GPUs only, this is AMD's"
    if _capability(device.index) < _AMPERE:
        return f"varlen attention needs compute capability 8.0, {_described(device.index)}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen attention has no kernel for {dtype}"
    if head_size > _MAX_FLASH_HEAD_SIZE:
        return f"varlen attention ends at head size {_MAX_FLASH_HEAD_SIZE}, this is {head_size}"
    if head_size % _HEAD_SIZE_STEP:
        return (
            f"varlen attention takes multiples of {_HEAD_SIZE_STEP} as head size, not {head_size}"
        )
    return None


def flex_obstacle(device: torch.device) -> str | None:
    """Why flex attention's compiled kernel cannot run, or None."""
    if device.type != "cuda":
        return f"flex attention trains on a GPU only, this is {device.type}"
    if torch.version.hip is None and _capability(device.index) < _AMPERE:
        return f"flex attention needs compute capability 8.0, {_described(device.index)}"
    return None


@functools.cache
def _capability(device_index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def _described(device_index: int | None) -> str:
    major, minor = _capability(device_index)
    return f"{torch.cuda.get_device_name(device_index)} has {major}.{minor}"


@functools.cache
def prefers_cudnn(device_index: int) -> bool:
    """Whether cuDNN's attention beats flash attention: measured so on Hopper (1.5 times)."""
    # AMD's numbers mean other things: an MI300 says (9, 4).
    return torch.version.hip is None and _capability(device_index)[0] == 9


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Pattern | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention hook.

    Args:
        module: the attention layer.
        query: (B, heads, S, D).
        key: (B, key heads, S, D); key heads divide heads.
        value: (B, key heads, S, value head size).
        attention_mask: what `make_mask` decided, or a mask that the model made.
        dropout: of the attention probabilities.
        scaling: of the scores; D ** -0.5 when None.
        is_causal: None asks the layer.
        softcap: of the scores.
        s_aux: (heads,), sinks: a score that takes probability and gives nothing.
        others: what the model passes along; anything that could change the result is refused.

    Returns:
        (B, S, heads, value head size), and no weights.
    """
    _refuse_unknown(module, others)
    if isinstance(attention_mask, Pattern):
        options = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "sinks": s_aux}
        split = attention_mask.split
        if split is not None:
            return _by_ranks(module, query, key, value, attention_mask, options, split), None
        return _by_pattern(module, query, key, value, attention_mask, options), None
    if row_split() is not None:
        raise ModelError(
            f"{type(module).__name__} attends without the mask that all layers share, so its part "
            "of a row would be taken for a whole one",
            where="parallel.sequence",
            fix="remove parallel.sequence",
        )
    if softcap is not None or s_aux is not None:
        if attention_mask is None and query.shape[2] > 1:
            raise ModelError(
                "soft caps and sinks came without a mask, so it is unknown what may be looked at",
                where=f"{type(module).__name__}, attn_implementation trainkit",
                fix="set model.attn_implementation to eager",
            )
        return spelled_out(
            query, key, value, attention_mask,
            dropout=dropout, scaling=scaling, softcap=softcap, sinks=s_aux,
        ), None  # fmt: skip
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


def _refuse_unknown(module: nn.Module, others: dict[str, Any]) -> None:
    """Refuse what a layer passes and nobody here knows: dropping it would be another model."""
    for name, value in others.items():
        if name not in NO_INFLUENCE and value is not None and value is not False:
            raise ModelError(
                f"{type(module).__name__} passes `{name}`, which trainkit's attention does not "
                "know; dropping it would change the model",
                where="model.attn_implementation: trainkit",
                fix="set it to auto, which takes another implementation then, or to eager",
            )


def _by_ranks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    options: dict[str, Any],
    split: RowSplit,
) -> Tensor:
    """`_by_pattern` where each rank has a part of the tokens: it attends for some of the heads."""
    split.refuse_heads(query.shape[1])
    sinks = options["sinks"]
    own = {**options, "sinks": None if sinks is None else split.own_heads(sinks)}
    query, key, value = (split.to_heads(states) for states in (query, key, value))
    return split.to_tokens(_by_pattern(module, query, key, value, pattern, own))


def _by_pattern(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    options: dict[str, Any],
) -> Tensor:
    """Causal attention on the fastest engine that serves this layer; (B, S, heads, D)."""
    if not query.shape[2] == key.shape[2] == pattern.length:
        raise ModelError(
            f"{type(module).__name__} looks from {query.shape[2]} tokens at {key.shape[2]} keys, "
            f"and the mask is of {pattern.length} tokens",
            where="model.attn_implementation: trainkit",
            fix="set it to auto, which takes another implementation then, or to eager",
        )
    bare = options["softcap"] is None and options["sinks"] is None
    scaling, dropout = options["scaling"], options["dropout"]
    if bare and pattern.is_causal_only:
        with _fastest_first(query, None):
            return sdpa_attention_forward(
                module, query, key, value, None, dropout=dropout, scaling=scaling, is_causal=True
            )[0]
    if pattern.engine == "varlen" and bare and pattern.is_plain and not dropout:
        dtype = compute_dtype(query)  # rotary embeddings leave float32
        obstacle = flash_obstacle(query.device, dtype, query.shape[-1])
        if obstacle is None and value.shape[-1] == query.shape[-1]:
            return _varlen(query.to(dtype), key.to(dtype), value.to(dtype), pattern, scaling)
    if pattern.engine != "blocks" and not dropout:
        return flex_attention_forward(
            module,
            query,
            key,
            value,
            pattern.block_mask,
            scaling=scaling,
            softcap=options["softcap"],
            s_aux=options["sinks"],
        )[0]
    return blockwise_attention(module, query, key, value, pattern, **options)


def _fastest_first(query: Tensor, mask: Tensor | None) -> AbstractContextManager[Any]:
    if mask is not None or not query.is_cuda or torch.compiler.is_compiling():
        return nullcontext()
    if not prefers_cudnn(query.get_device()):
        return nullcontext()
    return sdpa_kernel(_CUDNN_FIRST, set_priority=True)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, scaling: float | None
) -> Tensor:
    """Causal flash attention within each document; (B, heads, S, D) in, (B, S, heads, D) out."""
    batch_size, _, length, head_size = query.shape
    flat = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    window = (-1 if pattern.window is None else pattern.window - 1, 0)
    options = _varlen_options(window, scaling, query.shape[1] != key.shape[1])
    bounds, longest = pattern.bounds, pattern.longest
    key_bounds, most = bounds, longest
    if pattern.documents is not None and pattern.documents.keys is not None:
        # Causal from the end: the last query of a document sees the last of its keys.
        places, key_bounds, most = pattern.documents.keys
        flat[1:] = [states.index_select(0, places) for states in flat[1:]]
    output = varlen_attn(*flat, bounds, key_bounds, longest, most, **options)
    return output.view(batch_size, length, -1, head_size)


@functools.cache
def _varlen_options(
    window: tuple[int, int], scaling: float | None, grouped: bool
) -> dict[str, Any]:
    """Keywords of `varlen_attn`; their names differ between releases.

    ``window``: how far back and ahead a token sees besides itself; -1 is without an end.
    """
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": scaling}
    if "window_size" in names:
        options["window_size"] = window
    elif window[0] == -1:
        options["is_causal"] = window[1] == 0
    else:
        raise ModelError(
            f"torch {torch.__version__} has no varlen attention with a sliding window",
            fix="use a newer torch, or set data.packing to false",
        )
    if "enable_gqa" in names:
        options["enable_gqa"] = grouped
    return options


def attend_within_images(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention hook of towers that say where images begin, in both directions.

    Args:
        module: the attention layer.
        query: (1, heads, S, D): the patches of all images.
        key: likewise.
        value: likewise.
        attention_mask: there is none.
        cu_seq_lens_q: (images + 1,), where images begin, and the end of the last.
        max_length_q: patches of the largest.
        scaling: of the scores; D ** -0.5 when None.
        dropout: of the attention probabilities.

    Returns:
        (1, S, heads, D), and no weights.
    """
    states, dtype = (query, key, value), compute_dtype(query)
    if not dropout and flash_obstacle(query.device, dtype, query.shape[-1]) is None:
        flat = [each[0].transpose(0, 1).to(dtype) for each in states]
        bounds, longest = cu_seq_lens_q.to(torch.int32), int(max_length_q)
        options = _varlen_options((-1, -1), scaling, False)
        return varlen_attn(*flat, bounds, bounds, longest, longest, **options)[None], None
    sizes = cu_seq_lens_q.diff().tolist()
    images = zip(*(each.split(sizes, dim=2) for each in states), strict=True)
    settings: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "is_causal": False}
    outputs = [sdpa_attention_forward(module, *image, None, **settings)[0] for image in images]
    return torch.cat(outputs, dim=1), None


BLOCK = 1024
"""Queries of a block: its mask over a row of 128k keys takes 128 MiB."""


def blockwise_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within each document.

    Args:
        module: the attention layer.
        query: (B, H, S, D).
        key: (B, key heads, S, D).
        value: (B, key heads, S, value head size).
        pattern: what each token may look at.
        dropout: of the probabilities.
        scaling: of the scores; D ** -0.5 when None.
        softcap: of the scores: cap * tanh(score / cap).
        sinks: (H,), a score that takes probability from every token and gives nothing.

    Returns:
        (B, S, H, value head size).
    """
    pieces = []
    for rows, start, stop in pattern.spans:
        own = [states[rows, :, start:stop] for states in (key, value)]
        prefix = pattern.shared.get((rows.start, start))
        begin = start  # of the keys, as if those that are shared lay in front
        if prefix is not None:
            begin -= prefix.stop - prefix.start
            pairs = zip((key, value), own, strict=True)
            own = [torch.cat((states[rows, :, prefix], each), 2) for states, each in pairs]
        for first in range(start, stop, BLOCK):
            queries = slice(first, min(first + BLOCK, stop))
            earliest = begin
            if pattern.window is not None:
                earliest = max(begin, first - pattern.window + 1)
            keys = slice(earliest, queries.stop)
            # One square block of plain causality needs no mask.
            plain = pattern.is_plain and keys.start == queries.start
            plain = plain and (pattern.window is None or queries.stop - first <= pattern.window)
            mask = None if plain else pattern.block(rows, begin, queries, keys)
            seen = slice(keys.start - begin, keys.stop - begin)
            states = (query[rows, :, queries], own[0][:, :, seen], own[1][:, :, seen])
            if softcap is None and sinks is None:
                result, _ = sdpa_attention_forward(
                    module, *states, mask, dropout=dropout, scaling=scaling, is_causal=True
                )
            else:
                if mask is None:
                    mask = pattern.block(rows, begin, queries, keys)
                result = spelled_out(
                    *states, mask, dropout=dropout, scaling=scaling, softcap=softcap, sinks=sinks
                )
            pieces.append(result)
    if len(pieces) == 1:
        return pieces[0]
    # Rows of one piece each follow one another as well.
    return torch.cat(pieces, dim=1).view(query.shape[0], query.shape[2], *pieces[0].shape[2:])


def spelled_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention in plain torch, scores in fp32 at least; mask (B or 1, 1, C, K), bool or added.

    Returns:
        (B, C, H, value head size).
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query.to(wide), key.to(wide).transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    shares = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype)
    shares = functional.dropout(shares, p=dropout, training=dropout > 0.0)
    return torch.matmul(shares, value).transpose(1, 2).contiguous()
