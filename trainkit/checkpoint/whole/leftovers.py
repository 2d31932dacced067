"""Whose a staging directory is, and what to do with those whose owner is gone."""

import json
import os
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any

_LEFTOVER = re.compile(r"^\..+\.(staging|trash)-[0-9a-f]{32}$")
_OWNER_SUFFIX = ".owner"
# A leftover whose owner cannot be checked: it ran on another host, or died within the microseconds
# between two system calls. No save takes a day.
_STALE_SECONDS = 24 * 3600.0


def discard(staging: Path) -> None:
    """Remove a staging directory that will not be committed. Never raises on what is gone."""
    shutil.rmtree(staging, ignore_errors=True)
    owner_file(staging).unlink(missing_ok=True)


def clean_leftovers(parent: Path) -> list[Path]:
    """Remove the staging and trash directories of processes that are gone.

    Returns:
        What was removed. A directory of a living process is left alone; so is one of another host,
        until it is a day old.
    """
    removed = []
    for path in sorted(Path(parent).iterdir()):
        work = path.with_name(path.name.removesuffix(_OWNER_SUFFIX))
        is_leftover = _LEFTOVER.match(work.name) is not None
        if is_leftover and os.path.lexists(path) and not _is_owner_alive(work):
            discard(work)
            removed.append(work)
    return removed


def write_owner(staging: Path) -> None:
    """Say next to a staging directory that this process is at work in it."""
    owner_file(staging).write_text(json.dumps(_this_process()), encoding="utf-8")


def owner_file(staging: Path) -> Path:
    """Where the owner of a staging directory is written."""
    return staging.with_name(staging.name + _OWNER_SUFFIX)


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "start": _start_time(os.getpid())}


def _start_time(pid: int) -> str | None:
    """When a process started, in clock ticks since boot: a pid may be used again, the pair not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return fields.rpartition(")")[2].split()[19]


def _is_owner_alive(staging: Path) -> bool:
    if ".trash-" in staging.name:
        return False
    claim = owner_file(staging)
    try:
        evidence = claim if claim.exists() else staging
        is_recent = time.time() - evidence.stat().st_mtime < _STALE_SECONDS
        owner = json.loads(claim.read_text(encoding="utf-8"))
        host, pid, start = str(owner["host"]), int(owner["pid"]), owner["start"]
    except FileNotFoundError:
        return staging.exists() and is_recent
    except (ValueError, KeyError, TypeError):
        return is_recent
    if host != socket.gethostname():
        return is_recent
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, and somebody else's
    return start is None or _start_time(pid) == start
