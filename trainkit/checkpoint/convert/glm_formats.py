"""The layouts of a GLM-4 or Qwen2 checkpoint: what their config.json says, as a table.

Three layouts are known: ``chatglm`` (the checkpoint that ships with remote code; none of it is
run), ``glm`` (transformers' own) and ``qwen2``. Each is a row of ``FORMATS``: how its config.json
spells the sizes and which of its switches must have which value. Any row's config reads into a
``Geometry``, and a ``Geometry`` writes out as any row's config.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trainkit.checkpoint.convert.layers import OUTSIDE, PROJECTIONS, Geometry, in_layer
from trainkit.checkpoint.convert.rope import full_base, read_back, rope_scaling
from trainkit.checkpoint.weights.reader import TensorInfo, WeightsReader
from trainkit.errors import CheckpointError


@dataclass(frozen=True)
class Format:
    """One layout of a checkpoint.

    Attributes:
        keys: Geometry field to config key, for those that are a plain number.
        required: config key to (the value it must have, the value when absent, why).
        read_rope: config and head_dim to ``(theta, rotary_dim)``.
        write_rope: Geometry to config entries; None for a layout that is only read.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str]
    required: Mapping[str, tuple[Any, Any, str]]
    read_rope: Callable[[Mapping[str, Any], int], tuple[float, int]]
    write_rope: Callable[[Geometry], dict[str, Any]] | None = None
    written: Mapping[str, Any] = field(default_factory=dict)

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """Read the sizes."""
        if config.get("quantization_config"):
            raise CheckpointError(
                "config.json: the weights are stored quantised",
                fix="convert the model before it was quantised",
            )
        is_tied = config.get("tie_word_embeddings", False)
        if not isinstance(is_tied, bool):
            raise CheckpointError(f"config.json: tie_word_embeddings is {is_tied!r}, not a switch")
        for key, (wanted, default, why) in self.required.items():
            value = config.get(key, default)
            same = _SAME_VALUE.get(value, value) if isinstance(value, str) else value
            if same != wanted:
                raise CheckpointError(f"config.json: {key} is {value!r}, not {wanted!r}: {why}")
        found: dict[str, Any] = {}
        for size, key in self.keys.items():
            value = config.get(key)
            if size == "head_dim" and value is None and found["num_heads"] > 0:
                value = found["hidden_size"] // found["num_heads"]
            kinds = (int, float) if size == "rms_norm_eps" else (int,)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise CheckpointError(f"config.json: {key} is {value!r}, not a number")
            found[size] = float(value) if size == "rms_norm_eps" else value
        theta, rotary_dim = self.read_rope(config, found["head_dim"])
        return Geometry(**found, rope_theta=theta, rotary_dim=rotary_dim, is_tied=is_tied)

    def config(self, geometry: Geometry) -> dict[str, Any]:
        """The config.json of this layout, without tokens and dtype."""
        assert self.write_rope is not None
        sizes = {key: getattr(geometry, field) for field, key in self.keys.items()}
        switches = {key: wanted for key, (wanted, _, _) in self.required.items()}
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **sizes,
            **switches,
            **self.written,
            **self.write_rope(geometry),
            "tie_word_embeddings": geometry.is_tied,
            "use_cache": True,
        }


def _number(config: Mapping[str, Any], key: str, default: float | None) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json: {key} is {value!r}, not a positive number")
    return float(value)


def _rope_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings of a transformers config, in the spelling of version 4 or of version 5."""
    entries = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    for key in ("rope_scaling", "rope_parameters"):
        entries.update(config.get(key) or {})
    if "type" in entries:
        entries.setdefault("rope_type", entries.pop("type"))
    return entries


def _read_chatglm_rope(config: Mapping[str, Any], head_dim: int) -> tuple[float, int]:
    return 10000.0 * _number(config, "rope_ratio", 1), head_dim // 2


def _read_glm_rope(config: Mapping[str, Any], head_dim: int) -> tuple[float, int]:
    entries = _rope_entries(config)
    if entries.get("rope_type", "default") != "default":
        raise CheckpointError(
            f"config.json: rope_type {entries['rope_type']!r} on top of GLM's partial rotary "
            "embedding cannot be written as one that Qwen2 has"
        )
    factor = _number(entries, "partial_rotary_factor", 0.5)
    return _number(entries, "rope_theta", 10000.0), int(head_dim * factor)


def _write_glm_rope(geometry: Geometry) -> dict[str, Any]:
    factor = geometry.rotary_dim / geometry.head_dim
    return {"rope_theta": geometry.rope_theta, "partial_rotary_factor": factor}


def _read_qwen2_rope(config: Mapping[str, Any], head_dim: int) -> tuple[float, int]:
    entries = _rope_entries(config)
    return read_back(_number(entries, "rope_theta", 10000.0), entries, head_dim)


def _write_qwen2_rope(geometry: Geometry) -> dict[str, Any]:
    # transformers 4 reads only these two keys and falls back to base 10000 without a word when it
    # meets version 5's ``rope_parameters``; version 5 reads both spellings.
    theta, head_dim, rotary_dim = geometry.rope_theta, geometry.head_dim, geometry.rotary_dim
    return {
        "rope_theta": full_base(theta, head_dim, rotary_dim),
        "rope_scaling": rope_scaling(theta, head_dim, rotary_dim, geometry.max_positions),
    }


_SIZES = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}
_SAME_VALUE = {"swish": "silu"}  # two names of one function
_NO_BIAS = "Qwen2 has no such bias"

FORMATS: Mapping[str, Format] = {
    "chatglm": Format(
        model_type="chatglm",
        architecture="ChatGLMForConditionalGeneration",
        keys={
            "hidden_size": "hidden_size",
            "num_heads": "num_attention_heads",
            "num_layers": "num_layers",
            "num_kv_heads": "multi_query_group_num",
            "head_dim": "kv_channels",
            "intermediate_size": "ffn_hidden_size",
            "vocab_size": "padded_vocab_size",
            "max_positions": "seq_length",
            "rms_norm_eps": "layernorm_epsilon",
        },
        required={
            "rmsnorm": (True, True, "Qwen2 has RMS norms, not layer norms"),
            "post_layer_norm": (True, True, "Qwen2 has a norm after the last layer"),
            "apply_residual_connection_post_layernorm": (
                False,
                False,
                "Qwen2's residual branches off before the norm",
            ),
            "add_bias_linear": (False, False, _NO_BIAS),
            "multi_query_attention": (True, False, "only grouped key-value heads are known here"),
            "original_rope": (True, True, "GLM-4 rotates the dimensions of a head in neighbours"),
            "interleaved_qkv": (False, False, "GLM-4 keeps q, k and v of all heads apart"),
        },
        read_rope=_read_chatglm_rope,
    ),
    "glm": Format(
        model_type="glm",
        architecture="GlmForCausalLM",
        keys={**_SIZES, "head_dim": "head_dim"},
        required={"hidden_act": ("silu", "silu", "Qwen2's gate is SiLU")},
        read_rope=_read_glm_rope,
        write_rope=_write_glm_rope,
        written={"attention_bias": True},
    ),
    "qwen2": Format(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        keys={**_SIZES, "head_dim": "head_dim"},
        required={
            "hidden_act": ("silu", "silu", "GLM's gate is SiLU"),
            "use_sliding_window": (False, False, "GLM attends to everything before"),
        },
        read_rope=_read_qwen2_rope,
        write_rope=_write_qwen2_rope,
    ),
}

_REFUSED = {
    "glm4": "GLM-4-0414 (model_type glm4) has norms after attention and after the MLP; "
    "Qwen2 has none there, so no choice of weights computes the same function",
    "glm4_moe": "mixture-of-experts layers have no place in Qwen2",
    "glm4v": "vision towers have no place in Qwen2",
}


def detect_format(config: Mapping[str, Any]) -> str:
    """Which row of ``FORMATS`` a config.json belongs to."""
    model_type = config.get("model_type")
    if model_type in FORMATS:
        return str(model_type)
    reason = _REFUSED.get(str(model_type), f"known are {', '.join(FORMATS)}")
    raise CheckpointError(f"config.json: model_type is {model_type!r}: {reason}")


# A GLM or Qwen2 checkpoint as the conversion's table expects it, where its files say less or more.
#
# Qwen2's q, k and v have biases. A GLM without them is the same function with biases of zero. A
# model that ties its output matrix to its embeddings and stores it all the same stores it twice.

# With the value where it is absent; configs of GLM are too often written without it.
_BIAS_SWITCH = {"chatglm": ("add_qkv_bias", False), "glm": ("attention_bias", None)}


class GlmSource:
    """The tensors of a checkpoint with zeros for biases that it lacks and no matrix twice."""

    def __init__(
        self, reader: WeightsReader, layout: str, config: Mapping[str, Any], geometry: Geometry
    ) -> None:
        self._reader, self.layout = reader, layout
        self.directory = reader.directory
        self._zeros = _missing_biases(reader, layout, config, geometry)
        doubled = _doubled_head(reader, layout, geometry)
        self.tensors: Mapping[str, TensorInfo] = {
            **{name: info for name, info in reader.tensors.items() if name != doubled},
            **self._zeros,
        }

    def load(self, name: str) -> torch.Tensor:
        info = self._zeros.get(name)
        return (
            self._reader.load(name) if info is None else torch.zeros(info.shape, dtype=info.dtype)
        )


def _has_biases(layout: str, config: Mapping[str, Any]) -> bool | None:
    """What a GLM's config says of the biases of q, k and v; None where it says nothing."""
    if layout not in _BIAS_SWITCH:
        return True
    key, default = _BIAS_SWITCH[layout]
    value = config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} is {value!r}, not a switch")
    return value


def _missing_biases(
    reader: WeightsReader, layout: str, config: Mapping[str, Any], geometry: Geometry
) -> dict[str, TensorInfo]:
    wanted = {
        in_layer(layout, layer, f"{module}.bias")
        for layer in range(geometry.num_layers)
        for module in PROJECTIONS[layout]
    }
    present = wanted & reader.tensors.keys()
    said = _has_biases(layout, config)
    if present and said is False:
        raise CheckpointError(
            f"config.json: {_BIAS_SWITCH[layout][0]} is false, and there are biases such as "
            f"{min(present)}: a model that follows the config would not use them",
            where=str(reader.directory),
        )
    if present or said:
        return {}  # one that is missing then is named with all the others
    rows = {}
    for name in wanted:
        weight = reader.tensors.get(f"{name.removesuffix('.bias')}.weight")
        if weight is not None:
            rows[name] = TensorInfo(name, weight.dtype, weight.shape[:1])
    return rows


def _doubled_head(reader: WeightsReader, layout: str, geometry: Geometry) -> str | None:
    embedding, _, head = OUTSIDE[layout]
    if not geometry.is_tied or not {head, embedding} <= reader.tensors.keys():
        return None
    if not torch.equal(reader.load(head), reader.load(embedding)):
        raise CheckpointError(
            f"config.json: tie_word_embeddings is true, and {head} differs from {embedding}",
            where=str(reader.directory),
            fix="say tie_word_embeddings: false if the model has its own output matrix",
        )
    return head


def qwen2_shape(name: str, geometry: Geometry) -> tuple[int, ...]:
    """The shape that config.json promises for one of Qwen2's tensors."""
    hidden, inner = geometry.hidden_size, geometry.intermediate_size
    queries, keys = (
        geometry.num_heads * geometry.head_dim,
        geometry.num_kv_heads * geometry.head_dim,
    )
    shapes = {
        "embed_tokens.weight": (geometry.vocab_size, hidden),
        "lm_head.weight": (geometry.vocab_size, hidden),
        "q_proj.weight": (queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries),
        "gate_proj.weight": (inner, hidden),
        "up_proj.weight": (inner, hidden),
        "down_proj.weight": (hidden, inner),
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
    }
    return shapes.get(".".join(name.split(".")[-2:]), (hidden,))
