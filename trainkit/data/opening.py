"""Files as streams of plain bytes, whatever they are compressed with."""

import gzip
import io
from pathlib import Path
from typing import IO, Any

from trainkit.errors import DataError

COMPRESSIONS = (".gz", ".zst")
CHUNK_BYTES = 1 << 20

ZSTD_PIECE_BYTES = 4096
"""Four bytes of zstd may stand for 128 KiB: so much makes 128 MiB at the very worst."""


def open_bytes(file: Path) -> IO[bytes]:
    """Open a file for reading, decompressed as its suffix says.

    Raises:
        DataError: the package for zstd is missing.
        OSError: it cannot be opened; or later, while reading: it is damaged.
        EOFError: later, while reading: the compressed file was cut.
    """
    if file.name.endswith(".gz"):
        return io.BufferedReader(gzip.open(file, "rb"), CHUNK_BYTES)
    if file.name.endswith(".zst"):
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
    return file.open("rb", buffering=CHUNK_BYTES)


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
