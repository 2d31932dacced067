"""What a store keeps of the images of its samples: where their bytes are, and no pixel.

``images.npy`` (int64) has a row for each image, `COLUMNS`; ``image_offsets.npy`` says which are a
sample's. Paths are one text with its ends, and what each file was like when it was read: another
size or time has the rows read again, also of a file that could not be read then. Bytes that rows
bring along go into ``images.bin`` as they are. A store without images has none of these files.
"""

import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from trainkit.data.images import Image

COLUMNS = ("path", "start", "size", "digest", "frames", "rows", "columns", "num_tokens")
BLOB = "images.bin"
ARRAYS = ("images", "image_offsets", "image_paths", "image_path_ends", "image_path_marks")


class ImageWriter:
    """Collects the images of samples while a store is written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._images, self._offsets = array("q"), array("q", [0])
        self._paths: dict[str, int] = {}
        self._blob: BinaryIO | None = None

    def append(self, images: Iterable[Image]) -> None:
        for image in images:
            path, start = -1, image.start
            if image.data is None:
                path = self._paths.setdefault(image.path, len(self._paths))
            else:
                if self._blob is None:
                    self._blob = (self._directory / BLOB).open("wb")
                start = self._blob.tell()
                self._blob.write(image.data)
            self._images.extend(
                (path, start, image.size, image.digest, *image.grid, image.num_tokens)
            )
        self._offsets.append(len(self._images) // len(COLUMNS))

    def note(self, paths: Iterable[str]) -> None:
        """Files that could not be read: should they change, their rows are read again."""
        for path in paths:
            self._paths.setdefault(path, len(self._paths))

    def arrays(self) -> dict[str, np.ndarray]:
        """What is to be written, by name; nothing where no row had an image."""
        if self._blob is not None:
            self._blob.flush()
            os.fsync(self._blob.fileno())
            self._blob.close()
        if not self._images and not self._paths:
            return {}
        paths = [os.fsencode(path) for path in self._paths]
        return {
            "images": np.array(self._images, dtype=np.int64).reshape(-1, len(COLUMNS)),
            "image_offsets": np.array(self._offsets, dtype=np.int64),
            "image_paths": np.frombuffer(b"".join(paths), dtype=np.uint8),
            "image_path_ends": np.cumsum([0, *map(len, paths)]).astype(np.int64),
            "image_path_marks": np.array([_marks(path) for path in paths]).reshape(-1, 2),
        }


def _marks(path: bytes) -> tuple[int, int]:
    """What a file is like: size and time; -1 and 0 where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a million of them, as bytes
    except (OSError, ValueError):
        return -1, 0
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class StoredImages:
    """The images of a store's samples.

    Attributes:
        images: (M, 8) int64, `COLUMNS` of each.
        offsets: (N + 1,) where those of each sample are.
    """

    directory: Path
    images: np.ndarray
    offsets: np.ndarray
    paths: np.ndarray
    ends: np.ndarray

    @classmethod
    def open(cls, directory: Path) -> "StoredImages":
        names = ("images", "image_offsets", "image_paths", "image_path_ends")
        return cls(directory, *(np.load(directory / f"{name}.npy") for name in names))

    def changed(self) -> str | None:
        """The first file that is not what it was when the store was made; None where all are."""
        marks = np.load(self.directory / "image_path_marks.npy")
        for number, mark in enumerate(marks.tolist()):
            if _marks(os.fsencode(self._path(number))) != tuple(mark):
                return self._path(number)
        return None

    def of(self, sample: int) -> tuple[Image, ...]:
        start, end = self.offsets[sample : sample + 2].tolist()
        blob = str(self.directory / BLOB)
        return tuple(
            Image(blob if path < 0 else self._path(path), begin, size, digest, grid, tokens)
            for path, begin, size, digest, *cut, tokens in self.images[start:end].tolist()
            for grid in [tuple(cut)]
        )

    def _path(self, number: int) -> str:
        start, end = self.ends[number : number + 2].tolist()
        return os.fsdecode(self.paths[start:end].tobytes())
