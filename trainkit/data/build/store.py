"""Prepared samples on disk: a few flat arrays, appended to while preparing, mapped while training.

A store is a directory: ``input_ids.npy`` (int32) and ``loss_mask.npy`` (uint8), all samples end to
end; ``offsets.npy`` (int64, one more than samples); ``num_trained.npy``, ``file.npy``,
``line.npy``, ``row.npy``, ``part.npy`` per sample; ``row_digests.npy`` (uint8, 16 of them a row);
``meta.json``; ``dropped.jsonl`` and ``changed.jsonl`` where rows were.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

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

    @property
    def num_samples(self) -> int:
        """Samples so far."""
        return len(self._offsets) - 1

    def append(
        self,
        input_ids: np.ndarray,
        loss_mask: np.ndarray,
        *,
        file: int,
        line: int,
        row: int,
        part: int,
    ) -> None:
        """Write one sample; those of one row follow one another."""
        if (file, row) != self._row:
            self._end_row()
            self._row = (file, row)
        self._row_hash.update(np.ascontiguousarray(input_ids, dtype=np.int32).data)
        self._ids.append(input_ids)
        self._mask.append(loss_mask)
        self._offsets.append(self._offsets[-1] + len(input_ids))
        columns = self._columns
        columns["num_trained"].append(int(np.count_nonzero(loss_mask[1:])))
        columns["file"].append(file)
        columns["line"].append(line)
        columns["row"].append(row)
        columns["part"].append(part)

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
