"""A chat template that never ends is stopped: templates are programs, and come from outside."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from trainkit.errors import DataError

SECONDS = 10.0
"""Longer than any conversation takes to render: a thousand turns take about 0.1 s."""


@contextlib.contextmanager
def patience(seconds: float | None = None) -> Iterator[None]:
    """Raise a DataError in the body when it takes too long.

    Only in a process's main thread, where signals arrive; elsewhere the body runs as it is.

    Args:
        seconds: by default ``SECONDS``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    limit = SECONDS if seconds is None else seconds

    def stop(number: int, frame: FrameType | None) -> None:
        raise DataError(
            f"the chat template was still rendering one conversation after {limit:g} s",
            where="the tokenizer's chat_template, or data.chat_template",
            fix="give one that ends with data.chat_template",
        )

    before = signal.signal(signal.SIGALRM, stop)
    # And again after: Jinja takes any error of a constant for one that it should not fold.
    signal.setitimer(signal.ITIMER_REAL, limit, min(limit, 1.0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
