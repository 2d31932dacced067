"""What became of each run: read from the files of run directories, without torch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from trainkit.errors import RunDirectoryError, TrainkitError
from trainkit.places import checkpoints_in, refuse_file, step_of
from trainkit.processes import Process
from trainkit.run.metrics import as_float, read_metrics
from trainkit.run.status import Status, read_status

_STATUS, _METRICS = "status.json", "metrics.jsonl"
# A running run writes its status every ten seconds; on another host its age is all there is.
_SILENT_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """A run in one line.

    Attributes:
        state: ``running``, ``done``, ``failed``, ``interrupted``; ``killed`` where the status says
            running and the process is gone; ``damaged`` where the status cannot be read.
        started: ISO 8601, UTC.
        checkpoints: steps that were saved, the oldest first.
    """

    path: str
    state: str
    reason: str | None
    step: int | None
    total_steps: int | None
    loss: float | None
    eval_loss: float | None
    tokens_per_second: float | None
    started: str | None
    age_seconds: float | None
    checkpoints: list[int]
    has_final: bool


def find_runs(parent: Path) -> Iterator[RunSummary]:
    """The runs in a directory, the latest first; the directory itself where it is a run."""
    refuse_file(parent, RunDirectoryError)
    if not parent.is_dir():
        raise RunDirectoryError(
            "there is no such directory",
            where=str(parent),
            fix="give the directory that holds the runs: trainkit runs DIRECTORY",
        )
    if (parent / _STATUS).is_file():
        yield summarize(parent)
        return
    found = [path for path in parent.iterdir() if (path / _STATUS).is_file()]
    summaries = [summarize(path) for path in found]
    yield from sorted(summaries, key=lambda run: run.started or "", reverse=True)


def summarize(path: Path) -> RunSummary:
    refuse_file(path, RunDirectoryError)
    if not (path / _STATUS).is_file():
        raise RunDirectoryError(
            f"this is not a run: it has no {_STATUS}",
            where=str(path),
            fix="list runs: trainkit runs",
        )
    try:
        status: Status | None = read_status(path / _STATUS)
        reason = status.reason if status else None
    except TrainkitError as error:
        status, reason = None, str(error)
    try:
        rows = read_metrics(path / _METRICS)
    except TrainkitError as error:
        rows, reason = [], reason or str(error)
    trained: dict[str, Any] = next((row for row in reversed(rows) if "loss" in row), {})
    evaluated: dict[str, Any] = next((row for row in reversed(rows) if "eval_loss" in row), {})
    known = [row["step"] for row in rows] + [status.last_step or 0 if status else 0]
    steps = map(step_of, checkpoints_in(path))
    return RunSummary(
        path=str(path),
        state="damaged" if status is None else _state(status),
        reason=reason,
        step=max(known),
        total_steps=status.total_steps if status else None,
        loss=as_float(trained.get("loss")),
        eval_loss=as_float(evaluated.get("eval_loss")),
        tokens_per_second=as_float(trained.get("tokens_per_second")),
        started=status.started if status else None,
        age_seconds=_age(status) if status else None,
        checkpoints=sorted(step for step in steps if step >= 0),
        has_final=(path / "final").is_dir(),
    )


def _state(status: Status) -> str:
    if status.state != "running":
        return status.state
    if status.host is not None and status.pid is not None:
        process = Process(status.host, status.pid, start=None)
        if process.is_here:
            return "killed" if process.is_gone else "running"
    age = _age(status)
    return "running" if age is not None and age < _SILENT_SECONDS else "killed"


def _age(status: Status) -> float | None:
    try:
        return max(time.time() - datetime.fromisoformat(status.updated).timestamp(), 0.0)
    except ValueError:
        return None
