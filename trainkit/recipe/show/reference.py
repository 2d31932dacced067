"""The reference of all keys, made from the schema and the installed TrainingArguments."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainkit.recipe.check.foreign import REFUSED
from trainkit.recipe.fields.table import ACTS, FIXED, Acts
from trainkit.recipe.fields.training import TRAINING_DEFAULTS
from trainkit.recipe.fields.training_fields import TrainingField, training_fields
from trainkit.recipe.read.settings import SHORT_FORMS
from trainkit.recipe.schema import Recipe

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
        type: its values, in words.
        default: its default, in plain values.
        is_required: whether there is no default.
        help: its effect and unit.
    """

    key: str
    type: str
    default: Any
    is_required: bool
    help: str


def key_references() -> list[KeyReference]:
    """Every key, in the order of the schema."""
    return [
        KeyReference("base", "text", None, False, "A recipe to build on, relative to this one."),
        *_of_section(Recipe, "", set()),
        *_of_training(),
    ]


def default_of(key: str) -> Any:
    """The default of a dotted key; None of one that has none, or that is not in the reference."""
    return next((known.default for known in key_references() if known.key == key), None)


def section_in(annotation: Any, *, in_list: bool = False) -> tuple[type[BaseModel], bool] | None:
    """The section class inside an annotation, and whether it is the item of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, in_list
    origin = get_origin(annotation)
    if origin in (Annotated, list, Union, types.UnionType):
        for part in get_args(annotation):
            found = section_in(part, in_list=in_list or origin is list)
            if found is not None:
                return found
    return None


def _of_section(
    model: type[BaseModel], prefix: str, seen: set[type[BaseModel]]
) -> Iterator[KeyReference]:
    """The keys of a section; those of a section inside it once, where it comes first."""
    seen.add(model)
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        found = section_in(field.annotation)
        yield _of_field(key, field)
        if found is not None and found[0] not in seen:
            section, in_list = found
            yield from _of_section(section, f"{key}[]" if in_list else key, seen)


def _of_field(key: str, field: FieldInfo) -> KeyReference:
    required = field.is_required()
    default = None if required else field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        default = default.model_dump()
    section = section_in(field.annotation)
    text = field.description or (section[0].__doc__ or "" if section else "")
    return KeyReference(key, _type_words(field.annotation), default, required, _one_line(text))


def _of_training() -> Iterator[KeyReference]:
    for name, field in training_fields().fields.items():
        if name in REFUSED:
            continue
        text, default = field.help, field.default
        type_words = field.rule
        if name in FIXED:
            default, reason = FIXED[name]
            text = f"Cannot be changed: {reason}."
        elif name in TRAINING_DEFAULTS:
            default = TRAINING_DEFAULTS[name]
        if name in ACTS:
            row = ACTS[name]
            notes = {"Needs": row.needs, "By default": row.derived}
            text = " ".join([text, *(f"{say} {what}." for say, what in notes.items() if what)])
            type_words = f"one of {', '.join(row.choices)}" if row.choices else type_words
        if name == "report_to" and training_fields().trackers:
            type_words = f"none, all, or of {', '.join(sorted(training_fields().trackers))}"
        yield KeyReference(f"training.{name}", type_words, default, False, text)


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


def _one_line(text: str) -> str:
    """The first paragraph, on one line."""
    return " ".join(text.partition("\n\n")[0].split())


# -- The recipe as a JSON schema: what editors complete, explain and check while it is written
# The sections come from their own classes, ``training`` from the installed ``TrainingArguments``.


_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_CONTAINERS = {"dict": "object", "Dict": "object", "list": "array", "List": "array"}


def recipe_json_schema() -> dict[str, Any]:
    """A JSON schema (draft 2020-12) that every valid recipe fits.

    What the schema cannot say (rules across sections, files that must exist) is checked when the
    recipe is loaded.
    """
    schema = Recipe.model_json_schema(mode="validation")
    properties = schema["properties"]
    properties["training"] = _training()
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


def _training() -> dict[str, Any]:
    table = training_fields()
    described = {
        name: _field(field)
        for name, field in table.fields.items()
        if name not in REFUSED and (name in ACTS or name in FIXED)
    }
    return {
        "type": "object",
        "description": f"TrainingArguments of transformers {table.version}, field for field.",
        "properties": described,
        "additionalProperties": False,
    }


def _field(field: TrainingField) -> dict[str, Any]:
    if field.name in FIXED:
        value, reason = FIXED[field.name]
        return {"enum": [value], "description": f"Cannot be changed: {reason}."}
    row = ACTS[field.name]
    described: dict[str, Any] = {"description": field.help} if field.help else {}
    default = TRAINING_DEFAULTS.get(field.name, field.default)
    if isinstance(default, str | int | float | bool | list | dict):
        described["default"] = default
    choices = [word for word in row.choices or field.choices if word not in (row.without or {})]
    options = [_limited(_type_of(option), row) for option in field.options]
    if choices:
        words = {"type": "string", "enum": choices}
        options = [words, *(each for each in options if each.get("type") not in (None, "string"))]
    if {} in options or not options:
        return described  # a class that only transformers can judge
    return described | (options[0] if len(options) == 1 else {"anyOf": options})


def _limited(kind: dict[str, Any], row: Acts) -> dict[str, Any]:
    """A number's limits, where it has some."""
    if kind.get("type") not in ("integer", "number") or row.off is not None:
        return kind
    limits = {
        "minimum": row.at_least,
        "exclusiveMinimum": row.above,
        "exclusiveMaximum": row.below,
        "maximum": row.at_most,
    }
    return kind | {key: value for key, value in limits.items() if value is not None}


def _type_of(option: ast.expr) -> dict[str, Any]:
    if isinstance(option, ast.Constant) and option.value is None:
        return {"type": "null"}
    outer = option.value if isinstance(option, ast.Subscript) else option
    name = ast.unparse(outer)
    if name == "Literal" and isinstance(option, ast.Subscript):
        inner = option.slice
        words = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        return {"enum": [ast.literal_eval(word) for word in words]}
    if name in _CONTAINERS:
        return {"type": _CONTAINERS[name]}
    return {"type": _TYPES[name]} if name in _TYPES else {}
