"""What a model is made of, by its ``config.json`` or by a well-known name. No weights.

transformers builds it on the meta device; its layers and sizes are read from that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.errors import ModelError
from trainkit.estimate.job import ModelShape
from trainkit.hub import check_hub
from trainkit.places import local_path, regular


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The sizes in a ``config.json``."""
    from trainkit.estimate.build import shape_of  # which needs torch

    return shape_of(json.dumps(config, sort_keys=True), name)


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
    """The sizes of a recipe's ``model.name_or_path``."""
    return from_config(*find_config(name, revision))


def find_config(name: str, revision: str | None = None) -> tuple[Mapping[str, Any], str]:
    """What ``config.json`` says of a recipe's ``model.name_or_path``, and where that is from.

    A ``.gguf`` file's head, a directory's ``config.json``, a copy in the hub's cache, the table of
    names, and only then the hub, for this one file.
    """
    path = local_path(name)
    if path is not None and path.suffix.lower() == ".gguf":
        from trainkit.models.tokenizer import load_config  # which needs torch
        from trainkit.options import ModelOptions

        return load_config(ModelOptions(name_or_path=str(path))).to_dict(), str(path)
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
        return {**json.loads(regular(file, ModelError).read_bytes())}, str(file)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        fix = "fetch the file again, or write it with save_pretrained"
        where = "model.name_or_path"
        raise ModelError(f"{file} cannot be read: {error}", where=where, fix=fix) from error


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
