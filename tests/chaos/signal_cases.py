"""A launcher that gets signals, over ranks that take their time to save."""

import os
import signal
import time
from pathlib import Path

from launches import launch

RANKS = 2


def ranks_that_save(root, seconds, second=None):
    """The launcher's exit code, and the signals that each rank saw.

    Args:
        root: a folder.
        seconds: that a rank takes to save when it is asked to stop.
        second: a signal that the launcher gets while they save.
    """
    from trainkit.train.faults import signals

    signals._PATIENCE_SECONDS = 0.2  # else a test would take as long as it has
    root = Path(root)
    launcher = os.fork()
    if launcher == 0:
        os._exit(launch([], RANKS, in_rank=lambda: _rank(root, seconds)))
    _wait_for(root, "ready")
    os.kill(launcher, signal.SIGTERM)
    if second is not None:
        _wait_for(root, "saving")
        os.kill(launcher, second)
    code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
    return code, [path.read_text() for path in sorted(root.glob("ended.*"))]


def _wait_for(root, what):
    deadline = time.monotonic() + 60
    while len(list(root.glob(f"{what}.*"))) < RANKS and time.monotonic() < deadline:
        time.sleep(0.01)


def _rank(root, seconds):
    seen, name = [], os.environ["RANK"]

    def handle(number, _):
        seen.append(number)
        if len(seen) == 2:
            end(128 + number)
        (root / f"saving.{name}").touch()

    def end(code):
        (root / f"ended.{name}").write_text(" ".join(map(str, map(int, seen))))
        os._exit(code)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    (root / f"ready.{name}").touch()
    while not seen:
        time.sleep(0.01)
    time.sleep(seconds)
    end(75)


def ranks_that_cannot_go_on(root):
    """The launcher's exit code with restarts left, and how often ranks were started."""
    root = Path(root)

    def rank():
        with (root / "starts").open("a") as file:
            file.write("x")
        os._exit(2)

    launcher = os.fork()
    if launcher == 0:
        os._exit(launch([], RANKS, max_restarts=2, in_rank=rank))
    code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
    return code, len((root / "starts").read_text())
