"""What commands print with."""

import typer

from trainkit.terminal import visible


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a line; words of users and of files may be in it, and none is a terminal's command."""
    typer.echo(visible(text), err=err, nl=nl)
