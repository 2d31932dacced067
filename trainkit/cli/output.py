"""Where a command's result goes: ``-o`` everywhere; some also take it as their last argument."""

from pathlib import Path
from typing import Annotated

import typer

from trainkit.errors import RecipeError
from trainkit.terminal import visible

Argument = Annotated[
    Path | None,
    typer.Argument(metavar="[OUT]", help="The same as --output.", show_default=False),
]
Option = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Directory to make.", show_default=False),
]


def output_of(argument: Path | None, option: Path | None) -> Path:
    """The one place that was given.

    Raises:
        RecipeError: there is none, or there are two.
    """
    given = [place for place in (argument, option) if place is not None]
    if len(given) != 1:
        what = "say where the result goes" if not given else "the result goes to one place"
        raise RecipeError(what, where="--output", fix="give -o DIRECTORY, once")
    return given[0]


# -- What commands print with ---------------------------------------------------------------------


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a line; words of users and of files may be in it, and none is a terminal's command."""
    typer.echo(visible(text), err=err, nl=nl)
