"""Directories that appear complete or not at all.

Everything is written into ``.<name>.staging-<uuid>`` next to the target, forced to the disk, listed
in a manifest, and renamed into place. The rename is the commit point: whatever kills the process
before it leaves the target as it was; after it the target is complete. No torch here: a launcher
may call it before torch is imported.

One process uses ``staged_directory``. Several ranks split it: rank 0 calls ``stage`` and tells the
others the path; all write; each may hash its own files with ``record_files``; after a barrier rank
0 calls ``commit``, or ``discard`` if any rank failed.
"""

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainkit.checkpoint.whole.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    hash_files,
    list_files,
    verify_directory,
)
from trainkit.errors import CheckpointError
from trainkit.places import checkpoints_in, fsync_directory, own_umask
from trainkit.processes import Process

# -- Whose a staging directory is, and what to do with those whose owner is gone ------------------


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


def owner_file(staging: Path) -> Path:
    """Next to a staging directory: the process that is at work in it."""
    return staging.with_name(staging.name + _OWNER_SUFFIX)


def _is_owner_alive(staging: Path) -> bool:
    if ".trash-" in staging.name:
        return False
    claim = owner_file(staging)
    try:
        evidence = claim if claim.exists() else staging
        is_recent = time.time() - evidence.stat().st_mtime < _STALE_SECONDS
        owner = json.loads(claim.read_text(encoding="utf-8"))
        process = Process(str(owner["host"]), int(owner["pid"]), owner["start"])
    except FileNotFoundError:
        return staging.exists() and is_recent
    except (ValueError, KeyError, TypeError):
        return is_recent
    return not process.is_gone if process.is_here else is_recent


__all__ = [
    "MANIFEST_NAME",
    "NewestValid",
    "clean_leftovers",
    "commit",
    "discard",
    "free_space_check",
    "newest_valid",
    "readable",
    "record_files",
    "remove_directory",
    "stage",
    "staged_directory",
    "verify_directory",
]

_DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NEARLY_FULL_BYTES = 16 << 20


@contextlib.contextmanager
def staged_directory(
    target: Path, *, metadata: Mapping[str, Any] | None = None, replace: bool = False
) -> Iterator[Path]:
    """Write a directory that appears only if the body ends well.

    Args:
        target: where the finished directory appears. Its parent is made when missing.
        metadata: plain JSON values for the manifest. It is read when the body has ended, so the
            body may still fill it.
        replace: swap out an existing target; without it an existing target is an error.

    Yields:
        The staging directory to write into.
    """
    staging = stage(target, replace=replace)
    try:
        yield staging
        commit(staging, target, metadata=metadata, replace=replace)
    except BaseException as error:
        full = _is_disk_full(error, staging.parent)
        discard(staging)
        if full and not isinstance(error, CheckpointError):
            raise _disk_full_error(target, error) from error
        raise


def stage(target: Path, *, replace: bool = False, makes_parent: bool = True) -> Path:
    """Make a staging directory next to ``target`` and sweep what dead processes left there.

    Without ``makes_parent`` a parent that is missing stays so: a run directory that is gone is not
    made again.

    Returns:
        The staging directory: ``.<name>.staging-<uuid>`` in the target's parent, so that the final
        rename stays on one file system.
    """
    target = Path(target)
    if not replace and os.path.lexists(target):
        raise CheckpointError(
            "it exists already; trainkit does not write over a finished directory",
            where=str(target),
            fix="choose another path or move the old directory away",
        )
    staging = target.parent / f".{target.name}.staging-{uuid.uuid4().hex}"
    try:
        if makes_parent:
            target.parent.mkdir(parents=True, exist_ok=True)
        clean_leftovers(target.parent)
        # The owner is written first: a staging directory without one is never a fresh one.
        owner_file(staging).write_text(json.dumps(asdict(Process.this())), encoding="utf-8")
        staging.mkdir()
    except OSError as error:
        if _is_disk_full(error, target.parent):
            discard(staging)
            raise _disk_full_error(target, error) from error
        raise CheckpointError(
            f"it cannot be made: {error.strerror or error}",
            where=str(target),
            fix="choose another path",
        ) from error
    return staging


def record_files(staging: Path, paths: Iterable[str]) -> list[FileEntry]:
    """Force this rank's files to the disk and hash them, so that ranks share that work."""
    return hash_files(staging, paths, fsync=True)


def commit(
    staging: Path,
    target: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    recorded: Iterable[FileEntry] = (),
    replace: bool = False,
) -> Manifest:
    """Force everything to the disk, write the manifest, and rename into place.

    Files that are not in ``recorded``, of ``record_files`` on the ranks, are hashed here.
    """
    staging, target = Path(staging), Path(target)
    known = {entry.path: entry for entry in recorded}
    try:
        present = list_files(staging)
        for path in present:  # safetensors writes for the owner alone, whatever the umask
            (staging / path).chmod(0o666 & ~own_umask())
        _check_recorded(staging, known, present)
        fresh = hash_files(staging, [path for path in present if path not in known], fsync=True)
        manifest = Manifest((*known.values(), *fresh), dict(metadata or {}))
        _write_durably(staging / MANIFEST_NAME, manifest.to_bytes())
        for folder, _, _ in os.walk(staging, topdown=False):
            fsync_directory(Path(folder))
        _publish(staging, target, replace=replace)
    except OSError as error:
        if _is_disk_full(error, staging.parent):
            raise _disk_full_error(target, error) from error
        raise
    return manifest


def remove_directory(directory: Path) -> None:
    """Delete a finished directory so that a kill half-way leaves nothing that looks finished."""
    directory = Path(directory)
    trash = directory.parent / f".{directory.name}.trash-{uuid.uuid4().hex}"
    directory.rename(trash)
    fsync_directory(directory.parent)
    shutil.rmtree(trash, ignore_errors=True)


@dataclass(frozen=True)
class NewestValid:
    """The newest directory that is proved complete, and why newer ones were passed over.

    Attributes:
        path: None when there is none.
        manifest: of ``path``.
        skipped: damaged directories newer than ``path``, each with the reason, newest first.
    """

    path: Path | None
    manifest: Manifest | None
    skipped: tuple[tuple[Path, str], ...]


def newest_valid(run: Path) -> NewestValid:
    """Find a run's newest checkpoint whose every byte is as written."""
    skipped: list[tuple[Path, str]] = []
    for path in reversed(checkpoints_in(Path(run))):
        try:
            manifest = verify_directory(path)
        except CheckpointError as error:
            skipped.append((path, error.what))
        else:
            return NewestValid(path, manifest, tuple(skipped))
    return NewestValid(None, None, tuple(skipped))


def free_space_check(path: Path, needed_bytes: int) -> int:
    """Refuse to start what cannot fit, besides what a killed process has left there."""
    place = Path(path).absolute()
    while not place.is_dir():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes and clean_leftovers(place):
        free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{readable(needed_bytes)} are needed and {readable(free)} are free",
            where=str(path),
            fix="free some space or write to another disk",
        )
    return free


def readable(num_bytes: int) -> str:
    """``3.10 MiB``, ``12.00 GiB``."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.2f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"


def _check_recorded(staging: Path, known: Mapping[str, FileEntry], present: list[str]) -> None:
    for path, entry in known.items():
        if path not in present or (staging / path).stat().st_size != entry.size:
            raise CheckpointError(
                f"{path} is missing or has changed since a rank recorded it", where=str(staging)
            )


def _publish(staging: Path, target: Path, *, replace: bool) -> None:
    if replace and os.path.lexists(target):
        _exchange(staging, target)
        shutil.rmtree(staging, ignore_errors=True)  # what was the target a moment ago
    else:
        try:
            staging.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise CheckpointError("it appeared while it was written", where=str(target)) from error
    fsync_directory(target.parent)
    owner_file(staging).unlink(missing_ok=True)


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories in one step, so that no kill finds the target missing."""
    at_fdcwd, rename_exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        failure = errno.ENOSYS
    else:
        arguments = (at_fdcwd, os.fsencode(new), at_fdcwd, os.fsencode(old), rename_exchange)
        failure = 0 if renameat2(*arguments) == 0 else ctypes.get_errno()
    if failure == 0:
        return
    if failure not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise OSError(failure, os.strerror(failure), str(old))
    # A file system without the exchange: two steps, the old directory is deleted last.
    trash = old.parent / f".{old.name}.trash-{uuid.uuid4().hex}"
    old.rename(trash)
    new.rename(old)
    shutil.rmtree(trash, ignore_errors=True)


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _is_disk_full(error: BaseException, place: Path) -> bool:
    """Whether a write failed because the disk is full.

    safetensors and torch report it in their own words, without an errno; for those the free
    space at the moment of the failure decides.
    """
    if isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS:
        return True
    if not isinstance(error, Exception) or isinstance(error, CheckpointError):
        return False
    text = str(error)
    if any(os.strerror(number) in text for number in _DISK_FULL_ERRNOS):
        return True
    return "write" in text and shutil.disk_usage(place).free < _NEARLY_FULL_BYTES


def _disk_full_error(target: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"the disk is full ({error}); nothing was left behind and what was there before is intact",
        where=str(target),
        fix="free some space or write to another disk",
    )
