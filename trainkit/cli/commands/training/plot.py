"""``trainkit plot``: runs over one another."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli.completion import run_directories
from trainkit.cli.echo import echo


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
