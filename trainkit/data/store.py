"""Prepared samples on disk: a few flat arrays, content-addressed, written once, never stale.

A store is a directory: ``input_ids.npy`` (int32) and ``loss_mask.npy`` (uint8), all samples end to
end; ``offsets.npy`` (int64, one more than samples); ``num_trained.npy``, ``file.npy``,
``line.npy``, ``row.npy``, ``part.npy`` per sample; ``row_digests.npy`` (uint8, 16 of them a row);
where samples have images, what `image_store` keeps of them; ``meta.json``; the ledger of its rows,
``dropped.jsonl`` and ``changed.jsonl``, where there is any.

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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from trainkit.data import image_store
from trainkit.data.image_store import ImageWriter, StoredImages
from trainkit.data.images import Image
from trainkit.data.options import DataOptions
from trainkit.digests import digest_of
from trainkit.errors import DataError
from trainkit.options import Source
from trainkit.places import fsync_directory

logger = logging.getLogger(__name__)

# -- the ledger: every row that was left out or changed, with file, line and reason ---------------

Action = Literal["dropped", "cut", "repaired"]
LEDGER, CHANGED = "dropped.jsonl", "changed.jsonl"
LEFT_OUT = frozenset({"too_short", "duplicate", "not_wanted", "switched_off"})
"""Reasons of dropped rows that the recipe, or the row, leaves out: nothing is wrong with them."""


@dataclass(frozen=True)
class Entry:
    """One line of ``dropped.jsonl`` or ``changed.jsonl``.

    Attributes:
        line: where the row starts, as an editor counts.
        action: ``dropped`` (nothing of the row is used), ``cut`` (part of it), ``repaired`` (all of
            it, repaired).
    """

    file: str
    line: int
    action: Action
    reason: str
    detail: str
    tokens: int = 0
    trained_tokens: int = 0


@dataclass
class FileCounts:
    """What became of the rows of one file."""

    rows: int = 0
    kept: int = 0
    dropped: int = 0
    left_out: int = 0
    cut: int = 0
    repaired: int = 0
    not_chosen: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    tokens_lost: int = 0
    trained_tokens_lost: int = 0
    images: int = 0
    image_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    dropped_for: Counter[str] = field(default_factory=Counter)
    cut_for: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    samples_sha256: str | None = None


class Ledger:
    """Collects entries: as counts in memory, and as JSON lines on disk.

    Dropped rows go to ``path``, so it has one line for each row that is not used; cut and repaired
    rows go to ``changed.jsonl`` next to it.

    Args:
        path: the file to append to, made with the first entry; None keeps only the counts.
        changed: the file for cut and repaired rows, if not ``changed.jsonl`` next to it.
    """

    def __init__(self, path: Path | None = None, changed: Path | None = None) -> None:
        self.path = path
        self._changed = changed
        self.counts: Counter[tuple[Action, str]] = Counter()
        self.tokens: Counter[Action] = Counter()
        self.trained_tokens: Counter[Action] = Counter()
        self._streams: dict[Path, IO[str]] = {}

    def add(self, entry: Entry) -> None:
        self.counts[entry.action, entry.reason] += 1
        self.tokens[entry.action] += entry.tokens
        self.trained_tokens[entry.action] += entry.trained_tokens
        if self.path is None:
            return
        path = self._changed or self.path.with_name(CHANGED)
        path = self.path if entry.action == "dropped" else path
        if path not in self._streams:
            self._streams[path] = path.open("a", encoding="utf-8")
        self._streams[path].write(json.dumps(asdict(entry), ensure_ascii=False) + "\n")

    def num(self, action: Action) -> int:
        """How many rows were treated so."""
        return sum(count for (kind, _), count in self.counts.items() if kind == action)

    def flush(self) -> None:
        for stream in self._streams.values():
            stream.flush()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


def read_ledger(path: Path) -> Iterator[Entry]:
    """The entries of a ledger and of the file next to it; none where there is no file."""
    for file in (path, path.with_name(CHANGED)):
        if file.exists():
            with file.open(encoding="utf-8") as stream:
                for line in stream:
                    yield Entry(**json.loads(line))


# -- arrays ---------------------------------------------------------------------------------------

META = "meta.json"
ROW_DIGESTS = "row_digests"
COLUMNS = ("num_trained", "file", "line", "row", "part")
STREAMED: Mapping[str, type[np.generic]] = {"input_ids": np.int32, "loss_mask": np.uint8}
"""Arrays that are written sample by sample."""
ARRAYS = (*STREAMED, "offsets", ROW_DIGESTS, *COLUMNS)
DIGEST_BYTES = 16
_SALT = b"trainkit held out"
_DIGESTS = "sha256"
"""Where ``meta.json`` has them, by array."""
HEADER_BYTES = 128
"""Of a .npy file of one dimension; written last, when its length is known."""


class DamagedStoreError(Exception):
    """A store is not as it was written: says in what."""


class StoreWriter:
    """Writes a store into an empty directory.

    The directory is empty; the caller renames it when all is done.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._streams = {
            name: (directory / f"{name}.npy").open("wb", buffering=1 << 20) for name in STREAMED
        }
        for stream in self._streams.values():
            stream.write(b" " * HEADER_BYTES)
        self._offsets = array("q", [0])
        self.images = ImageWriter(directory)
        self._columns = {name: array("q") for name in COLUMNS}
        self._row_digests = bytearray()
        self._row: tuple[int, int] | None = None
        self._row_hash = _row_hash()

    def append(
        self,
        input_ids: np.ndarray,
        loss_mask: np.ndarray,
        images: Sequence[Image] = (),
        **place: int,
    ) -> int:
        """Write one sample; those of one row follow one another.

        Returns:
            How many of its tokens are trained; the first is never predicted.
        """
        if (place["file"], place["row"]) != self._row:
            self._end_row()
            self._row = place["file"], place["row"]
        ids = np.ascontiguousarray(input_ids, dtype=np.int32)
        self._row_hash.update(ids.data)
        for image in images:
            self._row_hash.update(image.digest.to_bytes(8, "little"))
        self.images.append(images)
        self._streams["input_ids"].write(ids.data)
        self._streams["loss_mask"].write(np.ascontiguousarray(loss_mask, dtype=np.uint8).data)
        self._offsets.append(self._offsets[-1] + len(ids))
        place["num_trained"] = int(np.count_nonzero(loss_mask[1:]))
        for name, column in self._columns.items():
            column.append(place[name])
        return place["num_trained"]

    def finish(self, meta: Mapping[str, Any]) -> None:
        """Write all to the disk; ``meta.json`` comes last."""
        self._end_row()
        for name, stream in self._streams.items():
            kind = {"descr": np.dtype(STREAMED[name]).str, "fortran_order": False}
            stream.seek(0)
            np.lib.format.write_array_header_1_0(stream, {**kind, "shape": (self._offsets[-1],)})
            assert stream.tell() == HEADER_BYTES
            stream.flush()
            os.fsync(stream.fileno())
        columns: dict[str, np.ndarray] = {
            "offsets": np.array(self._offsets, dtype=np.int64),
            ROW_DIGESTS: np.frombuffer(self._row_digests, dtype=np.uint8),
            **{name: np.array(values, dtype=np.int64) for name, values in self._columns.items()},
        }
        images = self.images.arrays()
        columns |= images
        for name, column in columns.items():
            with (self.directory / f"{name}.npy").open("wb") as stream:
                np.save(stream, column)
                stream.flush()
                os.fsync(stream.fileno())
        whole = {**meta, _DIGESTS: _digests(self.directory, (*ARRAYS, *images))}
        with (self.directory / META).open("w", encoding="utf-8") as text:
            json.dump(whole, text, ensure_ascii=False, indent=1)
            text.flush()
            os.fsync(text.fileno())

    def _end_row(self) -> None:
        if self._row is not None:
            self._row_digests += self._row_hash.digest()
            self._row_hash = _row_hash()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams.values():
            stream.close()


@dataclass(frozen=True)
class Store:
    """A finished store, memory-mapped.

    Attributes:
        offsets: (N + 1,) where samples start and end.
        num_trained: (N,) trained labels.
        file, line, row, part: (N,) where each came from: the number of its file, the line its row
            starts on, the number of its row in the file, and which sample of that row it is.
        row_digests: (R, 16) a digest of the tokens and images of each row that has samples, in
            their order.
        images: of the samples; None where no row has any.
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
    images: StoredImages | None = None

    @classmethod
    def open(cls, directory: Path) -> "Store":
        """Map a store's arrays, every byte of them as it was written."""
        try:
            meta = json.loads((directory / META).read_text(encoding="utf-8"))
            digests = meta[_DIGESTS]
            names = (*ARRAYS, *(name for name in image_store.ARRAYS if name in digests))
            found = _digests(directory, names)
        except (ValueError, LookupError, TypeError, FileNotFoundError) as error:
            raise DamagedStoreError(f"{type(error).__name__}: {error}") from error
        altered = [f"{name}.npy" for name in names if found[name] != digests.get(name)]
        if altered:
            raise DamagedStoreError(f"{', '.join(altered)} changed since it was written")
        images = StoredImages.open(directory) if len(names) > len(ARRAYS) else None
        if images is not None and (changed := images.changed()):
            raise DamagedStoreError(f"the image {changed} changed since it was read")
        arrays = {}
        for name in ARRAYS:
            file = directory / f"{name}.npy"
            is_mapped = name in STREAMED and file.stat().st_size > HEADER_BYTES  # not an empty one
            arrays[name] = np.load(file, mmap_mode="r" if is_mapped else None)
        arrays[ROW_DIGESTS] = arrays[ROW_DIGESTS].reshape(-1, DIGEST_BYTES)
        return cls(directory=directory, meta=meta, images=images, **arrays)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def num_trained_of(self, index: int) -> int:
        """How often a token id is trained, over all samples."""
        step = 1 << 24
        found = (
            (self.input_ids[at : at + step] == index) & (self.loss_mask[at : at + step] > 0)
            for at in range(0, len(self.input_ids), step)
        )
        return sum(int(np.count_nonzero(each)) for each in found)


def _digests(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """The sha256 of each array; hashlib lets the threads run side by side."""

    def one(name: str) -> str:
        return digest_of(directory / f"{name}.npy", hashlib.sha256)

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _row_hash() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=DIGEST_BYTES, key=_SALT)


# -- keys -----------------------------------------------------------------------------------------

CACHE_ONLY_OPTIONS = ("deduplicate", "max_dropped", "num_workers", "cache_dir")
"""Options that do not change a sample."""

STALE_SECONDS = 24 * 3600
"""Temporary directories of dead processes are swept after this long."""


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
    root = Path(__file__).parent
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
    vision: tuple[str, ...] = (),
) -> str:
    """The name of the store of one source.

    Args:
        source: how it is read.
        drawn: what rows are drawn by, where they are: the source's stream and names of files.
        data: (suffix, sha256) of each file, in order.
        tokenizer: :func:`tokenizer_digest`.
        options: those that change samples are used.
        code: :func:`code_digest`.
        vision: how images are read, and where relative paths of theirs start; nothing of a model
            of text.
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
    record = {"data": list(data), "source": reading, "tokenizer": tokenizer, "code": code}
    record |= {"vision": vision} if vision else {}
    text = json.dumps({**record, "options": chosen}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def stored(directory: Path, key: str, build: Callable[[Path], None]) -> tuple[Store, bool]:
    """Open the store named ``key``, building it first if there is none, or a damaged one.

    Returns:
        the store, and whether it was there already.
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
        # A POSIX record lock: unlike those of ``flock``, forked workers do not hold it too.
        with (directory / f"{key}.lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
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
                if target.exists() and not (target / META).exists():
                    shutil.rmtree(target)  # something took a part of the store away
                try:
                    temporary.rename(target)
                except OSError:
                    # Another machine on the same file system was faster; its store is as good.
                    if not (target / META).exists():
                        raise
                fsync_directory(directory)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"prepared data cannot be written: {error.strerror or error}",
            where=str(directory),
            fix="make room there, or name a directory that can be written with data.cache_dir",
        ) from error
    return Store.open(target), False


def _opened(target: Path) -> tuple[Store | None, str | None]:
    if not (target / META).exists():
        return None, None
    try:
        return Store.open(target), None
    except DamagedStoreError as error:
        return None, str(error)


def _sweep(directory: Path, mine: str) -> None:
    """Remove what crashed processes left, once nothing in it was written for a day.

    What begins with ``mine`` goes at once: the lock of its store is held by this process.
    """
    for leftover in directory.glob("tmp-*"):
        with contextlib.suppress(FileNotFoundError):
            newest = max(path.stat().st_mtime for path in (leftover, *leftover.iterdir()))
            if leftover.name.startswith(mine) or time.time() - newest > STALE_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
