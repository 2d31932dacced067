"""What travels with the weights: tokenizer, chat template, stop tokens, generation settings.

None of it is code, unless that was allowed: a conversion takes remote-code entries out, and a
tokenizer that exists only as remote code over a tiktoken vocabulary is rebuilt as a plain
``tokenizer.json``.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from trainkit.checkpoint.weights.plain_files import is_plain_name, plain_file, read_json
from trainkit.checkpoint.weights.tiktoken_vocabulary import build_tokenizer_json
from trainkit.errors import CheckpointError
from trainkit.places import local_path

PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""How images, videos and sounds are read; settings alone, and no code."""
_COPIED = (
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "LICENSE",
)
NAMED_TEMPLATES = "additional_chat_templates"
"""Where a tokenizer keeps templates besides its default one, such as that for rows with tools."""
# transformers 5 gives every model of type qwen2 Qwen2's own tokenizer class, whatever the files
# say, and that class keeps the vocabulary but cuts text by Qwen2's rules (each digit by itself,
# where GLM takes three at a time). An entry under auto_map makes it believe tokenizer_class
# again. It is never followed: with trust_remote_code it fails on the missing file, loudly.
_NOT_QWEN2S_OWN = {"AutoTokenizer": ["no_remote_code_needed.PreTrainedTokenizerFast", None]}
RECORD_NAME = "conversion.json"
_MAX_CODE_BYTES = 1 << 20
_STOPS = ("eos_token_id", "pad_token_id", "bos_token_id")


def carry_companions(
    source: Path, target: Path, config: Mapping[str, Any], new_config: Mapping[str, Any]
) -> dict[str, str]:
    """Bring the tokenizer and the generation settings over.

    Args:
        source: model directory.
        target: directory to write into.
        config: the source's config.json.
        new_config: the target's.

    Returns:
        File name to how it came: ``copied``, ``written``, ``built from tokenizer.model``.

    Raises:
        CheckpointError: the tokenizer is there in a form that cannot be carried.
    """
    came = dict.fromkeys(_copy_tokenizer(source, target, _COPIED), "copied")
    if (source / "tokenizer_config.json").exists():
        settings = _object(source, "tokenizer_config.json")
        if "tokenizer.json" not in came and (source / "tokenizer.model").exists():
            text = build_tokenizer_json(plain_file(source, "tokenizer.model"), settings)
            (target / "tokenizer.json").write_text(text, encoding="utf-8")
            came["tokenizer.json"] = "built from tokenizer.model"
        is_qwen2 = new_config.get("model_type") == "qwen2"
        _write(target / "tokenizer_config.json", _plain_tokenizer(settings, is_qwen2=is_qwen2))
        came["tokenizer_config.json"] = "copied without remote code"
    came.update(dict.fromkeys(copy_processors(source, target), "copied without remote code"))
    _write(target / "generation_config.json", _generation_config(source, config, new_config))
    came["generation_config.json"] = "written"
    return came


def copy_companions(
    sources: Sequence[Path], target: Path, *, with_code: bool = False
) -> dict[str, str]:
    """Copy tokenizer, template and generation settings as they are.

    Args:
        sources: directories; the first that has a tokenizer gives all of its files, and the first
            that has generation settings gives those. A run's own come before its base's.
        target: directory to write into.
        with_code: the code that their settings name, too; nothing else loads the result.

    Returns:
        File name to the directory it came from.
    """
    came: dict[str, str] = {}
    tokenizer = next((p for p in sources if (p / "tokenizer_config.json").exists()), None)
    settings = next((p for p in sources if (p / "generation_config.json").exists()), None)
    if tokenizer is not None:
        names = (*_COPIED, "tokenizer_config.json", "tokenizer.model")
        came.update(dict.fromkeys(_copy_tokenizer(tokenizer, target, names), str(tokenizer)))
    if settings is not None:
        name = "generation_config.json"
        (target / name).write_bytes(plain_file(settings, name).read_bytes())
        came[name] = str(settings)
    for source in sources:
        came.update(dict.fromkeys(copy_processors(source, target), str(source)))
        if RECORD_NAME not in came and carry_record(source, target):
            came[RECORD_NAME] = str(source)
        if with_code:
            came.update(dict.fromkeys(_copy_code(source, target), str(source)))
    return came


def _copy_code(source: Path, target: Path) -> list[str]:
    """Copy the modules that ``auto_map`` names and what they import next to them."""
    from transformers.dynamic_module_utils import get_relative_import_files

    copied: list[str] = []
    for settings in ("config.json", "tokenizer_config.json", *PROCESSORS):
        named = _code_files(_object(source, settings)) if (source / settings).is_file() else []
        for name in (name for name in named if (source / name).is_file()):
            needed = (Path(each).name for each in get_relative_import_files(source / name))
            for each in dict.fromkeys((name, *needed)):
                if not (target / each).exists():
                    (target / each).write_bytes(plain_file(source, each).read_bytes())
                    copied.append(each)
    return copied


def _copy_tokenizer(source: Path, target: Path, names: Sequence[str]) -> list[str]:
    """Copy those of the files that there are, and all templates that have a name."""
    copied = [name for name in names if (source / name).exists()]
    for name in copied:
        (target / name).write_bytes(plain_file(source, name).read_bytes())
    templates = source / NAMED_TEMPLATES
    for path in sorted(templates.glob("*.jinja")):
        (target / NAMED_TEMPLATES).mkdir(exist_ok=True)
        content = plain_file(templates, path.name).read_bytes()
        (target / NAMED_TEMPLATES / path.name).write_bytes(content)
        copied.append(f"{NAMED_TEMPLATES}/{path.name}")
    return copied


def stored_at(base: Path) -> Path:
    """The directory of a model: itself, or where the hub's cache has one of that name."""
    if base.is_file():  # a GGUF
        return base.parent
    if local_path(str(base)) is not None:
        return base
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(str(base), "config.json")
    return Path(found).parent if isinstance(found, str) else base


def copy_processors(source: Path, target: Path) -> list[str]:
    """Copy the settings of a model's processors, where it has any and the target has none.

    Args:
        source: model directory.
        target: directory to write into.

    Returns:
        The names of the files.
    """
    copied = []
    for name in PROCESSORS:
        if (source / name).is_file() and not (target / name).exists():
            settings = _object(source, name)
            settings.pop("auto_map", None)
            _write(target / name, settings)
            copied.append(name)
    return copied


def carry_record(source: Path, target: Path) -> bool:
    """Keep with new weights what a conversion wrote down about the model that they came from.

    The way back needs its config and what had no counterpart; the digests of its weights are left
    out, since they are those of the weights before.

    Returns:
        Whether the source has such a record, and the target had none.
    """
    if not (source / RECORD_NAME).is_file() or (target / RECORD_NAME).exists():
        return False
    record = _object(source, RECORD_NAME)
    for key in ("tensors", "proof", "companions"):
        record.pop(key, None)
    _write(target / RECORD_NAME, record)
    return True


def code_of(source: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The text of the remote code that a config names, to be kept for the way back; never run."""
    code: dict[str, str] = {}
    for name in _code_files(config):
        if (source / name).is_file():
            path = plain_file(source, name)
            if path.stat().st_size <= _MAX_CODE_BYTES:
                code[name] = path.read_text(encoding="utf-8", errors="replace")
    return code


def write_code(target: Path, record: Mapping[str, Any] | None, config: Mapping[str, Any]) -> None:
    """Put the remote code back next to the config that names it."""
    code = (record or {}).get("remote_code")
    if not isinstance(code, dict):
        return
    for name in _code_files(config):
        if isinstance(code.get(name), str):
            (target / name).write_text(code[name], encoding="utf-8")


def _code_files(config: Mapping[str, Any]) -> list[str]:
    """Files of the directory itself that ``auto_map`` names."""
    entries = config.get("auto_map")
    values = entries.values() if isinstance(entries, dict) else ()
    words = chain.from_iterable(each if isinstance(each, list) else [each] for each in values)
    names = {f"{word.partition('.')[0]}.py" for word in words if isinstance(word, str)}
    return sorted(name for name in names if is_plain_name(name))


def _plain_tokenizer(settings: Mapping[str, Any], *, is_qwen2: bool) -> dict[str, Any]:
    kept = {**settings, "tokenizer_class": "PreTrainedTokenizerFast"}
    kept.pop("auto_map", None)
    if is_qwen2:
        kept["auto_map"] = _NOT_QWEN2S_OWN
    return kept


def _generation_config(
    source: Path, config: Mapping[str, Any], new_config: Mapping[str, Any]
) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if (source / "generation_config.json").exists():
        settings = _object(source, "generation_config.json")
    for key in _STOPS:
        value = settings.get(key, config.get(key, new_config.get(key)))
        if value is not None:
            settings[key] = value
    return settings


def _object(directory: Path, name: str) -> dict[str, Any]:
    content = read_json(plain_file(directory, name))
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} is not a JSON object", where=str(directory))
    return content


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
