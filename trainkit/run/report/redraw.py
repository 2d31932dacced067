"""Redraw a run's curves and its report while it trains, in a process of their own.

matplotlib holds Python's lock for most of a drawing's second; a thread of the training process
would make the steps of that second wait for it.

    python -m trainkit.run.report.redraw RUN
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from trainkit.errors import ResumeRefusedError
from trainkit.processes import module_command
from trainkit.run.directory import RunDirectory
from trainkit.run.report.curves import History
from trainkit.run.report.html import write_report
from trainkit.run.report.plot import draw_plots

_PATIENCE_SECONDS = 5.0


class CurveRefresher:
    """Starts a drawing now and then, never two at once.

    Args:
        run: whose ``metrics.jsonl`` to draw.
        interval_seconds: the shortest time between two drawings.
    """

    def __init__(self, run: RunDirectory, *, interval_seconds: float = 30.0) -> None:
        self._run = run
        self._interval = interval_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._started = time.monotonic()

    def refresh(self, *, has_news: bool = False) -> bool:
        """Start a drawing if it is time; takes microseconds if not. Call it at every log.

        Args:
            has_news: an evaluation or a checkpoint: it is time a little earlier.

        Returns:
            Whether one was started.
        """
        is_busy = self._process is not None and self._process.poll() is None
        interval = self._interval / 6 if has_news else self._interval
        if is_busy or time.monotonic() - self._started < interval:
            return False
        self._started = time.monotonic()
        command = module_command("trainkit.run.report.redraw", str(self._run.root))
        # A machine that cannot start one more process must not lose a run for a picture.
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            return True
        return False

    def close(self) -> None:
        """Stop a drawing that is under way: the run's end draws everything once more."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def draw_all(run: RunDirectory, *, is_training: bool = False) -> None:
    """The report and all pictures, from one reading of the metrics.

    Args:
        run: whose.
        is_training: more is to come; a browser loads the report again by itself.
    """
    history = History.read(run.metrics)
    write_report(run, history, is_training=is_training)
    draw_plots(run, history)


@contextlib.contextmanager
def reported_at_an_early_end(run: RunDirectory) -> Iterator[None]:
    """Write the report of a run that fails or is stopped, as its end would; enter it first.

    The last drawing may be half a minute old, says that the run goes on, and may not be there.
    """
    try:
        yield
    except ResumeRefusedError:
        raise  # the run is what it was
    except BaseException:
        # What ended the run is more important than its page.
        with contextlib.suppress(Exception):
            if run.metrics.exists():
                write_report(run)
        raise


def main() -> None:
    """Draw the curves of the run named on the command line."""
    # Leave through the clean-up of half-written files, and after everybody else's work.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.nice(10)
    run = RunDirectory(Path(sys.argv[1]))
    draw_all(run, is_training=True)


if __name__ == "__main__":
    main()
