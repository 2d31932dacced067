"""Where prepared data is kept: content-addressed, written once, never stale.

A key covers the bytes of the data, the template, the tokenizer, the options, this package's own
code and the versions of what it depends on. A store is built in a temporary directory and renamed
when it is whole, so a crash leaves nothing that could be taken for a store. A file lock makes the
other processes of a machine wait for the first instead of doing the work again; it needs no process
group, and the system drops it when its holder dies.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from trainkit.data.build.store import META, DamagedStoreError, Store, file_digest
from trainkit.data.options import DataOptions
from trainkit.errors import DataError
from trainkit.options import Source
from trainkit.places import fsync_directory

logger = logging.getLogger(__name__)

CACHE_ONLY_OPTIONS = ("max_dropped", "num_workers", "cache_dir")
"""Options that do not change a sample."""

STALE_SECONDS = 24 * 3600
"""Temporary directories of dead processes are swept after this long."""


def sha256_of(file: Path, memo: Path) -> str:
    """The sha256 of a file, remembered for as long as the file provably did not change.

    The memory is trusted when device, inode, size and both times are the same, and the file was
    already two seconds old when it was hashed: every later write moves its change time.

    Args:
        file: to be hashed.
        memo: the directory of the memory.
    """
    status = file.stat()
    marks = [
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    ]
    name = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]
    note = memo / f"{name}.json"
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["marks"] == marks:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # No memory, or half of one: hash again.
    begun = time.time_ns()
    with file.open("rb") as stream:
        digest = file_digest(stream)
    if begun - max(status.st_mtime_ns, status.st_ctime_ns) > 2 * 10**9:
        # A cache that cannot be written may still hold what is needed.
        with contextlib.suppress(OSError):
            memo.mkdir(parents=True, exist_ok=True)
            temporary = note.with_suffix(f".{uuid.uuid4().hex}.tmp")
            temporary.write_text(json.dumps({"marks": marks, "sha256": digest}), encoding="utf-8")
            temporary.replace(note)
    return digest


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of everything about a tokenizer that changes its ids."""
    digest = hashlib.sha256()
    backend = tokenizer.backend_tokenizer
    digest.update(backend.to_str().encode())
    digest.update(type(tokenizer).__name__.encode())
    named = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    digest.update(json.dumps(named, sort_keys=True).encode())
    digest.update(json.dumps(tokenizer.chat_template, sort_keys=True).encode())
    return digest.hexdigest()


def code_digest() -> str:
    """A digest of all source of trainkit.data, and of the versions that render and tokenise."""
    digest = hashlib.sha256(f"{transformers.__version__} {tokenizers.__version__}".encode())
    root = Path(__file__).parents[1]
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def store_key(
    source: Source,
    drawn: tuple[str, Sequence[str]],
    data: Sequence[tuple[str, str]],
    tokenizer: str,
    options: DataOptions,
    code: str,
) -> str:
    """The name of the store of one source.

    Args:
        source: how it is read.
        drawn: what rows are drawn by, where they are: the source's stream and names of files.
        data: (suffix, sha256) of each file, in order.
        tokenizer: :func:`tokenizer_digest`.
        options: those that change samples are used.
        code: :func:`code_digest`.
    """
    chosen = options.model_dump(exclude=set(CACHE_ONLY_OPTIONS))
    reading: dict[str, Any] = {
        "format": source.format,
        "columns": dict(source.columns),
        "roles": sorted(source.roles),
    }
    if source.max_samples is None:
        del chosen["seed"]
    else:
        reading |= {"max_samples": source.max_samples, "drawn": drawn}
    record = {
        "data": list(data),
        "source": reading,
        "tokenizer": tokenizer,
        "options": chosen,
        "code": code,
    }
    text = json.dumps(record, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def stored(directory: Path, key: str, build: Callable[[Path], None]) -> tuple[Store, bool]:
    """Open the store named ``key``, building it first if there is none, or a damaged one.

    Args:
        directory: of the cache.
        key: of the store.
        build: fills an empty directory.

    Returns:
        the store, and whether it was there already.

    Raises:
        DataError: the directory cannot be written, or the disk is full; nothing is left behind.
    """
    target = directory / key
    whole, damage = _opened(target)
    if whole is not None:
        return whole, True
    if damage is not None:
        logger.warning(
            "the prepared data in %s is damaged (%s) and is prepared again", target, damage
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / f"{key}.lock"):
            whole, damage = _opened(target)
            if whole is not None:
                return whole, True
            if damage is not None:
                (target / META).unlink()  # from here on there is none
            mine = f"tmp-{key}-{socket.gethostname()}-"
            _sweep(directory, mine)
            temporary = directory / f"{mine}{uuid.uuid4().hex}"
            temporary.mkdir()
            try:
                build(temporary)
                _publish(temporary, target)
            finally:
                if temporary.exists():
                    shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"prepared data cannot be written: {error.strerror or error}",
            where=str(directory),
            fix="make room there, or name a directory that can be written with data.cache_dir",
        ) from error
    return Store.open(target), False


def _opened(target: Path) -> tuple[Store | None, str | None]:
    """A store that is there and as it was written; or what is wrong with it."""
    if not (target / META).exists():
        return None, None
    try:
        return Store.open(target), None
    except DamagedStoreError as error:
        return None, str(error)


def _publish(temporary: Path, target: Path) -> None:
    if target.exists() and not (target / META).exists():
        shutil.rmtree(target)  # something took a part of the store away
    try:
        temporary.rename(target)
    except OSError:
        # Another machine on the same file system was faster; its store is as good.
        if not (target / META).exists():
            raise
    fsync_directory(target.parent)


def _sweep(directory: Path, mine: str) -> None:
    """Remove what crashed processes left, once nothing in it was written for a day.

    What begins with ``mine`` goes at once: the lock of its store is held by this process.
    """
    for leftover in directory.glob("tmp-*"):
        if leftover.name.startswith(mine):
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        try:
            newest = max(path.stat().st_mtime for path in (leftover, *leftover.iterdir()))
        except FileNotFoundError:
            continue
        if time.time() - newest > STALE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; wait for it as long as it takes.

    A POSIX record lock: unlike those of ``flock``, forked workers do not hold it too.
    """
    with path.open("w") as stream:
        fcntl.lockf(stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(stream, fcntl.LOCK_UN)
