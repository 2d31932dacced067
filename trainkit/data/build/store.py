"""Prepared samples on disk: a few flat arrays, content-addressed, written once, never stale.

A store is a directory: ``input_ids.npy`` (int32) and ``loss_mask.npy`` (uint8), all samples end to
end; ``offsets.npy`` (int64, one more than samples); ``num_trained.npy``, ``file.npy``,
``line.npy``, ``row.npy``, ``part.npy`` per sample; ``row_digests.npy`` (uint8, 16 of them a row);
``meta.json``; ``dropped.jsonl`` and ``changed.jsonl`` where rows were.

Its key covers the bytes of the data, the template, the tokenizer, the options, this package's own
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
import os
import shutil
import socket
import time
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from trainkit.data.options import DataOptions
from trainkit.errors import DataError
from trainkit.options import Source
from trainkit.places import fsync_directory

META = "meta.json"

COLUMNS = ("num_trained", "file", "line", "row", "part")

ROW_DIGESTS = "row_digests"

ARRAYS = ("input_ids", "loss_mask", "offsets", ROW_DIGESTS, *COLUMNS)

DIGEST_BYTES = 16

_SALT = b"trainkit held out"

_DIGESTS = "sha256"
"""Where ``meta.json`` has them, by array."""

HEADER_BYTES = 128
"""Room for a .npy header, written last, when the shape is known."""


class DamagedStoreError(Exception):
    """A store is not as it was written: says in what."""


class ArrayFile:
    """A one-dimensional .npy file that grows.

    Args:
        path: the file.
        dtype: of its numbers.
    """

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        self._dtype = np.dtype(dtype)
        self._stream = path.open("wb", buffering=1 << 20)
        self._stream.write(b" " * HEADER_BYTES)
        self._count = 0

    def append(self, values: np.ndarray) -> None:
        """Write values behind the others."""
        self._stream.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self._count += len(values)

    def close(self) -> None:
        """Write the header, and everything to the disk."""
        shape = (
            f"{{'descr': '{self._dtype.str}', 'fortran_order': False, 'shape': ({self._count},), }}"
        )
        text = shape.ljust(HEADER_BYTES - 11) + "\n"
        self._stream.seek(0)
        self._stream.write(b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little"))
        self._stream.write(text.encode("ascii"))
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._stream.close()


class StoreWriter:
    """Writes a store into an empty directory.

    Args:
        directory: exists, is empty, and is renamed by the caller when all is done.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ids = ArrayFile(directory / "input_ids.npy", np.int32)
        self._mask = ArrayFile(directory / "loss_mask.npy", np.uint8)
        self._offsets = array("q", [0])
        self._columns = {name: array("q") for name in COLUMNS}
        self._row_digests = bytearray()
        self._row: tuple[int, int] | None = None
        self._row_hash = _row_hash()

    def append(self, input_ids: np.ndarray, loss_mask: np.ndarray, **place: int) -> int:
        """Write one sample; those of one row follow one another.

        Args:
            input_ids: (S,).
            loss_mask: (S,).
            place: ``file``, ``line``, ``row`` and ``part``.

        Returns:
            How many of its tokens are trained; the first is never predicted.
        """
        if (place["file"], place["row"]) != self._row:
            self._end_row()
            self._row = place["file"], place["row"]
        self._row_hash.update(np.ascontiguousarray(input_ids, dtype=np.int32).data)
        self._ids.append(input_ids)
        self._mask.append(loss_mask)
        self._offsets.append(self._offsets[-1] + len(input_ids))
        place["num_trained"] = int(np.count_nonzero(loss_mask[1:]))
        for name, column in self._columns.items():
            column.append(place[name])
        return place["num_trained"]

    def finish(self, meta: Mapping[str, Any]) -> None:
        """Close all files; ``meta.json`` comes last."""
        self._ids.close()
        self._mask.close()
        self._end_row()
        digests = ArrayFile(self.directory / f"{ROW_DIGESTS}.npy", np.uint8)
        digests.append(np.frombuffer(self._row_digests, dtype=np.uint8))
        digests.close()
        for name, values in {"offsets": self._offsets, **self._columns}.items():
            column = ArrayFile(self.directory / f"{name}.npy", np.int64)
            column.append(
                np.frombuffer(values, dtype=np.int64) if values else np.empty(0, np.int64)
            )
            column.close()
        whole = {**meta, _DIGESTS: _digests(self.directory)}
        with (self.directory / META).open("w", encoding="utf-8") as stream:
            json.dump(whole, stream, ensure_ascii=False, indent=1)
            stream.flush()
            os.fsync(stream.fileno())

    def _end_row(self) -> None:
        if self._row is not None:
            self._row_digests += self._row_hash.digest()
            self._row_hash = _row_hash()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._ids.abandon()
            self._mask.abandon()


@dataclass(frozen=True)
class Store:
    """A finished store, memory-mapped.

    Attributes:
        directory: where it lies.
        input_ids, loss_mask: all samples end to end.
        offsets: (N + 1,) where samples start and end.
        num_trained: (N,) trained labels.
        file, line, row, part: (N,) where each came from: the number of its file, the line its row
            starts on, the number of its row in the file, and which sample of that row it is.
        row_digests: (R, 16) a digest of the tokens of each row that has samples, in their order.
        meta: what was written by :meth:`StoreWriter.finish`.
    """

    directory: Path
    input_ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    num_trained: np.ndarray
    file: np.ndarray
    line: np.ndarray
    row: np.ndarray
    part: np.ndarray
    row_digests: np.ndarray
    meta: Mapping[str, Any]

    @classmethod
    def open(cls, directory: Path) -> "Store":
        """Map a store's arrays, every byte of them as it was written.

        Raises:
            DamagedStoreError: an array is missing or was altered: its tokens would be trained.
        """
        try:
            meta = json.loads((directory / META).read_text(encoding="utf-8"))
            digests, found = meta[_DIGESTS], _digests(directory)
        except (ValueError, LookupError, TypeError, FileNotFoundError) as error:
            raise DamagedStoreError(f"{type(error).__name__}: {error}") from error
        altered = [f"{name}.npy" for name in ARRAYS if found[name] != digests.get(name)]
        if altered:
            raise DamagedStoreError(f"{', '.join(altered)} changed since it was written")
        columns = {name: np.load(directory / f"{name}.npy") for name in ("offsets", *COLUMNS)}
        return cls(
            directory=directory,
            input_ids=_map(directory / "input_ids.npy"),
            loss_mask=_map(directory / "loss_mask.npy"),
            row_digests=np.load(directory / f"{ROW_DIGESTS}.npy").reshape(-1, DIGEST_BYTES),
            meta=meta,
            **columns,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(N,) tokens per sample."""
        return np.diff(self.offsets)

    def num_trained_of(self, index: int) -> int:
        """How often a token id is trained, over all samples."""
        step = 1 << 24
        places = range(0, len(self.input_ids), step)
        return sum(
            int(
                np.count_nonzero(
                    (self.input_ids[at : at + step] == index) & (self.loss_mask[at : at + step] > 0)
                )
            )
            for at in places
        )


def file_digest(stream: BinaryIO) -> str:
    """The sha256 of what is left of an open file."""
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 22):
        digest.update(chunk)
    return digest.hexdigest()


def _digests(directory: Path) -> dict[str, str]:
    """The sha256 of each array; hashlib lets the threads run side by side."""

    def one(name: str) -> str:
        with (directory / f"{name}.npy").open("rb") as stream:
            return file_digest(stream)

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(ARRAYS, pool.map(one, ARRAYS), strict=True))


def _row_hash() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=DIGEST_BYTES, key=_SALT)


def _map(path: Path) -> np.ndarray:
    empty = path.stat().st_size <= HEADER_BYTES  # an empty file cannot be mapped
    return np.load(path) if empty else np.load(path, mmap_mode="r")


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
