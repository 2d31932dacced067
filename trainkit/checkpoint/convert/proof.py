"""Proves that a converted model computes what its source computes, layer by layer.

The source side is transformers' GLM layer, built from the sizes that were read and fed from the
source's own files; the result side is its Qwen2 layer, built from the config.json that was written
and fed from the files that were written. Both run in float32 over the same tokens at near and far
positions. One layer of each is in memory at a time, and last both output matrices: 4 GB for a 9B
model.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GlmConfig

from trainkit.checkpoint.convert.glm_formats import FORMATS
from trainkit.checkpoint.convert.layers import Geometry
from trainkit.checkpoint.weights.reader import WeightsReader
from trainkit.errors import CheckpointError

logger = logging.getLogger(__name__)

# Near, the edges of common windows, and far; those beyond the model's length are left out.
POSITIONS = (*range(32), 63, 64, 1000, 4095, 8191, 8192, 32767, 65536, 100000, 131071, 1048575)
# Float32 rounds to 6e-8; the two sides add the same products in another order. Measured on random
# layers of width 1024: 1e-6 of the largest hidden state. A wrong order, frequency or bias is 1e-2.
LAYER_TOLERANCE = 3e-5
# What the layers' roundings grow to on the way; measured 8e-7 to 2e-5 after 40 random layers.
DRIFT_TOLERANCE = 1e-2
_VOCABULARY_ROWS = 16384
_BIASES = (".query_key_value.bias", ".q_proj.bias")


@dataclass(frozen=True)
class LayerError:
    """How far apart the two sides are after one layer.

    Attributes:
        layer: from 0; the number of layers stands for the final norm.
        max_error: largest absolute difference of a hidden state, both fed the source's.
        max_value: largest absolute hidden state of the source.
    """

    layer: int
    max_error: float
    max_drift: float
    max_value: float


@dataclass(frozen=True)
class Proof:
    """The comparison's result.

    Attributes:
        max_logit_error: largest absolute difference of a logit, over all tokens.
    """

    positions: tuple[int, ...]
    layers: tuple[LayerError, ...]
    max_logit_error: float
    max_logit: float


def prove_same_function(
    glm: Path,
    qwen2: Path,
    geometry: Geometry,
    rounded_to: torch.dtype | None = None,
    progress: Callable[[str], None] = logger.info,
) -> Proof:
    """Compare a GLM checkpoint and a Qwen2 one.

    Both sides are first rounded to ``rounded_to``, as the conversion did: this is about the
    arithmetic, not about that choice.
    """
    positions = torch.tensor([[p for p in POSITIONS if p < geometry.max_positions]])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(geometry.vocab_size, positions.shape, generator=generator)
    with WeightsReader(glm) as source, WeightsReader(qwen2) as result, torch.inference_mode():
        load = _loader(source, rounded_to)
        if any(name.startswith("transformer.") for name in source.tensors):
            load = _from_chatglm(load, geometry)
        has_bias = any(name.endswith(_BIASES) for name in source.tensors)
        ours = _Side("Glm", _glm_config(geometry, has_bias=has_bias), load, positions)
        config = AutoConfig.from_pretrained(qwen2, trust_remote_code=False)
        theirs = _Side("Qwen2", config, _loader(result, rounded_to), positions)
        x, y = ours.embed(tokens), theirs.embed(tokens)
        errors = []
        for layer in range(geometry.num_layers):
            same, y = theirs.layer(torch.cat((x, y)), layer).split(1)
            x = ours.layer(x, layer)
            errors.append(_compare(layer, x, same, y))
            progress(f"layer {layer + 1}/{geometry.num_layers}: error {errors[-1].max_error:.1e}")
        same, x, y = theirs.norm(x), ours.norm(x), theirs.norm(y)
        errors.append(_compare(geometry.num_layers, x, same, y))
        max_logit_error, max_logit = _compare_logits(x, y, ours.head(), theirs.head())
    _check_finite(max_logit, "logits")
    proof = Proof(tuple(positions[0].tolist()), tuple(errors), max_logit_error, max_logit)
    if not max_logit_error <= DRIFT_TOLERANCE * max_logit:
        raise CheckpointError(f"logits of source and result differ by {max_logit_error:.2e}")
    return proof


def _glm_config(geometry: Geometry, *, has_bias: bool) -> Any:
    sizes = FORMATS["glm"].config(geometry)
    return GlmConfig(**{**sizes, "attention_bias": has_bias, "pad_token_id": None})


def _loader(reader: WeightsReader, dtype: torch.dtype | None) -> Callable[[str], Tensor]:
    if dtype is None:
        return reader.load
    return lambda name: reader.load(name).to(dtype)


def _compare(layer: int, x: Tensor, fed_same: Tensor, fed_own: Tensor) -> LayerError:
    error = LayerError(
        layer,
        (x - fed_same).abs().max().item(),
        (x - fed_own).abs().max().item(),
        x.abs().max().item(),
    )
    _check_finite(error.max_value, f"hidden states after layer {layer}")
    if (
        not error.max_error <= LAYER_TOLERANCE * error.max_value
        or not error.max_drift <= DRIFT_TOLERANCE * error.max_value
    ):
        raise CheckpointError(
            f"after layer {layer} source and result differ by {error.max_error:.2e} "
            f"(largest hidden state {error.max_value:.2e}): the conversion is not exact"
        )
    return error


def _check_finite(value: float, what: str) -> None:
    if not math.isfinite(value):
        raise CheckpointError(
            f"the source's own {what} are not finite: its weights are damaged",
            fix="fetch the source again",
        )


def _compare_logits(x: Tensor, y: Tensor, x_head: Tensor, y_head: Tensor) -> tuple[float, float]:
    """Over blocks of the vocabulary, so that no float32 copy of a whole head is made."""
    errors, values = [], []  # reduced by torch, where NaN wins; Python's max passes over it
    for start in range(0, x_head.shape[0], _VOCABULARY_ROWS):
        rows = slice(start, start + _VOCABULARY_ROWS)
        ours, theirs = x @ x_head[rows].float().T, y @ y_head[rows].float().T
        errors.append((ours - theirs).abs().max())
        values.append(ours.abs().max())
    return torch.stack(errors).max().item(), torch.stack(values).max().item()


# A module of transformers' GLM: the remote code's name for it.
_CHATGLM = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
    "model.layers": "transformer.encoder.layers",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def _from_chatglm(load: Callable[[str], Tensor], geometry: Geometry) -> Callable[[str], Tensor]:
    """Read a ChatGLM checkpoint under the names of transformers' GLM.

    It shares no code with the conversion, so that a mistake there shows here.
    """
    keys = geometry.num_kv_heads * geometry.head_dim
    parts = (geometry.num_heads * geometry.head_dim, keys, keys)

    def named(name: str) -> Tensor:
        for ours, theirs in _CHATGLM.items():
            name = name.replace(ours, theirs)
        for number, part in enumerate("qkv"):
            if f"self_attn.{part}_proj" in name:
                fused = name.replace(f"self_attn.{part}_proj", "self_attention.query_key_value")
                return load(fused).split(parts)[number]
        return load(name)

    return named


class _Side:
    """One of transformers' models, one layer in memory."""

    def __init__(
        self, name: str, config: Any, load: Callable[[str], Tensor], positions: Tensor
    ) -> None:
        self._load, self._positions = load, positions
        config._attn_implementation = "eager"
        self._head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        modeling = import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
        self._layer = getattr(modeling, f"{name}DecoderLayer")(config, layer_idx=0).float().eval()
        self._norm = getattr(modeling, f"{name}RMSNorm")(
            config.hidden_size, eps=config.rms_norm_eps
        ).eval()
        rotary = getattr(modeling, f"{name}RotaryEmbedding")(config)
        self._cos_sin = rotary(torch.zeros(1, 1, 1), positions)
        length = positions.shape[1]
        self._future = torch.full((1, 1, length, length), -torch.inf).triu(1)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._load("model.embed_tokens.weight")[tokens].float()

    def norm(self, x: Tensor) -> Tensor:
        self._norm.weight.copy_(self._load("model.norm.weight"))
        return self._norm(x)

    def head(self) -> Tensor:
        return self._load(self._head)

    def layer(self, x: Tensor, number: int) -> Tensor:
        for name, parameter in self._layer.named_parameters():
            parameter.copy_(self._load(f"model.layers.{number}.{name}"))
        return self._layer(
            x,
            attention_mask=self._future,
            position_ids=self._positions,
            position_embeddings=self._cos_sin,
        )
