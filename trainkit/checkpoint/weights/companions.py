"""What travels with the weights: tokenizer, chat template, stop tokens, generation settings.

None of it is code, unless that was allowed: a conversion takes remote-code entries out, and a
tokenizer that exists only as remote code over a tiktoken vocabulary is rebuilt as a plain
``tokenizer.json``.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from trainkit.checkpoint.weights.plain_files import (
    is_plain_name,
    plain_file,
    read_object,
    write_json,
)
from trainkit.errors import CheckpointError
from trainkit.places import NAMED_TEMPLATES, local_path

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
# transformers 5 gives every model of type qwen2 Qwen2's own tokenizer class, whatever the files
# say, and that class keeps the vocabulary but cuts text by Qwen2's rules (each digit by itself,
# where GLM takes three at a time). An entry under auto_map makes it believe tokenizer_class
# again. It is never followed: with trust_remote_code it fails on the missing file, loudly.
_NOT_QWEN2S_OWN = {"AutoTokenizer": ["no_remote_code_needed.PreTrainedTokenizerFast", None]}
_STOPS = ("eos_token_id", "pad_token_id", "bos_token_id")


def carry_companions(
    source: Path, target: Path, config: Mapping[str, Any], new_config: Mapping[str, Any]
) -> dict[str, str]:
    """Bring the tokenizer and the generation settings over.

    Returns:
        File name to how it came: ``copied``, ``written``, ``built from tokenizer.model``.
    """
    came = dict.fromkeys(_copy_tokenizer(source, target, _COPIED), "copied")
    if (source / "tokenizer_config.json").exists():
        settings = read_object(source, "tokenizer_config.json")
        if "tokenizer.json" not in came and (source / "tokenizer.model").exists():
            text = build_tokenizer_json(plain_file(source, "tokenizer.model"), settings)
            (target / "tokenizer.json").write_text(text, encoding="utf-8")
            came["tokenizer.json"] = "built from tokenizer.model"
        is_qwen2 = new_config.get("model_type") == "qwen2"
        write_json(target / "tokenizer_config.json", _plain_tokenizer(settings, is_qwen2=is_qwen2))
        came["tokenizer_config.json"] = "copied without remote code"
    came.update(dict.fromkeys(copy_processors(source, target), "copied without remote code"))
    write_json(target / "generation_config.json", _generation_config(source, config, new_config))
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
        if with_code:
            came.update(dict.fromkeys(_copy_code(source, target), str(source)))
    return came


def _copy_code(source: Path, target: Path) -> list[str]:
    """Copy the modules that ``auto_map`` names and what they import next to them."""
    from transformers.dynamic_module_utils import get_relative_import_files

    copied: list[str] = []
    for settings in ("config.json", "tokenizer_config.json", *PROCESSORS):
        named = _code_files(read_object(source, settings)) if (source / settings).is_file() else []
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


def copy_processors(source: Path, target: Path, of_images: Mapping[str, Any] = {}) -> list[str]:
    """Copy the settings of a model's processors, where it has any and the target has none.

    ``of_images`` are settings of the image processor, over those of the file.
    """
    copied = []
    for name in PROCESSORS:
        if (source / name).is_file() and not (target / name).exists():
            settings = read_object(source, name)
            settings.pop("auto_map", None)
            held = settings if name == PROCESSORS[0] else settings.get("image_processor")
            if isinstance(held, dict):
                held.update(of_images)
            write_json(target / name, settings)
            copied.append(name)
    return copied


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
        settings = read_object(source, "generation_config.json")
    for key in _STOPS:
        value = settings.get(key, config.get(key, new_config.get(key)))
        if value is not None:
            settings[key] = value
    return settings


GLM4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PREFIX = ("[gMASK]", "<sop>")  # what GLM-4's tokenizer puts before every text


def read_ranks(path: Path) -> dict[bytes, int]:
    """The tokens of a tiktoken file."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        raise CheckpointError(
            "it is not a tiktoken vocabulary", where=str(path), fix="add a tokenizer.json"
        ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError("its ranks have holes or repeat", where=str(path))
    return ranks


def build_tokenizer_json(path: Path, settings: Mapping[str, Any]) -> str:
    """The text of ``tokenizer.json``."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ranks = read_ranks(path)
    letters = bytes_to_unicode()  # the printable stand-ins of bytes
    words = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {words[token]: rank for token, rank in ranks.items()}
    merges = [(words[left], words[right]) for left, right in _merges(ranks)]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GLM4_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    for number, added in _added_tokens(path, settings):
        core.add_tokens([AddedToken(**added)])
        if core.token_to_id(added["content"]) != number:
            raise CheckpointError(
                f"special token {added['content']!r} has id {number}, but the vocabulary ends at "
                f"{core.get_vocab_size() - 2}",
                where=str(path.parent),
            )
    _add_prefix(core)
    return str(core.to_str(pretty=True))


def _added_tokens(path: Path, settings: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    listed = settings.get("added_tokens_decoder")
    try:
        rows = [
            (int(number), {flag: row[flag] for flag in flags if flag in row})
            for number, row in dict(listed or {}).items()
        ]
        if not rows or not all(isinstance(row["content"], str) for _, row in rows):
            raise ValueError
    except (TypeError, ValueError, KeyError):
        raise CheckpointError(
            "tokenizer_config.json does not list the special tokens (added_tokens_decoder)",
            where=str(path.parent),
            fix="add a tokenizer.json",
        ) from None
    return sorted(rows, key=lambda row: row[0])


def _add_prefix(core: Any) -> None:
    from tokenizers import processors

    ids = [(token, core.token_to_id(token)) for token in _PREFIX]
    if all(number is not None for _, number in ids):
        prefix = " ".join(f"{token}:0" for token in _PREFIX)
        core.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{prefix} $A:0", pair=f"{prefix} $A:0 $B:1", special_tokens=ids
                ),
            ]
        )


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every cut of every token into two tokens, by rank of the token, then of the parts."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
    return merges
