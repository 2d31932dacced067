"""What commands share: options, each group defined once; what they print; what TAB offers."""

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainkit.errors import RecipeError
from trainkit.terminal import visible

if TYPE_CHECKING:
    from trainkit.infer.locate import ModelPaths


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a line; words of users and of files may be in it, and none is a terminal's command."""
    typer.echo(visible(text), err=err, nl=nl)


def tell(row: Mapping[str, Any], as_json: bool, *lines: str) -> None:
    """Print a result: an object for programs, or lines for people."""
    for line in [json.dumps(row, ensure_ascii=False)] if as_json else lines:
        echo(line)


def note(text: str) -> None:
    """Print a line on standard error, which is for people: results go to standard output."""
    echo(text, err=True)


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: a parameter that is a dataclass stands for the options of its fields."""
    signature = inspect.signature(command)
    groups = {
        name: inspect.signature(parameter.annotation).parameters
        for name, parameter in signature.parameters.items()
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)
    }
    options = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        for option in groups.get(name, {name: parameter}).values()
    ]

    @functools.wraps(command)
    def call(**values: Any) -> None:
        for name, fields in groups.items():
            group = signature.parameters[name].annotation
            values[name] = group(**{field: values.pop(field) for field in fields})
        command(**values)

    del call.__wrapped__  # typer would look through it
    call.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    call.__annotations__ = {option.name: option.annotation for option in options}
    return call


# -- What the shell offers after TAB ---------------------------------------------------------------


_DEFAULT_PARENT = Path("train_model")


def recipe_keys(incomplete: str) -> Iterator[tuple[str, str]]:
    """Keys as overrides are written, ``training.learning_rate=``, each with its help."""
    from trainkit.recipe import key_references

    for entry in key_references():
        if entry.key.startswith(incomplete) and "[]" not in entry.key:
            yield f"{entry.key}=", entry.help


def key_words(incomplete: str) -> Iterator[tuple[str, str]]:
    """Keys as they are named, ``training.learning_rate``."""
    for key, text in recipe_keys(incomplete):
        yield key.removesuffix("="), text


def shipped(incomplete: str) -> Iterator[tuple[str, str]]:
    from trainkit.recipe.write import describe_recipe, shipped_recipes

    for name, path in shipped_recipes().items():
        if name.startswith(incomplete):
            yield name, describe_recipe(path)


def run_directories(incomplete: str) -> Iterator[str]:
    """Runs in ``train_model`` by the start of their name, or by that of their path."""
    parent = Path(incomplete).parent if "/" in incomplete else _DEFAULT_PARENT
    start = Path(incomplete).name if not incomplete.endswith("/") else ""
    if not parent.is_dir():
        return
    for status in sorted(parent.glob("*/status.json")):
        if status.parent.name.startswith(start):
            yield str(status.parent)


# -- Options ---------------------------------------------------------------------------------------


def json_lines(keys: str) -> Any:
    return typer.Option("--json", help=f"Print one JSON object {{{keys}}} a line.")


JsonObject = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]


# -- A recipe -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecipeChoice:
    """A recipe, named with or without ``--config``, and values that win over its own."""

    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The recipe (YAML).", show_default=False)
    ] = None
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [SECTION.KEY=VALUE]...",
            help="The recipe, where --config does not name it; values that win over its own.",
            autocompletion=recipe_keys,
        ),
    ] = None

    def given(self) -> tuple[Path | None, list[str]]:
        """The recipe, also where it is the first word without an option, and the overrides."""
        from trainkit.recipe.document import is_override

        words = list(self.overrides or ())
        if self.config is None and words and not is_override(words[0]):
            return Path(words[0]), words[1:]
        return self.config, words

    def required(self) -> tuple[Path, list[str]]:
        path, words = self.given()
        if path is None:
            raise RecipeError("no recipe is given", where="--config", fix="--config FILE")
        return path, words


# -- A model --------------------------------------------------------------------------------------

BaseModel = Annotated[
    str | None, typer.Option(help="The base model, where it is not where the adapter says.")
]
AnyBase = Annotated[
    bool, typer.Option("--any-base", help="Take an adapter over other weights than its own base.")
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="Store the weights so; by default as in the source."),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code that comes with the model. Read it first."
    ),
]


@dataclass(frozen=True)
class ModelChoice:
    """Which model answers."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL",
            help="A run directory, a checkpoint, an adapter, or a model.",
            autocompletion=run_directories,
        ),
    ]
    adapter: Annotated[Path | None, typer.Option(help="An adapter to put over the model.")] = None
    base_model: BaseModel = None
    trust_remote_code: TrustRemoteCode = False

    def find(self) -> "ModelPaths":
        from trainkit.infer.locate import find_model

        return find_model(
            self.model,
            adapter=self.adapter,
            base_model=self.base_model,
            trust_remote_code=self.trust_remote_code,
        )


@dataclass(frozen=True)
class Held:
    """How the weights are in memory, and what of them is checked before."""

    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option(help="Of the weights in memory."),
    ] = "auto"
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1; by default the GPU if there is one.")
    ] = "auto"
    any_base: AnyBase = False
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Compare the model's files with their manifest before loading.",
        ),
    ] = True


# -- A place for the result -----------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """The directory to make: ``-o``, or the last argument."""

    target: Annotated[
        Path | None,
        typer.Argument(metavar="[OUT]", help="The same as --output.", show_default=False),
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory to make.", show_default=False)
    ] = None

    def place(self) -> Path:
        given = [place for place in (self.target, self.output) if place is not None]
        if len(given) != 1:
            what = "say where the result goes" if not given else "the result goes to one place"
            raise RecipeError(what, where="--output", fix="give -o DIRECTORY, once")
        return given[0]
