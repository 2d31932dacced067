"""``attn_implementation: auto``: the fastest attention there is, with documents kept apart.

An unpacked batch runs on SDPA, cuDNN's kernel first where it is the fastest. A packed batch, known
by the ``cu_seq_lens_q`` of its collator, runs on one of three engines:

- varlen: torch's variable-length flash attention over the documents end to end; no mask exists.
- flex: flex attention with a block mask of the documents, for dtypes and head sizes flash refuses.
- mask: SDPA with a dense document mask, which runs anywhere.

Nothing here makes the host wait for the device. transformers looks at the values of a mask (and of
``position_ids``) to learn whether it can do without one; a forward pre-hook on the decoder, set by
`install`, answers that question beforehand.

Shapes: B batch, S sequence, T = B * S tokens, D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from trainkit.errors import ModelError, TrainkitError
from trainkit.models.attend import attend, flash_obstacle, prefers_cudnn
from trainkit.models.document_masks import (
    document_blocks,
    document_mask,
    make_mask,
    no_mask,
)
from trainkit.models.leak_test import leak_test

__all__ = [
    "NAME",
    "Attention",
    "Engine",
    "install",
    "leak_test",
    "register",
    "resolve_attention",
]

NAME = "trainkit"
"""The name under which transformers knows this attention."""

Engine = Literal["varlen", "flex", "mask"]

_CANNOT_PACK = {
    "qwen2_vl": "the positions of its images span the whole row",
    "qwen2_5_vl": "the positions of its images span the whole row",
    "qwen3_vl": "the positions of its images span the whole row",
    **dict.fromkeys(
        (
            *("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba", "zamba2", "falcon_h1"),
            *("recurrent_gemma", "rwkv", "qwen3_next", "qwen3_5", "granitemoehybrid", "nemotron_h"),
            *("lfm2", "kimi_linear", "olmo_hybrid", "minimax"),
        ),
        "its recurrent layers carry state from one document into the next",
    ),
}


@dataclass(frozen=True)
class Attention:
    """What a run attends with, and why.

    Args:
        name: the value for ``attn_implementation``.
        reason: for the run's record.
        engine: what packed batches run on; None when the batches are not packed.
    """

    name: str
    reason: str
    engine: Engine | None = None


def register() -> None:
    """Make ``attn_implementation="trainkit"`` known to transformers; a second call is harmless."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def resolve_attention(
    model_type: str,
    *,
    packed: bool,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    head_size: int = 128,
) -> Attention:
    """Choose what ``attn_implementation: auto`` means for a run.

    Args:
        model_type: ``config.model_type``.
        packed: whether several documents share a row.
        device: where the model trains.
        dtype: what attention computes in (autocast's dtype under autocast).
        head_size: D.

    Raises:
        ModelError: the family's layers cannot keep packed documents apart.
    """
    register()
    device = torch.device(device)
    if not packed:
        if device.type == "cuda" and prefers_cudnn(device.index or 0):
            return Attention(NAME, "SDPA, cuDNN's kernel first: fastest on this GPU")
        return Attention(NAME, f"SDPA with torch's own choice of kernel on {device.type}")
    if model_type in _CANNOT_PACK:
        raise ModelError(
            f"{model_type} cannot be trained on packed rows: {_CANNOT_PACK[model_type]}",
            where="data.packing",
            fix="set data.packing to false",
        )
    obstacle = flash_obstacle(device, dtype, head_size)
    if obstacle is None:
        return Attention(NAME, "varlen flash attention over the documents, no mask", "varlen")
    if device.type == "cuda":
        return Attention(NAME, f"flex attention with a document mask: {obstacle}", "flex")
    return Attention(NAME, f"SDPA with a dense document mask: {obstacle}", "mask")


def install(model: nn.Module, engine: Engine | None = None) -> RemovableHandle:
    """Prepare a model that was loaded with ``attn_implementation="trainkit"``.

    The hook decides once per forward pass what each layer would otherwise decide again, and hands
    it to the layers as their mask.

    Args:
        model: a causal language model, bare or under peft.
        engine: what packed batches run on, from `resolve_attention`; by default varlen on a GPU
            and the dense mask elsewhere.

    Returns:
        A handle whose ``remove`` undoes it.
    """
    causal_lm = next(each for each in model.modules() if isinstance(each, PreTrainedModel))
    decoder = causal_lm.get_decoder()

    def prepare(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        mask = _mask_for(decoder.config, engine, args, kwargs)
        return None if mask is None else (args, {**kwargs, "attention_mask": mask})

    return decoder.register_forward_pre_hook(prepare, with_kwargs=True)


def _mask_for(
    config: Any, engine: Engine | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | BlockMask | None:
    """The mask that spares the layers a decision; None leaves the decision to transformers."""
    use_cache = kwargs.get("use_cache")
    caches = kwargs.get("past_key_values") is not None or (
        config.use_cache if use_cache is None else use_cache
    )
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if tokens is None:
        tokens = kwargs["inputs_embeds"]
    bounds = kwargs.get("cu_seq_lens_q")
    if bounds is None:
        plain = kwargs.get("attention_mask") is None and kwargs.get("position_ids") is None
        return no_mask(tokens.device) if plain and not caches and len(args) <= 1 else None
    if caches:
        raise TrainkitError(
            "packed documents and a key/value cache do not go together",
            where="use_cache",
            fix="set model.config.use_cache to False for training (the Trainer does)",
        )
    if engine is None:
        engine = "varlen" if tokens.device.type == "cuda" else "mask"
    if engine == "varlen":
        return no_mask(tokens.device)
    make = document_blocks if engine == "flex" else document_mask
    return make(bounds, *tokens.shape[:2])
