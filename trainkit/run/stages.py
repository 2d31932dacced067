"""Where the time of a start went, from the command to the first step: ``start.json``."""

import time
from pathlib import Path

FILE = "start.json"


def now() -> float:
    """Seconds on the clock that the starts of processes are measured by."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def process_began() -> float:
    """When this process was started, on the clock of :func:`now`; now where nothing says so."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        began = int(fields[19]) / 100  # USER_HZ is 100 on every Linux that has torch
    except (OSError, ValueError, IndexError):
        return now()
    return began if now() - began >= 0 else now()


class Stages:
    """A stop-watch with a name for each stretch.

    Args:
        began: when the command was given, on the clock of :func:`now`; by default it starts now.
    """

    def __init__(self, began: float | None = None) -> None:
        self._began = self._last = now() if began is None else began
        self._seconds: dict[str, float] = {}

    def end(self, stage: str) -> None:
        """A stage ends here; the next one begins. A stage that comes again is added up."""
        at = now()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + at - self._last
        self._last = at

    def to_dict(self) -> dict[str, float | dict[str, float]]:
        """The content of ``start.json``: seconds in all, and of each stage in order."""
        stages = {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        return {"seconds": round(self._last - self._began, 3), "stages": stages}
