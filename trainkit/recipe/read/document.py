"""One YAML file as plain values plus the line of every key.

The reading follows YAML 1.2's core schema, not PyYAML's 1.1: ``1e-5`` is a number, ``yes``, ``no``,
``on`` and ``off`` are strings, a key that appears twice is an error. Nothing in a file can name a
Python type.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainkit.errors import RecipeError
from trainkit.places import regular

KeyPath = tuple[str | int, ...]
"""Where a value sits: mapping keys and list positions from the top, ``("data", "train", 0)``."""

# A recipe has tens of values. Aliases of aliases could blow one up to billions.
_MAX_VALUES = 10_000

# Python refuses to read integers of thousands of digits; as a float one is merely infinite.
_LONGEST_INTEGER = 100

_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]{1,30}")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]{1,30}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"[-+]?\.(?:inf|Inf|INF)")
_WORDS: Mapping[str, bool | float | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


@dataclass(frozen=True)
class Document:
    """A parsed recipe file.

    Attributes:
        path: the file, as it was given.
        text: its content.
        values: its mapping, in plain Python values.
        lines: the 1-based line of every key and list item.
    """

    path: Path
    text: str
    values: dict[str, Any]
    lines: dict[KeyPath, int]


def read_document(path: Path) -> Document:
    """Read a recipe file.

    Raises:
        RecipeError: the file is missing, not UTF-8, not YAML, empty, or not a mapping; or a key
            appears twice.
    """
    text = _read_text(path)
    reader = _Reader(str(path))
    values = reader.read(text)
    if values is None:
        raise RecipeError(
            "the recipe is empty", where=str(path), fix="`trainkit new` writes one to start from"
        )
    if not isinstance(values, dict):
        raise RecipeError(
            f"a recipe is a mapping of sections, not a {_kind(values)}",
            where=f"{path}:1",
            fix="write `model:`, `data:`, `training:` at the left margin",
        )
    return Document(path, text, values, reader.lines)


def parse_value(text: str, where: str) -> Any:
    """Read one value typed on a command line.

    A value that begins with ``[``, ``{`` or a quote is YAML. Any other is a single scalar, exactly
    as typed, so globs and Windows paths need no quotes.

    Args:
        text: what follows the equals sign.
        where: named in errors.

    Raises:
        RecipeError: the YAML is broken.
    """
    stripped = text.strip()
    if stripped[:1] in ("[", "{", '"', "'"):
        return _Reader(where, is_file=False).read(stripped)
    return read_scalar(stripped)


def read_scalar(text: str) -> Any:
    """The value of a plain scalar: null, a boolean, a number, or else the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text) and len(text) <= _LONGEST_INTEGER:
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITY.fullmatch(text):
        return float(text.replace(".", "", 1))
    for pattern, base in ((_OCTAL, 8), (_HEXADECIMAL, 16)):
        if pattern.fullmatch(text):
            return int(text, base)
    return text


def _read_text(path: Path) -> str:
    try:
        content = regular(path, RecipeError).read_bytes()
    except FileNotFoundError as error:
        raise RecipeError(
            f"there is no recipe at {path.absolute()}",
            where=str(path),
            fix="check the path; `trainkit new` lists the recipes that come with trainkit",
        ) from error
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(path)) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise RecipeError(
            f"byte {content[error.start]:#04x} is not UTF-8",
            where=f"{path}:{line}",
            fix="save the file as UTF-8",
        ) from error


class _Composer(yaml.SafeLoader):
    """PyYAML's parser without YAML 1.1's guesses: every plain scalar stays text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - the base class's own shape


class _Reader:
    """Turns one YAML text into values and remembers the lines."""

    def __init__(self, where: str, *, is_file: bool = True) -> None:
        self.where = where
        self.is_file = is_file
        self.lines: dict[KeyPath, int] = {}
        self._num_values = 0
        self._open: list[yaml.Node] = []

    def read(self, text: str) -> Any:
        try:
            node = yaml.compose(text, Loader=_Composer)
        except yaml.MarkedYAMLError as error:
            raise self._broken(error, text) from error
        except yaml.YAMLError as error:  # a character that YAML forbids; it carries no mark
            raise RecipeError(
                f"not valid YAML: {str(error).splitlines()[0]}",
                where=self.where,
                fix="remove control characters from the file",
            ) from error
        except RecursionError as error:
            raise RecipeError("nested too deeply", where=self.where) from error
        return None if node is None else self._value(node, ())

    def _broken(self, error: yaml.MarkedYAMLError, text: str) -> RecipeError:
        """Say where YAML's own rules are broken, and where the broken thing began."""
        what = f"not valid YAML: {' '.join(filter(None, (error.context, error.problem)))}"
        start, mark = error.context_mark, error.problem_mark or error.context_mark
        last_line = max(text.rstrip().count("\n"), 0)
        line = min(mark.line, last_line) if mark else 0
        if self.is_file and start is not None and start.line < line:
            what += f" (it began on line {start.line + 1})"
        advice = _yaml_advice(error.problem or "", self.is_file)
        return RecipeError(what, where=self._place(line), fix=advice)

    def _place(self, line: int) -> str:
        return f"{self.where}:{line + 1}" if self.is_file else self.where

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        place = self._place(node.start_mark.line)
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            raise RecipeError(
                f"more than {_MAX_VALUES} values", where=place, fix="expand fewer aliases"
            )
        if any(node is parent for parent in self._open):
            raise RecipeError("an alias contains itself", where=place, fix="write it out")
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.split(":")[-1] not in (
            "str",
            "map",
            "seq",
        ):
            raise RecipeError(
                f"the YAML tag {node.tag!r} is not allowed", where=place, fix="remove the tag"
            )
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self._item(item, (*path, i)) for i, item in enumerate(node.value)]
            is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
            return read_scalar(node.value) if is_plain else node.value
        finally:
            self._open.pop()

    def _item(self, node: yaml.Node, path: KeyPath) -> Any:
        self.lines[path] = node.start_mark.line + 1
        return self._value(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line
            if not isinstance(key_node, yaml.ScalarNode):
                raise RecipeError(
                    "a key must be a word", where=self._place(line), fix="quote a value with braces"
                )
            key = key_node.value
            if _lacks_blank(node, key_node, value_node):
                name, _, value = key.partition(":")
                raise RecipeError(
                    f"{key} is one word in YAML: a colon inside braces needs a blank behind it",
                    where=self._place(line),
                    fix=f"write {{{name}: {value}}}, and quote the whole argument in a shell",
                )
            if key == "<<":
                raise RecipeError(
                    "merge keys (<<) are not part of YAML 1.2",
                    where=self._place(line),
                    fix="put what recipes share into a file and name it with `base: FILE`",
                )
            inner = (*path, key)
            if key in values:
                first = self.lines[inner]
                raise RecipeError(
                    f"the key {key!r} appears twice"
                    + (f", first on line {first}" if self.is_file else ""),
                    where=self._place(line),
                    fix="keep one of them",
                )
            self.lines[inner] = line + 1
            values[key] = self._value(value_node, inner)
        return values


def _lacks_blank(node: yaml.MappingNode, key: yaml.ScalarNode, value: yaml.Node) -> bool:
    """Whether ``{name:value}`` was typed, which YAML reads as a key without a value."""
    is_empty = isinstance(value, yaml.ScalarNode) and value.style is None and value.value == ""
    return bool(node.flow_style) and key.style is None and ":" in key.value and is_empty


def _kind(value: Any) -> str:
    return "list" if isinstance(value, list) else "single value"


def _yaml_advice(problem: str, is_file: bool) -> str:
    if "'\\t'" in problem:
        return "indent with spaces, not with tabs"
    if "mapping values are not allowed" in problem:
        return "quote a value that contains `: `, and check the indentation"
    if "undefined alias" in problem or "expected alphabetic" in problem or "alias" in problem:
        return "quote a value that begins with * or &"
    if not is_file:
        return "check quotes and brackets"
    return "check quotes, brackets and indentation on that line and the one before"
