"""Write files so that a reader, a crash or a full disk never meets half of one."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.errors import RunDirectoryError
from trainkit.places import fsync_directory, regular

PRIVATE_FILE_MODE = 0o600
PRIVATE_DIRECTORY_MODE = 0o700

# EFBIG is the same event under a file-size limit, EDQUOT under a quota.
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DiskFullError(RunDirectoryError):
    """No space is left for a file of the run; what was written before is intact."""

    exit_code = 1


@contextlib.contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or a refused write of ``path`` into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise DiskFullError(
                f"no space left on the device while writing {path.name} ({error.strerror})",
                where=str(path),
                fix="free some space or point --output-dir at a larger disk, then --resume; "
                "files written before are intact",
            ) from error
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise RunDirectoryError(
                f"{path.name} cannot be written ({error.strerror})",
                where=str(path),
                fix="choose a writable directory with --output-dir",
            ) from error
        if isinstance(error, NotADirectoryError):
            raise RunDirectoryError(
                "a part of this path is a file, so no directory can be under it",
                where=str(path),
                fix="choose another directory with --output-dir",
            ) from error
        raise


def write_bytes_atomic(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Replace ``path`` by ``data`` in one step; on any failure the old file stays as it was.

    Args:
        path: the file; its directory exists.
        data: all of the content.
        mode: permission bits, or None for what the process's umask gives.

    Raises:
        DiskFullError: no space is left.
    """
    with explain_os_errors(path):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            # mkstemp makes 0600 files whatever the umask.
            Path(temporary).chmod(0o666 & ~current_umask() if mode is None else mode)
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
        fsync_directory(path.parent)


def write_text_atomic(path: Path, text: str, *, mode: int | None = None) -> None:
    """``write_bytes_atomic`` for UTF-8 text. Lone surrogates are written as escapes."""
    write_bytes_atomic(path, text.encode("utf-8", errors="backslashreplace"), mode=mode)


def write_json_atomic(path: Path, value: Any, *, mode: int | None = None) -> None:
    """``write_text_atomic`` for one JSON value, indented, strict (see ``jsonable``)."""
    text = json.dumps(jsonable(value), ensure_ascii=False, indent=2, allow_nan=False)
    write_text_atomic(path, text + "\n", mode=mode)


def read_json(path: Path) -> Any:
    """The content of a JSON file, or None where there is no file."""
    there = regular(path, RunDirectoryError).exists()
    return json.loads(path.read_text(encoding="utf-8")) if there else None


def jsonable(value: Any) -> Any:
    """Make ``value`` strict JSON.

    Non-finite floats become the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``: JSON has no
    such numbers, and ``null`` would hide that a loss became NaN. Python's ``float()`` and
    JavaScript's ``Number()`` read them back.
    """
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def current_umask() -> int:
    """The process's umask. It can only be read by setting it: the window is two system calls."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
