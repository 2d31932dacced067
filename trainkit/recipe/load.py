"""From a recipe file, overrides and options to a checked ``Recipe``, or to every error in it."""

import copy
import functools
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from trainkit.errors import RecipeError
from trainkit.options.section import ask, nearest
from trainkit.parallel.process import Machine
from trainkit.parallel.strategies import STRATEGIES, strategy_for
from trainkit.places import local_path, regular
from trainkit.recipe.derived import Derived, derive_values
from trainkit.recipe.document import Document, KeyPath, Origin, Settings, read_document
from trainkit.recipe.keys import InvalidRecipe, Problem, validate
from trainkit.recipe.schema import Recipe
from trainkit.recipe.training import FIELDS
from trainkit.redact import redact

DEFAULT = "default"
TRAINKIT_DEFAULT = "trainkit default"
TRANSFORMERS_DEFAULT = "transformers default"


@dataclass(frozen=True)
class ResolvedValue:
    """One value of a run and where it came from.

    Attributes:
        origin: where it was given, what it follows from, or whose default it is.
    """

    key: str
    value: Any
    origin: str
    is_derived: bool = False
    is_of_machine: bool = False


def shown(values: Iterable[ResolvedValue]) -> Iterator[tuple[ResolvedValue, Any]]:
    """Each with what may be shown of it: ``<redacted>`` where its key or its text is secret."""
    values = [*values]
    # Numbers hide nothing, and most values are some.
    words = [one for one in values if not isinstance(one.value, int | float | None)]
    pairs = redact([{one.key.rpartition(".")[2]: one.value} for one in words])
    hidden = {
        one.key: said for one, pair in zip(words, pairs, strict=True) for said in pair.values()
    }
    return ((one, hidden.get(one.key, one.value)) for one in values)


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, and where each of its values came from.

    Attributes:
        origins: by dotted key ``qwen2.yaml:14``, ``override``, ``--deepspeed``, or whose default.
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
        """Every value, in the order of the schema; ``training`` with what follows from the rest."""
        derived = derive_values(self.recipe, machine or Machine())
        if machine is None:
            derived = {key: value for key, value in derived.items() if not value.is_of_machine}
        derived |= settled or {}
        plain = dict(_leaves(self.recipe))
        defaults = (DEFAULT, TRAINKIT_DEFAULT, TRANSFORMERS_DEFAULT)
        for key in dict.fromkeys([*plain, *derived]):
            found = derived.get(key)
            if only_given and (found is not None or self.origins[key] in defaults):
                continue
            yield (
                ResolvedValue(key, plain[key], self.origins[key])
                if found is None
                else ResolvedValue(key, found.value, found.origin, True, found.is_of_machine)
            )

    def idle(self, machine: Machine) -> Iterator[str]:
        """What was written under ``training`` and does nothing next to the rest, in words."""
        values = {each.key: each for each in self.values(machine)}
        eval_steps = values["training.eval_steps"].origin
        for row in FIELDS.values():
            own = values.get(f"training.{row.name}")
            if own is None or own.is_derived or own.value == row.default:
                continue
            for key, needed in row.acts_with.items():
                other = values[key if "." in key else f"training.{key}"]
                words = other.value if isinstance(other.value, list) else [other.value]
                is_on = other.value not in (None, False, "no", "none", [], ["none"])
                acts = (True in needed and is_on) or any(word in needed for word in words)
                if not acts and own.key not in eval_steps:
                    ((_, said),) = shown([own])
                    yield (
                        f"{own.key}: {yaml_text(said)} ({own.origin}) does nothing with "
                        f"{other.key}: {yaml_text(other.value)}"
                    )
        if values["training.eval_strategy"].value in ("no", False) and self.recipe.early_stopping:
            yield "early_stopping does nothing with training.eval_strategy: 'no'"

    def overridden(self, overrides: Sequence[str]) -> "LoadedRecipe":
        """The same with more values on top, as a run finds them by itself."""
        settings = copy.deepcopy(self.settings)
        for text in overrides:
            settings.override(text, "found by the run")
        recipe = validate(settings)
        return replace(self, recipe=recipe, origins=_origins(recipe, settings), settings=settings)

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
    """
    path, settings = Path(path), Settings()
    documents = _with_bases(path, bases)
    for document in documents:
        settings.merge(document)
    if bases is not None:
        settings.forget_secrets()
    for text, label in [*recorded, *((text, "override") for text in overrides)]:
        settings.override(text, label)
    for option, (key, value) in option_values(cli or {}, settings.values).items():
        settings.assign(tuple(key.split(".")), value, Origin(option, option))
    settings.refuse_secrets()
    recipe = validate(settings)
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
    base_texts = tuple(document.text for document in documents[:-1])
    text = documents[-1].text
    return LoadedRecipe(recipe, _origins(recipe, settings), text, path, settings, base_texts)


def _with_bases(path: Path, bases: Sequence[Path] | None) -> list[Document]:
    """The recipe and those it builds on, the deepest base first."""
    if bases is not None:
        documents = [read_document(file) for file in (*bases, path)]
        for document in documents:
            document.values.pop("base", None)
        return documents
    documents, seen = [], set()
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


def _leaves(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a recipe."""
    for name in Recipe.model_fields:
        value = getattr(recipe, name)
        if name == "training":  # what was given or is trainkit's default, then all other fields
            rest = {key: field.default for key, field in FIELDS.items() if key not in value}
            if recipe.global_batch_size:
                rest.pop("gradient_accumulation_steps", None)  # that decides it
            value = {**value, **rest}
        if isinstance(value, BaseModel):
            for key in type(value).model_fields:
                yield f"{name}.{key}", _plain(getattr(value, key))
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        else:
            yield name, value


def _plain(value: Any) -> Any:
    """Sources as they are written: a path, or a mapping of what was given."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, BaseModel):
        given = value.model_dump(exclude_defaults=True)
        return given["path"] if set(given) == {"path"} else given
    return value


def _origins(recipe: Recipe, settings: Settings) -> dict[str, str]:
    """By dotted key the short form of where a value was given, or whose default it is."""
    origins = {}
    for key, _ in _leaves(recipe):
        section, _, name = key.partition(".")
        known = settings.origins.get(tuple(key.split(".")))
        if known is not None:
            origins[key] = known.label
        elif section != "training":
            origins[key] = DEFAULT
        else:
            origins[key] = TRAINKIT_DEFAULT if FIELDS[name].is_ours else TRANSFORMERS_DEFAULT
    return origins


# -- Whether what a recipe names on disk exists, before anything slow is imported ------------------


_TRACKERS = "clearml codecarbon comet_ml dvclive mlflow neptune swanlab tensorboard trackio wandb"
"""Those of transformers' names for trackers that are also the package's name."""

_SAME_AS = {"tensorboard": ("tensorboardX",), "mlflow": ("mlflow-skinny",)}
"""Packages that serve instead."""


def check_files(loaded: LoadedRecipe) -> None:
    """Refuse data and model paths that lead nowhere.

    Relative paths start at the current directory. Names that can only be a hub's are left to the
    loading.
    """
    recipe, problems = loaded.recipe, []
    lists = {"data.train": recipe.data.train, "data.eval": recipe.data.eval_sources}
    if recipe.generation_eval is not None:
        lists["generation_eval.data"] = recipe.generation_eval.data
    for key, sources in lists.items():
        for index, source in enumerate(sources):
            if what := _missing(source.path, key):
                fix = "check the path; it starts at the directory you are in"
                problems.append(Problem(what, loaded.where(f"{key}[{index}]"), fix))
    model = local_path(recipe.model.name_or_path)
    if model is not None and not os.path.exists(model):  # noqa: PTH110 - as below
        problems.append(
            Problem(
                f"model.name_or_path: there is no model at {model.absolute()}",
                loaded.where("model.name_or_path"),
                "give a directory that save_pretrained wrote, a .gguf file, or a hub name",
            )
        )
    chosen = recipe.training.get("report_to")
    for tracker in [chosen] if isinstance(chosen, str) else chosen or []:
        packages = (tracker, *_SAME_AS.get(tracker, ()))
        if tracker in _TRACKERS.split() and not any(map(_is_installed, packages)):
            what = f"training.report_to: {tracker} is not installed"
            fix = f"pip install {tracker}, or take it out of report_to"
            problems.append(Problem(what, loaded.where("training.report_to"), fix))
    for read in (lambda: read_chat_template(recipe.data.chat_template), recipe.model.tokens):
        try:
            read()
        except RecipeError as error:
            of_key = str(error.where).startswith(("data.", "model."))  # else it names a file's line
            where = loaded.where(str(error.where)) if of_key else error.where
            problems.append(Problem(error.what, where, error.fix))
    if problems:
        raise InvalidRecipe(problems)


def read_chat_template(choice: str | None) -> str | None:
    """The template itself: ``choice`` is Jinja when it has a brace, else a file with it."""
    if choice is None or "{" in choice:
        return choice
    path = Path(choice).expanduser()
    try:
        text = regular(path, RecipeError).read_text(encoding="utf-8")
        if not text.strip():  # which would stand for the tokenizer's own
            raise ValueError("it is empty")
        return text
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"data.chat_template: {path.absolute()} cannot be read: {error}",
            where="data.chat_template",
            fix="give a text file with the Jinja template, or the template itself",
        ) from error


def _is_installed(package: str) -> bool:
    """Looked up in the installed packages: a directory ``wandb`` next to the recipe is none."""
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _missing(name: str, key: str) -> str | None:
    path = Path(name).expanduser()
    if os.path.exists(path):  # noqa: PTH110 - Path.exists raises for a name that is too long
        return None
    if glob.has_magic(name):
        matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207 - Path.glob is relative
        is_there = next(matches, None) is not None
        return None if is_there else f"{key}: no file matches {path.absolute()}"
    return f"{key}: there is no file {path.absolute()}" if local_path(name) is not None else None


# -- A loaded recipe as text -----------------------------------------------------------------------


class _OneLine(yaml.SafeDumper):
    """Texts of several lines in double quotes, which hold their ends as ``\\n``."""


_OneLine.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if "\n" in text else None
    ),
)


def yaml_text(value: Any) -> str:
    """A value on one line, as YAML that reads the same under 1.1 and 1.2."""
    if value is None or isinstance(value, int):
        return json.dumps(value)  # the same, and most are
    # A start writes its values twice, and most are words.
    return _word(value) if isinstance(value, str) else _dumped(value)


def _dumped(value: Any) -> str:
    text = yaml.dump(
        value, None, _OneLine, default_flow_style=True, sort_keys=False, allow_unicode=True,
        width=2**31,
    )  # fmt: skip
    return text.removesuffix("...\n").strip()


_word = functools.lru_cache(1024)(_dumped)


def dump_resolved(
    loaded: LoadedRecipe,
    machine: Machine | None = None,
    *,
    only_given: bool = False,
    settled: Mapping[str, Derived] | None = None,
) -> str:
    """A recipe that loads to the same values, with origins; what a machine decides is comments."""
    lines = [f"# Values and where they come from; made from {loaded.path.name}."]
    open_section = ""
    values = loaded.values(machine, only_given=only_given, settled=settled)
    for value, said in shown(values):
        section, _, key = value.key.rpartition(".")
        if section and section != open_section:
            lines.append(f"{section}:")
        open_section = section
        indent = "  " if section else ""
        mark = "# " if value.is_of_machine else ""
        lines.append(f"{indent}{mark}{key}: {yaml_text(said)}  # {value.origin}")
    return "\n".join(lines) + "\n"


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
        began: when the command was given, on the clock of ``trainkit.run.starts``; None is now.
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

    ``--replace-kernel`` leaves a mapping of single ops alone.

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
            values[option] = ("data.mask", "none")
        elif option == "--deepspeed":
            values[option] = ("parallel.shard", value)
        elif option == "--output-dir":
            values[option] = ("training.output_dir", str(value))
    return values
