"""What to say about a key that does not exist: the right place, the right name, or the nearest."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.options.lora import NOT_TAKEN
from trainkit.options.words import VERY_CLOSE, ask, nearest
from trainkit.recipe.check.foreign import FOREIGN, REFUSED, REMOVED
from trainkit.recipe.check.problems import Problem
from trainkit.recipe.read.document import KeyPath

_MOST_KEYS_LISTED = 30


@dataclass(frozen=True)
class Vocabulary:
    """Every key there is.

    Attributes:
        sections: the keys of each section; the top level is ``""``.
        transformers: the version whose TrainingArguments ``training`` mirrors.
    """

    sections: Mapping[str, tuple[str, ...]]
    transformers: str

    def places(self, name: str) -> list[str]:
        """The dotted keys that end in ``name``, except those of list items."""
        return [
            f"{section}.{name}" if section else name
            for section, names in self.sections.items()
            if name in names and "[]" not in section
        ]

    def names(self) -> Iterable[str]:
        """All last parts of keys."""
        return {name for names in self.sections.values() for name in names}


def explain_unknown_key(
    path: KeyPath, value: Any, vocabulary: Vocabulary, where: str | None
) -> Problem:
    """Describe an unknown key.

    Args:
        path: where it is.
        value: what was given.
        vocabulary: what there is.
        where: file and line.
    """
    name = str(path[-1])
    section = section_of(path)
    shown = "..." if isinstance(value, dict | list) else _yaml_word(value)
    dotted = dotted_key(path)
    if section == "training" and name in REFUSED:
        return Problem(f"{dotted} is not set there", where, REFUSED[name].format(value=shown))
    if section in ("training", "") and name in REMOVED:
        version = vocabulary.transformers
        return Problem(
            f"{name} was removed from TrainingArguments (transformers {version} is installed)",
            where,
            REMOVED[name].format(value=shown),
        )
    if section == "lora" and name in NOT_TAKEN:
        return Problem(f"{dotted}: peft's {name} is not taken", where, NOT_TAKEN[name])
    if name in FOREIGN:
        return _explain_foreign(name, shown, where)
    places = vocabulary.places(name)
    if places:
        here = f"under {section}" if section else "at the top level"
        return Problem(f"{name} is misplaced {here}", where, f"write {' or '.join(places)}")
    return _explain_typo(path, vocabulary, where)


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


def _explain_foreign(name: str, shown: str, where: str | None) -> Problem:
    entry = FOREIGN[name]
    if entry.target is None:
        return Problem(f"{name} is {entry.owner} name; it has no key here", where, entry.note)
    fix = f"write {entry.target}: {shown}" if entry.note is None else entry.note
    return Problem(f"{name} is {entry.owner} name for {entry.target}", where, fix)


def _explain_typo(path: KeyPath, vocabulary: Vocabulary, where: str | None) -> Problem:
    name, section = str(path[-1]), section_of(path)
    what = f"unknown key {dotted_key(path)}"
    siblings = vocabulary.sections.get(section, ())
    prefix = f"{dotted_key(path[:-1])}." if len(path) > 1 else ""
    close = [f"{prefix}{sibling}" for sibling in nearest(name, siblings)]
    if not close:
        known = nearest(name, vocabulary.names(), VERY_CLOSE)
        close = [place for word in known for place in vocabulary.places(word)]
    if close:
        return Problem(what, where, ask(close))
    for foreign in nearest(name, FOREIGN, VERY_CLOSE):
        entry = FOREIGN[foreign]
        hint = f"{foreign} is {entry.owner} name for {entry.target}" if entry.target else entry.note
        return Problem(what, where, hint)
    if len(siblings) > _MOST_KEYS_LISTED:
        return Problem(what, where, "`trainkit config show` lists the keys there are")
    return Problem(what, where, f"the keys there are: {', '.join(siblings)}")


def _yaml_word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
