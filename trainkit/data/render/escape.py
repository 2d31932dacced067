"""Control tokens inside message text: found, and broken up so that they stay mere text."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

ESCAPE = "\u200b"
"""A zero-width space behind the first character of a control token makes it plain text."""


def alternatives(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of ``words``, longest first; one that never matches when there are none."""
    ordered = sorted((word for word in words if word.strip()), key=lambda word: (-len(word), word))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


class Escaper:
    """Breaks up control tokens inside text."""

    def __init__(self, tokens: set[str]) -> None:
        self._pattern = alternatives(tokens)
        self._starts = tuple({token[:2] for token in tokens if token.strip()})

    def __call__(self, text: str) -> tuple[str, int]:
        """The text with its control tokens broken up, and how many there were."""
        if not any(start in text for start in self._starts):
            return text, 0
        return self._pattern.subn(lambda match: f"{match[0][0]}{ESCAPE}{match[0][1:]}", text)

    def deep(self, value: Any) -> tuple[Any, int]:
        """Escape every string inside lists, tuples and dicts."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            pairs = [(self.deep(key), self.deep(item)) for key, item in value.items()]
            count = sum(key[1] + item[1] for key, item in pairs)
            return {key[0]: item[0] for key, item in pairs}, count
        if isinstance(value, (list, tuple)):
            items = [self.deep(item) for item in value]
            return type(value)(item for item, _ in items), sum(number for _, number in items)
        return value, 0
