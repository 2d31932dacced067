"""The reference of all keys, made from the sections and the rows of ``training``."""

import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainkit.options.section import section_in
from trainkit.recipe.document import SHORT_FORMS
from trainkit.recipe.problems import FOREIGN, REMOVED, explain_unknown_key
from trainkit.recipe.schema import Recipe
from trainkit.recipe.training import EVERY, FIELDS, TRANSFORMERS

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
        *(
            KeyReference(f"training.{name}", row.rule, row.default, False, row.about)
            for name, row in FIELDS.items()
        ),
    ]


def default_of(key: str) -> Any:
    """The default of a dotted key; None of one that has none, or that is not in the reference."""
    return next((known.default for known in key_references() if known.key == key), None)


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


def find_keys(words: Sequence[str]) -> tuple[list[KeyReference], list[str], list[str]]:
    """The keys that contain one of the words, and those that others call by one of them.

    A word of no key is looked for among values and effects.

    Args:
        words: none means every key. Case and dashes do not matter.

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
