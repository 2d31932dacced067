"""Looking a key up by any name: a part of ours, or what another tool calls it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.recipe.check.foreign import FOREIGN, REFUSED, REMOVED
from trainkit.recipe.check.suggest import explain_unknown_key
from trainkit.recipe.check.validation import vocabulary
from trainkit.recipe.show.reference import KeyReference, key_references


@dataclass(frozen=True)
class FoundKeys:
    """What was found.

    Attributes:
        entries: the keys, in the order of the schema.
        notes: a line for each name of another tool.
        unknown: a line for each word that nobody knows.
    """

    entries: Sequence[KeyReference]
    notes: Sequence[str]
    unknown: Sequence[str]


def find_keys(words: Sequence[str]) -> FoundKeys:
    """The keys that contain one of the words, and those that others call by one of them.

    A word of no key is looked for among values and effects.

    Args:
        words: none means every key. Case and dashes do not matter.
    """
    references = key_references()
    if not words:
        return FoundKeys(references, (), ())
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
        entry = FOREIGN.get(name)
        is_elsewhere = name in REFUSED or name in REMOVED
        if entry is not None or is_elsewhere:
            notes.append(_note(name, is_elsewhere=is_elsewhere))
            if entry is not None and entry.target is not None:
                matches += [each.key for each in references if each.key == entry.target]
        elif not matches or not plain:
            problem = explain_unknown_key(tuple(plain.split(".")), "VALUE", vocabulary(), None)
            advice = f"; {problem.fix}" if problem.fix else ""
            unknown.append(f"no key and no other tool's name for one has {word!r} in it{advice}")
        wanted += matches
    entries = [entry for entry in references if entry.key in wanted]
    return FoundKeys(entries, notes, unknown)


def _note(name: str, *, is_elsewhere: bool) -> str:
    path = ("training", name) if is_elsewhere else (name,)
    problem = explain_unknown_key(path, "VALUE", vocabulary(), None)
    return f"{problem.what}: {problem.fix}" if problem.fix else problem.what
