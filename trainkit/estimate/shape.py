"""A model's sizes, from its ``config.json`` or by a well-known name. No torch, no weights.

H hidden, F feed-forward, A query width (heads x head size), K key width, V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import ModelError
from trainkit.hub import check_hub
from trainkit.places import local_path, regular


@dataclass(frozen=True)
class Traits:
    """What a family adds to the common decoder.

    Attributes:
        packed_gate: gate and up are one layer.
        packed_qkv: q, k and v are one layer.
        head_norms: q and k are normalised head by head.
        whole_norms: all heads of them at once, each number with a weight of its own.
        norms: RMSNorms in a layer.
        wide_norms: they multiply by their weight in fp32, and round then.
        qkv_bias: the projections of attention have biases; None where ``attention_bias`` says it.
        o_bias: that of its output has one where they have.
        mlp_bias: ``mlp_bias`` counts.
        rope_copies: Hugging Face's rotation leaves attention's output to be copied.
        tied: the default of ``tie_word_embeddings``.
        kernels: trainkit has a row for it; else it runs as plain transformers.
    """

    packed_gate: bool = False
    packed_qkv: bool = False
    head_norms: bool = False
    whole_norms: bool = False
    norms: int = 2
    wide_norms: bool = False
    qkv_bias: bool | None = None
    o_bias: bool = True
    mlp_bias: bool = False
    rope_copies: bool = False
    tied: bool = False
    kernels: bool = True


TRAITS: Mapping[str, Traits] = {
    "llama": Traits(mlp_bias=True),
    "mistral": Traits(qkv_bias=False),
    "qwen2": Traits(qkv_bias=True, o_bias=False),
    "qwen2_vl": Traits(qkv_bias=True, o_bias=False),
    "qwen3": Traits(head_norms=True),
    "glm": Traits(packed_gate=True, o_bias=False, rope_copies=True),
    "glm4": Traits(packed_gate=True, o_bias=False, norms=4, rope_copies=True),
    "phi3": Traits(qkv_bias=False, packed_gate=True, packed_qkv=True, rope_copies=True),
    "gemma": Traits(tied=True, wide_norms=True),
    "gemma3": Traits(tied=True, wide_norms=True, norms=4, head_norms=True, kernels=False),
    "olmo2": Traits(head_norms=True, whole_norms=True, wide_norms=True, kernels=False),
    "olmo3": Traits(head_norms=True, whole_norms=True, wide_norms=True, kernels=False),
    "smollm3": Traits(tied=True, mlp_bias=True, kernels=False),
    "granite": Traits(mlp_bias=True, kernels=False),
    "ministral": Traits(qkv_bias=False, kernels=False),
    "exaone4": Traits(qkv_bias=False, head_norms=True, kernels=False),
    "hunyuan_v1_dense": Traits(head_norms=True, kernels=False),
}
"""Families of dense decoders whose saved tensors are counted in `peak`."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide memory and time.

    Args:
        name: where they are from, for the report.
        family: ``model_type``.
        has_embeddings: not on a later stage of a pipeline.
        has_head: and the final norm; only on its last stage.
        tower: weights that see images and are frozen.
        stored: how the files hold the layers' weights, where they are quantised: ``nf4``, or the
            method's own name.
    """

    name: str
    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    mlp_bias: bool = False
    has_embeddings: bool = True
    has_head: bool = True
    tower: int = 0
    stored: str | None = None

    @property
    def traits(self) -> Traits:
        """What the family adds."""
        return TRAITS[self.family]

    @property
    def query(self) -> int:
        """A: width of q and of attention's output."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """K: width of k, and of v."""
        return self.kv_heads * self.head_dim

    def linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a decoder layer: name to (inputs, outputs)."""
        h, f, a, k = self.hidden, self.ffn, self.query, self.key
        heads = {"q_proj": (h, a), "k_proj": (h, k), "v_proj": (h, k)}
        gate = {"gate_proj": (h, f), "up_proj": (h, f)}
        if self.traits.packed_qkv:
            heads = {"qkv_proj": (h, a + 2 * k)}
        if self.traits.packed_gate:
            gate = {"gate_up_proj": (h, 2 * f)}
        return {**heads, "o_proj": (a, h), **gate, "down_proj": (f, h)}

    @property
    def layer_matrices(self) -> int:
        """Weights of a decoder layer's linear layers."""
        return sum(inputs * outputs for inputs, outputs in self.linears().values())

    @property
    def layer_vectors(self) -> int:
        """Norms and biases of a decoder layer."""
        count = self.traits.norms * self.hidden
        if self.qkv_bias:
            count += self.query + 2 * self.key + self.traits.o_bias * self.hidden
        if self.mlp_bias:
            count += 2 * self.ffn + self.hidden
        if self.traits.whole_norms:
            return count + self.query + self.key
        return count + (2 * self.head_dim if self.traits.head_norms else 0)

    @property
    def table(self) -> int:
        """Weights of the embedding, and of an untied head."""
        return self.vocab * self.hidden

    @property
    def tables(self) -> int:
        ends = self.has_embeddings + self.has_head
        return min(ends, 1) if self.tied else ends

    @property
    def outside(self) -> int:
        """Weights outside the decoder layers."""
        return self.tables * self.table + self.has_head * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * (self.layer_matrices + self.layer_vectors) + self.outside


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The sizes in a ``config.json``.

    Raises:
        ModelError: a family whose tensors nobody has counted, or a size is missing.
    """
    parts = {key: config.get(key) or {} for key in ("text_config", "vision_config")}
    for key, part in parts.items():
        if not isinstance(part, Mapping):
            raise ModelError(f"{key} is {part!r}, and must be an object", where=name)
    config, vision = {**config, **parts["text_config"]}, parts["vision_config"]
    family = str(config.get("model_type", "")).removesuffix("_text")
    others = {key for key, part in config.items() if key.endswith("_config") and part}
    if others - {"text_config", "vision_config", "quantization_config", "compression_config"}:
        family += " with a tower for sound"
    elif vision and family != "qwen2_vl":
        family += " with a tower for images"
    if family not in TRAITS or any(config.get(key) for key in ("num_experts", "num_local_experts")):
        raise ModelError(
            f"no estimate for model_type {family!r}: its layers have not been counted",
            where=name,
            fix=f"known are {', '.join(TRAITS)}; `trainkit sft --dry-run` measures one real step",
        )
    wanted = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    hidden, layers, heads, vocab = (_size(config, key, name) for key in wanted)
    kv_heads = _size(config, "num_key_value_heads", name, heads)
    if heads % kv_heads:
        raise ModelError(
            f"{heads} num_attention_heads cannot share {kv_heads} num_key_value_heads", where=name
        )
    traits = TRAITS[family]
    return ModelShape(
        name=name,
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_size(config, "head_dim", name, max(hidden // heads, 1)),
        ffn=_size(config, "intermediate_size", name),
        vocab=vocab,
        tied=_flag(config, "tie_word_embeddings", name, traits.tied),
        qkv_bias=_flag(config, "attention_bias", name, False)
        if traits.qkv_bias is None
        else traits.qkv_bias,
        mlp_bias=traits.mlp_bias and _flag(config, "mlp_bias", name, False),
        tower=_tower(vision, name) if vision else 0,
        stored=_stored(config.get("quantization_config")),
    )


def _stored(quantization: Any) -> str | None:
    """How a ``quantization_config`` holds weights."""
    if not isinstance(quantization, Mapping):
        return None
    if quantization.get("load_in_4bit") or quantization.get("_load_in_4bit"):
        return "nf4"
    return str(quantization.get("quant_method", "unknown"))


_MOST = {"num_hidden_layers": 10_000, "depth": 10_000}


def _size(config: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    """A whole number of a configuration.

    Raises:
        ModelError: it is missing, and has no default, or no layer could have such a size.
    """
    found, most = config.get(key), _MOST.get(key, 100_000_000)
    if found is None and default is not None:
        return default
    if found is None:
        raise ModelError(f"its config has no {key}", where=name)
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= most:
        said = f"{found!r:.40}, and must be a whole number from 1 to {most:,}"
        raise ModelError(f"{key} is {said}", where=name)
    return found


def _flag(config: Mapping[str, Any], key: str, name: str, default: bool) -> bool:
    found = config.get(key)
    if found is None:
        return default
    if not isinstance(found, bool):
        raise ModelError(f"{key} is {found!r:.40}, and must be true or false", where=name)
    return found


def _tower(vision: Mapping[str, Any], name: str) -> int:
    """Weights of Qwen2-VL's tower: its blocks, the patches, and what merges four of them."""
    sizes = {"embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "patch_size": 14, "depth": 32}
    width, out, ratio, patch, depth = (
        _size(vision, key, name, size) for key, size in sizes.items()
    )
    inner, merged = ratio * width, 4 * width
    block = 4 * width * width + 9 * width + 2 * width * inner + inner
    patches = 3 * 2 * patch**2 * width
    ends = 2 * width + merged * merged + merged + merged * out + out
    return depth * block + patches + ends


def _named(
    family: str, hidden: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "tie_word_embeddings": more.pop("tie", False),
        **more,
    }


_QWEN2_05B = _named("qwen2", 896, 4864, 24, 14, 2, 151936, tie=True)
_QWEN2_15B = _named("qwen2", 1536, 8960, 28, 12, 2, 151936, tie=True)
_QWEN2_7B = _named("qwen2", 3584, 18944, 28, 28, 4, 152064)
_LLAMA3_8B = _named("llama", 4096, 14336, 32, 32, 8, 128256)
_GLM4 = _named("glm", 4096, 13696, 40, 32, 2, 151552, head_dim=128, attention_bias=True)

NAMED: Mapping[str, dict[str, Any]] = {
    "qwen2-0.5b": _QWEN2_05B,
    "qwen2.5-0.5b": _QWEN2_05B,
    "qwen2-1.5b": _QWEN2_15B,
    "qwen2.5-1.5b": _QWEN2_15B,
    "qwen2.5-3b": _named("qwen2", 2048, 11008, 36, 16, 2, 151936, tie=True),
    "qwen2-7b": _QWEN2_7B,
    "qwen2.5-7b": _QWEN2_7B,
    "qwen2.5-14b": _named("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _named("qwen2", 5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _named("qwen2", 8192, 29568, 80, 64, 8, 152064),
    "qwen3-0.6b": _named("qwen3", 1024, 3072, 28, 16, 8, 151936, tie=True, head_dim=128),
    "qwen3-1.7b": _named("qwen3", 2048, 6144, 28, 16, 8, 151936, tie=True, head_dim=128),
    "qwen3-4b": _named("qwen3", 2560, 9728, 36, 32, 8, 151936, tie=True, head_dim=128),
    "qwen3-8b": _named("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "qwen3-14b": _named("qwen3", 5120, 17408, 40, 40, 8, 151936, head_dim=128),
    "qwen3-32b": _named("qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128),
    "llama-3.2-1b": _named("llama", 2048, 8192, 16, 32, 8, 128256, tie=True, head_dim=64),
    "llama-3.2-3b": _named("llama", 3072, 8192, 28, 24, 8, 128256, tie=True, head_dim=128),
    "llama-3-8b": _LLAMA3_8B,
    "llama-3.1-8b": _LLAMA3_8B,
    "llama-3.1-70b": _named("llama", 8192, 28672, 80, 64, 8, 128256),
    "llama-2-7b": _named("llama", 4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": _named("llama", 5120, 13824, 40, 40, 40, 32000),
    "tinyllama-1.1b": _named("llama", 2048, 5632, 22, 32, 4, 32000),
    "smollm2-135m": _named("llama", 576, 1536, 30, 9, 3, 49152, tie=True),
    "smollm2-360m": _named("llama", 960, 2560, 32, 15, 5, 49152, tie=True),
    "smollm2-1.7b": _named("llama", 2048, 8192, 24, 32, 32, 49152, tie=True),
    "smollm3-3b": _named("smollm3", 2048, 11008, 36, 16, 4, 128256, tie=True),
    "mistral-7b": _named("mistral", 4096, 14336, 32, 32, 8, 32768),
    "glm-4-9b": _GLM4,
    "glm-4-9b-0414": {**_GLM4, "model_type": "glm4"},
    "glm4-9b": _GLM4,
    "glm4-9b-as-qwen2": {**_GLM4, "model_type": "qwen2", "attention_bias": True},
    "phi-3-mini": _named("phi3", 3072, 8192, 32, 32, 32, 32064),
    "phi-4": _named("phi3", 5120, 17920, 40, 40, 10, 100352),
    "gemma-2b": _named("gemma", 2048, 16384, 18, 8, 1, 256000, tie=True, head_dim=256),
    "gemma-7b": _named("gemma", 3072, 24576, 28, 16, 16, 256000, tie=True, head_dim=256),
    "gemma-3-270m": _named("gemma3_text", 640, 2048, 18, 4, 1, 262144, tie=True, head_dim=256),
    "gemma-3-1b": _named("gemma3_text", 1152, 6912, 26, 4, 1, 262144, tie=True, head_dim=256),
}
"""Shapes that need no file and no network."""

_ENDINGS = ("-instruct", "-chat", "-base", "-hf", "-it", "-4k", "-2507", "-thinking")
_VERSION = re.compile(r"-v[01]\.\d$")


def plain_name(name: str) -> str:
    """A hub name as `NAMED` writes it: without owner, capitals, and what a tuning adds."""
    short = name.rsplit("/", 1)[-1].lower().removeprefix("meta-").replace("_", "-")
    changed = True
    while changed:
        changed = False
        bare = _VERSION.sub("", short)
        for ending in _ENDINGS:
            bare = bare.removesuffix(ending)
        short, changed = bare, bare != short
    return short


def find_shape(name: str, revision: str | None = None) -> ModelShape:
    """The sizes of a recipe's ``model.name_or_path``.

    Raises:
        ModelError: there is no config.json of it, or nobody has counted its family.
    """
    return from_config(*find_config(name, revision))


def find_config(name: str, revision: str | None = None) -> tuple[Mapping[str, Any], str]:
    """What ``config.json`` says of a recipe's ``model.name_or_path``, and where that is from.

    A directory's ``config.json``, a copy in the hub's cache, the table of names, and only then the
    hub, for this one file.

    Raises:
        ModelError: nothing of these has it.
    """
    path = local_path(name)
    file = None if path is None else regular(path / "config.json", ModelError)
    if file is None:
        file = _cached(name, revision)
        if file is None and plain_name(name) in NAMED:
            short = plain_name(name)
            return NAMED[short], f"the shape of {short}"
        file = file or _download(name, revision)
    if file is None or not file.is_file():
        raise ModelError(
            f"there is no config.json of {name}",
            where="model.name_or_path",
            fix=f"give a directory that has one, a hub name, or a shape: {', '.join(NAMED)}",
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", where="model.name_or_path") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} is not a JSON object", where="model.name_or_path")
    return config, str(file)


def _cached(name: str, revision: str | None) -> Path | None:
    if name.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found) if isinstance(found, str) else None


def _download(name: str, revision: str | None) -> Path | None:
    if name.count("/") != 1:
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        check_hub(name, ModelError, "model.name_or_path", "give a directory")
        return Path(hf_hub_download(name, "config.json", revision=revision, etag_timeout=5))
    except (ModelError, HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
        return None
