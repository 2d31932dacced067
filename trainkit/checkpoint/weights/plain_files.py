"""Small files of a directory that need not be trusted: really there, really files, really JSON."""

import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.errors import CheckpointError
from trainkit.places import refuse_duplicates

_PLAIN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
_BLOB_NAME = re.compile(r"^[0-9a-f]{40,64}$")


def is_plain_name(name: str) -> bool:
    """Whether a file name can only mean a file of the directory itself."""
    return _PLAIN_NAME.match(name) is not None


def plain_file(directory: Path, name: str) -> Path:
    """The path of a file of ``directory``, refused unless it really lies there.

    A link is followed only inside the directory, or in the Hugging Face cache's own layout (a
    snapshot whose files are links into the ``blobs`` folder of the same repository).
    """
    where = str(directory)
    if not is_plain_name(name):
        raise CheckpointError(f"{name!r} is not a plain file name", where=where)
    path = directory / name
    try:
        real = path.resolve(strict=True)
    except OSError:
        raise CheckpointError(f"{name} is missing", where=where) from None
    home = directory.resolve()
    # A snapshot, or a folder in one.
    blobs = [path.parent / "blobs" for path in home.parents[:2] if path.name == "snapshots"]
    inside = real.is_relative_to(home) or (
        real.parent in blobs and _BLOB_NAME.match(real.name) is not None
    )
    if not inside:
        raise CheckpointError(
            f"{name} is a link that leads out of the directory",
            where=where,
            fix="copy the file itself into the directory",
        )
    if not stat.S_ISREG(real.stat().st_mode):
        raise CheckpointError(f"{name} is not a file", where=where)
    return real


def read_json(path: Path) -> Any:
    """A JSON file, with duplicate keys and ``NaN`` refused."""
    try:
        return json.loads(
            path.read_bytes(), object_pairs_hook=refuse_duplicates, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"it is not valid JSON: {error}", where=str(path)) from None


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def read_object(directory: Path, name: str) -> dict[str, Any]:
    content = read_json(plain_file(directory, name))
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} is not a JSON object", where=str(directory))
    return content


def read_config(directory: Path) -> dict[str, Any]:
    return read_object(directory, "config.json")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
