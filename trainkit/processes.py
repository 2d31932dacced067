"""Whether a process is alive, stopped or gone, and how one is started. No torch."""

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

LAUNCHER = "TRAINKIT_LAUNCHER"
"""The variable with the number of the process that has started the ranks of this host."""

STARTER = str(Path(__file__).with_name("started") / "module.py")
"""The script that every process of Python's is started with: see there."""


def module_command(module: str, *arguments: str) -> list[str]:
    """``python -m MODULE ARGUMENTS``, for which the user's folder is no place to import from."""
    return [sys.executable, STARTER, module, *arguments]


@dataclass(frozen=True)
class Process:
    """A process, told from a later one with the same number by when it started.

    Attributes:
        start: when it started, in clock ticks since boot; None where that is not known.
    """

    host: str
    pid: int
    start: str | None

    @classmethod
    def this(cls) -> "Process":
        """The one that asks."""
        return cls(socket.gethostname(), os.getpid(), _fields(os.getpid())[1])

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine, so that it can be asked about."""
        return self.host == socket.gethostname()

    @property
    def is_gone(self) -> bool:
        """Whether it ended; False where that cannot be known."""
        if not self.is_here:
            return False
        state, start = _fields(self.pid)
        return state in (None, "Z", "X") or (self.start is not None and start != self.start)

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP or a debugger holds it."""
        return self.is_here and _fields(self.pid)[0] in ("T", "t")


def _fields(pid: int) -> tuple[str | None, str | None]:
    """The state and the start time of a process on this machine; (None, None) if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return (None, None)
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
