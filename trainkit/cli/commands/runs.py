"""``trainkit runs``, ``show``, ``watch``, ``compare`` and ``plot``: what became of runs."""

import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainkit.cli.options import JsonLines, echo, note, run_directories, tell
from trainkit.terminal import aligned, visible

if TYPE_CHECKING:
    from trainkit.run.listing import RunSummary

Run = Annotated[Path, typer.Argument(help="A run directory.", autocompletion=run_directories)]

_ENDED = ("done", "failed", "interrupted", "killed", "damaged")


def runs(
    directory: Annotated[Path, typer.Argument(help="Where the runs are.")] = Path("train_model"),
    as_json: JsonLines = False,
) -> None:
    """List runs, the latest first: state, step, loss, speed, age."""
    from trainkit.run.listing import find_runs

    found = list(find_runs(directory))
    for run in found:
        if as_json:
            tell(asdict(run), as_json)
        elif run.state == "damaged":
            note(f"{run.reason}")
    if not found and not as_json:
        note(f"no runs in {directory}")
    for line in _table(found, shutil.get_terminal_size().columns) if found and not as_json else ():
        echo(line)


def show(run: Run, as_json: JsonLines = False) -> None:
    """Show one run: its state, its last values, its files, and what can be done with it."""
    from trainkit.run.listing import summarize

    summary = summarize(run)
    tell(asdict(summary), as_json, *(f"{name:<15}{value}" for name, value in _facts(summary)))


def watch(
    run: Run,
    every: Annotated[
        float, typer.Option("--every", min=0.1, help="Seconds between two looks.")
    ] = 2.0,
    as_json: JsonLines = False,
) -> None:
    """Follow a run from another terminal or host until it ends; Ctrl-C leaves it running.

    Exits with 1 where the run failed or was killed.
    """
    from trainkit.run.listing import summarize

    shown: list[dict[str, Any]] = []
    while True:
        summary = summarize(run)  # before the rows: a run that has ended has written them all
        for row in _new_rows(run, shown):
            tell(row, as_json, _row_line(row, summary.total_steps))
        if summary.state in _ENDED:
            break
        time.sleep(every)
    if not as_json:
        echo(f"{summary.state}{f': {summary.reason}' if summary.reason else ''}")
    if summary.state in ("failed", "killed", "damaged"):
        raise typer.Exit(1)


def _new_rows(run: Path, shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that were not shown, which are then; those that a continued run computes again, too."""
    from trainkit.run.metrics import read_metrics

    rows = read_metrics(run / "metrics.jsonl")
    same = len(shown)
    if rows[:same][-1:] != shown[-1:]:  # rows behind the checkpoint were dropped
        pairs = enumerate(zip(rows, shown, strict=False))
        same = next((at for at, (row, old) in pairs if row != old), min(len(rows), same))
    shown[:] = rows
    return rows[same:]


def _row_line(row: dict[str, Any], total: int | None) -> str:
    from trainkit.run.metrics import format_count, format_loss, format_number

    step = f"step {row['step']}{f'/{total}' if total else ''}"
    if "loss" not in row and "num_skipped_steps" in row:
        return f"{step}  skipped: its numbers are bad"
    if "loss" not in row:
        return f"{step}  evaluation loss {format_loss(row.get('eval_loss'))}"
    parts = [step, f"loss {format_loss(row['loss'])}"]
    parts += [f"{key[5:]} {format_loss(row[key])}" for key in row if key.startswith("loss/")]
    if row.get("learning_rate") is not None:
        parts.append(f"lr {format_number(row['learning_rate'])}")
    if row.get("tokens_per_second") is not None:
        parts.append(f"tok/s {format_count(row['tokens_per_second'])}")
    return "  ".join(parts)


def _cells(run: "RunSummary") -> list[str]:
    from trainkit.run.metrics import format_count, format_duration, format_loss

    def shown(value: float | None, form: Any) -> str:
        return "" if value is None else form(value)

    step = f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)
    age = shown(run.age_seconds, format_duration)
    speed = shown(run.tokens_per_second, format_count)
    name = visible(Path(run.path).resolve().name)
    return [name, run.state, step, shown(run.loss, format_loss), speed, age]


def _table(found: "list[RunSummary]", width: int) -> list[str]:
    """Columns where they fit; two lines a run in a narrow terminal."""
    rows = [["run", "state", "step", "loss", "tok/s", "age"], *map(_cells, found)]
    lines = list(aligned(rows))
    if max(map(len, lines)) > width:
        lines = []
        for name, state, step, loss, speed, age in rows[1:]:
            facts = [state, f"step {step}", f"loss {loss}", f"tok/s {speed}", f"{age} ago"]
            lines += [name, "  " + ", ".join(facts)]
    return lines


def _way_to_the_first_step(run: Path) -> Iterator[tuple[str, str]]:
    from trainkit.run.files import read_record
    from trainkit.run.starts import FILE

    def said(start: Any) -> str:
        parts = ", ".join(f"{visible(name)} {each:.1f}" for name, each in start["stages"].items())
        return f"{start['seconds']:.1f} s after the command ({parts})"

    if text := read_record(run / FILE, said, ""):  # not there before it is reached
        yield "first step", text


def _facts(run: "RunSummary") -> Iterator[tuple[str, str]]:
    from trainkit.run.status import resume_command

    name, state, step, loss, speed, age = _cells(run)
    yield "run", name
    yield "state", f"{state}, {age} ago" if age else state
    if run.reason:
        yield "reason", visible(run.reason)
    yield "started", run.started or "unknown"
    yield "step", step
    yield from _way_to_the_first_step(Path(run.path))
    if loss:
        yield "loss", loss
    if run.eval_loss is not None:
        yield "eval loss", f"{run.eval_loss:.4f}"
    if speed:
        yield "tok/s", speed
    yield "checkpoints", ", ".join(map(str, run.checkpoints)) or "none"
    path = Path(run.path)
    for file in ("report.html", "resolved.yaml", "metrics.jsonl", "final"):
        if (path / file).exists():
            yield file, str(path / file)
    if run.has_final:
        yield "talk to it", shlex.join(["trainkit", "chat", str(path)])
    elif run.checkpoints and run.state != "running":
        yield "go on", resume_command(path)


# -- Runs side by side --------------------------------------------------------------------------


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN...",
            help="Run directories; the first is what the others are held against.",
            autocompletion=run_directories,
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", "-o", help="Write a page with curves and answers here.", show_default=False
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON lines: {run, ...}, {key, values}, then {quantity, ...}."
        ),
    ] = False,
) -> None:
    """Compare runs: recipes, losses with their noise, speed, memory, answers.

    Runs that differ in training.seed alone are repetitions of one recipe: their spread is the noise
    that a difference between recipes is judged by.
    """
    from trainkit.compare.report import as_page, as_text
    from trainkit.compare.runs import differing_keys, group_by_recipe, one_of_each, read_run
    from trainkit.compare.verdicts import verdicts

    if len(runs) < 2:
        raise typer.BadParameter("give two or more run directories")
    read, notes = one_of_each([read_run(path, _resolved(path)) for path in runs])
    for line in notes:
        note(line)
    keys = differing_keys(read)
    found = list(verdicts(group_by_recipe(read)))
    if html is not None:
        from trainkit.run.files import write_text_atomic
        from trainkit.run.plot import comparison_svgs

        write_text_atomic(
            html, as_page(read, keys, found, comparison_svgs([run.path for run in read]))
        )
        note(str(html))
    if as_json:
        rows: list[Mapping[str, Any]] = [run.summary() for run in read]
        rows += [{"key": key, "values": values} for key, values in keys.items()]
        rows += [verdict.to_dict() for verdict in found]
        for row in rows:
            tell(row, as_json)
    for line in () if as_json else as_text(read, keys, found):
        echo(line)


def _resolved(run: Path) -> dict[str, Any]:
    """A run's resolved values by dotted key; none where it recorded none."""
    from trainkit.compare.runs import spelt_out
    from trainkit.recipe.document import read_document

    path = run / "resolved.yaml"
    values = dict(_flat(spelt_out(read_document(path).values))) if path.is_file() else {}
    if "model.name_or_path" not in values and (run / "status.json").is_file():
        note(f"{path} is damaged, or missing: not every key of this run's recipe is known")
    return values


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories.", autocompletion=run_directories),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The picture to write; comparison.png here."),
    ] = None,
    as_json: JsonLines = False,
) -> None:
    """Draw the curves of runs over one another and print where the pictures are."""
    from trainkit.run.plot import draw_comparison

    for path in draw_comparison(runs, output):
        tell({"picture": str(path)}, as_json, str(path))
