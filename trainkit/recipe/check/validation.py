"""Hold the merged values against the schema and say everything that is wrong, with its line."""

from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainkit.options.section import UNION_TAGS
from trainkit.options.words import advice_of, rule_of
from trainkit.recipe.check.foreign import REFUSED
from trainkit.recipe.check.problems import InvalidRecipe, Problem
from trainkit.recipe.check.suggest import Vocabulary, dotted_key, explain_unknown_key
from trainkit.recipe.fields.training import check_training
from trainkit.recipe.fields.training_fields import training_fields
from trainkit.recipe.read.document import KeyPath, read_scalar
from trainkit.recipe.read.settings import Settings
from trainkit.recipe.schema import Recipe
from trainkit.recipe.show.reference import section_in


def validate(settings: Settings) -> Recipe:
    """Make the recipe.

    Raises:
        InvalidRecipe: with every problem, in the order of the lines.
    """
    problems = _training_problems(settings)
    # A field of `training` with a problem is left out, so that the rest is checked as well.
    values = dict(settings.values)
    training = values.get("training")
    if isinstance(training, dict):
        bad = {problem_path[-1] for problem_path, _ in problems}
        values["training"] = {key: item for key, item in training.items() if key not in bad}
    elif training is None:
        values.pop("training", None)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        problems += _schema_problems(error.errors(include_url=False), settings)
    else:
        if not problems:
            return recipe
    order = list(settings.origins)
    problems.sort(key=lambda found: order.index(found[0]) if found[0] in order else -1)
    raise InvalidRecipe([problem for _, problem in problems])


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """Every key of the schema and of the installed TrainingArguments."""
    fields = training_fields()
    sections: dict[str, tuple[str, ...]] = {"": ("base",)}
    _collect(Recipe, "", sections)
    sections["training"] = tuple(name for name in fields.fields if name not in REFUSED)
    return Vocabulary(sections, fields.version)


def _collect(model: type[BaseModel], prefix: str, sections: dict[str, tuple[str, ...]]) -> None:
    sections[prefix] = (*sections.get(prefix, ()), *model.model_fields)
    for name, field in model.model_fields.items():
        dotted = f"{prefix}.{name}" if prefix else name
        found = section_in(field.annotation)
        if found is not None:
            section, in_list = found
            _collect(section, f"{dotted}[]" if in_list else dotted, sections)


def _training_problems(settings: Settings) -> list[tuple[KeyPath, Problem]]:
    training = settings.values.get("training")
    if not isinstance(training, dict):
        return []
    problems = []
    for found in check_training(training):
        path: KeyPath = ("training", found.name)
        where = _where(settings, path)
        if found.is_unknown:
            problem = explain_unknown_key(path, training[found.name], vocabulary(), where)
        else:
            problem = Problem(found.what, where, found.fix)
        problems.append((path, problem))
    return problems


def _schema_problems(
    errors: list[ErrorDetails], settings: Settings
) -> list[tuple[KeyPath, Problem]]:
    problems: dict[KeyPath, Problem] = {}
    for error in errors:
        path = _existing(error["loc"], settings.values)
        if error["type"] == "rule":
            context = error["ctx"]
            key = tuple(context["key"].split("."))
            path = key if "." in context["key"] or not path else (*path, *key)
            what, where = str(context["what"]), _where(settings, path)
            if str(path[-1]) not in f"{where} {what}":
                what = f"{'.'.join(map(str, path))}: {what}"  # a line may hold many keys
            problem = Problem(what, where, context["fix"])
        elif error["type"] == "extra_forbidden":
            where = _where(settings, path)
            problem = explain_unknown_key(path, error["input"], vocabulary(), where)
        elif error["type"] == "missing":
            problem = _missing(error, settings)
            path = error["loc"]
        else:
            problem = _wrong_value(error, path, settings)
        problems.setdefault(path, problem)
    return list(problems.items())


def _existing(location: tuple[str | int, ...], values: Any) -> KeyPath:
    """The part of pydantic's location that is a key; it adds the members of unions to it."""
    path: list[str | int] = []
    for part in location:
        is_key = isinstance(values, dict) and part in values
        is_item = isinstance(values, list) and isinstance(part, int) and part < len(values)
        if is_key or is_item:
            values = values[part]
        elif part == 0 and isinstance(values, dict | str):
            continue  # one source without a list
        elif part in UNION_TAGS:
            continue  # one of several forms
        else:
            break
        path.append(part)
    return tuple(path)


def _missing(error: ErrorDetails, settings: Settings) -> Problem:
    path = error["loc"]
    parent = _existing(path[:-1], settings.values)
    dotted = dotted_key(path)
    fix = {
        "model": "add `model: {name_or_path: DIRECTORY}`",
        "data": "add `data: {train: [FILE]}`",
    }.get(dotted, f"add {dotted}")
    where = _where(settings, parent) if parent else settings.file
    return Problem(f"{dotted} is missing", where, fix)


def _wrong_value(error: ErrorDetails, path: KeyPath, settings: Settings) -> Problem:
    value, dotted = error["input"], dotted_key(path)
    shown = "" if isinstance(value, dict | list) else f" {value!r}"
    return Problem(
        f"{dotted}:{shown} {rule_of(error)}", _where(settings, path), _advice(error, dotted, value)
    )


def _advice(error: ErrorDetails, dotted: str, value: Any) -> str | None:
    """What to write instead, where that is plain from the value."""
    kind = error["type"]
    if kind in ("model_type", "model_attributes_type"):
        if value is False and dotted != "model":
            return f"leave the section out, or write {dotted}: null"
        if value is True and dotted != "model":
            return f"put its keys under `{dotted}:`, or write {dotted}: {{}} for its defaults"
        if value is None:
            return f"put its keys under `{dotted}:`, indented by two spaces"
        return f"write {dotted}: {{name_or_path: {value}}}" if dotted == "model" else None
    if kind == "list_type":
        return f"write {dotted}: [{'FILE' if value is None else value}]"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        plain = read_scalar(value)
        if isinstance(plain, int | float):
            return f"write {value} without quotes"
        if value.lower() in ("yes", "on", "no", "off"):
            return f"write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    return advice_of(error)


def _where(settings: Settings, path: KeyPath) -> str | None:
    origin = settings.origin(path)
    return origin.where if origin else settings.file
