"""One YAML file as plain values plus the line of every key, and such values over one another.

The reading follows YAML 1.2's core schema, not PyYAML's 1.1: ``1e-5`` is a number, ``yes``, ``no``,
``on`` and ``off`` are strings, a key that appears twice is an error. Nothing in a file can name a
Python type. Later values win: mappings merge key by key; lists and single values are replaced.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainkit.errors import RecipeError
from trainkit.places import regular
from trainkit.redact import REDACTED, is_secret_name, redact

RECORD = ("# What a run used; the file ends with three dots.\n", "...\n")
"""The first and the last line of a run's ``resolved.yaml``: values that it lacks have defaults."""

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
        lines: the 1-based line of every key and list item.
    """

    path: Path
    text: str
    values: dict[str, Any]
    lines: dict[KeyPath, int]


def text_of(path: Path) -> str:
    """The text of a recipe file."""
    try:
        content = regular(path, RecipeError).read_bytes()
        return content.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise RecipeError(
            f"there is no recipe at {path.absolute()}",
            where=str(path),
            fix="check the path; `trainkit new` lists the recipes that come with trainkit",
        ) from error
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise RecipeError(
            f"byte {content[error.start]:#04x} is not UTF-8",
            where=f"{path}:{line}",
            fix="save the file as UTF-8",
        ) from error


def read_document(path: Path) -> Document:
    """Read a recipe file."""
    text = text_of(path)
    if text.startswith(RECORD[0]) and not text.endswith(RECORD[1]):
        raise RecipeError(
            "its end is lost, and values with it", where=str(path), fix="take it from a copy"
        )
    reader = _Reader(str(path))
    values = reader.read(text)
    if values is None:
        raise RecipeError(
            "the recipe is empty", where=str(path), fix="`trainkit new` writes one to start from"
        )
    if not isinstance(values, dict):
        kind = "list" if isinstance(values, list) else "single value"
        raise RecipeError(
            f"a recipe is a mapping of sections, not a {kind}",
            where=f"{path}:1",
            fix="write `model:`, `data:`, `training:` at the left margin",
        )
    return Document(path, text.removesuffix("\n") + "\n", values, reader.lines)


def parse_value(text: str, where: str) -> Any:
    """Read one value typed on a command line.

    A value that begins with ``[``, ``{`` or a quote is YAML. Any other is a single scalar, exactly
    as typed, so globs and Windows paths need no quotes.
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
        if node.tag.removeprefix("tag:yaml.org,2002:") not in ("str", "map", "seq"):
            raise RecipeError(
                f"the YAML tag {node.tag!r} is not allowed", where=place, fix="remove the tag"
            )
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                inner = [((*path, number), item) for number, item in enumerate(node.value)]
                self.lines |= {place: item.start_mark.line + 1 for place, item in inner}
                return [self._value(item, place) for place, item in inner]
            is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
            return read_scalar(node.value) if is_plain else node.value
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line
            if not isinstance(key_node, yaml.ScalarNode):
                raise RecipeError(
                    "a key must be a word", where=self._place(line), fix="quote a value with braces"
                )
            key = key_node.value
            is_plain = isinstance(value_node, yaml.ScalarNode) and value_node.style is None
            has_colon = bool(node.flow_style) and key_node.style is None and ":" in key
            if has_colon and is_plain and value_node.value == "":  # {name:value}
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


# -- ``section.key=value`` from the command line ---------------------------------------------------


_KEY = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")


def is_override(argument: str) -> bool:
    """Whether a command-line argument has the shape ``section.key=value``."""
    key, equals, _ = argument.partition("=")
    return bool(equals) and _KEY.fullmatch(key) is not None


def parse_override(argument: str) -> tuple[tuple[str, ...], Any]:
    """Split an override into the key's path and its value."""
    key, equals, text = argument.partition("=")
    where = f"override {argument!r}"
    if not equals or not _KEY.fullmatch(key):
        raise RecipeError(
            "an override is section.key=value",
            where=where,
            fix="write training.learning_rate=1e-5, for example; a recipe goes after --config",
        )
    return tuple(key.split(".")), parse_value(text, where)


# -- Values from base recipes, the recipe, overrides and options, and where each is from -----------


SHORT_FORMS: Mapping[str, tuple[str, str]] = {"deepspeed": ("parallel", "shard")}
"""``deepspeed: zero2`` is ``parallel: {shard: zero2}``."""

_NOTHING_SAID: Mapping[tuple[str, ...], Any] = {
    ("kernels",): (True, False),
    ("model", "fp8"): (True, False),
    ("recompute",): ("none",),
}
"""Values that a key of the section replaces: they say no more than a section with nothing in it."""


@dataclass(frozen=True)
class Origin:
    """Where a value was given.

    Attributes:
        label: the short form that ``config show`` prints: ``qwen2.yaml:14``, ``override``,
            ``--deepspeed``.
        where: the long form for errors: ``configs/qwen2.yaml:14``.
    """

    label: str
    where: str


@dataclass
class Settings:
    """A tree of values with the origin of every key in it.

    Attributes:
        file: the last file merged, named where a key is missing.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    file: str | None = None

    def merge(self, document: Document) -> None:
        """Put a file's values over what is there, those of its short keys at the same lines."""
        self.file = str(document.path)
        for short, (section, key) in SHORT_FORMS.items():
            if short not in document.values:
                continue
            value, line = document.values.pop(short), document.lines.pop((short,))
            inside = document.values.setdefault(section, {})
            if not isinstance(inside, dict) or key in inside:
                raise RecipeError(
                    f"{short} is short for {section}.{key}, and {section} is given as well",
                    where=f"{document.path}:{line}",
                    fix=f"keep one: {section}: {{{key}: {value}}}",
                )
            inside[key] = value
            document.lines.setdefault((section,), line)
            document.lines[section, key] = line
        origins = {
            path: Origin(f"{document.path.name}:{line}", f"{document.path}:{line}")
            for path, line in document.lines.items()
        }
        self._merge(self.values, document.values, (), origins)

    def override(self, text: str, label: str) -> None:
        """Put ``section.key=value`` over what is there."""
        keys, value = parse_override(text)
        keys = SHORT_FORMS.get(keys[0], keys) if len(keys) == 1 else keys
        where, target = f"override {text!r}", self.values
        for depth, key in enumerate(keys[:-1], 1):
            target = target.get(key)  # type: ignore[assignment]
            says_nothing = isinstance(target, bool | str) and target in _NOTHING_SAID.get(
                keys[:depth], ()
            )
            if target is None or says_nothing:
                break
            if not isinstance(target, dict):
                dotted = ".".join(keys[:depth])
                raise RecipeError(
                    f"{dotted} is a {'list' if isinstance(target, list) else 'single value'}, "
                    f"so {'.'.join(keys)} cannot be set in it",
                    where=where,
                    fix=f"give {dotted} as one value",
                )
        self.assign(keys, value, Origin(label, where))

    def assign(self, path: tuple[str, ...], value: Any, origin: Origin) -> None:
        """Put one value over what is there; sections on the way are made.

        ``kernels: true`` turns into a mapping when one op is set: the ops not named stay on.
        """
        tree: Any = value
        for key in reversed(path):
            tree = {key: tree}
        origins = dict.fromkeys(_paths(tree, ()), origin)
        self._merge(self.values, tree, (), origins)

    def forget_secrets(self) -> None:
        """Drop what a run's record keeps instead of secrets: they are asked for again."""
        for path in [path for path in self.origins if _at(self.values, path) == REDACTED]:
            del _at(self.values, path[:-1])[path[-1]]
            del self.origins[path]

    def refuse_secrets(self) -> None:
        """A value that the run's records would hold without its secret could not be resumed."""
        values = {path: _at(self.values, path) for path in self.origins}
        for (path, value), redacted in zip(values.items(), redact([*values.values()]), strict=True):
            if isinstance(value, dict) or is_secret_name(str(path[-1])):
                continue
            if str(redacted) != str(value) or REDACTED in str(value):
                key = ".".join(map(str, path))
                raise RecipeError(
                    f"{key} holds a secret, which the records of a run leave out",
                    where=self.origins[path].where,
                    fix="give it where the library that needs it looks for it: an environment "
                    "variable as HF_TOKEN, a login, ~/.netrc",
                )

    def origin(self, path: KeyPath) -> Origin | None:
        """The origin of a key, or of the closest key above it that has one."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path[:-1]
        return None

    def _merge(
        self,
        target: dict[str, Any],
        source: Mapping[str, Any],
        prefix: KeyPath,
        origins: Mapping[KeyPath, Origin],
    ) -> None:
        for key, value in source.items():
            path = (*prefix, key)
            if isinstance(value, Mapping) and isinstance(target.get(key), dict):
                self._merge(target[key], value, path, origins)
                continue
            for known in [known for known in self.origins if known[: len(path)] == path]:
                del self.origins[known]
            target[key] = value
            self.origins.update({p: o for p, o in origins.items() if p[: len(path)] == path})


def _at(tree: Any, path: KeyPath) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _paths(value: Any, prefix: KeyPath) -> Iterator[KeyPath]:
    for key, item in value.items() if isinstance(value, Mapping) else ():
        yield (*prefix, key)
        yield from _paths(item, (*prefix, key))
