"""Ranks that watch one another, through small files in the run directory.

A rank that was killed leaves the others in a collective, which may wait for half an hour; one that
hangs, for ever. So a thread of every rank writes a line a second: which process it is and how far
it has come. Who sees that another is gone ends its own process and says who it was; who comes no
further writes down where all ranks are.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.errors import StoppedError, TrainkitError
from trainkit.processes import Process
from trainkit.run.status import resume_command
from trainkit.terminal import visible

_LINE_BYTES = 8192
_SAID_AT_MOST = 1000
"""Characters of why a rank has ended; as JSON each may take six bytes."""
_SILENT_SECONDS = 120.0
"""After which a rank of another machine, of which no line arrives, is taken for lost: file systems
between machines show a change late."""

_SLOW = 6.0
"""How many times longer the first step and a save may take."""

_EXPLAIN_SECONDS = 4.0


class LostRankError(TrainkitError):
    """Another rank was killed, has failed, or hangs."""


@dataclass
class _Line:
    """What a rank says of itself.

    Attributes:
        launch: tells this start of the run from earlier ones.
        ended: why it failed; empty while it lives.
    """

    launch: str
    process: Process
    beats: int = 0
    marks: int = 0
    doing: str = "preparing"
    ended: str = ""


class Watch:
    """Watches the other ranks and this one's own progress.

    ``launch`` is the same on all ranks of this start, and on no other start; without
    ``step_timeout`` it waits for ever.

    Attributes:
        timeout: None from when nothing is to be said about how long anything takes.
        factor: how many times longer a step may take now; 1 behind the first one, which compiles.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dist_rank: int,
        world_size: int,
        launch: str,
        step_timeout: float | None,
        record: Callable[[str], None],
        interval: float = 1.0,
    ) -> None:
        self._folder, self._rank, self._world_size = folder, dist_rank, world_size
        self.timeout, self._record, self._interval = step_timeout, record, interval
        self._line = _Line(launch, Process.this())
        self._seen: dict[int, tuple[int, float]] = {}
        self._progress_at = time.monotonic()
        self.factor = _SLOW
        self._done = threading.Event()
        self._write_stacks: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    # -- what the run tells ----------------------------------------------------------------------

    def mark(self, doing: str = "training") -> None:
        """This rank came further. Takes a microsecond."""
        self._line.marks += 1
        self._line.doing = doing
        self._progress_at = time.monotonic()

    @contextlib.contextmanager
    def slow(self, doing: str) -> Iterator[None]:
        """The body may take longer than a step."""
        before, self.factor = self.factor, _SLOW
        self.mark(doing)
        try:
            yield
        finally:
            self.factor = before
            self.mark()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the body runs; the other ranks learn of an error in it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        stacks = self._stacks(self._rank).open("w", encoding="utf-8")
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        self._write_stacks = partial(faulthandler.dump_traceback, stacks, all_threads=True)
        self._write()
        self.mark("preparing")
        self._thread.start()
        try:
            yield
        except BaseException as error:
            lost = self._cause(error)
            if not isinstance(error, StoppedError) or error.is_abort:
                self._line.ended = f"{type(error).__name__}: {error}"[:_SAID_AT_MOST]
                self._write()
            if lost is not None:
                if self._is_first():
                    self._record(lost)
                raise LostRankError(
                    lost, where=str(self._folder.parent), fix=self._fix()
                ) from error
            raise
        finally:
            self._done.set()
            self._thread.join(5)
            if not self._line.ended:  # the last one that has ended well takes the folder along
                self._file(self._rank).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    self._folder.rmdir()
            faulthandler.unregister(signal.SIGUSR2)
            stacks.close()
            with contextlib.suppress(FileNotFoundError):  # the run directory may be gone
                if not self._stacks(self._rank).stat().st_size:
                    self._stacks(self._rank).unlink()

    # -- the thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        woke = time.monotonic()
        while not self._done.wait(self._interval):
            slept, woke = time.monotonic() - woke, time.monotonic()
            if slept > 2 * self._interval:  # this process was stopped: that is nobody else's delay
                self._progress_at += slept
            self._line.beats += 1
            self._write()
            lost = self._lost()
            if lost is not None:
                time.sleep(_EXPLAIN_SECONDS / 2)  # what this rank says by itself says more
                if not self._done.is_set():
                    self._end(lost)
            if self.timeout is not None:
                waited = time.monotonic() - self._progress_at
                if waited > self.timeout * self.factor:
                    self._end(self._hang(waited))

    def _write(self) -> None:
        text = json.dumps(asdict(self._line)).encode().ljust(_LINE_BYTES)
        with contextlib.suppress(OSError):  # a full disk must not end a run that could go on
            descriptor = os.open(self._file(self._rank), os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.pwrite(descriptor, text, 0)
            finally:
                os.close(descriptor)

    def _others(self) -> dict[int, _Line]:
        """What the other ranks of this start have said last."""
        lines = {}
        for rank in set(range(self._world_size)) - {self._rank}:
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
                values: dict[str, Any] = json.loads(self._file(rank).read_bytes())
                line = _Line(**{**values, "process": Process(**values["process"])})
                if line.launch == self._line.launch:
                    lines[rank] = line
        return lines

    def _lost(self) -> str | None:
        now = time.monotonic()
        for rank, line in sorted(self._others().items()):
            who = f"rank {rank} (process {line.process.pid} on {line.process.host})"
            if line.ended:
                return f"{who} has failed: {line.ended}"
            if line.process.is_gone:
                return f"{who} was killed"
            beats, since = self._seen.get(rank, (-1, now))
            self._seen[rank] = (line.beats, now if line.beats != beats else since)
            if not line.process.is_here and now - self._seen[rank][1] > _SILENT_SECONDS:
                return f"{who} has said nothing for {_SILENT_SECONDS:.0f} s"
        return None

    def _hang(self, waited: float) -> str:
        """Have every rank of this machine write its stacks, and say who is behind."""
        others = self._others()
        for line in others.values():
            if line.process.is_here and not line.process.is_gone:
                with contextlib.suppress(OSError):
                    os.kill(line.process.pid, signal.SIGUSR2)
        # Not by a signal: that would look at this thread's frames while they change, and may crash.
        self._write_stacks()
        stopped = [rank for rank, line in others.items() if line.process.is_stopped]
        for rank in stopped:  # writes its stacks when it goes on, and then finds the others gone
            with contextlib.suppress(OSError):
                os.kill(others[rank].process.pid, signal.SIGCONT)
        time.sleep(2.0)
        everyone = {self._rank: self._line, **others}
        behind = stopped or [min(everyone, key=lambda rank: (everyone[rank].marks, rank))]
        places = ", ".join(
            f"rank {rank}{' (stopped by a signal)' if rank in stopped else ''}: "
            f"{everyone[rank].doing}"
            for rank in sorted(everyone)
        )
        return (
            f"no progress for {waited:.0f} s (faults.step_timeout); rank {behind[0]} is behind "
            f"({places}); the stacks of all ranks are in {self._folder.parent}/stacks-rank*.txt"
        )

    def _end(self, reason: str) -> None:
        """End this process, whose main thread may never come back."""
        if self._is_first():
            with contextlib.suppress(Exception):
                self._record(reason)
            message = visible(f"error: {reason}\n  fix: {self._fix()}")
            os.write(sys.stderr.fileno(), f"{message}\n".encode())
        self._line.ended = f"ended, because {reason}"[:_SAID_AT_MOST]
        self._write()
        os._exit(1)

    def _is_first(self) -> bool:
        """Whether this is the lowest rank that is left, which speaks for all."""
        return not any(
            rank < self._rank and not line.process.is_gone and not line.ended
            for rank, line in self._others().items()
        )

    def _cause(self, error: BaseException) -> str | None:
        """Which rank's end has led to an error here; a connection breaks before a file tells."""
        if isinstance(error, StoppedError):  # a launcher's, when it finds that a rank is gone
            return self._lost()
        if isinstance(error, TrainkitError) or not isinstance(error, Exception):
            return None
        deadline = time.monotonic() + (_EXPLAIN_SECONDS if self._world_size > 1 else 0)
        while time.monotonic() < deadline:
            lost = self._lost()
            if lost is not None:
                return lost
            time.sleep(0.1)
        return None

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.json"

    def _stacks(self, rank: int) -> Path:
        return self._folder.parent / f"stacks-rank{rank}.txt"

    def _fix(self) -> str:
        go_on = resume_command(self._folder.parent.parent)
        return f"look at what that rank says (logs/ of the run), and continue with: {go_on}"
