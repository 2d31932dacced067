"""``trainkit compare``: runs side by side, with what chance would do."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trainkit.cli.completion import run_directories
from trainkit.cli.output import echo


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
    for note in notes:
        echo(note, err=True)
    keys = differing_keys(read)
    found = list(verdicts(group_by_recipe(read)))
    if html is not None:
        from trainkit.run.files import write_text_atomic
        from trainkit.run.report.plot import comparison_svgs

        write_text_atomic(
            html, as_page(read, keys, found, comparison_svgs([run.path for run in read]))
        )
        echo(str(html), err=True)
    if as_json:
        rows: list[Mapping[str, Any]] = [run.summary() for run in read]
        rows += [{"key": key, "values": values} for key, values in keys.items()]
        rows += [verdict.to_dict() for verdict in found]
        for row in rows:
            echo(json.dumps(row, ensure_ascii=False))
        return
    for line in as_text(read, keys, found):
        echo(line)


def _resolved(run: Path) -> dict[str, Any]:
    """A run's resolved values by dotted key; none where it recorded none."""
    from trainkit.recipe.document import read_document

    path = run / "resolved.yaml"
    return dict(_flat(read_document(path).values)) if path.is_file() else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# -- ``trainkit plot``: runs over one another -----------------------------------------------------


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run directories.", autocompletion=run_directories),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The picture to write; comparison.png here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, an object a line.")] = False,
) -> None:
    """Draw the curves of runs over one another and print where the pictures are."""
    from trainkit.run.report.plot import draw_comparison

    for path in draw_comparison(runs, output):
        echo(json.dumps({"picture": str(path)}) if as_json else str(path))
