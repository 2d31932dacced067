"""Proves that a converted model computes what its source computes, layer by layer.

The source side is GLM's published arithmetic in plain torch, fed from the source's own files; the
result side is transformers' Qwen2 layer, built from the config.json that was written and fed from
the files that were written. Both run in float32 over the same tokens at near and far positions.
One layer of each is in memory at a time, and last both output matrices: 4 GB for a 9B model.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class LayerError:
    """How far apart the two sides are after one layer.

    Attributes:
        layer: from 0; the number of layers stands for the final norm.
        max_error: largest absolute difference of a hidden state, both fed the source's.
        max_drift: the same with each side fed its own, so that errors add up.
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
        max_logit: largest absolute logit of the source.
    """

    positions: tuple[int, ...]
    layers: tuple[LayerError, ...]
    max_logit_error: float
    max_logit: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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
        is_chatglm = _NAMES["chatglm"]["embed"] in source.tensors
        biases = (".query_key_value.bias", ".q_proj.bias")
        has_bias = any(name.endswith(biases) for name in source.tensors)
        load = _loader(source, rounded_to)
        ours = _GlmSide(load, is_chatglm, geometry, positions, has_bias=has_bias)
        theirs = _Qwen2Side(qwen2, _loader(result, rounded_to), positions)
        x = ours.embed(tokens)
        y = theirs.embed(tokens)
        errors = []
        for layer in range(geometry.num_layers):
            fed_same_and_own = theirs.layer(torch.stack((x, y)), layer)
            x, y = ours.layer(x, layer), fed_same_and_own[1]
            errors.append(_compare(layer, x, *fed_same_and_own))
            progress(f"layer {layer + 1}/{geometry.num_layers}: error {errors[-1].max_error:.1e}")
        same, x, y = theirs.norm(x), ours.norm(x), theirs.norm(y)
        errors.append(_compare(geometry.num_layers, x, same, y))
        max_logit_error, max_logit = _compare_logits(x, y, ours.head(), theirs.head())
    _check_finite(max_logit, "logits")
    proof = Proof(tuple(positions[0].tolist()), tuple(errors), max_logit_error, max_logit)
    if not max_logit_error <= DRIFT_TOLERANCE * max_logit:
        raise CheckpointError(f"logits of source and result differ by {max_logit_error:.2e}")
    return proof


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


_NAMES = {
    "chatglm": {
        "embed": "transformer.embedding.word_embeddings.weight",
        "norm": "transformer.encoder.final_layernorm.weight",
        "head": "transformer.output_layer.weight",
        "layer": "transformer.encoder.layers.{}.",
        "o": "self_attention.dense.weight",
        "gate_up": "mlp.dense_h_to_4h.weight",
        "down": "mlp.dense_4h_to_h.weight",
    },
    "glm": {
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
        "layer": "model.layers.{}.",
        "o": "self_attn.o_proj.weight",
        "gate_up": "mlp.gate_up_proj.weight",
        "down": "mlp.down_proj.weight",
    },
}


class _GlmSide:
    """GLM's forward in plain torch, straight from a checkpoint's tensors.

    Source: the arithmetic of ``modeling_chatglm.py`` of THUDM/glm-4-9b-chat and of transformers'
    ``modeling_glm.py``. It shares no code with the conversion, so that a mistake there shows here.
    """

    def __init__(
        self,
        load: Callable[[str], Tensor],
        is_chatglm: bool,
        geometry: Geometry,
        positions: Tensor,
        *,
        has_bias: bool,
    ) -> None:
        self._load, self._sizes, self._has_bias = load, geometry, has_bias
        self._names = _NAMES["chatglm" if is_chatglm else "glm"]
        self._is_fused = is_chatglm
        exponents = torch.arange(0, geometry.rotary_dim, 2, dtype=torch.float) / geometry.rotary_dim
        angles = positions[0, :, None].float() * (1.0 / geometry.rope_theta**exponents)
        self._cos, self._sin = angles.cos(), angles.sin()
        length = positions.shape[1]
        self._future = torch.full((length, length), -torch.inf).triu(1)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._load(self._names["embed"])[tokens[0]].float()

    def norm(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self._load(self._names["norm"]).float())

    def head(self) -> Tensor:
        return self._load(self._names["embed" if self._sizes.is_tied else "head"])

    def layer(self, x: Tensor, number: int) -> Tensor:
        prefix = self._names["layer"].format(number)

        def weight(name: str) -> Tensor:
            return self._load(prefix + name).float()

        hidden = self._rms_norm(x, weight("input_layernorm.weight"))
        queries, keys, values = self._project(hidden, weight)
        x = x + self._attend(queries, keys, values) @ weight(self._names["o"]).T
        hidden = self._rms_norm(x, weight("post_attention_layernorm.weight"))
        gate, up = (hidden @ weight(self._names["gate_up"]).T).chunk(2, dim=-1)
        return x + (torch.nn.functional.silu(gate) * up) @ weight(self._names["down"]).T

    def _project(self, x: Tensor, weight: Callable[[str], Tensor]) -> Sequence[Tensor]:
        if self._is_fused:
            fused = x @ weight("self_attention.query_key_value.weight").T
            if self._has_bias:
                fused = fused + weight("self_attention.query_key_value.bias")
            keys = self._sizes.num_kv_heads * self._sizes.head_dim
            return fused.split((self._sizes.num_heads * self._sizes.head_dim, keys, keys), dim=-1)
        projected = [x @ weight(f"self_attn.{part}_proj.weight").T for part in "qkv"]
        if not self._has_bias:
            return projected
        biases = [weight(f"self_attn.{part}_proj.bias") for part in "qkv"]
        return [each + bias for each, bias in zip(projected, biases, strict=True)]

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        sizes = self._sizes
        # (tokens, heads, head_dim) -> (heads, tokens, head_dim)
        q = self._rotate(queries.unflatten(-1, (sizes.num_heads, -1))).transpose(0, 1)
        k = self._rotate(keys.unflatten(-1, (sizes.num_kv_heads, -1))).transpose(0, 1)
        v = values.unflatten(-1, (sizes.num_kv_heads, -1)).transpose(0, 1)
        share = sizes.num_heads // sizes.num_kv_heads
        k, v = k.repeat_interleave(share, dim=0), v.repeat_interleave(share, dim=0)
        scores = q @ k.transpose(1, 2) * sizes.head_dim**-0.5 + self._future
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)

    def _rotate(self, x: Tensor) -> Tensor:
        """Turn the adjacent pairs of the first ``rotary_dim`` dimensions."""
        pairs = x[..., : self._sizes.rotary_dim].unflatten(-1, (-1, 2))
        rest = x[..., self._sizes.rotary_dim :]
        even, odd = pairs[..., 0], pairs[..., 1]
        cos, sin = self._cos[:, None], self._sin[:, None]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        return torch.cat((turned.flatten(-2), rest), dim=-1)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._sizes.rms_norm_eps)


class _Qwen2Side:
    """transformers' Qwen2, one layer in memory."""

    def __init__(self, directory: Path, load: Callable[[str], Tensor], positions: Tensor) -> None:
        from transformers import AutoConfig
        from transformers.models.qwen2.modeling_qwen2 import (
            Qwen2DecoderLayer,
            Qwen2RMSNorm,
            Qwen2RotaryEmbedding,
        )

        self._load, self._positions = load, positions
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        config._attn_implementation = "eager"
        self._is_tied = bool(config.tie_word_embeddings)
        self._layer = Qwen2DecoderLayer(config, layer_idx=0).float().eval()
        self._norm = Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps).eval()
        rotary = Qwen2RotaryEmbedding(config)
        self._cos_sin = rotary(torch.zeros(1, 1, 1), positions)
        length = positions.shape[1]
        self._future = torch.full((1, 1, length, length), -torch.inf).triu(1)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._load("model.embed_tokens.weight")[tokens[0]].float()

    def norm(self, x: Tensor) -> Tensor:
        self._norm.weight.copy_(self._load("model.norm.weight"))
        return self._norm(x)

    def head(self) -> Tensor:
        name = "model.embed_tokens.weight" if self._is_tied else "lm_head.weight"
        return self._load(name)

    def layer(self, x: Tensor, number: int) -> Tensor:
        for name, parameter in self._layer.named_parameters():
            parameter.copy_(self._load(f"model.layers.{number}.{name}"))
        return self._layer(
            x,
            attention_mask=self._future,
            position_ids=self._positions,
            position_embeddings=self._cos_sin,
        )
