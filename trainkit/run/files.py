"""Write files so that a reader, a crash or a full disk never meets half of one."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import math
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from trainkit.errors import RunDirectoryError
from trainkit.places import fsync_directory, regular

# EFBIG is the same event under a file-size limit, EDQUOT under a quota.
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Links in a circle, too (EEXIST where one is to be a directory), and what the kernel shows.
_NAMES = "EACCES EPERM EROFS ELOOP ENAMETOOLONG EEXIST EISDIR ENOENT"
_NO_PLACE = {getattr(errno, name) for name in _NAMES.split()}

logger = logging.getLogger(__name__)
WAY_OUT = "a copy of the run may have it as it was"
_OF_EVERY_RUN = ("data.json", "environment.json", "kernels.json", "samples.json")

T = TypeVar("T")


class DiskFullError(RunDirectoryError):
    """No space is left for a file of the run; what was written before is intact."""

    exit_code = 1


class RunGoneError(RunDirectoryError):
    """The run directory was moved or deleted while the run went on; it is not made again."""

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
        is_gone = isinstance(error, FileNotFoundError) and not path.parent.is_dir()
        if error.errno in _NO_PLACE and not is_gone:
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
        if is_gone:
            raise RunGoneError(
                "the directory is gone: it was moved or deleted",
                where=str(path.parent),
                fix="continue it where it is now: trainkit sft --resume DIRECTORY",
            ) from error
        raise


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` in one step; on any failure the old file stays as it was."""
    with explain_os_errors(path):
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        try:
            with temporary.open("xb") as stream:  # with the rights that the umask gives
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        fsync_directory(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """``write_bytes_atomic`` for UTF-8 text. Lone surrogates are written as escapes."""
    write_bytes_atomic(path, text.encode("utf-8", errors="backslashreplace"))


def write_json_atomic(path: Path, value: Any) -> None:
    """``write_text_atomic`` for one JSON value, indented, strict (see ``jsonable``)."""
    text = json.dumps(jsonable(value), ensure_ascii=False, indent=2, allow_nan=False)
    write_text_atomic(path, text + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file; None without one, and with a word for a damaged or owed one."""
    try:
        content = json.loads(regular(path, RunDirectoryError).read_bytes())
    except FileNotFoundError:
        if path.name in _OF_EVERY_RUN:
            say_once(f"{path} is missing; {WAY_OUT}")
        return None
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        say_once(f"{path}:{line} is damaged and is left out: {error}; {WAY_OUT}")
        return None
    if not content and path.name in _OF_EVERY_RUN:
        say_strange(path)
        return None
    return content


def read_record(path: Path, read: Callable[[Any], T], default: T) -> T:
    """What ``read`` makes of a JSON file; ``default`` without one, and for a damaged one, named."""
    content = read_json(path)
    if content is None:
        return default
    try:
        return read(content)
    except (LookupError, TypeError, ValueError, AttributeError):
        say_strange(path)
        return default


def say_strange(path: Path) -> None:
    say_once(f"{path}:1 does not hold what a run writes there, and is left out; {WAY_OUT}")


@functools.cache  # several parts of a command read a file
def say_once(text: str) -> None:
    logger.warning("%s", text)


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
