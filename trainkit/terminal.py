"""What is printed: no character of it commands a terminal, and its reader may leave."""

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO, cast

UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]"
)
"""Characters that move a terminal's cursor, change its state, or turn text around; tabs and line
feeds are not among them."""


def visible(text: str) -> str:
    """A text whose control characters are written as ``\\u001b``, which JSON reads back."""
    return UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield visible("  ".join(map(str.ljust, row, widths)).rstrip())


class _LastingStream:
    """A stream that takes what is written when nobody is there any more to read it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._go_on_without_a_reader(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._go_on_without_a_reader(error)

    def _go_on_without_a_reader(self, error: OSError) -> None:
        if error.errno not in _NOBODY_READS:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # what is in the buffer goes there, too
        os.close(nowhere)


_NOBODY_READS = (errno.EPIPE, errno.EIO)
"""A pipe whose reader has ended (``| head``); a terminal that was closed."""


def lasting(stream: TextIO | None) -> TextIO:
    """The same stream for what must not end with its reader, as a run of many hours."""
    return cast(TextIO, stream and _LastingStream(stream))
