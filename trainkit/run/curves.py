"""The numbers behind the pictures: series of metrics, smoothed and thinned. No matplotlib here."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import Any

from trainkit.errors import RunDirectoryError
from trainkit.run.format import as_float
from trainkit.run.metrics import read_metrics

Row = Mapping[str, Any]

_BLOCK = 64
"""Rows that are taken apart at a time: they stay in the processor's cache."""
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
    """The numbers of rows by metric, in a tenth of their room: a run may have logged a million.

    Args:
        rows: read once; they need not be there together.
        prefixes: how the metrics begin that are kept.
    """

    def __init__(self, rows: Iterable[Row], prefixes: tuple[str, ...] = ("",)) -> None:
        self._series: dict[str, tuple[array[float], array[float], array[float]] | None] = {}
        self._thinned: dict[tuple[str, int], Series] = {}
        self._prefixes = prefixes
        rows = iter(rows)
        while block := list(islice(rows, _BLOCK)):
            keys = [key for key in dict.fromkeys(chain.from_iterable(block)) if self._keeps(key)]
            steps, *columns = _columns(block, ["step", *keys])
            for key, column in zip(keys, columns, strict=True):
                kept = self._series[key]
                if kept is not None:
                    _add(kept, steps, column)

    def _keeps(self, key: str) -> bool:
        if key not in self._series:
            self._series[key] = self._start(key, self._prefixes)
        return self._series[key] is not None

    @staticmethod
    def _start(key: str, prefixes: tuple[str, ...]) -> Any:
        if key == "step" or not key.startswith(prefixes):
            return None
        return (array("d"), array("d"), array("d"))

    @property
    def keys(self) -> list[str]:
        """Every metric, in order of appearance."""
        return [key for key, kept in self._series.items() if kept is not None]

    def series(self, key: str) -> Series:
        """The values of one."""
        kept = self._series.get(key)
        return Series([], [], []) if kept is None else Series(*kept)

    def thinned(self, key: str, most: int) -> Series:
        """See `thinned`."""
        known = self._thinned.get((key, most))
        if known is None:
            known = self._thinned[key, most] = thinned(self.series(key), most)
        return known


def _columns(rows: Sequence[Row], keys: Sequence[str]) -> Iterable[Sequence[Any]]:
    """The values of some rows by key; None where a row has it not."""
    try:
        return zip(*map(itemgetter(*keys), rows), strict=True) if len(keys) > 1 else []
    except KeyError:
        return [[row.get(key) for row in rows] for key in keys]


def _add(
    kept: tuple[array[float], array[float], array[float]],
    steps: Sequence[int],
    values: Sequence[Any],
) -> None:
    """Put the values of some rows where they belong; text and gaps are left out."""
    if {*map(type, values)} == {float} and isfinite(sum(values)):
        kept[0].extend(steps)
        kept[1].extend(values)
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
    result = []
    seconds = 0.0
    last_step = 0
    for row in rows:
        spent = as_float(row.get("step_seconds"))
        if spent is None or "loss" not in row:
            continue
        # step_seconds is per step; a row may stand for several.
        seconds += spent * max(row["step"] - last_step, 1)
        last_step = row["step"]
        result.append({**row, "step": seconds / 60})
    return result


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
