"""The numbers behind the pictures: series of metrics, smoothed and thinned. No matplotlib here."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import Any

from trainkit.errors import RunDirectoryError
from trainkit.places import regular
from trainkit.run.format import as_float
from trainkit.run.metrics import decode_row, is_whole, read_metrics, say_damaged

Row = Mapping[str, Any]

_BLOCK = 64
"""Rows that are taken apart at a time: they stay in the processor's cache."""
_BLOCK_BYTES = 1 << 16
"""Of lines that are read at a time: those next to an evaluation are read as JSON, one by one."""
# Each pass averages over about this share of the run: noise goes, bends stay.
_SMOOTHING_SHARE = 1 / 100


@dataclass(frozen=True)
class Series:
    """One metric over the steps.

    Attributes:
        steps: ascending.
        values: finite, one a step.
        broken_steps: where the metric was NaN or infinite.
    """

    steps: Sequence[float]
    values: Sequence[float]
    broken_steps: Sequence[float]

    def __len__(self) -> int:
        return len(self.steps)


class Columns:
    """The numbers of rows by metric, in a tenth of their room: a run may have logged a million."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._series: dict[str, tuple[array[float], array[float], array[float]]] = {}
        self._thinned: dict[tuple[str, int], Series] = {}
        self.add(rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Rows with a ``step``; they need not be there together."""
        rows = iter(rows)
        while block := list(islice(rows, _BLOCK)):
            keys = [key for key in dict.fromkeys(chain.from_iterable(block)) if key != "step"]
            self.extend(["step", *keys], _columns(block, ["step", *keys]))

    def extend(self, keys: Sequence[str], columns: Iterable[Sequence[Any]]) -> None:
        """The values of some rows by metric, steps first; None where a row has none."""
        given = iter(columns)
        steps = array("d", next(given, ()))
        for key, column in zip(keys[1:], given, strict=True):
            if key not in self._series:
                self._series[key] = (array("d"), array("d"), array("d"))
            _add(self._series[key], steps, column)

    @property
    def keys(self) -> list[str]:
        """Every metric, in order of appearance."""
        return list(self._series)

    def series(self, key: str) -> Series:
        """The values of one."""
        return Series(*self._series.get(key, ([], [], [])))

    def thinned(self, key: str, most: int) -> Series:
        """See `thinned`."""
        known = self._thinned.get((key, most))
        if known is None:
            known = self._thinned[key, most] = thinned(self.series(key), most)
        return known


class History:
    """What a run has logged, read once and kept in little room: a run may have a million rows.

    Attributes:
        columns: the numbers of all rows.
        first: row of training; None without one.
        last: row of training.
        evaluations: rows with figures of an evaluation, whole.
        last_step: of any row; 0 without one.
        figures: what has been drawn of them, by the name of its curve.
    """

    def __init__(self) -> None:
        self.columns = Columns()
        self.first: Row | None = None
        self.last: Row | None = None
        self.evaluations: list[Row] = []
        self.last_step = 0
        self.figures: dict[str, Any] = {}
        self._forms: dict[tuple[str, ...], re.Pattern[bytes]] = {}

    @classmethod
    def read(cls, metrics: Path) -> History:
        """A ``metrics.jsonl``; damaged lines are named, and one that is missing has no rows."""
        history, damaged = cls(), list[int]()
        if regular(metrics, RunDirectoryError).exists():
            with metrics.open("rb") as stream:
                number = 1
                while lines := stream.readlines(_BLOCK_BYTES):
                    damaged += history._take(lines, number)
                    number += len(lines)
        say_damaged(metrics, tuple(damaged))
        return history

    def _take(self, lines: list[bytes], first: int) -> list[int]:
        """Take lines up, of which the first has this number; the numbers of damaged ones."""
        damaged = []
        ends = [decode_row(line.decode("utf-8", "replace")) for line in (lines[0], lines[-1])]
        if self._take_numbers(ends[0] or {}, lines):
            rows = [row for row in ends if row is not None]
        else:
            read = [decode_row(line.decode("utf-8", "replace")) for line in lines]
            rows = [row for row in read if row is not None]
            for number, (row, line) in enumerate(zip(read, lines, strict=True), first):
                if row is None and is_whole(line):
                    damaged.append(number)
            self.columns.add(rows)
        for row in rows:
            if "loss" in row:
                self.first, self.last = self.first or row, row
            if any(key.startswith("eval_") for key in row):
                self.evaluations.append(row)
            self.last_step = max(self.last_step, row["step"])
        return damaged

    def _take_numbers(self, like: Row, lines: list[bytes]) -> bool:
        """Take lines that have the form of their first one, and no more than its numbers.

        Nearly all are like that; so they are read in a third of the time that JSON takes.
        """
        keys = tuple(like)
        are_numbers = {*map(type, like.values())} <= {float, int} and keys[:1] == ("step",)
        if not are_numbers or "loss" not in like or any(key.startswith("eval_") for key in keys):
            return False
        if keys not in self._forms:
            others = (re.escape(json.dumps(key)) + r": ([-+.\deE]+)" for key in keys[1:])
            form = ", ".join([r'"step": (\d+)', *others])
            self._forms[keys] = re.compile(rf"^{{{form}}}\n".encode(), re.MULTILINE)
        found = self._forms[keys].findall(b"".join(lines))
        if len(found) != len(lines):
            return False
        try:
            columns = [array("d", map(float, column)) for column in zip(*found, strict=True)]
        except ValueError:
            return False
        if not all(isfinite(sum(column)) for column in columns):
            return False
        self.columns.extend(keys, columns)
        return True


def _columns(rows: Sequence[Row], keys: Sequence[str]) -> Iterable[Sequence[Any]]:
    """The values of some rows by key; None where a row has it not."""
    try:
        return zip(*map(itemgetter(*keys), rows), strict=True) if len(keys) > 1 else []
    except KeyError:
        return [[row.get(key) for row in rows] for key in keys]


def _add(
    kept: tuple[array[float], array[float], array[float]],
    steps: array[float],
    values: Sequence[Any],
) -> None:
    """Put the values of some rows where they belong; text and gaps are left out."""
    with suppress(OverflowError):  # a whole number of hundreds of digits
        if isinstance(values, array) or {*map(type, values)} <= {float, int}:
            numbers = array("d", values)
            if isfinite(sum(numbers)):
                kept[0].extend(steps)
                kept[1].extend(numbers)
                return
    for step, number in zip(steps, values, strict=True):
        value = as_float(number)
        if value is None:
            continue
        if isfinite(value):
            kept[0].append(step)
            kept[1].append(value)
        else:
            kept[2].append(step)


def series(rows: Iterable[Row], key: str) -> Series:
    """The values of one metric in rows that have it."""
    columns = Columns({"step": row["step"], key: row[key]} for row in rows if key in row)
    found = columns.series(key)
    return Series(list(found.steps), list(found.values), list(found.broken_steps))


def smoothed(values: Sequence[float]) -> list[float]:
    """The exponential mean over the values before and after each one.

    A mean of what came before only lags behind a falling loss and shows it too high.
    """
    decay = 1 - 1 / max(len(values) * _SMOOTHING_SHARE, 2)
    before = _decayed_sums(values, decay)
    after = _decayed_sums(values[::-1], decay)[::-1]
    weights = _decayed_sums([1.0] * len(values), decay)
    # Each value is in both sums, each weight too: once must go.
    return [
        (before[i] + after[i] - values[i]) / (weights[i] + weights[-1 - i] - 1)
        for i in range(len(values))
    ]


def _decayed_sums(values: Sequence[float], decay: float) -> list[float]:
    """``sums[i] = values[i] + decay * sums[i - 1]``."""
    total = 0.0
    sums = []
    for value in values:
        total = decay * total + value
        sums.append(total)
    return sums


def thinned(curve: Series, most: int) -> Series:
    """At most about ``most`` points with the same outline: each stretch keeps its low and high.

    A run of a million steps must not take a minute to draw, nor lose its spikes.
    """
    if len(curve) <= most:
        return curve
    stretch = math.ceil(len(curve) / (most // 2))
    kept: list[int] = []
    for start in range(0, len(curve), stretch):
        stop = start + stretch
        part = curve.values[start:stop]
        kept += sorted({start + part.index(min(part)), start + part.index(max(part))})
    return Series(
        [curve.steps[index] for index in kept],
        [curve.values[index] for index in kept],
        curve.broken_steps,
    )


def warmup_end(rates: Series) -> float | None:
    """The step at which the learning rate is highest for the first time; None if it never rose."""
    if len(rates) < 2:
        return None
    values = list(rates.values)
    peak = values.index(max(values))
    return rates.steps[peak] if peak > 0 else None


def by_minutes(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The training rows with the minutes spent in steps so far as their ``step``."""
    timed = [row for row in rows if "loss" in row and as_float(row.get("step_seconds")) is not None]
    spent = seconds_spent(
        [row["step"] for row in timed], [as_float(row["step_seconds"]) or 0.0 for row in timed]
    )
    return [{**row, "step": each / 60} for row, each in zip(timed, spent, strict=True)]


def seconds_spent(steps: Sequence[float], step_seconds: Sequence[float]) -> list[float]:
    """The seconds in all steps up to each row: a row stands for every step since the one before.

    Args:
        steps: of the rows.
        step_seconds: of one step, as each row says.
    """
    befores = [0.0, *steps][:-1]
    parts = zip(befores, steps, step_seconds, strict=True)
    return list(accumulate(each * max(step - before, 1) for before, step, each in parts))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run.

    Args:
        path: a run directory; or any JSON that Hugging Face's Trainer left: ``trainer_state.json``,
            a ``log_history.json`` as an array or as JSON lines, or a directory with one of them.

    Raises:
        RunDirectoryError: there is nothing to draw there.
    """
    for candidate in (
        path / "metrics.jsonl",
        path / "log_history.json",
        path / "trainer_state.json",
    ):
        if candidate.is_file():
            return read_rows(candidate)
    if not path.is_file():
        raise RunDirectoryError(
            "there are no metrics here (no metrics.jsonl, log_history.json or trainer_state.json)",
            where=str(path),
            fix="give the directory that `trainkit sft` printed as its last line",
        )
    if path.name == "metrics.jsonl":
        return read_metrics(path)
    rows = _history(path)
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]


def _history(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        return read_metrics(path)
    if isinstance(content, dict):
        content = content.get("log_history", [content])
    return content if isinstance(content, list) else []
