"""``trainkit diagnose``: why the numbers of a step were bad."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli.completion import run_directories
from trainkit.cli.output import echo


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run directory.", autocompletion=run_directories)],
    step: Annotated[
        int | None, typer.Option(help="Of the steps whose batch was kept; the last by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay the batch of a bad step, change one thing at a time, and name the culprit.

    Exits with 1 where the batch is not bad any more.
    """
    from trainkit.parallel.launch.processes import quieten_imports

    quieten_imports()
    from trainkit.run import RunDirectory
    from trainkit.run.files import jsonable
    from trainkit.train.diagnose.diagnosis import diagnose as find
    from trainkit.train.log.quiet import quieten_libraries

    quieten_libraries()
    say = (lambda text: None) if as_json else lambda text: echo(text, err=True)
    found = find(RunDirectory.open(run), step, say)
    if as_json:
        echo(json.dumps(jsonable(found.to_dict()), ensure_ascii=False))
    else:
        culprit = f"{found.culprit}: {found.name}" if found.culprit else "none found"
        echo(f"step {found.step}  {found.says}")
        echo(f"weights of {found.weights}")
        echo(f"culprit  {culprit}")
        echo(f"because  {found.because}")
        echo(f"fix      {found.fix}")
    if found.culprit is None:
        raise typer.Exit(1)
