"""Where trainkit keeps what outlives a process. No torch."""

import os
import re
from pathlib import Path

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def data_cache() -> Path:
    """Of tokenised data: ``$XDG_CACHE_HOME/trainkit/data``, or the same under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trainkit" / "data"


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
