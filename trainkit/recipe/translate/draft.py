"""A recipe in the making, and what became of each key of the other tool's."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from trainkit.recipe.fields.table import ACTS
from trainkit.redact import REDACTED, is_secret_name

Kind = Literal["taken", "changed", "added", "left out"]
"""The same here; here with another meaning; a default that has to be said; not here."""


@dataclass(frozen=True)
class Line:
    """What became of one key.

    Attributes:
        kind: see ``Kind``.
        theirs: the key and value in the other tool's words; of what is added, the tool's name.
        ours: the keys and values here; empty where there are none.
        note: what differs, or why it is left out.
    """

    kind: Kind
    theirs: str
    ours: str = ""
    note: str = ""


@dataclass
class Draft:
    """What has been made so far.

    Attributes:
        tool: the other tool's name.
        folder: where its file is, for files that it names.
        theirs: its keys.
        values: ours, dotted.
        origins: by our key, what to write behind it.
        lines: a line for each key that was looked at, in its order.
        seen: keys that need no line of their own any more.
    """

    tool: str
    folder: Path
    theirs: Mapping[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def take(self, theirs: str, ours: Mapping[str, Any], note: str = "") -> None:
        """A key of theirs sets keys of ours; with a note it does not mean quite the same."""
        for key, value in ours.items():
            if key in self.values and self.values[key] != value:
                self._take_back(key, theirs)
            self.values[key] = value
            self.origins[key] = f"{self.tool}: {theirs}"
        text = ", ".join(f"{key}: {shown(value)}" for key, value in ours.items())
        self.lines.append(Line("changed" if note else "taken", self._named(theirs), text, note))

    def _take_back(self, key: str, theirs: str) -> None:
        """An earlier line no longer says a value that a later key of theirs sets."""
        old = f", {key}: {shown(self.values[key])}, "
        for place, line in enumerate(self.lines):
            said = f", {line.ours}, "
            if old in said:
                left = said.replace(old, ", ", 1).strip(", ")
                note = line.note or ("" if left else f"{theirs} says it again")
                self.lines[place] = replace(line, ours=left, note=note)

    def leave(self, theirs: str, why: str) -> None:
        """A key of theirs has nothing here."""
        self.lines.append(Line("left out", self._named(theirs), "", why))

    def has_line(self, theirs: str) -> bool:
        """Whether a key was already spoken of."""
        return any(line.theirs.startswith(f"{theirs}: ") for line in self.lines)

    def same(self, theirs: str) -> None:
        """A key that needs nothing: off in both, or said with another one."""
        self.lines.append(Line("taken", self._named(theirs), "", "nothing to write for it"))

    def add(self, ours: str, value: Any, why: str) -> None:
        """A value that their file does not hold: unless it is set already."""
        if ours in self.values:
            return
        self.values[ours] = value
        self.origins[ours] = why
        self.lines.append(Line("added", self.tool, f"{ours}: {shown(value)}", why))

    def change(self, ours: str, value: Any, note: str) -> None:
        """Trainkit's default, said since the tool's own differs: unless it is set already."""
        if ours in self.values:
            return
        self.values[ours] = value
        self.origins[ours] = "trainkit's default"
        self.lines.append(Line("changed", self.tool, f"{ours}: {shown(value)}", note))

    def drop(self, ours: str, why: str) -> None:
        """A value that this tool refuses."""
        value, origin = self.values.pop(ours), self.origins.pop(ours, "")
        theirs = origin.partition(": ")[2] or ours
        self.lines = [line for line in self.lines if not line.ours.startswith(f"{ours}: ")]
        self.lines.append(Line("left out", f"{theirs}: {shown(value)}", "", why))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of theirs; the default where it is absent or null."""
        value = self.theirs.get(key)
        return default if value is None else value

    def _named(self, theirs: str) -> str:
        if theirs not in self.theirs:
            return theirs
        value = REDACTED if is_secret_name(theirs) else shown(self.theirs[theirs])
        return f"{theirs}: {value}"


Row = Callable[[Draft, str, Any], None]
"""What to do with a key of theirs that has a value."""


def to(target: str, convert: Callable[[Any], Any] | None = None, note: str = "") -> Row:
    """The key is called ``target`` here."""

    def row(draft: Draft, key: str, value: Any) -> None:
        draft.take(key, {target: convert(value) if convert else value}, note)

    return row


def leave(why: str) -> Row:
    """The key has nothing here."""

    def row(draft: Draft, key: str, value: Any) -> None:
        draft.leave(key, why)

    return row


def when(flag: Any, then: Row, otherwise: str) -> Row:
    """One row for a value, and a reason to leave out all others."""

    def row(draft: Draft, key: str, value: Any) -> None:
        then(draft, key, value) if value == flag else draft.leave(key, otherwise)

    return row


def part_of(others: str) -> Row:
    """The key is read together with another one, which has the line."""

    def row(draft: Draft, key: str, value: Any) -> None:
        if others not in draft.theirs or draft.theirs[others] is None:
            draft.leave(key, f"it says more about {others}, which is not set")

    return row


def rows_of(target: Mapping[str, str], convert: Callable[[Any], Any] | None = None) -> dict:
    """Several keys that have another name here."""
    return {theirs: to(ours, convert) for theirs, ours in target.items()}


def as_training_field(key: str) -> Row | None:
    """The row of a key that is a field of TrainingArguments, and acts."""
    return to(f"training.{key}") if key in ACTS else None


def words(value: Any) -> list[str]:
    """``a,b`` and ``[a, b]`` alike."""
    parts: Iterable[Any] = value.split(",") if isinstance(value, str) else value
    return [str(part).strip() for part in parts if str(part).strip()]


def shown(value: Any) -> str:
    """A value on one short line."""
    text = {True: "true", False: "false", None: "null"}[value] if _is_word(value) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 72 else f"{text[:69]}..."


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)
