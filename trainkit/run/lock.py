"""One process group at a time trains in a run directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from trainkit.errors import RunDirectoryError
from trainkit.processes import Process
from trainkit.run.directory import RunDirectory
from trainkit.run.files import explain_os_errors

_NAME = ".lock"
_HALF_WRITTEN = re.compile(r"\..+\.[a-z0-9_]{8}")
"""What ``write_bytes_atomic`` names a file until it is complete."""


@contextlib.contextmanager
def locked(run: RunDirectory) -> Iterator[None]:
    """Keep other starts of the run out while the body runs; sweep what a killed one left.

    Raises:
        RunDirectoryError: another start is at work there. One that was killed does not count.
    """
    path = run.root / _NAME
    with explain_os_errors(path):
        _take(path)
    _sweep(run)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _take(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with os.fdopen(descriptor, "r+", encoding="utf-8") as stream:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # two starts look at the file one after the other
        owner = _owner(stream.read())
        if owner is not None and owner != Process.this() and not owner.is_gone:
            where = "" if owner.is_here else f" on {owner.host}"
            raise RunDirectoryError(
                f"process {owner.pid}{where} is training in this run",
                where=str(path.parent),
                fix=f"wait for it, or stop it (kill {owner.pid})"
                if owner.is_here
                else f"stop it there; if that machine is gone: rm {path}",
            )
        stream.seek(0)
        stream.truncate()
        stream.write(json.dumps(asdict(Process.this())))


def _owner(text: str) -> Process | None:
    """Who holds the lock; None where nobody does, or a kill tore the line."""
    try:
        return Process(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None


def _sweep(run: RunDirectory) -> None:
    for folder in (run.root, run.plots):
        for path in folder.glob(".*"):
            if path.is_file() and path.name != _NAME and _HALF_WRITTEN.fullmatch(path.name):
                path.unlink(missing_ok=True)
