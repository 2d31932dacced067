"""What a run does about a step whose numbers are bad, and what it remembers to decide it.

All of it is decided from numbers that every rank has, so all ranks decide alike; and it is saved
with each checkpoint, so that a continued run decides as the unbroken one.
"""

import json
import statistics
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.checkpoint.weights.contents import taking_up

_FILE = "numbers.json"

_SMALLEST_SHARE = 0.01
"""Of the median: the least that the median distance counts as. A loss that hardly moves is no
reason to call its next small step a spike."""


@dataclass
class NumberPolicy:
    """The recipe's rules about bad numbers, and the steps so far.

    Attributes:
        on_bad: stop, skip or roll_back.
        max_skips: steps that may be skipped in a row.
        max_rollbacks: how often the run may go back.
        spike: see `limit`; None watches for no spike.
        window: steps that a loss is compared with.
        passed_over: steps whose update is left out whatever their numbers: the run has gone back
            to before them.
        in_a_row: steps skipped since the last that was taken.
        num_steps, num_left_out: since the last logged row, and those of them without an update
            whose loss is not in the row's mean.
    """

    on_bad: str = "stop"
    max_skips: int = 5
    max_rollbacks: int = 3
    spike: float | None = None
    window: int = 100
    passed_over: frozenset[int] = frozenset()
    in_a_row: int = 0
    num_steps: int = 0
    num_left_out: int = 0
    _losses: deque[float] = field(default_factory=deque)

    @property
    def leaves_out(self) -> bool:
        """Whether the run may go on behind a step without its update."""
        return self.on_bad == "skip" or bool(self.passed_over)

    @property
    def goes_back(self) -> bool:
        """Whether the run may go back once more."""
        return self.on_bad == "roll_back" and len(self.passed_over) < self.max_rollbacks

    @property
    def limit(self) -> float:
        """The loss above which the next step spikes: median + spike x MAD of the last steps."""
        if self.spike is None or len(self._losses) < self.window:
            return float("inf")
        median = statistics.median(self._losses)
        distance = statistics.median(abs(loss - median) for loss in self._losses)
        return median + self.spike * max(distance, _SMALLEST_SHARE * abs(median))

    def describe_limit(self) -> str:
        """In a message."""
        median = statistics.median(self._losses)
        return f"the median of the last {self.window} steps is {median:.4g}, faults.spike's limit "

    def take(self, loss: float) -> None:
        """A step was taken; ``loss`` is its mean over the ranks."""
        self.num_steps += 1
        self.in_a_row = 0
        if self.spike is not None:
            self._losses.append(loss)
            while len(self._losses) > self.window:
                self._losses.popleft()

    def leave_out(self, *, is_new: bool) -> None:
        """A step was not taken; ``is_new``: nobody knew that it would not."""
        self.num_steps += 1
        self.num_left_out += 1
        self.in_a_row += is_new

    def take_counts(self) -> tuple[int, int]:
        """``num_steps`` and ``num_left_out``, which begin at 0 again."""
        counts = self.num_steps, self.num_left_out
        self.num_steps = self.num_left_out = 0
        return counts

    def save(self, directory: Path) -> None:
        """Into a checkpoint; one rank does."""
        values = {
            "in_a_row": self.in_a_row,
            "num_steps": self.num_steps,
            "num_left_out": self.num_left_out,
            "losses": list(self._losses),  # JSON keeps every bit of a float
        }
        (directory / _FILE).write_text(json.dumps(values), encoding="utf-8")

    def load(self, directory: Path) -> None:
        """From a checkpoint; one of a run without such rules has nothing to tell."""
        path = directory / _FILE
        if not path.is_file():
            return
        with taking_up(path):
            values = json.loads(path.read_text(encoding="utf-8"))
            names = ("in_a_row", "num_steps", "num_left_out")
            self.in_a_row, self.num_steps, self.num_left_out = (int(values[key]) for key in names)
            self._losses = deque(map(float, values["losses"]))
        while len(self._losses) > self.window:
            self._losses.popleft()
