"""From a recipe file, overrides and options to a checked ``Recipe``, or to every error in it."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainkit.errors import RecipeError
from trainkit.options.section import ask, nearest
from trainkit.parallel.process import Machine
from trainkit.parallel.strategies import STRATEGIES, strategy_for
from trainkit.recipe.derived import Derived, derive_data, derive_training
from trainkit.recipe.document import (
    Document,
    KeyPath,
    Origin,
    Settings,
    long_key,
    parse_override,
    read_document,
    spell_out,
)
from trainkit.recipe.problems import validate
from trainkit.recipe.schema import Recipe
from trainkit.recipe.training import FIELDS

DEFAULT = "default"
TRAINKIT_DEFAULT = "trainkit default"
TRANSFORMERS_DEFAULT = "transformers default"


@dataclass(frozen=True)
class ResolvedValue:
    """One value of a run and where it came from.

    Attributes:
        key: dotted.
        value: what the run uses.
        origin: where it was given, what it follows from, or whose default it is.
        is_derived: it follows from other values or from the machine.
        is_of_machine: another machine would use another one.
    """

    key: str
    value: Any
    origin: str
    is_derived: bool = False
    is_of_machine: bool = False

    @property
    def is_default(self) -> bool:
        """Whether nobody chose it."""
        return self.is_derived or self.origin in (
            DEFAULT,
            TRAINKIT_DEFAULT,
            TRANSFORMERS_DEFAULT,
        )


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, and where each of its values came from.

    Attributes:
        recipe: the values.
        origins: dotted key to origin: ``qwen2.yaml:14``, ``override``, ``--deepspeed``,
            ``default``, ``trainkit default`` or ``transformers default``.
        source_text: the recipe file as it was given.
        path: that file.
        settings: the merged values as they were given.
        base_texts: the recipes that it builds on, as they were given, the deepest first.
    """

    recipe: Recipe
    origins: Mapping[str, str]
    source_text: str
    path: Path
    settings: Settings
    base_texts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The run's name: the recipe's, or else its file's."""
        return self.recipe.name or self.path.stem

    def values(
        self,
        machine: Machine | None = None,
        *,
        only_given: bool = False,
        settled: Mapping[str, Derived] | None = None,
    ) -> Iterator[ResolvedValue]:
        """Every value, in the order of the schema; ``training`` with what follows from the rest.

        Args:
            machine: where the run is; None leaves out what only a machine can decide.
            only_given: leave out what nobody chose.
            settled: dotted key to a value that was only known when the model was built.
        """
        training = derive_training(self.recipe, machine or Machine())
        derived = {f"training.{key}": value for key, value in training.items()}
        derived |= derive_data(self.recipe)
        if machine is None:
            derived = {key: value for key, value in derived.items() if not value.is_of_machine}
        derived |= settled or {}
        printed = dict.fromkeys(key for key, _ in _leaves(self.recipe))
        keys = [*printed, *derived]
        plain = dict(_leaves(self.recipe))
        for key in dict.fromkeys(keys):
            found = derived.get(key)
            resolved = (
                ResolvedValue(key, plain[key], self.origins[key])
                if found is None
                else ResolvedValue(key, found.value, found.origin, True, found.is_of_machine)
            )
            if not (only_given and resolved.is_default):
                yield resolved

    def overridden(self, overrides: Sequence[str]) -> "LoadedRecipe":
        """The same with more values on top, as a run finds them by itself.

        Args:
            overrides: ``section.key=value``.
        """
        settings = copy.deepcopy(self.settings)
        for text in overrides:
            keys, value = parse_override(text)
            keys = long_key(keys)
            _check_sections(settings, keys, text)
            settings.assign(keys, value, Origin("found by the run", f"override {text!r}"))
        recipe = validate(settings)
        origins = {key: _origin_label(key, settings) for key, _ in _leaves(recipe)}
        return replace(self, recipe=recipe, origins=origins, settings=settings)

    def where(self, key: str) -> str:
        """The file and line (or override) of a key, or of the closest one above it."""
        path: KeyPath = tuple(
            int(part) if part.isdecimal() else part for part in re.findall(r"[^.\[\]]+", key)
        )
        origin = self.settings.origin(path)
        return str(self.path) if origin is None else origin.where


def load_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    cli: Mapping[str, Any] | None = None,
    *,
    bases: Sequence[Path] | None = None,
    recorded: Sequence[tuple[str, str]] = (),
) -> LoadedRecipe:
    """Read, merge and check a recipe. Imports neither torch nor transformers, touches no data.

    Args:
        path: the recipe file. It may name another with ``base: FILE`` (relative to itself), whose
            values it then replaces key by key.
        overrides: ``section.key=value``; they win over the file.
        cli: options of the command line, ``{"--deepspeed": "zero2"}``; they win over all.
        bases: for the copy of a recipe that a run keeps: copies of the files it builds on, the
            deepest first. Secrets, which copies do not hold, are not given then.
        recorded: overrides that a run was given before, each with the label of its origin;
            ``overrides`` win over them.

    Raises:
        RecipeError: with all that is wrong, each with file and line.
    """
    path = Path(path)
    settings = Settings()
    documents = _with_bases(path, bases)
    for document in documents:
        spell_out(document)
        settings.merge(document)
    if bases is not None:
        settings.forget_secrets()
    for text, label in [*recorded, *((text, "override") for text in overrides)]:
        keys, value = parse_override(text)
        keys = long_key(keys)
        _check_sections(settings, keys, text)
        settings.assign(keys, value, Origin(label, f"override {text!r}"))
    for option, (key, value) in option_values(cli or {}, settings.values).items():
        settings.assign(tuple(key.split(".")), value, Origin(option, option))
    settings.refuse_secrets()
    recipe = validate(settings)
    _check_strategy(recipe, settings)
    origins = {key: _origin_label(key, settings) for key, _ in _leaves(recipe)}
    base_texts = tuple(document.text for document in documents[:-1])
    return LoadedRecipe(recipe, origins, documents[-1].text, path, settings, base_texts)


def _check_strategy(recipe: Recipe, settings: Settings) -> None:
    """Refuse a strategy that is neither a row of the table nor a file, with the nearest row."""
    shard, origin = recipe.parallel.shard, settings.origin(("parallel", "shard"))
    try:
        strategy_for(shard)
    except RecipeError as error:
        hint = ask(nearest(shard, STRATEGIES))
        raise RecipeError(
            error.what,
            where=origin.where if origin else None,
            fix=f"{hint or ''} The strategies are {', '.join(STRATEGIES)}".strip(),
        ) from error


def _with_bases(path: Path, bases: Sequence[Path] | None) -> list[Document]:
    """The recipe and those it builds on, the deepest base first."""
    if bases is not None:
        documents = [read_document(file) for file in (*bases, path)]
        for document in documents:
            document.values.pop("base", None)
        return documents
    documents = []
    seen: set[Path] = set()
    while True:
        document = read_document(path)
        seen.add(path.resolve())
        documents.insert(0, document)
        if "base" not in document.values:
            return documents
        base = document.values.pop("base")
        where = f"{path}:{document.lines[('base',)]}"
        if not isinstance(base, str):
            raise RecipeError(
                "base must be one recipe file", where=where, fix="write base: other.yaml"
            )
        path = path.parent / base
        if path.resolve() in seen:
            raise RecipeError(
                f"base: {base} comes back to a recipe that builds on it",
                where=where,
                fix="remove one base",
            )
        if not path.is_file():
            raise RecipeError(
                f"base: there is no recipe at {path.absolute()}",
                where=where,
                fix="give a path relative to the recipe that names it",
            )


_NOTHING_SAID: Mapping[tuple[str, ...], Any] = {
    ("kernels",): (True, False),
    ("model", "fp8"): (True, False),
    ("recompute",): ("none",),
}
"""Values that a key of the section replaces: they say no more than a section with nothing in it."""


def _check_sections(settings: Settings, keys: tuple[str, ...], text: str) -> None:
    """Refuse to set a key inside a list or a single value, which would replace it unseen."""
    target: Any = settings.values
    for depth, key in enumerate(keys[:-1]):
        target = target.get(key)
        is_plain = isinstance(target, (bool, str))
        if target is None or (is_plain and target in _NOTHING_SAID.get(keys[: depth + 1], ())):
            return
        if not isinstance(target, dict):
            dotted = ".".join(keys[: depth + 1])
            raise RecipeError(
                f"{dotted} is a {'list' if isinstance(target, list) else 'single value'}, "
                f"so {'.'.join(keys)} cannot be set in it",
                where=f"override {text!r}",
                fix=f"give {dotted} as one value",
            )


def _leaves(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a recipe."""
    for name in Recipe.model_fields:
        value = getattr(recipe, name)
        if name == "training":
            yield from _training_leaves(value, derived_accumulation=bool(recipe.global_batch_size))
        elif isinstance(value, BaseModel):
            for key in type(value).model_fields:
                yield f"{name}.{key}", _plain(getattr(value, key))
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        else:
            yield name, value


def _training_leaves(
    training: Mapping[str, Any], *, derived_accumulation: bool
) -> Iterator[tuple[str, Any]]:
    """What was given or is trainkit's default, then the rest of TrainingArguments."""
    for key, value in training.items():
        yield f"training.{key}", value
    for key, field in FIELDS.items():
        if key in training:
            continue
        if derived_accumulation and key == "gradient_accumulation_steps":
            continue  # global_batch_size decides it
        yield f"training.{key}", field.default


def _plain(value: Any) -> Any:
    """Sources as they are written: a path, or a mapping of what was given."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, BaseModel):
        given = value.model_dump(exclude_defaults=True)
        return given["path"] if set(given) == {"path"} else given
    return value


def _origin_label(key: str, settings: Settings) -> str:
    path = tuple(key.split("."))
    found = settings.origins.get(path)
    if found is not None:
        return found.label
    if path[0] != "training":
        return DEFAULT
    return TRAINKIT_DEFAULT if FIELDS[path[1]].is_ours else TRANSFORMERS_DEFAULT


# -- The recipes that come with trainkit, found in an installed package as in a clone ------------


_DIRECTORY = Path(__file__).parents[1] / "configs"
_SCHEMA = "recipe.schema.json"


def shipped_recipes() -> dict[str, Path]:
    """Name to file, in alphabetical order."""
    return {path.stem: path for path in sorted(_DIRECTORY.glob("*.yaml"))}


def schema_uri() -> str:
    """Where an editor finds the recipe's JSON schema, for recipes that are written elsewhere."""
    return (_DIRECTORY / _SCHEMA).resolve().as_uri()


def describe_recipe(path: Path) -> str:
    """The first sentence of the comment at the top of a shipped recipe."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


def shipped_text(name: str) -> str:
    """A shipped recipe's text, with the schema where an editor finds it from anywhere.

    Raises:
        RecipeError: there is no such recipe.
    """
    recipes = shipped_recipes()
    if name not in recipes:
        hint = ask(nearest(name, recipes))
        raise RecipeError(
            f"there is no shipped recipe {name!r}",
            fix=f"{hint or ''} The recipes are {', '.join(recipes)}".strip(),
        )
    text = recipes[name].read_text(encoding="utf-8")
    return text.replace(f"$schema={_SCHEMA}", f"$schema={schema_uri()}", 1)


def write_text(text: str, target: Path) -> None:
    """Write a new recipe.

    Raises:
        RecipeError: the file exists, or cannot be written.
    """
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(
            "this file exists and is not overwritten",
            where=str(target),
            fix="name another one with --output",
        ) from None
    except OSError as error:
        raise RecipeError(f"cannot be written: {error.strerror}", where=str(target)) from error


# -- What the options of ``trainkit sft`` mean: recipe values some, the rest ``SftOptions`` --------


@dataclass(frozen=True)
class SftOptions:
    """What a run takes besides its recipe.

    Attributes:
        resume: the run or checkpoint directory to continue; None for a new run.
        allow_changed: what may differ from the run that is continued: keys, or ``all``.
        overrides: what this start was given besides the recipe and what is recorded.
        dry_run: train one optimizer step in a temporary directory, then stop.
        output_dir: the run directory to make, or None for a new one under ``train_model/``.
        command: the command line, to be kept in ``command.sh``.
        force: train although the estimate says that the memory is not enough.
        rows: takes each row of the log, and the summary at the end; what people read stays on
            standard error.
        began: when the command was given, on the clock of ``trainkit.run.stages``; None is now.
    """

    resume: Path | None = None
    allow_changed: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    output_dir: Path | None = None
    command: tuple[str, ...] = ()
    force: bool = False
    rows: Callable[[Mapping[str, Any]], None] | None = None
    began: float | None = None


def option_values(options: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe values that command-line options set.

    Args:
        options: option to value: ``{"--deepspeed": "zero2", "--replace-kernel": True}``. None means
            not given.
        recipe: the values so far. ``--replace-kernel`` leaves a mapping of single ops alone.

    Returns:
        Option to ``(dotted key, value)``, only for those that change something.
    """
    values: dict[str, Any] = {}
    for option, value in options.items():
        if value is None:
            continue
        if option == "--replace-kernel":
            if not (value and isinstance(recipe.get("kernels"), Mapping)):
                values[option if value else "--no-replace-kernel"] = ("kernels", value)
        elif option == "--pretrain":
            if value:
                values[option] = ("data.mask", "none")
        elif option == "--deepspeed":
            values[option] = ("parallel.shard", value)
        elif option == "--output-dir":
            values[option] = ("training.output_dir", str(value))
        else:
            raise ValueError(f"no option called {option}")
    return values
