"""Typed reading of decoded rows: each function returns the wanted type or raises RowError."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from trainkit.data.read.messages import RowError


def decoded(text: str, place: str) -> Any:
    """Decode JSON inside a text; ``place`` names it in the error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError("bad_json", f"{place} holds JSON that cannot be read: {error}") from error


def items(row: Mapping[str, Any], key: str) -> list[Any]:
    """The list under ``key``, which may be written as JSON text."""
    value = row.get(key)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = decoded(value, repr(key))
    if not isinstance(value, list):
        raise RowError("wrong_type", f"{key!r} is {kind(value)}, not a list")
    return value


def text(row: Mapping[str, Any], key: str) -> str:
    """The text under ``key``."""
    value = row.get(key)
    if not isinstance(value, str):
        raise RowError("wrong_type", f"{key!r} is {kind(value)}, not text")
    return value


def optional_text(row: Mapping[str, Any], key: str) -> str | None:
    """The text under ``key``, or None."""
    return None if row.get(key) is None else text(row, key)


def string_or_none(item: Mapping[str, Any], key: str, number: int) -> str | None:
    """The same for a field of turn ``number``."""
    value = item.get(key)
    if value is None or isinstance(value, str):
        return value
    raise RowError("wrong_type", f"turn {number}: {key!r} is {kind(value)}, not text")


def integers(row: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The whole numbers under ``key``."""
    items = switches(row, key)
    if any(isinstance(item, bool) for item in items):
        raise RowError("wrong_type", f"{key!r} holds true or false among numbers")
    return items


def switches(row: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The same, where true and false may stand for 1 and 0."""
    value = row.get(key)
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise RowError("wrong_type", f"{key!r} is {kind(value)}, not a list of whole numbers")
    items = tuple(value)
    if not all(isinstance(item, int) for item in items):
        raise RowError("wrong_type", f"{key!r} holds something that is not an integer")
    return items


def kind(value: Any) -> str:
    """What a value is, in words for an error."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", type(None): "null"}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "a number"
    return "missing" if value is None else names.get(type(value), type(value).__name__)
