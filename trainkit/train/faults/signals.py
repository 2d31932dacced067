"""SIGINT, SIGTERM, SIGUSR1 and SIGHUP: a stop that loses nothing, at any moment of a run. No torch.

While a run is being prepared there is nothing to lose: the first signal ends it at once. While it
trains, the first one asks for a stop, on which all ranks agree at the next step; the second aborts.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from trainkit.errors import StoppedError
from trainkit.processes import LAUNCHER

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C; what schedulers send before they kill; what they send to warn; the terminal is gone."""

FAILED = 1000
"""In place of a signal's number, and above them all: the run cannot go on."""

_SAME_PRESS_SECONDS = 2.0
"""A terminal sends Ctrl-C to a launcher and to its ranks, and the launcher sends it on."""

_PATIENCE_SECONDS = 5.0

_LAUNCHER_KILLED = "the launcher was killed"


@dataclass
class StopRequest:
    """A wish to stop.

    Attributes:
        number: of the signal that this rank got; 0 is none.
        agreed: of the signal that any rank got, once all ranks know of it at the same step.
        has_saved: the run ended at a step for it, with a checkpoint.
        misses_evaluation: one was due at that step, and the user was not to wait for it.
    """

    number: int = 0
    agreed: int = 0
    reason: str | None = None
    has_saved: bool = False
    misses_evaluation: bool = False

    def fail(self) -> None:
        """Stop without saving: a checkpoint could not be written, as will be told."""
        self.number = FAILED

    @property
    def is_wanted(self) -> bool:
        return self.number > 0

    @property
    def why(self) -> str:
        if not self.number and _watcher.has_lost_its_launcher():  # another rank has seen it first
            return _LAUNCHER_KILLED
        return self.reason or f"stopped by {signal.Signals(self.agreed or self.number).name}"


class _Watcher:
    """What the handlers of this process do now."""

    def __init__(self) -> None:
        self.stop: StopRequest | None = None
        self.say: Callable[[str], None] = lambda text: None
        self.abandon: Callable[[str], None] = lambda reason: None
        self.phase = "before the first step"
        self.is_ending = False
        self.held: list[int] | None = None
        self.is_orphan = False
        self.launcher: int | None = None
        self._asked_at = 0.0

    def has_lost_its_launcher(self) -> bool:
        return self.launcher is not None and os.getppid() != self.launcher

    def handle(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        why = _LAUNCHER_KILLED if self.is_orphan else f"stopped by {name}"
        if self.held is not None:
            self.held.append(number)
            return
        if self.stop is None:
            if self.is_ending:  # one more must not keep the status from saying how it ended
                return
            self.is_ending = True
            raise StoppedError(number, f"{why} {self.phase}")
        if self.stop.is_wanted:
            if self.is_orphan:
                return  # that was this process's own signal
            is_same = "TORCHELASTIC_RUN_ID" in os.environ and number == self.stop.number
            if is_same and time.monotonic() - self._asked_at < _SAME_PRESS_SECONDS:
                return
            raise StoppedError(number, f"aborted by a second signal ({name})", is_abort=True)
        self.stop.number = number
        self.stop.reason = why if self.is_orphan else None
        self._asked_at = time.monotonic()
        cause = why if self.is_orphan else name
        self.say(f"{cause}: saving after this step; once more aborts at once")

    def give_up_if_stuck(self, numbers: int) -> None:
        """End a process that is being prepared and does not react: it waits inside a library.

        And stop one whose launcher was killed: nobody else tells it, and it would wait for ranks
        that cannot meet any more.
        """
        while not _ended.is_set():
            if select.select([numbers], [], [], 1.0)[0]:
                for number in os.read(numbers, 1):
                    if number in WATCHED and self.stop is None:
                        threading.Timer(_PATIENCE_SECONDS, self._give_up, [number]).start()
            if not self.is_orphan and self.has_lost_its_launcher() and not _ended.is_set():
                self.is_orphan = True
                os.kill(os.getpid(), signal.SIGTERM)

    def _give_up(self, number: int) -> None:
        if self.stop is None and not _ended.is_set():
            why = f"stopped by {signal.Signals(number).name}"
            reason = f"{_LAUNCHER_KILLED if self.is_orphan else why} {self.phase}"
            with contextlib.suppress(Exception):
                self.abandon(reason)
            os._exit(StoppedError(number, reason).exit_code)


_watcher = _Watcher()
_ended = threading.Event()


def acted_on() -> list[signal.Signals]:
    """Those of WATCHED that end this process: `nohup` has a run outlive its terminal."""
    return [
        number
        for number in WATCHED
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


@contextlib.contextmanager
def watching_signals() -> Iterator[None]:
    """Turn signals into a StoppedError, from here to the end of the body."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    _ended.clear()
    _watcher.is_ending = _watcher.is_orphan = False
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    _watcher.launcher = int(os.environ.get(LAUNCHER) or os.getppid()) if is_rank else None
    threading.Thread(target=_watcher.give_up_if_stuck, args=[reader], daemon=True).start()
    before = {number: signal.signal(number, _watcher.handle) for number in acted_on()}
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)  # a launcher's, see `hold_back`
    try:
        yield
    finally:
        _ended.set()
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def not_in_between() -> Iterator[None]:
    """Take note of signals while the body runs, and act on the first when it has ended."""
    _watcher.held = []
    try:
        yield
    finally:
        held, _watcher.held = _watcher.held, None
    if held:
        _watcher.handle(held[0], None)


def hold_back() -> None:
    """Keep signals from this process until `watching_signals`, in the program that it becomes.

    Between ``execv`` and the handlers of the new program one would end it without a word.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)


def leave_to_others() -> None:
    """From here on another's handlers act on signals, and take their time: nothing is stuck."""
    _ended.set()


def record_if_stuck(abandon: Callable[[str], None]) -> None:
    """Call this with the reason before a process that does not react to a signal is ended."""
    _watcher.abandon = abandon


@contextlib.contextmanager
def saving_on_signals(stop: StopRequest, say: Callable[[str], None]) -> Iterator[None]:
    """Let signals ask ``stop`` instead; the second one raises."""
    before = {number: signal.signal(number, _watcher.handle) for number in acted_on()}
    _watcher.stop, _watcher.say = stop, say
    try:
        yield
        _watcher.is_ending = stop.has_saved
    except BaseException:
        _watcher.is_ending = True
        raise
    finally:
        _watcher.stop, _watcher.phase = None, "after the last step"
        for number, handler in before.items():
            signal.signal(number, handler)
