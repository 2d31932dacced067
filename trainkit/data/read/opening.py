"""Files as streams of plain bytes, whatever they are compressed with."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from trainkit.errors import DataError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".parquet")
TEXT = ".txt"
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
CHUNK_BYTES = 1 << 20

ZSTD_PIECE_BYTES = 4096
"""Four bytes of zstd may stand for 128 KiB: so much makes 128 MiB at the very worst."""

UNREADABLE: Mapping[str, str] = {
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "unpack the archive"),
    **dict.fromkeys((".lz4", ".br", ".sz", ".snappy", ".lzma"), "decompress it, or use .gz"),
    **dict.fromkeys((".arrow", ".feather", ".orc", ".avro"), "write it as parquet"),
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".tsv"), "write it as csv"),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".bin", ".npy", ".npz"), "write it as JSON lines"),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".yaml", ".yml"), "write it as JSON lines"),
}
"""Files that hold no rows that could be read, by their suffix, and what to do."""

DAMAGED = (OSError, zlib.error, lzma.LZMAError)
"""What reading a damaged file raises, besides EOFError for one that was cut."""

MARKS: Mapping[bytes, str] = {
    b"\x1f\x8b": "gzip (.gz)",
    b"BZh": "bzip2 (.bz2)",
    b"\xfd7zXZ\x00": "xz (.xz)",
    b"\x28\xb5\x2f\xfd": "zstd (.zst)",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "parquet (.parquet)",
    b"7z\xbc\xaf": "a 7z archive",
    b"ARROW1": "Arrow (.arrow)",
    b"SQLite format 3": "an SQLite database",
}
"""The first bytes of files that are not text, and what they are."""


def container(file: Path) -> tuple[str, str]:
    """The suffixes of a file, in small letters: of what it holds, and of its compression."""
    name = file.name.lower()
    compression = next((each for each in COMPRESSIONS if name.endswith(each)), "")
    return Path(name.removesuffix(compression)).suffix, compression


def is_packed(file: Path) -> bool:
    """Whether its bytes are fewer than those of its rows."""
    kind, compression = container(file)
    return bool(compression) or kind == ".parquet"


def open_bytes(file: Path) -> IO[bytes]:
    """Open a file for reading, decompressed as its suffix says.

    Raises:
        DataError: it is of a kind that is not read, or no text; the package for zstd is missing.
        OSError: it cannot be opened; or later, while reading: it is damaged (also ``DAMAGED``).
        EOFError: later, while reading: the compressed file was cut.
    """
    kind, compression = container(file)
    if kind in UNREADABLE:
        raise DataError(f"{kind} files are not read", where=str(file), fix=UNREADABLE[kind])
    if compression == ".gz":
        return io.BufferedReader(gzip.open(file, "rb"), CHUNK_BYTES)
    if compression == ".bz2":
        return io.BufferedReader(bz2.open(file, "rb"), CHUNK_BYTES)
    if compression == ".xz":
        return io.BufferedReader(lzma.open(file, "rb"), CHUNK_BYTES)
    if compression == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise DataError(
                "reading .zst needs the package zstandard",
                where=str(file),
                fix="pip install 'trainkit[zstd]'",
            ) from error
        return io.BufferedReader(
            _Zstd(file.open("rb", buffering=CHUNK_BYTES), zstandard), CHUNK_BYTES
        )
    stream = io.BufferedReader(io.FileIO(file), CHUNK_BYTES)
    begins = stream.peek(16)[:16]
    mark = next((mark for mark in MARKS if begins.startswith(mark)), None)
    if mark is not None and kind != ".parquet":
        stream.close()
        raise DataError(
            f"the file is {MARKS[mark]}, which its name does not say",
            where=str(file),
            fix="name it as what it is, or write it as JSON lines",
        )
    return stream


class _Zstd(io.RawIOBase):
    """The frames of a zstd file, one after another.

    The package's own reader takes the end of a cut file for the end of the data.
    """

    def __init__(self, packed: IO[bytes], zstandard: Any) -> None:
        self._packed = packed
        self._make = zstandard.ZstdDecompressor().decompressobj
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._rest = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._more():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _more(self) -> bool:
        """Decompress the next piece, which may come out empty; False at the end."""
        piece = self._rest or self._packed.read(ZSTD_PIECE_BYTES)
        if not piece:
            if self._frame is not None:
                raise EOFError("the last zstd frame is not whole")
            return False
        self._frame = self._frame or self._make()
        try:
            self._ready = memoryview(self._frame.decompress(piece))
        except self._error as error:
            raise OSError(f"damaged zstd stream: {error}") from error
        self._rest = b""
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        return True

    def close(self) -> None:
        self._packed.close()
        super().close()
