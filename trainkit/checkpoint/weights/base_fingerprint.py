"""What a run stands on, byte for byte: a digest of every file of its base that is loaded.

An adapter carries the record next to it. The same weights in other shards or another dtype are
other files, and so another base: what is fetched again from the hub is equal to the byte.

A file is read once: its digest is kept by path, size, times and inode. It tells what changed, by
accident as a rule, and is no proof against somebody who seeks out another file of the same digest.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import xxhash

from trainkit.checkpoint.weights.adapter import CONFIG_NAME
from trainkit.checkpoint.weights.plain_files import plain_file, read_json, write_json
from trainkit.checkpoint.weights.reader import weight_files
from trainkit.digests import remembered_digest
from trainkit.errors import CheckpointError
from trainkit.places import NAMED_TEMPLATES, cache_of

FILE_NAME = "base_fingerprint.json"
SCHEMA_VERSION = 3
_SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    f"{NAMED_TEMPLATES}/*.jinja",
    "*processor_config.json",
    "*.py",
)
"""A file written later than this before it was read may change once more within a clock tick."""
_MAX_NAMED = 4


def base_files(
    directory: Path, *, weights: bool = True, gguf_file: str | None = None
) -> dict[str, str]:
    """The digest of each file that a model is loaded from, by name."""
    if directory.is_file():
        directory, gguf_file = directory.parent, directory.name
    found = {path.relative_to(directory) for each in _SETTINGS for path in directory.glob(each)}
    names = {each.as_posix() for each in found if (directory / each).is_file()}
    if gguf_file is not None:
        names |= {gguf_file} if weights else set()
    elif weights:
        names |= set(weight_files(directory))
    return _digests(directory, sorted(names))


def _digests(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """On a few threads: reading and hashing let go of Python's lock."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        paths = (directory / name for name in names)
        return dict(zip(names, pool.map(file_digest, paths), strict=True))


def file_digest(path: Path) -> str:
    return remembered_digest(path, xxhash.xxh3_128, cache_of("digests"))


def write_fingerprint(adapter: Path, files: Mapping[str, str] | None = None) -> bool:
    """Keep the record of an adapter's base next to the adapter.

    Without ``files``, the digests of the base as it was loaded, it is read as it is now.

    Returns:
        Whether it was written. False for what is not an adapter, and where the base has no
        weight files that can be read here.
    """
    try:
        base = str(read_json(plain_file(adapter, CONFIG_NAME))["base_model_name_or_path"] or "?")
        known = dict(files) if files else base_files(base_on_disk(base))
    except (CheckpointError, OSError, LookupError, TypeError):
        return False
    record = {"schema_version": SCHEMA_VERSION, "base": base, "files": known}
    write_json(adapter / FILE_NAME, record)
    return True


def check_fingerprint(adapter: Path, base: Path) -> str | None:
    """Compare every byte of the base at hand with the one that the adapter was trained over.

    Returns:
        Why that could not be; None where it was, and they are the same.
    """
    if not (adapter / FILE_NAME).exists():
        return "the adapter does not say what it was trained over"
    record = read_json(plain_file(adapter, FILE_NAME))
    version = record.get("schema_version") if isinstance(record, dict) else None
    files = record.get("files") if isinstance(record, dict) else None
    is_right = isinstance(files, dict) and all(isinstance(each, str) for each in files.values())
    if version != SCHEMA_VERSION or not files or not is_right:
        raise CheckpointError(f"{FILE_NAME} is damaged", where=str(adapter))
    place = base.parent if base.is_file() else base
    there = [name for name in files if (place / name).is_file()]
    digests = _digests(place, there)
    faults = [f"{name} is missing" for name in files if name not in digests]
    faults += [f"{name} was changed" for name in there if digests[name] != files[name]]
    if base.is_file() and base.name not in files:
        faults.append(f"{base.name} is new")
    elif base.is_dir():
        with suppress(CheckpointError):  # without any weights, those of the record are missing
            faults += [f"{name} is new" for name in weight_files(base) if name not in files]
    if faults:
        more = f" and {len(faults) - _MAX_NAMED} more" if len(faults) > _MAX_NAMED else ""
        raise CheckpointError(
            f"{base} is not the base that the adapter was trained over ({record.get('base')}): "
            f"{', '.join(faults[:_MAX_NAMED])}{more}",
            where=str(adapter),
            fix="give that base, file for file, with --base-model, or take this one all the same "
            "with --any-base",
        )
    return None


def base_on_disk(name: str, revision: str | None = None) -> Path:
    """Where a base model's files are: the directory or .gguf file, or the hub's copy."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    directory = Path(name).expanduser()
    if directory.is_dir() or (directory.suffix == ".gguf" and directory.is_file()):
        return directory
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is not a model: {error}") from None
