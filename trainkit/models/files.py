"""The files of a model directory, looked at before anything slow reads them."""

import json
import re
import shlex
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from trainkit.errors import ModelError
from trainkit.places import WEIGHTS, refuse_duplicates, regular_files

MOST = 10**6
"""Layers, heads, experts that a configuration may speak of; tokens, where it does not say."""

_DROPS = r"dropout|_pdrop|_drop$"

FETCH = "fetch the file again, or write the model again with save_pretrained"
PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def check_model_files(directory: Path, *, with_weights: bool) -> None:
    """Refuse a directory whose files are pipes, cut, damaged, or not all there."""
    regular_files(directory, ModelError)
    if not (directory / "config.json").exists() and (directory / "adapter_config.json").exists():
        raise ModelError(
            "this is an adapter, and no model",
            where=str(directory),
            fix="give its base model, or merge the two: trainkit merge --help",
        )
    if not (directory / "config.json").exists() and (directory / "status.json").exists():
        raise ModelError(
            "this is a run directory, and no model",
            where=str(directory),
            fix=f"give the model that it has trained: {directory / 'final'}, or, of adapters, what "
            f"this writes: {shlex.join(['trainkit', 'merge', str(directory), 'DIR'])}",
        )
    if (directory / "config.json").exists():
        refuse_counts(_object(directory / "config.json"), str(directory / "config.json"))
    if not with_weights:
        return
    found = [name for name in WEIGHTS if (directory / name).exists()]
    if not found and any((directory / name).exists() for name in PICKLED_WEIGHTS):
        raise ModelError(
            "its weights are a pickle, which may hold code, and are not opened",
            where=str(directory),
            fix="write them as safetensors: load them with transformers, and save_pretrained",
        )
    for name in found[:1]:
        file = directory / name
        homes = _shards(file) if name.endswith(".json") else {"": name}
        held: dict[str, set[str]] = {home: _tensors(directory / home) for home in {*homes.values()}}
        lost = [name for name, home in homes.items() if name not in {"", *held[home]}]
        if lost:
            raise ModelError(
                f"the index puts {lost[0]} into {homes[lost[0]]}, where it is not "
                f"({len(lost)} tensors like this)",
                where=str(file),
                fix=FETCH,
            )


def refuse_counts(config: Mapping[str, Any], where: str) -> None:
    """Of layers, heads, experts: a configuration makes lists as long, before anyone could look."""
    for key, value in config.items():
        if isinstance(value, dict):
            refuse_counts(value, where)
        elif isinstance(value, int) and value > MOST and re.match(r"num_|n_|depth|.*_layers$", key):
            raise ModelError(
                f"{key} is {str(value)[:20]}: no model has so many, and to build them would take "
                "for ever",
                where=where,
                fix="put the model's own config.json back",
            )
        elif _is_number(value) and not 0 <= value < 1 and re.search(_DROPS, str(key)):
            raise ModelError(
                f"{key} is {value}, and can be 0 up to 1",
                where=where,
                fix="put the model's own config.json back",
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=refuse_duplicates)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"it is not JSON: {error}", where=str(file), fix=FETCH) from error
    if not isinstance(content, dict):
        raise ModelError("it is not a JSON object", where=str(file), fix=FETCH)
    return content


def _shards(index: Path) -> dict[str, str]:
    homes = _object(index).get("weight_map")
    if not isinstance(homes, dict) or not homes:
        raise ModelError("the index has no weight_map", where=str(index), fix=FETCH)
    for name, home in homes.items():
        if isinstance(home, str) and Path(home).name != home:
            raise ModelError(
                f"the index puts {name} into {home!r}, which is not a file of this directory",
                where=str(index),
                fix=FETCH,
            )
        if not isinstance(home, str) or not (index.parent / home).is_file():
            raise ModelError(
                f"the shard {home!r} is missing; the index puts {name} there",
                where=str(index),
                fix=FETCH,
            )
    return homes


def _tensors(file: Path) -> set[str]:
    """The names in a safetensors file, its length proved."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if stream.read(8).startswith(b"version "):
            raise ModelError(
                "it is a Git LFS pointer, and not the weights", where=str(file), fix="git lfs pull"
            )
    try:
        with safe_open(file, "np") as tensors:
            return set(tensors.keys())
    except SafetensorError as error:
        raise ModelError(
            f"it was cut, or is no safetensors file, or the header of the safetensors file is "
            f"damaged ({size} bytes): {error}",
            where=str(file),
            fix=FETCH,
        ) from error


def check_tokenizer_files(directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a directory whose tokenizer was made of nothing.

    Without files transformers makes an empty one, which turns every text into no tokens.
    """
    names = {"tokenizer.json", *tokenizer.vocab_files_names.values()} - {"tokenizer_config.json"}
    if any((directory / name).exists() for name in names) or len(tokenizer) > _FEW_TOKENS:
        return
    raise ModelError(
        f"there are no tokenizer files next to the model (none of {', '.join(sorted(names))})",
        where=str(directory),
        fix="copy tokenizer.json and tokenizer_config.json of the base model there",
    )


_FEW_TOKENS = 300
"""An empty tokenizer has special tokens only, or the bytes besides them."""


_MOST_GROWTH = 1000
_DECODER = json.JSONDecoder()


def with_sound_normalizer(directory: Path) -> Path:
    """The directory, unless its tokenizer makes a text many times as long before it is cut.

    The Rust code that does so can neither be stopped nor run out of memory without ending Python.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return directory
    text, steps = path.read_text(encoding="utf-8", errors="replace"), []
    for key in re.finditer(r'"(?:normalizer|pre_tokenizer)"\s*:\s*(?={)', text):
        try:
            left = [_DECODER.raw_decode(text, key.end())[0]]
        except (ValueError, RecursionError):
            break  # its reader says so
        while left:
            part = left.pop()
            inner = part.values() if isinstance(part, dict) else part
            left += [each for each in inner if isinstance(each, (dict, list))]
            if isinstance(part, dict) and isinstance(part.get("content"), str):
                pattern = part.get("pattern")
                found = pattern.get("String") if isinstance(pattern, dict) else None
                steps.append((found if isinstance(found, str) else "", part["content"]))
    factor = max((len(content) for _, content in steps), default=1)
    if factor <= _MOST_GROWTH:
        # What one step writes another may find again, and so on.
        fed = [(old, new) for old, new in steps if any(each in new for each, _ in steps)]
        factor = prod(max(len(new) // max(len(old), 1), 1) for old, new in fed)
    if factor > _MOST_GROWTH:
        raise ModelError(
            "its normalizer makes more than a thousand letters of one",
            where=str(path),
            fix="use the tokenizer.json of the base model",
        )
    return directory
