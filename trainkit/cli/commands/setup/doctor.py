"""``trainkit doctor``: is this machine fit to train."""

import json
from typing import Annotated

import typer

from trainkit.cli.output import echo


def doctor(
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object {check, state, found, fix} a line."),
    ] = False,
) -> None:
    """Check GPUs, packages, communication, disk, limits and the hub; say how to fix each fault.

    Exits with 1 where something keeps training from working.
    """
    from trainkit.doctor import diagnose

    failed = False
    for finding in diagnose():
        failed |= finding.state == "error"
        if as_json:
            echo(json.dumps(finding.to_dict(), ensure_ascii=False))
            continue
        echo(f"{finding.state:<8} {finding.check}: {finding.found}")
        if finding.fix:
            echo(f"{'':8}   fix: {finding.fix}")
    if failed:
        raise typer.Exit(1)
