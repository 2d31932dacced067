"""What every key is, by any name, and what is wrong with a recipe: all of it at once.

Each problem comes with its line, its rule and what to write. An unknown key is told its right
place, its name here (``foreign.json`` holds what other tools and older transformers call our keys)
or the nearest that there is.
"""

import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trainkit.errors import RecipeError
from trainkit.options.model import NOT_TAKEN
from trainkit.options.section import (
    ACTS,
    UNION_TAGS,
    VERY_CLOSE,
    OnResume,
    Section,
    advice_of,
    ask,
    nearest,
    rule_of,
    section_in,
)
from trainkit.recipe.document import SHORT_FORMS, KeyPath, Settings, read_scalar
from trainkit.recipe.schema import Recipe
from trainkit.recipe.training import EVERY, FIELDS, TRANSFORMERS


@dataclass(frozen=True)
class Problem:
    """One thing to fix.

    Attributes:
        what: the key, its value and the rule that it breaks.
        where: ``file:line``, an override, or an option.
    """

    what: str
    where: str | None = None
    fix: str | None = None


class InvalidRecipe(RecipeError):
    """A recipe that cannot be used, with every problem that was found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            (only,) = self.problems
            super().__init__(only.what, where=only.where, fix=only.fix)
            return
        blocks = [str(RecipeError(p.what, where=p.where, fix=p.fix)) for p in self.problems]
        super().__init__(f"{len(blocks)} problems in the recipe\n\n" + "\n\n".join(blocks))


# -- Names that other tools use for our keys -------------------------------------------------------


@dataclass(frozen=True)
class ForeignName:
    """What a key of another tool is here.

    Attributes:
        target: our dotted key, or None.
        note: how to say it here, where copying the value is not enough.
    """

    owner: str
    target: str | None
    note: str | None = None


_ROWS = json.loads(Path(__file__).with_name("foreign.json").read_text(encoding="utf-8"))

FOREIGN: Mapping[str, ForeignName] = {
    name: ForeignName(*row) for name, row in _ROWS["foreign"].items()
}

REMOVED: Mapping[str, str] = _ROWS["removed"]
"""Fields that TrainingArguments once had; ``{value}`` stands for what was given."""


# -- A key that does not exist ---------------------------------------------------------------------


_MOST_KEYS_LISTED = 30


def _walk(
    model: type[BaseModel], prefix: str = ""
) -> Iterator[tuple[str, FieldInfo, type[BaseModel]]]:
    """Every key below a section, dotted, with ``[]`` for the items of a list, and its section."""
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        yield key, field, model
        if inner := section_in(field.annotation):
            section, in_list = inner
            yield from _walk(section, f"{key}[]" if in_list else key)


@lru_cache(maxsize=1)
def sections() -> Mapping[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {"": ("base",)}
    for key, _, _ in _walk(Recipe):
        section, _, name = key.rpartition(".")
        found[section] = (*found.get(section, ()), name)
    return {**found, "training": tuple(FIELDS)}


def places(name: str) -> list[str]:
    """The dotted keys that end in ``name``, except those of list items."""
    return [
        f"{section}.{name}" if section else name
        for section, names in sections().items()
        if name in names and "[]" not in section
    ]


def explain_unknown_key(path: KeyPath, value: Any, where: str | None) -> Problem:
    name, section, dotted = str(path[-1]), section_of(path), dotted_key(path)
    shown = "..." if isinstance(value, dict | list) else str(value)
    if value is None or isinstance(value, bool):
        shown = json.dumps(value)
    if section == "training" and name in EVERY:
        fix = EVERY[name].elsewhere.format(value=shown)
        return Problem(f"{dotted} is not set there", where, fix)
    if section in ("training", "") and name in REMOVED:
        return Problem(
            f"{name} was removed from TrainingArguments (transformers {TRANSFORMERS} is installed)",
            where,
            REMOVED[name].format(value=shown),
        )
    if section == "lora" and name in NOT_TAKEN:
        return Problem(f"{dotted}: peft's {name} is not taken", where, NOT_TAKEN[name])
    if name in FOREIGN:
        foreign = FOREIGN[name]
        if foreign.target is None:
            return Problem(
                f"{name} is {foreign.owner} name; it has no key here", where, foreign.note
            )
        what = f"{name} is {foreign.owner} name for {foreign.target}"
        return Problem(what, where, foreign.note or f"write {foreign.target}: {shown}")
    if right := places(name):
        here = f"under {section}" if section else "at the top level"
        return Problem(f"{name} is misplaced {here}", where, f"write {' or '.join(right)}")
    return Problem(f"unknown key {dotted}", where, _nearest_key(path))


def dotted_key(path: KeyPath) -> str:
    """``("data", "train", 0, "path")`` as ``data.train[0].path``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def section_of(path: KeyPath) -> str:
    """The section that holds a key, with ``[]`` for any list position: ``data.train[]``."""
    if any(isinstance(part, int) for part in path):
        return ".".join(part for part in path[:-1] if isinstance(part, str)) + "[]"
    return dotted_key(path[:-1])


def _nearest_key(path: KeyPath) -> str | None:
    name, siblings = str(path[-1]), sections().get(section_of(path), ())
    prefix = f"{dotted_key(path[:-1])}." if len(path) > 1 else ""
    close = [f"{prefix}{sibling}" for sibling in nearest(name, siblings)]
    if not close:
        every = {name for names in sections().values() for name in names}
        close = [place for word in nearest(name, every, VERY_CLOSE) for place in places(word)]
    if close:
        return ask(close)
    for word in nearest(name, FOREIGN, VERY_CLOSE):
        foreign = FOREIGN[word]
        is_key = foreign.target is not None
        return f"{word} is {foreign.owner} name for {foreign.target}" if is_key else foreign.note
    if len(siblings) > _MOST_KEYS_LISTED:
        return "`trainkit config show` lists the keys there are"
    return f"the keys there are: {', '.join(siblings)}"


# -- The merged values against the schema ----------------------------------------------------------


def validate(settings: Settings) -> Recipe:
    values = dict(settings.values)
    if "training" in values and values["training"] is None:
        del values["training"]
    problems: dict[Problem, KeyPath] = {}
    while True:
        try:
            recipe = Recipe.model_validate(values)
        except ValidationError as error:
            found = _schema_problems(error.errors(include_url=False), settings)
        else:
            break
        problems |= found
        # The rest is checked as well: rules across sections wait for fields without mistakes.
        bad = {path[1] for path in found.values() if path[0] == "training" and path[1:]}
        if not bad & set(values.get("training") or ()):
            break
        values["training"] = {k: v for k, v in values["training"].items() if k not in bad}
    if not problems:
        return recipe
    order = list(settings.origins)
    place = {path: order.index(path) if path in order else -1 for path in problems.values()}
    raise InvalidRecipe(sorted(problems, key=lambda problem: place[problems[problem]]))


def _schema_problems(errors: list[ErrorDetails], settings: Settings) -> dict[Problem, KeyPath]:
    problems: dict[Problem, KeyPath] = {}
    for error in errors:
        path = _existing(error["loc"], settings.values)
        if error["type"] == "rule":
            context = error["ctx"]
            key = tuple(context["key"].split("."))
            path = key if "." in context["key"] or not path else (*path, *key)
            what, where = str(context["what"]), _where(settings, path)
            if str(path[-1]) not in f"{where} {what}":
                what = f"{'.'.join(map(str, path))}: {what}"  # a line may hold many keys
            problems[Problem(what, where, context["fix"])] = path
        elif error["type"] == "missing":
            dotted, parent = dotted_key(error["loc"]), _existing(error["loc"][:-1], settings.values)
            how = {
                "model": "add `model: {name_or_path: DIRECTORY}`",
                "data": "add `data: {train: [FILE]}`",
            }.get(dotted, f"add {dotted}")
            where = _where(settings, parent) if parent else settings.file
            problems[Problem(f"{dotted} is missing", where, how)] = error["loc"]
        elif path in problems.values():
            continue  # each form of a value has its own error
        elif error["type"] == "extra_forbidden":
            problem = explain_unknown_key(path, error["input"], _where(settings, path))
            problems[problem] = path
        else:
            value, dotted = error["input"], dotted_key(path)
            shown = "" if isinstance(value, dict | list) else f" {value!r}"
            what, fix = f"{dotted}:{shown} {rule_of(error)}", _advice(error, dotted, value)
            problems[Problem(what, _where(settings, path), fix)] = path
    return problems


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


def _advice(error: ErrorDetails, dotted: str, value: Any) -> str | None:
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


# -- The reference of all keys, made from the sections and the rows of ``training`` ----------------


_WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    type(None): "null",
    Any: "anything",
}


@dataclass(frozen=True)
class KeyReference:
    """What a key is.

    Attributes:
        key: dotted; ``[]`` stands for the items of a list.
        on_resume: its rule of ``OnResume``.
    """

    key: str
    type: str
    default: Any
    is_required: bool
    help: str
    on_resume: str = ACTS


@lru_cache(maxsize=1)
def key_references() -> tuple[KeyReference, ...]:
    """Every key, in the order of the schema; those of a section that comes again, once."""
    found = [
        KeyReference("base", "text", None, False, "A recipe to build on, relative to this one.")
    ]
    seen, rules = set(), {"": ACTS}
    for key, field, model in _walk(Recipe):
        inner, required = section_in(field.annotation), field.is_required()
        above = key.rpartition(".")[0]
        rules[key] = rules[above]  # of the section, unless the key has its own
        if model is Recipe and inner is not None and issubclass(inner[0], Section):
            rules[key] = inner[0].on_resume
        for each in field.metadata:
            rules[key] = each.rule if isinstance(each, OnResume) else rules[key]
        default = None if required else field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            default = default.model_dump()
        text = field.description or (inner[0].__doc__ or "" if inner else "")
        about = " ".join(text.partition("\n\n")[0].split())
        words = _type_words(field.annotation)
        rules.setdefault(f"{key}[]", rules[key])
        if (model, key.rpartition(".")[2]) not in seen:
            seen.add((model, key.rpartition(".")[2]))
            found.append(KeyReference(key, words, default, required, about, rules[key]))
    for name, row in FIELDS.items():
        key = f"training.{name}"
        found.append(KeyReference(key, row.rule, row.default, False, row.about, row.on_resume))
    return tuple(found)


@lru_cache(maxsize=1)
def _known() -> Mapping[str, KeyReference]:
    return {entry.key: entry for entry in key_references()}


def default_of(key: str) -> Any:
    """The default of a dotted key; None of one that has none, or that is not in the reference."""
    return _known()[key].default if key in _known() else None


def on_resume(key: str) -> str:
    """What a continued run does with another value: ``acts``, ``consent``, or why it is refused.

    A key inside a value goes by the one that has the value.
    """
    while key not in _known() and "." in key:
        key = key.rpartition(".")[0]
    return _known()[key].on_resume if key in _known() else ACTS


def _type_words(annotation: Any) -> str:
    if annotation in _WORDS:
        return _WORDS[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_words(parts[0])
    if origin is Literal:
        return "one of " + ", ".join(str(part) for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_words(part) for part in parts))
    if origin is list:
        return "list"
    return "mapping" if origin is dict else "section"


# -- The recipe as a JSON schema: what editors complete, explain and check while it is written
# The sections come from their own classes, ``training`` from its rows.


def recipe_json_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) that every valid recipe fits.

    What the schema cannot say (rules across sections, files that must exist) is checked when the
    recipe is loaded.
    """
    schema = Recipe.model_json_schema(mode="validation")
    properties = schema["properties"]
    properties["training"] = {
        "type": "object",
        "description": f"TrainingArguments of transformers {TRANSFORMERS}, field for field.",
        "properties": {name: row.schema() for name, row in FIELDS.items()},
        "additionalProperties": False,
    }
    properties["base"] = {
        "type": "string",
        "description": "A recipe to build on, relative to this one.",
    }
    for short, (section, key) in SHORT_FORMS.items():
        inner = schema["$defs"][_class_of(properties[section])]["properties"][key]
        text = f"Short for {section}.{key}. {inner.get('description', '')}"
        properties[short] = {**inner, "description": text}
    # A recipe with a base may leave the required sections to it.
    schema.pop("required", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _class_of(section: dict[str, Any]) -> str:
    options = [section, *section.get("anyOf", ()), *section.get("allOf", ())]
    return next(str(each["$ref"]).rpartition("/")[2] for each in options if "$ref" in each)


# -- Looking a key up by any name: a part of ours, or what another tool calls it -------------------


def find_keys(words: Sequence[str]) -> tuple[Sequence[KeyReference], list[str], list[str]]:
    """The keys that contain one of the words, and those that others call by one of them.

    A word of no key is looked for among values and effects.

    No words are every key; case and dashes do not matter.

    Returns:
        The keys; a line for each name of another tool; a line for each word that nobody knows.
    """
    references = key_references()
    if not words:
        return references, [], []
    wanted: list[str] = []
    notes: list[str] = []
    unknown: list[str] = []
    for word in words:
        plain = word.strip().lstrip("-").lower().replace("-", "_")
        matches = [entry.key for entry in references if plain in entry.key.lower()]
        if not matches and len(plain) > 2:  # a value, or a word of what it does
            value = re.compile(rf"(?<![a-z0-9]){re.escape(plain)}(?![a-z0-9])")
            matches = [
                entry.key
                for entry in references
                if value.search(f"{entry.type} {entry.default} {entry.help}".lower())
            ]
        name = plain.rpartition(".")[2]
        is_elsewhere = name in REMOVED or (name in EVERY and name not in FIELDS)
        if name in FOREIGN or is_elsewhere:
            problem = explain_unknown_key(
                ("training", name) if is_elsewhere else (name,), "VALUE", None
            )
            notes.append(f"{problem.what}: {problem.fix}" if problem.fix else problem.what)
            matches += [FOREIGN[name].target or ""] if name in FOREIGN else []
        elif not matches or not plain:
            problem = explain_unknown_key(tuple(plain.split(".")), "VALUE", None)
            advice = f"; {problem.fix}" if problem.fix else ""
            unknown.append(f"no key and no other tool's name for one has {word!r} in it{advice}")
        wanted += matches
    return [entry for entry in references if entry.key in wanted], notes, unknown
