"""Where things lie: what a name means, what may be read, what outlives a process. No torch."""

import os
import re
import stat
from pathlib import Path
from typing import Any

from trainkit.errors import TrainkitError

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

_FILE_NAME = re.compile(
    r"\.(gguf|safetensors|jsonl?|ndjson|csv|tsv|parquet|arrow|txt|ya?ml|zip|tar)(\.\w+)?$", re.I
)

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""What weights are saved as: in one file, or in several with an index."""

NAMED_TEMPLATES = "additional_chat_templates"
"""Where a tokenizer keeps templates besides its default one, such as that for rows with tools."""

_OPENED = re.compile(
    r"\.(jsonl?|safetensors|gguf|bin|pt|pth|model|tiktoken|txt|jinja|py|ya?ml)$", re.I
)
"""What loaders open of a folder without being told to."""


def local_path(name: str) -> Path | None:
    """The path that the name of a model or data set means; None where it is the hub's.

    What is there is meant. A name of at most two words without a file's suffix may be the hub's.
    """
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser raises for ~nobody
    may_be = name.startswith("hf://") or (_HUB_NAME.fullmatch(name) and not _FILE_NAME.search(name))
    return None if may_be and not os.path.exists(path) else path  # noqa: PTH110 - for long names


def regular(path: Path, kind: type[TrainkitError]) -> Path:
    """``path``, for a reader: a pipe would keep it waiting, a folder or device is no content.

    A link is what it leads to. What is not there is for the reader to say.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        if not path.is_symlink():
            return path
        what = "a link that leads nowhere"
    else:
        is_kernels = path.resolve().parts[1:2] in (("proc",), ("sys",))  # one may wait for ever
        if stat.S_ISREG(mode) and not is_kernels:
            return path
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
    raise kind(
        f"this is {what}, where a file is meant",
        where=str(path),
        fix="put a regular file there, or a link to one",
    )


_KINDS = {
    r"\.gguf": ("a GGUF file", "generate, chat and eval take it as it is; sft: model.name_or_path"),
    r"\.safetensors|\.bin|\.pth?": ("a file of weights", "give the directory that it lies in"),
    r"\.ya?ml": ("a recipe", "sft begins a run of it; runs and merged models are directories"),
    r"\.(jsonl?|ndjson|csv|parquet|txt)(\.\w+)?": (
        "a file of rows",
        "data preview, check and stats look at it; sft trains on it: data.train",
    ),
}
"""By the ends of their names: what files are, and what takes them."""


def refuse_file(path: Path, kind: type[TrainkitError]) -> None:
    """Refuse a file where a run, a checkpoint or a model's directory is meant."""
    if not path.is_file():
        return
    known = (each for end, each in _KINDS.items() if re.search(rf"({end})$", path.name, re.I))
    what, fix = next(known, ("a file", "give the directory that it lies in"))
    raise kind(f"this is {what}, where a directory is meant", where=str(path), fix=fix)


def regular_files(folder: Path, kind: type[TrainkitError]) -> Path:
    """``folder``, for a loader: `regular` for every file of it that one may open by its name."""
    for path in (*folder.iterdir(), *folder.glob(f"{NAMED_TEMPLATES}/*")):
        is_templates = path.name == NAMED_TEMPLATES and not path.is_dir()
        if is_templates or _OPENED.search(path.name):
            regular(path, kind)
    return folder


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for json: of two equal keys the last would win without a word."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def cache_of(kind: str) -> Path:
    """``$XDG_CACHE_HOME/trainkit/KIND``, or the same under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trainkit" / kind


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint; -1 where it is called otherwise."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def checkpoints_in(run: Path) -> list[Path]:
    """The checkpoints of a run by step. A ``checkpoint-4-kept`` among them is the user's own."""
    found = [path for path in run.glob("checkpoint-*") if step_of(path) >= 0 and path.is_dir()]
    return sorted(found, key=step_of)


def fsync_directory(path: Path) -> None:
    """Make a rename inside ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def own_umask() -> int:
    """The process's umask. It can only be read by setting it: the window is two system calls."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
