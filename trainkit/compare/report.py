"""A comparison as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainkit.compare.runs import ComparedRun
from trainkit.compare.verdicts import Verdict
from trainkit.run.metrics import format_count, format_duration, format_judged, format_loss
from trainkit.run.report import parts
from trainkit.terminal import aligned, visible

_HEAD = ("run", "steps", "loss", "eval loss", "exact", "tok/s", "GiB", "time")
_MOST_ANSWERS = 50


def benchmarks(runs: Sequence[ComparedRun]) -> list[tuple[str, ...]]:
    """Rows of a table: a figure, and each run's score with its standard error."""

    def shown(row: Mapping[str, Any] | None) -> str:
        if row is None:
            return ""
        stderr = row["stderr"]
        return f"{row['value']:.4f}" + ("" if stderr is None else f" +-{stderr:.4f}")

    names = dict.fromkeys(name for run in runs for name in run.scores)
    rows = [(name, *(shown(run.scores.get(name)) for run in runs)) for name in names]
    own = dict.fromkeys(name for run in runs for name in run.held_out)
    return rows + [(name, *(format_judged(run.held_out.get(name)) for run in runs)) for name in own]


def figures(run: ComparedRun) -> list[str]:
    found = run.summary()

    def shown(key: str, form: Any) -> str:
        return "" if found[key] is None else str(form(found[key]))

    return [
        run.name,
        str(found["steps"]),
        shown("last_loss", format_loss),
        shown("last_eval_loss", format_loss),
        shown("accuracy", lambda share: f"{share:.1%}"),
        shown("tokens_per_second", format_count),
        shown("peak_memory_gib", lambda gib: f"{gib:.1f}"),
        format_duration(run.step_seconds),
    ]


def as_text(
    runs: Sequence[ComparedRun], keys: Mapping[str, Sequence[Any]], found: Sequence[Verdict]
) -> Iterator[str]:
    yield from aligned([_HEAD, *map(figures, runs)])
    yield ""
    if rows := benchmarks(runs):
        yield from aligned([("benchmark", *(run.name for run in runs)), *rows])
        yield ""
    yield "they differ in:" if keys else "the recipes are the same"
    for key, values in keys.items():
        yield visible(f"  {key}: {' | '.join(map(str, values))}")
    yield ""
    for verdict in found:
        against = f"{', '.join(verdict.second)} against {', '.join(verdict.first)}"
        yield visible(f"{verdict.quantity}: {_difference(verdict)} ({against})")
        yield f"  {verdict.words}"


def as_page(
    runs: Sequence[ComparedRun],
    keys: Mapping[str, Sequence[Any]],
    found: Sequence[Verdict],
    pictures: Sequence[tuple[str, str]],
) -> str:
    names = [run.name for run in runs]
    page = parts()
    shared = [each for each in runs[0].texts if all(each in run.texts for run in runs)]
    unlike = [each for each in shared if len({run.texts[each] for run in runs}) > 1]
    answers = [
        (question.partition(" ")[2], *(run.texts[question] for run in runs))
        for question in unlike[:_MOST_ANSWERS]
    ]
    body = page.comparison(
        names,
        page.table(_HEAD, map(figures, runs)),
        benchmarks(runs),
        [f"{each.quantity}: {_difference(each)}: {each.words}" for each in found],
        pictures,
        [(key, *row) for key, row in keys.items()],
        f"{len(unlike)} of {len(shared)} answers differ." if shared else "",
        answers,
    )
    return str(page.page("Comparison", body))


def _difference(verdict: Verdict) -> str:
    interval = verdict.interval
    if verdict.quantity == "exact answers":
        return f"{interval.difference:+.1%}"
    spread = "" if interval.half is None else f" [{interval.low:+.4f}, {interval.high:+.4f}]"
    return f"{interval.difference:+.4f}{spread}"
