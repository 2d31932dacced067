"""``training.optim_args``, which are text: what each takes, and its value."""

import math
from dataclasses import dataclass
from typing import Any

_ON, _OFF = ("true", "1", "yes"), ("false", "0", "no")


@dataclass(frozen=True)
class Argument:
    """One of ``training.optim_args``, which are text.

    Attributes:
        name: as it is written there.
        kind: ``float``, ``int``, ``bool``, or ``str``.
        least: the smallest number.
        below: what a number is less than.
        words: those that a text may be.
        keeps: bytes of state a trained number, where it is neither 0 nor false.
        like: the field of ``training`` that says the same; one of them may.
    """

    name: str
    kind: type = float
    least: float = 0.0
    below: float = math.inf
    words: tuple[str, ...] = ()
    keeps: float = 0.0
    like: str = ""

    def broken_rule(self, text: str) -> str | None:
        """What the text must be and is not; None where it is right."""
        if self.kind is str:
            return None if text in self.words else f"must be one of {', '.join(self.words)}"
        if self.kind is bool:
            return None if text.lower() in (*_ON, *_OFF) else "must be true or false"
        try:
            value = self.kind(text)
        except ValueError:
            return "must be a whole number" if self.kind is int else "must be a number"
        if self.least <= value < self.below:  # nan is not
            return None
        if not math.isfinite(value):
            return "must be a number"
        end = "" if self.below == math.inf else f" and below {self.below:g}"
        return f"must be {self.least:g} or more{end}"

    def read(self, text: str) -> Any:
        """The value of a text that breaks no rule."""
        return text.lower() in _ON if self.kind is bool else self.kind(text)


def count(name: str, least: int = 1) -> Argument:
    """A whole number."""
    return Argument(name, int, least=least)


def switch(name: str) -> Argument:
    """True or false."""
    return Argument(name, bool)


def word(name: str, *words: str) -> Argument:
    """One of some words."""
    return Argument(name, str, words=words)


def parts_of(text: str | None) -> list[tuple[str, str]]:
    """``a=1, b=2`` in parts; one without ``=`` has an empty value."""
    parts = (part.partition("=") for part in (text or "").replace(" ", "").split(",") if part)
    return [(name, value) for name, _, value in parts]
