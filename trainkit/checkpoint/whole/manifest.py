"""The manifest of a finished directory: which files it holds, how long they are, their sha256.

A storage fault that keeps a file's length is invisible to safetensors and to ``torch.load``; only
an own digest shows it. The manifest also vouches for itself: it is written in one canonical form
and carries a digest of itself, so that no byte of the directory can change unseen.
"""

import hashlib
import json
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import CheckpointError
from trainkit.places import own_umask, regular

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1

UNPROVED = "has no manifest, so nobody can say whether its files are as they were written"
"""Said of a run's directory that is read nevertheless."""

_CHUNK_BYTES = 8 << 20
_MAX_NAMED = 8
# What from_pretrained may read of a model directory; notes, pictures and optimizer states are not.
_READ_BY_LOADERS = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py")


@dataclass(frozen=True)
class FileEntry:
    """One file of a finished directory.

    Attributes:
        path: relative to the directory, with forward slashes.
    """

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a finished directory says about itself.

    Attributes:
        metadata: what the caller recorded: a step, a config hash, versions. Plain JSON values.
    """

    files: tuple[FileEntry, ...]
    metadata: Mapping[str, Any]
    schema_version: int = SCHEMA_VERSION

    def to_bytes(self) -> bytes:
        content = {
            "schema_version": self.schema_version,
            "metadata": dict(self.metadata),
            "files": [vars(entry) for entry in sorted(self.files, key=lambda entry: entry.path)],
        }
        digest = hashlib.sha256(_canonical(content)).hexdigest()
        return _canonical({"manifest_sha256": digest, **content})


def _canonical(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def hash_file(path: Path, name: str, *, fsync: bool = False) -> FileEntry:
    """Read a file through; ``name`` is the entry's path.

    A link is refused; ``fsync`` also forces the file to the disk first.
    """
    digest = hashlib.sha256()
    size = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        if fsync:
            os.fsync(descriptor)
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(name, size, digest.hexdigest())


def hash_files(root: Path, paths: Iterable[str], *, fsync: bool = False) -> list[FileEntry]:
    """Hash files under ``root`` on a few threads (hashlib releases the GIL)."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda path: hash_file(root / path, path, fsync=fsync), paths))


def list_files(root: Path) -> list[str]:
    """Every file under ``root`` but the manifest, sorted, with forward slashes."""
    found: list[str] = []
    for folder, folders, names in os.walk(root, followlinks=False):
        for name in [*folders, *names]:
            path = Path(folder) / name
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CheckpointError(
                    f"{path.relative_to(root)} is a link or a special file; "
                    "a checkpoint holds plain files only",
                    where=str(root),
                    fix="copy the file itself into the directory",
                )
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in names]
    return sorted(path for path in found if path != MANIFEST_NAME)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a finished directory, checked against its own digest."""
    where = str(directory)
    try:
        raw = regular(directory / MANIFEST_NAME, CheckpointError).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{MANIFEST_NAME} is missing: the directory was not finished by trainkit", where=where
        ) from None
    try:
        content = json.loads(raw)
        version = content["schema_version"]
        manifest = Manifest(
            tuple(FileEntry(**entry) for entry in content["files"]), content["metadata"], version
        )
        unaltered = manifest.to_bytes() == raw
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{MANIFEST_NAME} is damaged", where=where) from None
    if not unaltered:
        raise CheckpointError(f"{MANIFEST_NAME} was altered after it was written", where=where)
    if version != SCHEMA_VERSION:
        raise CheckpointError(
            f"{MANIFEST_NAME} has schema version {version}; this trainkit reads {SCHEMA_VERSION}",
            where=where,
            fix="use the trainkit that wrote it, or a newer one",
        )
    return manifest


def verify_directory(directory: Path) -> Manifest:
    """Prove that a directory is as it was when it was finished, byte for byte.

    Returns:
        The manifest, since a caller that resumes needs its metadata.
    """
    return _verify(Path(directory), lambda _: True)


def verify_model(directory: Path) -> Manifest | None:
    """Prove that the files from which a model is loaded are as they were written.

    Unlike `verify_directory` it reads no optimizer state, and a note or a picture that somebody
    put next to the model is fine.

    Returns:
        The manifest; None for a directory that has none, because something else wrote it.
    """
    if not (Path(directory) / MANIFEST_NAME).exists():
        return None
    return _verify(Path(directory), lambda path: path.endswith(_READ_BY_LOADERS))


def _verify(directory: Path, concerns: Callable[[str], bool]) -> Manifest:
    manifest = read_manifest(directory)
    present = {path for path in list_files(directory) if concerns(path)}
    listed = {entry.path: entry for entry in manifest.files if concerns(entry.path)}
    faults = [f"{path} is missing" for path in sorted(listed.keys() - present)]
    faults += [f"{path} is not in the manifest" for path in sorted(present - listed.keys())]
    same_size = []
    for path in sorted(listed.keys() & present):
        size = (directory / path).stat().st_size
        if size == listed[path].size:
            same_size.append(path)
        else:
            faults.append(f"{path} has {size} bytes instead of {listed[path].size}")
    for entry in hash_files(directory, same_size):
        if entry != listed[entry.path]:
            faults.append(f"{entry.path} was altered (its sha256 differs)")
    if faults:
        more = f" and {len(faults) - _MAX_NAMED} more" if len(faults) > _MAX_NAMED else ""
        what, fix = "; ".join(faults[:_MAX_NAMED]) + more, "put the files back, or take another"
        raise CheckpointError(what, where=str(directory), fix=f"{fix} checkpoint of the run")
    return manifest


# Whether nobody else can have written a checkpoint.
#
# A digest does not help against somebody who can write the manifest too: no code of theirs would
# run (see ``weights.contents``), but their numbers would be trained on. So every file must belong
# to this user, must not be writable by others beyond what this user's own umask lets them write,
# and must lie in the checkpoint itself.


def refuse_foreign(directory: Path) -> None:
    """Refuse a checkpoint that another user has made or could have changed.

    Call it after ``verify_directory`` and before anything is loaded.
    """
    directory = Path(directory)
    me = os.getuid()
    above = directory.parent.lstat()
    if above.st_uid == me and not above.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return  # nobody else gets in here, whatever a lax umask wrote on the files
    folders = {(directory / name).parent for name in list_files(directory)}
    kept_out = own_umask()
    # Whoever may write a folder may replace a file in it.
    files = [directory / name for name in list_files(directory)]
    for path in [directory.parent, directory, *sorted(folders), *files]:
        status = path.lstat()
        is_mine = status.st_uid in (me, 0)
        is_open = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) & kept_out)
        # In a sticky folder such as /tmp others can add files, but not replace mine.
        if path == directory.parent and status.st_mode & stat.S_ISVTX:
            is_mine, is_open = True, False
        if not is_mine or is_open:
            who = f"belongs to user {status.st_uid}" if not is_mine else "is writable by others"
            raise CheckpointError(
                f"{path} {who}, so the checkpoint may not be yours any more",
                where=str(directory),
                fix=f"if you trust it: {_cure(directory, is_mine=is_mine)}",
            )


def _cure(directory: Path, *, is_mine: bool) -> str:
    """The command after which this check passes, the folder around the checkpoint included."""
    parent = shlex.quote(str(directory.parent))
    if not is_mine:
        return f"sudo chown -R $USER {parent}"
    return f"chmod go-w {parent} && chmod -R go-w {shlex.quote(str(directory))}"
