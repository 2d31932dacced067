"""Scores as they are kept: a row a figure, every sample, the files of an evaluation. No torch."""

from __future__ import annotations

import json
import math
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainkit.errors import RunDirectoryError
from trainkit.places import fsync_directory
from trainkit.run.files import explain_os_errors, jsonable
from trainkit.run.metrics import RESULTS, SCORE_HEAD, score_cells
from trainkit.terminal import aligned

_OPEN = ".unfinished"


@dataclass(frozen=True)
class Ranks:
    """Several processes with a copy of the model each; what they exchange is small and on the CPU.

    Attributes:
        gather: a value of every rank, on every rank.
    """

    rank: int = 0
    size: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]


@dataclass(frozen=True)
class Score:
    """One figure of a task, or of a group of tasks.

    Attributes:
        task: in the harness's words.
        metric: with its filter behind a slash, where the task has several.
        stderr: its standard error; None where the harness knows none.
        shots: examples before each question.
        prompts: sha256 of all prompts' token ids.
        parts: of a group, the tasks below it.
        is_part: of a group that was asked for.
        expected: published figures, model to score.
        is_main: the figure that stands for the set.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    shots: int | None
    version: str | None
    num_samples: int
    num_all: int | None
    prompts: str | None = None
    parts: Sequence[str] = ()
    is_part: bool = False
    expected: Mapping[str, float] = field(default_factory=dict)
    is_main: bool = False

    @property
    def name(self) -> str:
        return f"{self.task}/{self.metric}"


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        scores: groups before their parts.
        samples: every question with its prompt, answer and verdict, by task.
        settings: the model, how prompts were made, versions.
        notes: what a reader must know: prompts cut, thoughts not finished.
    """

    scores: Sequence[Score]
    samples: Mapping[str, Sequence[Mapping[str, Any]]]
    settings: Mapping[str, Any]
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "scores": [asdict(score) for score in self.scores],
            "notes": list(self.notes),
            **self.settings,
        }

    @classmethod
    def joined(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """Evaluations of one model as one."""
        return cls(
            [score for part in parts for score in part.scores],
            {task: rows for part in parts for task, rows in part.samples.items()},
            {key: value for part in parts for key, value in part.settings.items()},
            [note for part in parts for note in part.notes],
        )

    def write(self, target: Path, then: Callable[[], object] = lambda: None) -> Path:
        """Write ``results.json`` and ``samples/``, both at once; killed in ``then``, as if none.

        Returns:
            Where: another name, if something has come to the target since the questions began.
        """
        with explain_os_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            mark = uuid.uuid4().hex
            partial = target.parent / f".{target.name}.{mark}"
            partial.mkdir()
            try:
                (partial / _OPEN).touch()
                (partial / "samples").mkdir()
                for task, rows in self.samples.items():
                    text = "".join(f"{_line(row)}\n" for row in rows)
                    name = f"{task.replace('/', '_')}.jsonl"
                    (partial / "samples" / name).write_text(text, "utf-8", "backslashreplace")
                content = json.dumps(jsonable(self.to_dict()), ensure_ascii=False, indent=2)
                (partial / RESULTS).write_text(f"{content}\n", "utf-8", "backslashreplace")
                if _is_taken(target):
                    target = target.with_name(f"{target.name}-{mark[:8]}")
                if (target / _OPEN).is_file():
                    shutil.rmtree(target)
                partial.rename(target)
                fsync_directory(target.parent)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            then()
            (target / _OPEN).unlink()
        return target


def _is_taken(target: Path) -> bool:
    if not target.is_dir():
        return target.exists()
    return any(target.iterdir()) and not (target / _OPEN).is_file()


def check_free(target: Path) -> None:
    """See that an evaluation can be written there."""
    if _is_taken(target):
        raise RunDirectoryError(
            "there is something here already; an evaluation is never overwritten",
            where=str(target),
            fix="give another --output, or leave it out",
        )


def as_lines(scores: Sequence[Score]) -> Iterator[str]:
    """A table for a terminal: parts of groups left out, published figures in the last column."""
    rows = [score_cells(asdict(score)) for score in scores if not score.is_part]
    return aligned([SCORE_HEAD, *rows])


def finite(value: Any) -> float | None:
    """A number, or None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(jsonable(dict(row)), ensure_ascii=False, default=str)
