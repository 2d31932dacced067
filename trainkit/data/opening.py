"""Files as streams of plain bytes, whatever they are compressed with."""

import gzip
import io
from pathlib import Path
from typing import IO, Any

from trainkit.errors import DataError

COMPRESSIONS = (".gz", ".zst")
CHUNK_BYTES = 1 << 20


def open_bytes(file: Path) -> IO[bytes]:
    """Open a file for reading, decompressed as its suffix says.

    Raises:
        DataError: it is no zstd stream, or the package for it is missing.
        OSError: it cannot be opened; or later, while reading: it is damaged.
        EOFError: later, while reading: a .gz was cut.
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
        try:
            stream = zstandard.open(file, "rb")
        except zstandard.ZstdError as error:
            raise DataError(f"the file is no zstd stream: {error}", where=str(file)) from error
        return io.BufferedReader(_ZstdErrors(stream, file), CHUNK_BYTES)
    return file.open("rb", buffering=CHUNK_BYTES)


class _ZstdErrors(io.RawIOBase):
    """Turns zstandard's own exception into an OSError, as every other stream raises."""

    def __init__(self, stream: Any, file: Path) -> None:
        import zstandard

        self._stream = stream
        self._error = zstandard.ZstdError

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except self._error as error:
            raise OSError(f"damaged zstd stream: {error}") from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()
