"""The starts of a run: ``changes.jsonl``, a line each, and what a start does to the directory.

The first line holds the overrides of the command line; each later one what a continued run was
given on top, what that changed, and which checkpoints it gave up. Recipe and overrides together are
the recipe as given, from which every start works out its values again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from trainkit.errors import RunDirectoryError
from trainkit.places import checkpoints_in, step_of
from trainkit.redact import REDACTED, redact, redact_argv
from trainkit.run.directory import RunDirectory, file_name, is_unfinished
from trainkit.run.files import explain_os_errors, jsonable, write_text_atomic
from trainkit.run.status import say_if_changed, utc_now

RETIRED = "retired-"
"""Before the name of a checkpoint that the run went back behind."""


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        step: the optimizer step it continues from; 0 begins.
        time: ISO 8601, UTC.
        overrides: ``section.key=value``, options of the command line included.
        changes: ``{key, before, now}`` for each value that is not what it was.
        accepted: the same for what ``--allow-changed`` let pass.
        retired: checkpoints and models of later steps that no longer count.
        passed_over: steps whose update is left out from here on: a bad batch made the run go back.
        former_recipe: the recipe's text before, where another one was given.
    """

    overrides: tuple[str, ...]
    step: int = 0
    time: str = dataclasses.field(default_factory=utc_now)
    changes: tuple[Mapping[str, Any], ...] = ()
    accepted: tuple[Mapping[str, Any], ...] = ()
    retired: tuple[str, ...] = ()
    passed_over: tuple[int, ...] = ()
    former_recipe: str | None = None


def append_start(run: RunDirectory, start: Start) -> None:
    """Add a line to ``changes.jsonl``, without secrets."""
    row = {**dataclasses.asdict(start), "overrides": redact_argv(start.overrides)}
    line = json.dumps(jsonable(redact(row)), ensure_ascii=False) + "\n"
    before = run.changes.read_text(encoding="utf-8") if run.changes.is_file() else ""
    whole = before[: before.rfind("\n") + 1]  # without a line that a crash tore
    write_text_atomic(run.changes, whole + line)


@functools.cache
def _shape() -> TypeAdapter[Start]:
    return TypeAdapter(Start)


def read_starts(run: RunDirectory) -> list[Start]:
    """The starts so far; every one is written with those before it, so none is ever torn."""
    say_if_changed(run.changes)
    if not run.changes.is_file():
        return []
    starts = []
    lines = run.changes.read_bytes().removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            starts.append(_shape().validate_json(line, strict=True))
        except ValueError as error:
            raise RunDirectoryError(
                f"line {number} is damaged, so what the run was given is not known",
                where=str(run.changes),
                fix="give the recipe with --config and every override again, without this file",
            ) from error
    return starts


def passed_over(run: RunDirectory) -> frozenset[int]:
    """Every step whose update the run leaves out because it went back to before it."""
    return frozenset(step for start in read_starts(run) for step in start.passed_over)


def recorded_overrides(run: RunDirectory) -> list[tuple[str, str]]:
    """Every override so far with the label of its origin; secrets were never kept."""
    return [
        (text, f"override at step {start.step}")
        for start in read_starts(run)
        for text in start.overrides
        if REDACTED not in text
    ]


def retire_after(run: RunDirectory, step: int) -> tuple[str, ...]:
    """Take the checkpoints after ``step`` out of the run by name, and the final model with them.

    They belong to an attempt that the run went back behind; left in place, the next start would
    take them for the newest.
    """
    # The newest first: killed half-way, the older ones are still in order.
    later = [path for path in reversed(checkpoints_in(run.root)) if step_of(path) > step]
    if later and run.final.exists():
        later.append(run.final)
    names = []
    for path in later:
        target = path.with_name(RETIRED + path.name)
        number = 1
        while target.exists():
            number += 1
            target = path.with_name(f"{RETIRED}{path.name}-{number}")
        with explain_os_errors(path):
            path.rename(target)
        names.append(target.name)
    return tuple(names)


def begin_again(path: Path) -> RunDirectory:
    """A run that was stopped before its first checkpoint, to be begun again in its directory."""
    if is_unfinished(path):
        return RunDirectory.adopt(path)
    run = RunDirectory.open(path)
    for pattern in ("dropped*.jsonl", "changed*.jsonl"):  # rows are added to these as they stream
        for ledger in run.root.glob(pattern):
            ledger.unlink()
    return RunDirectory.adopt(run.root)


def runs_named(parent: Path, name: str) -> list[Path]:
    """The runs of a recipe, the newest first: ``NAME-<stamp>``, not ``NAME-lowlr-<stamp>``."""
    pattern = re.compile(re.escape(file_name(name)) + r"-(\d{8}T\d{6}Z)(?:-(\d+))?")
    found = []
    for path in parent.glob("*") if parent.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and path.is_dir():
            found.append((match[1], int(match[2] or 1), path))
    return [path for *_, path in sorted(found, reverse=True)]


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
    """A stop-watch with a name for each stretch."""

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
