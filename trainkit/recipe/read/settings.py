"""Values from base recipes, the recipe, overrides and options, and where each is from.

Later ones win. Mappings merge key by key; lists and single values are replaced.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import RecipeError
from trainkit.recipe.read.document import Document, KeyPath
from trainkit.redact import REDACTED, is_secret_name, redact


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
        values: the merged values.
        origins: where each key was given.
        file: the last file merged, named where a key is missing.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    file: str | None = None

    def merge(self, document: Document) -> None:
        """Put a file's values over what is there."""
        self.file = str(document.path)
        origins = {
            path: Origin(f"{document.path.name}:{line}", f"{document.path}:{line}")
            for path, line in document.lines.items()
        }
        self._merge(self.values, document.values, (), origins)

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
        for path in self.origins:
            value = _at(self.values, path)
            if isinstance(value, dict) or is_secret_name(str(path[-1])):
                continue
            if str(redact(value)) != str(value) or REDACTED in str(value):
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
            self._forget(path)
            target[key] = value
            self.origins.update({p: o for p, o in origins.items() if p[: len(path)] == path})

    def _forget(self, path: KeyPath) -> None:
        stale = [known for known in self.origins if known[: len(path)] == path]
        for known in stale:
            del self.origins[known]


def _at(tree: Any, path: KeyPath) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _paths(value: Any, prefix: KeyPath) -> Iterator[KeyPath]:
    """The paths of all keys in a tree of mappings."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield (*prefix, key)
            yield from _paths(item, (*prefix, key))


# -- Keys that are short for others: written either way, read in one way --------------------------


SHORT_FORMS: Mapping[str, tuple[str, str]] = {"deepspeed": ("parallel", "shard")}
"""``deepspeed: zero2`` is ``parallel: {shard: zero2}``."""


def long_key(keys: tuple[str, ...]) -> tuple[str, ...]:
    """The key that is meant, where one is short for it."""
    return SHORT_FORMS.get(keys[0], keys) if len(keys) == 1 else keys


def spell_out(document: Document) -> None:
    """Replace the short keys of a recipe file by the long ones, at the same lines.

    Raises:
        RecipeError: the file has both.
    """
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
