"""One log file for each process, without secrets."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from trainkit.redact import redact_text
from trainkit.run.files import explain_os_errors

# These libraries keep their records from the root logger, so each needs the handler itself.
_LIBRARIES = ("transformers", "datasets", "accelerate", "DeepSpeed", "peft")


class RankLogHandler(logging.FileHandler):
    """Appends redacted records to ``logs/rank<N>.log``.

    A record that arrives twice (from a library's logger and from the root) is written once, and a
    full disk costs the record, not the run.
    """

    def __init__(self, path: Path, dist_rank: int) -> None:
        with explain_os_errors(path):
            super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setLevel(logging.INFO)
        layout = f"%(asctime)s rank{dist_rank} %(levelname)s %(name)s: %(message)s"
        self.setFormatter(logging.Formatter(layout))
        self._last_record: logging.LogRecord | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        if record is self._last_record:
            return
        self._last_record = record
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """The record's line, traceback included, without secrets."""
        return redact_text(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a record that cannot be written."""
        with contextlib.suppress(OSError, ValueError):
            self.flush()


def start_rank_log(path: Path, dist_rank: int) -> RankLogHandler:
    """Send this process's log records and warnings to ``path``.

    Args:
        path: ``RunDirectory.rank_log(dist_rank)``.
        dist_rank: the process's global number.

    Returns:
        The handler, for ``stop_rank_log``.
    """
    handler = RankLogHandler(path, dist_rank)
    root = logging.getLogger()
    if root.level > logging.INFO or root.level == logging.NOTSET:
        # The console must stay as quiet as it was: handlers that took their calm from the root's
        # level get it themselves.
        for other in root.handlers:
            other.setLevel(max(other.level, root.level))
        root.setLevel(logging.INFO)
    root.addHandler(handler)
    for name in _LIBRARIES:
        logging.getLogger(name).addHandler(handler)
    logging.captureWarnings(True)
    return handler


def stop_rank_log(handler: RankLogHandler) -> None:
    """Undo ``start_rank_log`` and close the file."""
    logging.captureWarnings(False)
    for name in ("", *_LIBRARIES):
        logging.getLogger(name).removeHandler(handler)
    handler.close()
