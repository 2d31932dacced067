"""``attn_implementation: auto``: the fastest attention there is, with documents kept apart.

Causal attention over whole rows runs on SDPA, cuDNN's kernel first where it is the fastest. What
has documents or a window runs on one of three engines:

- varlen: torch's variable-length flash attention over the documents end to end; no mask exists.
- flex: flex attention with a block mask, for dtypes, head sizes, sinks and soft caps that flash
  attention refuses.
- blocks: document by document and block by block, which runs anywhere.

transformers looks at the values of a mask (and of ``position_ids``) to learn whether it can do
without one, which makes the host wait; `install` sets hooks on the model under the head that spare
it.

Shapes: B batch, S sequence, D head size.
"""

from contextvars import Token
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from trainkit.errors import TrainkitError
from trainkit.models.attention.forward import (
    attend_within_images,
    attention_forward,
    flash_obstacle,
    flex_obstacle,
    prefers_cudnn,
)
from trainkit.models.attention.pattern import Batch, Documents, Engine, current_batch, make_mask
from trainkit.parallel.rows import row_split

NAME = "trainkit"
"""The name under which transformers knows this attention."""

OF_IMAGES = "trainkit_flash_of_images"
"""Of a tower's. transformers gives bounds to what has "flash" in its name, and to nothing else."""


@dataclass(frozen=True)
class Attention:
    """What a run attends with, and why."""

    name: str
    reason: str
    engine: Engine | None = None
    checks: tuple[dict[str, Any], ...] = field(default=())


def register() -> None:
    """Make ``attn_implementation="trainkit"`` known to transformers; a second call is harmless."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionInterface.register(OF_IMAGES, attend_within_images)
    AttentionMaskInterface.register(NAME, make_mask)


def attention_heads(config: Any) -> list[tuple[int, int]]:
    """Heads and the size of each, layer by layer; empty for a model without attention.

    In some models (gemma4) the sizes differ between layers.
    """
    layers = [config] * getattr(config, "num_hidden_layers", 1)
    if getattr(config, "is_heterogeneous", False):
        layers = list(config.per_layer_config)
    found = []
    for layer in layers:
        heads = getattr(layer, "num_attention_heads", None)
        if heads:
            found.append((heads, getattr(layer, "head_dim", None) or layer.hidden_size // heads))
    return found


def resolve_attention(
    *,
    packed: bool,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    head_size: int = 128,
) -> Attention:
    """Choose what ``attn_implementation: auto`` means on a device.

    Whether the model's own mathematics survives is another question, which
    `trainkit.models.attention.proof` answers by running it.

    ``dtype`` is what attention computes in, autocast's under autocast.
    """
    register()
    device = torch.device(device)
    engine, reason = _engine(device, dtype, head_size)
    if packed:
        return Attention(NAME, reason, engine)
    if device.type == "cuda" and prefers_cudnn(device.index or 0):
        return Attention(NAME, "SDPA, cuDNN's kernel first: fastest on this GPU", engine)
    return Attention(NAME, f"SDPA with torch's own choice of kernel on {device.type}", engine)


def _engine(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, head_size: int = 128
) -> tuple[Engine, str]:
    """The best engine and why; each layer looks at its own dtype and head size again."""
    obstacle = flash_obstacle(device, dtype, head_size)
    if obstacle is None:
        return "varlen", "varlen flash attention over the documents, no mask"
    if flex_obstacle(device) is None:
        return "flex", f"flex attention with a block mask of the documents: {obstacle}"
    return "blocks", f"SDPA, document by document: {obstacle}"


class Installed:
    """The hooks on the model under the head; ``remove`` takes them away."""

    def __init__(self, base: PreTrainedModel, engine: Engine) -> None:
        self._base = base
        self._engine = engine
        self._tokens: list[Token[Batch | None]] = []
        self._handles = [
            base.register_forward_pre_hook(self._before, with_kwargs=True),
            base.register_forward_hook(self._after, always_call=True, prepend=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._base.config._attn_implementation != NAME:
            return None  # another one was set since: transformers makes its masks
        bounds = kwargs.get("cu_seq_lens_q")
        shape, device = _shape_of(args, kwargs)
        documents, split = None, row_split()
        if bounds is not None:
            if self._caches(kwargs):
                raise TrainkitError(
                    "packed documents and a key/value cache do not go together",
                    where="use_cache",
                    fix="set model.config.use_cache to False for training (the Trainer does)",
                )
            longest = kwargs.get("max_length_q")
            whole = shape[1] * (1 if split is None else split.size)
            keys, most = kwargs.pop("shared_keys", None), kwargs.get("max_length_k")
            shared = None if keys is None else (keys, kwargs["cu_seq_lens_k"], int(most or whole))
            documents = Documents(bounds, whole if longest is None else longest, shared)
        self._tokens.append(current_batch.set(Batch(self._engine, documents, split)))
        plain = kwargs.get("position_ids") is None and not self._caches(kwargs) and len(args) <= 1
        known = plain or documents is not None or split is not None
        if kwargs.get("attention_mask") is None and known:
            # transformers reads the positions, and so makes the host wait, where there is no mask.
            ones = torch.ones(shape, dtype=torch.bool, device=device)
            return args, {**kwargs, "attention_mask": ones}
        return None

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._tokens:
            current_batch.reset(self._tokens.pop())

    def _caches(self, kwargs: dict[str, Any]) -> bool:
        use_cache = kwargs.get("use_cache")
        config: Any = self._base.config
        return kwargs.get("past_key_values") is not None or bool(
            getattr(config, "use_cache", False) if use_cache is None else use_cache
        )


def _shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Size, torch.device]:
    """(B, S) of the batch, and where it is."""
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if tokens is None:
        tokens = kwargs["inputs_embeds"]
    return tokens.shape[:2], tokens.device


def install(model: nn.Module, engine: Engine | None = None) -> Installed:
    """Prepare a model that was loaded with ``attn_implementation="trainkit"``."""
    causal_lm = next(each for each in model.modules() if isinstance(each, PreTrainedModel))
    if engine is None:
        engine, _ = _engine(next(causal_lm.parameters()).device)
    for hook in list(causal_lm.base_model._forward_pre_hooks.values()):
        earlier = getattr(hook, "__self__", None)
        if isinstance(earlier, Installed):
            earlier.remove()  # two would end each other's batches
    # Not on the decoder: what surrounds it, in models of several parts, makes its masks.
    return Installed(causal_lm.base_model, engine)
