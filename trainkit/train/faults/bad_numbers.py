"""What a run does about a step whose numbers are bad, and what it remembers to decide it.

All of it is decided from numbers that every rank has, so all ranks decide alike; and it is saved
with each checkpoint, so that a continued run decides as the unbroken one.
"""

import json
import shutil
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from trainkit.checkpoint.weights.contents import taking_up
from trainkit.errors import RunDirectoryError
from trainkit.run.files import jsonable, write_bytes_atomic

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


# The batch of a step whose numbers are bad, kept for `trainkit diagnose`: no pickle.
#
# Each rank writes one safetensors file: the tensors of its micro-batches, and, as JSON in the
# header, their rows, their losses and why the step is bad.

FOLDER = "bad_batches"
WEIGHTS = "weights"
"""Inside the folder of a step that ended the run: the weights it met."""

_KEPT = 20
"""Steps whose batches stay: a run that skips now and then must not fill the disk."""


@dataclass(frozen=True)
class BadBatch:
    """What one rank knows of a bad step.

    Attributes:
        step: its number, from 1.
        dist_rank: whose part it is.
        kind: loss, gradient, spike or weights: what was bad.
        says: the sentence that the user read.
        losses: of the micro-batches, each its part of the step's loss.
        grad_norm: before clipping.
        limit: of a spike.
        rows: the samples of each micro-batch, ``file:line`` where that is known.
        batches: the micro-batches' tensors by name.
        extras: what else they hold, by name: plain values.
    """

    step: int
    dist_rank: int
    kind: str
    says: str
    losses: Sequence[float]
    grad_norm: float
    limit: float
    rows: Sequence[Sequence[str]]
    batches: Sequence[Mapping[str, torch.Tensor]] = field(repr=False)
    extras: Sequence[Mapping[str, Any]] = ()


def split(batch: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A batch's tensors and its plain values."""
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    plain = (str, int, float, bool, list, type(None))
    return tensors, {k: v for k, v in batch.items() if k not in tensors and isinstance(v, plain)}


def folder_of(run: Path, step: int) -> Path:
    """Where the batch of a step is."""
    return run / FOLDER / f"step-{step}"


def write_batch(run: Path, bad: BadBatch) -> Path:
    """Keep this rank's part; returns the step's folder.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    folder = folder_of(run, bad.step)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{number}.{name}": value.detach().cpu().contiguous().clone()
        for number, batch in enumerate(bad.batches)
        for name, value in batch.items()
    }
    about = {key: value for key, value in vars(bad).items() if key != "batches"}
    text = json.dumps(jsonable(about), ensure_ascii=False)
    data = save(tensors, metadata={"bad_batch": text})
    path = folder / f"rank{bad.dist_rank}.safetensors"
    write_bytes_atomic(path, data)
    if bad.dist_rank == 0:
        for old in steps_kept(run)[:-_KEPT]:
            shutil.rmtree(folder_of(run, old), ignore_errors=True)
    return folder


def steps_kept(run: Path) -> list[int]:
    """The steps whose batches were kept, in order."""
    names = (path.name.removeprefix("step-") for path in (run / FOLDER).glob("step-*"))
    return sorted(int(name) for name in names if name.isdigit())


def read_batches(folder: Path) -> list[BadBatch]:
    """What the ranks kept of a step, in order.

    Raises:
        RunDirectoryError: a file is damaged, or there is none.
    """
    found = []
    for path in sorted(folder.glob("rank*.safetensors"), key=lambda p: (len(p.name), p.name)):
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["bad_batch"])
                batches: list[dict[str, torch.Tensor]] = [{} for _ in about["rows"]]
                for key in file.keys():  # noqa: SIM118 - no mapping
                    number, _, name = key.partition(".")
                    batches[int(number)][name] = file.get_tensor(key)
            about["losses"] = [float(loss) for loss in about["losses"]]
            about |= {key: float(about[key]) for key in ("grad_norm", "limit")}
            found.append(BadBatch(**about, batches=batches))
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
            raise RunDirectoryError(
                f"this is not a batch that a run has kept: {error}",
                where=str(path),
                fix="delete its folder, and go on with the run: what is bad again is kept again",
            ) from error
    if not found:
        raise RunDirectoryError("no batch is kept here", where=str(folder))
    return found
