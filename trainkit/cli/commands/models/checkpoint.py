"""``trainkit checkpoint``: whether checkpoints are as they were written."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli.output import echo

app = typer.Typer(no_args_is_help=True, help="Check checkpoints.")


@app.callback()
def checkpoint() -> None:
    """Check checkpoints."""


@app.command()
def verify(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Runs, checkpoints, final models, merged models."),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object {path, status, reason} a line.")
    ] = False,
) -> None:
    """Compare every byte with the manifest; the exit code is 1 if any directory is damaged."""
    from trainkit.checkpoint.whole.manifest import verify_directory
    from trainkit.errors import CheckpointError

    is_damaged = False
    for directory in _parts(directories):
        reason = None
        try:
            manifest = verify_directory(directory)
        except CheckpointError as error:
            is_damaged, reason = True, error.what
        row = {
            "path": str(directory),
            "status": "damaged" if reason else "whole",  # programs read it: it stays
            "reason": reason,
        }
        if as_json:
            echo(json.dumps(row))
        elif reason:
            echo(f"{directory}: damaged: {reason}")
        else:
            echo(f"{directory}: complete, {len(manifest.files)} files")
    if is_damaged:
        raise typer.Exit(1)


def _parts(directories: list[Path]) -> list[Path]:
    """The directories, and instead of a run its checkpoints and its final model.

    Raises:
        CheckpointError: a run has neither.
    """
    from trainkit.errors import CheckpointError
    from trainkit.places import checkpoints_in

    found: list[Path] = []
    for directory in directories:
        if not (directory / "status.json").is_file():
            found.append(directory)
            continue
        inside = [*checkpoints_in(directory), *directory.glob("final")]
        if not inside:
            raise CheckpointError(
                "this run holds neither a checkpoint nor a final model", where=str(directory)
            )
        found += inside
    return found
