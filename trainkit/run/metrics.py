"""``metrics.jsonl``: one flat line a step, written as the run goes."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from io import FileIO
from pathlib import Path
from typing import Any

from trainkit.errors import RunDirectoryError, TrainkitError
from trainkit.places import regular
from trainkit.run.files import explain_os_errors, jsonable, read_record, write_bytes_atomic
from trainkit.run.status import say_if_changed

logger = logging.getLogger(__name__)

Scalar = float | int | str | bool | None

METRIC_KEYS = (
    "step",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "num_trained_tokens",
    "step_seconds",
    "tokens_per_second",
    "mfu",
    "peak_memory_gib",
    "data_seconds",
)
"""The keys of a training row, in the order they are written; ``eval_*`` and others follow."""


_MOST_NAMED = 5

_NUMBERS = (float, int, type(None))
_WORDS = ("NaN", "Infinity", "-Infinity")
_LONGEST = 1e12
"""Seconds: of a step that is a damaged row, and not so slow."""

_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


class MetricsWriter:
    """Appends rows to ``metrics.jsonl``; each row is on disk (flushed) when ``append`` returns.

    A resumed run passes the step it continues from: rows after it were computed by an attempt
    that is being redone, so they move to ``metrics.superseded.jsonl`` next to the file, and a last
    line torn by a crash is dropped.

    ``resume_step`` is the last step to keep; 0 redoes everything, None appends as is.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self.path = path
        if resume_step is not None and path.exists():
            _supersede_rows(path, resume_step)
        self._stream = self._opened()

    def _opened(self) -> FileIO:
        with explain_os_errors(self.path):
            # Unbuffered: a row is with the operating system when append returns, and a failed
            # write leaves nothing behind that a later close would try again.
            return self.path.open("ab", buffering=0)

    def append(self, row: Mapping[str, Scalar]) -> None:
        """Write one row."""
        data = _encode(row).encode("utf-8")
        if not os.fstat(self._stream.fileno()).st_nlink:
            logger.warning(
                "%s was deleted while the run went on: its rows before step %s are lost",
                *(self.path, row["step"]),
            )
            self._stream = self._opened()
        start = self._stream.tell()
        try:
            with explain_os_errors(self.path):
                # A disk that fills up accepts part of a line before it refuses the rest.
                while data:
                    data = data[self._stream.write(data) :]
        except TrainkitError:
            self._stream.truncate(start)
            raise

    def close(self) -> None:
        """Put everything on the disk and close the file; a second call does nothing."""
        if self._stream.closed:
            return
        with explain_os_errors(self.path):
            os.fsync(self._stream.fileno())
            self._stream.close()


def _encode(row: Mapping[str, Scalar]) -> str:
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        raise RunDirectoryError(f"a metrics row needs an int step, got {step!r}")
    for key, value in row.items():
        if value is not None and not isinstance(value, int | float | str):
            raise RunDirectoryError(
                f"metric {key} is a {type(value).__name__}, not a plain number",
                fix="convert it with .item() before appending",
            )
    known = {key: row[key] for key in METRIC_KEYS if key in row}
    ordered = {**known, **{key: value for key, value in row.items() if key not in known}}
    return json.dumps(jsonable(ordered), ensure_ascii=False, allow_nan=False) + "\n"


def _supersede_rows(path: Path, resume_step: int) -> None:
    """Move rows after ``resume_step`` to the superseded file; first there, then out of here.

    A damaged line goes where the row before it goes, byte for byte; one that a crash tore goes.
    """
    kept: list[bytes] = []
    superseded: list[bytes] = []
    lines = kept
    content = regular(path, RunDirectoryError).read_bytes().split(b"\n")
    for number, line in enumerate(content, 1):
        row = decode_row(line.decode("utf-8", "replace"))
        if row is not None:
            lines = kept if row["step"] <= resume_step else superseded
            lines.append(line)
        elif line.strip() and number < len(content):
            logger.warning("%s:%d is damaged: it stays, and nothing is drawn of it", path, number)
            lines.append(line)
    if superseded:
        other = path.with_name("metrics.superseded.jsonl")
        with explain_os_errors(other), other.open("ab") as stream:
            stream.writelines(line + b"\n" for line in superseded)
            stream.flush()
            os.fsync(stream.fileno())
    write_bytes_atomic(path, b"".join(line + b"\n" for line in kept))


def decode_row(line: str) -> dict[str, Any] | None:
    """One row of plain values, or None for a line that is damaged."""
    try:
        row, end = _scan(line, 0)  # what json.loads takes most of its time for is around it
    except (StopIteration, ValueError, RecursionError):  # a number of thousands of digits, too
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0
    is_flat = is_row and not any(isinstance(value, dict | list) for value in row.values())
    if not is_flat or line[end:].strip():
        return None
    # Its figures are numbers, or the words for those that JSON has not; its time is summed.
    are_numbers = all(
        type(row.get(key)) in _NUMBERS or row[key] in _WORDS for key in METRIC_KEYS[1:]
    )
    seconds = row.get("step_seconds") or 0
    is_time = isinstance(seconds, int | float) and 0 <= seconds < _LONGEST
    return row if are_numbers and is_time else None


def iter_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a ``metrics.jsonl`` in file order; none if it is missing.

    Damaged ones are named and left out. A last line without an end is of a run that goes on, or
    that was killed. Non-finite values stay the strings that ``MetricsWriter`` wrote (``"NaN"``).
    """
    say_if_changed(path)
    if not regular(path, RunDirectoryError).exists():
        return
    damaged = []
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            row = decode_row(line.decode("utf-8", "replace"))
            if row is not None:
                yield row
            elif line.strip() and line.endswith(b"\n"):
                damaged.append(number)
    if damaged:
        say_damaged(path, tuple(damaged))


@lru_cache(maxsize=64)  # once: a report reads its rows several times, `watch` for ever
def say_damaged(path: Path, numbers: tuple[int, ...]) -> None:
    """Name the first rows that nothing is drawn of, and how many there are."""
    for number in numbers[:_MOST_NAMED]:
        logger.warning("%s:%d is damaged and is left out", path, number)
    if len(numbers) > _MOST_NAMED:
        logger.warning("%s: %d more rows are damaged", path, len(numbers) - _MOST_NAMED)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return list(iter_metrics(path))


RESULTS = "results.json"


def read_scores(run: Path) -> list[dict[str, Any]]:
    """The newest score of each figure, without the parts of groups.

    Returns:
        Rows of ``results.json``, each with the ``directory`` that it is from.
    """
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(run.glob(f"eval/[!.]*/{RESULTS}")):
        newest |= read_record(path, partial(_scores, str(path.parent)), dict(newest))
    return list(newest.values())


def _scores(folder: str, content: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (row["task"], row["metric"]): {**row, "directory": folder}
        for row in content["scores"]
        if not row["is_part"]
    }


def read_verdicts(score: dict[str, Any]) -> dict[str, bool]:
    """Whether each question of a task or group was answered right; empty where that is not known.

    A verdict that is no yes or no, and a part without samples, leave all of it unknown.
    """
    metric, _, kind = str(score["metric"]).partition("/")
    found = {}
    try:
        for task in score.get("parts") or [score["task"]]:
            name = str(task).replace("/", "_")
            path = Path(score["directory"], "samples", f"{name}.jsonl")
            for line in path.read_text(encoding="utf-8").split("\n"):
                row = json.loads(line) if line else {}
                value = row.get(metric)
                if value in (0, 1) and row.get("filter") in (kind or row.get("filter"),):
                    found[f"{task} {row['doc_id']} {row['doc_hash']}"] = bool(value)
    except (OSError, ValueError, KeyError):
        return {}
    return found


def score_cells(score: dict[str, Any]) -> tuple[str, ...]:
    """A score as a row of a table: task, metric, score, error, shots, questions, published."""
    stderr, published = score["stderr"], score["expected"] if score["is_main"] else {}
    return (
        score["task"],
        score["metric"],
        f"{score['value']:.4f}",
        "" if stderr is None else f"{stderr:.4f}",
        "" if score["shots"] is None else str(score["shots"]),
        str(score["num_samples"]),
        ", ".join(f"{name} {value:.3g}" for name, value in published.items()),
    )


SCORE_HEAD = ("task", "metric", "score", "standard error", "shots", "questions", "published")


Number = float | int | str | None


def as_float(value: Number) -> float | None:
    """A metric as a float (``"NaN"`` strings of ``metrics.jsonl`` included), None if it is not."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        return None


def format_loss(value: Number) -> str:
    """Four decimals: ``2.3417``."""
    number = as_float(value)
    if number is None:
        return str(value)
    return f"{number:.4f}" if math.isfinite(number) and abs(number) < 1e4 else f"{number:.3g}"


def format_number(value: Number) -> str:
    """Three significant digits: ``0.00123``, ``1.5e-05``, ``12.3``."""
    number = as_float(value)
    if number is None:
        return str(value)
    if number != 0 and not 1e-3 <= abs(number) < 1e9:
        return f"{number:.2e}"
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:,.0f}"


def format_count(value: Number) -> str:
    """Thousands and up with a letter: ``950``, ``12.3k``, ``4.56M``."""
    number = as_float(value)
    if number is None or not math.isfinite(number):
        return str(value)
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= scale:
            return f"{number / scale:.3g}{letter}"
    return f"{number:.0f}"


def format_duration(seconds: float) -> str:
    """``42s``, ``3m07s``, ``2h05m``, ``3d04h``."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


JUDGED = (
    *("rewards/accuracies", "rewards/margins", "logps/chosen_change", "kl"),
    *("distill/divergence", "distill/agreement"),
)
"""What an objective's evaluation is read by, besides its loss; without ``eval_``."""


def judged_figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Those of the last evaluation that has any: the value, and its interval if there is one."""
    found: dict[str, tuple[float, ...]] = {}
    for row in rows:
        for name in JUDGED:
            given = [as_float(row.get(f"eval_{name}{end}")) for end in ("", "_low", "_high")]
            known = tuple(value for value in given if value is not None)
            if given[0] is not None and len(known) in (1, 3):
                found[name] = known
    return found


def format_judged(figure: Sequence[float] | None) -> str:
    """``0.631 [0.610, 0.652]``."""
    if figure is None:
        return ""
    interval = "" if len(figure) == 1 else f" [{figure[1]:.3f}, {figure[2]:.3f}]"
    return f"{figure[0]:.3f}{interval}"
