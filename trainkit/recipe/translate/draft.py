"""What another tool's file says, the tables it is read by, and the recipe in the making."""

import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from trainkit.errors import RecipeError
from trainkit.recipe.keys import default_of
from trainkit.redact import REDACTED, is_secret_name

TOOLS = ("axolotl", "llamafactory", "llamafactory_v1", "swift", "unsloth", "trl")


@functools.cache
def table(name: str) -> Any:
    """A data file of this folder."""
    text = (Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


@functools.cache
def tool_table(name: str, variant: str = "") -> dict[str, Any]:
    """A tool's settings, over those of the tools that it is built on; a variant's lie over all.

    A variant is another trainer of the same tool, such as DPO's.
    """
    if variant:
        under = tool_table(name)
        return _over(under, dict(under["variants"][variant]))
    own = dict(table(f"tools/{name}"))
    base = own.get("based_on")
    return _over(tool_table(base) if base else {}, own)


def _over(under: Mapping[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """One table over another, whose keys win; what is idle or refused is by key there."""
    whys = {part: own.get(part, {}).items() for part in ("idle", "refused")}
    own |= {part: {key: why for why, keys in rows for key in keys} for part, rows in whys.items()}
    judged = ("expected", "idle", "refused")
    mine = {key for part in ("keys", *judged) for key in own.get(part, {})}
    merged = {**under, **own}
    for part in ("keys", "defaults", "row_formats", "variants", *judged):
        kept = under.get(part, {})
        if part in judged:  # what the tool beneath says of a key of this one's
            kept = {key: said for key, said in kept.items() if key not in mine}
        merged[part] = {**kept, **own.get(part, {})}
    return merged


def known_keys(name: str) -> set[str]:
    """Every key that a tool's table speaks of."""
    known = set(tool_table(name).get("training", ()))
    for variant in ("", *tool_table(name)["variants"]):
        rows = tool_table(name, variant)
        known |= {key for part in ("keys", "expected", "idle", "refused") for key in rows[part]}
    return known


def other_kind(kind: str, sign: str, path: Path) -> RecipeError:
    """The refusal of what is no training that is translated."""
    row = table("kinds")[kind]
    why = row.get("why", "which trainkit does not do")
    return RecipeError(f"this is {row['says']} ({sign}), {why}", where=str(path), fix=row["serves"])


@dataclass
class Theirs:
    """What a file says.

    Attributes:
        program: the program and subcommand of a command line, such as ``swift sft``.
        launcher: options of the launcher before it, such as ``config_file``.
        unclear: keys whose value only running it could tell, with the expression.
        lost: what a script does to the model or the rows that has no counterpart: (what, why).
        noted: what it does that changes nothing here: (what, why).
        tool: whose a script is.
    """

    path: Path
    values: dict[str, Any]
    program: str = ""
    launcher: dict[str, Any] = field(default_factory=dict)
    unclear: dict[str, str] = field(default_factory=dict)
    lost: list[tuple[str, str]] = field(default_factory=list)
    noted: list[tuple[str, str]] = field(default_factory=list)
    tool: str | None = None


Kind = Literal["lost", "changed", "taken", "added", "left out"]
"""Changes the result and is not here; here in another way; the same here; a default of theirs
that has to be said; changes nothing that is learnt."""

OFF: tuple[Any, ...] = (None, False, 0, "", "none", "None", "no", "false", "False", [], {})


@dataclass(frozen=True)
class Line:
    """What became of one setting.

    Attributes:
        kind: see ``Kind``.
        theirs: the key and value in the other tool's words; of its defaults, with its name.
        ours: the keys and values here; empty where there are none.
    """

    kind: Kind
    theirs: str
    ours: str = ""
    note: str = ""


@dataclass
class Draft:
    """What has been made so far.

    Attributes:
        folder: where its file is, for files that it names.
        given: its keys, as its file has them.
        theirs: the same, with the tool's own defaults.
        keys: by the word that we know a setting by, the tool's keys for it.
        ours: our values, dotted.
        origins: by our key, what to write behind it.
        lines: what became of each setting.
    """

    tool: str
    folder: Path
    given: Mapping[str, Any]
    theirs: dict[str, Any]
    keys: Mapping[str, tuple[str, ...]]
    ours: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    said: set[str] = field(default_factory=set)
    launcher: Mapping[str, Any] = field(default_factory=dict)

    def get(self, word: str, default: Any = None) -> Any:
        """The value of a setting: what is given, else the tool's default."""
        keys = (*self.keys.get(word, ()), word)
        for values in (self.given, self.theirs):
            found = [values[key] for key in keys if values.get(key) is not None]
            if found:  # of a switch with two names, the one that is on
                return next((value for value in found if value not in OFF), found[0])
        return default

    def chats_only(self) -> bool:
        """Whether a chat template renders every row."""
        sources = self.ours.get("data.train") or [{}]
        return all(each.get("format") in ("messages", "sharegpt") for each in sources)

    def take(self, words: str, ours: Mapping[str, Any], note: str = "") -> None:
        """Settings of theirs set keys of ours; with a note it does not mean quite the same."""
        named, is_given = self._named(words)
        new = {
            key: value
            for key, value in ours.items()
            if is_given or key in self.ours or value != default_of(key)
        }
        for key, value in new.items():
            self.ours[key] = value
            self.origins[key] = f"{self.tool}: {named}" if is_given else f"{self.tool}'s default"
        text = ", ".join(f"{key}: {shown(value)}" for key, value in new.items())
        if new or is_given or note:
            kind: Kind = "changed" if note else "taken" if is_given else "added"
            named = named if is_given else f"{self.tool}'s default"
            self.lines.append(Line(kind, named, text, note))

    def lose(self, words: str, why: str) -> None:
        """A setting changes the result, and trainkit does not have it."""
        self.lines.append(Line("lost", self._named(words)[0], "", why))

    def leave(self, words: str, why: str) -> None:
        """A setting changes nothing that is learnt."""
        self.lines.append(Line("left out", self._named(words)[0], "", why))

    def remove(self, ours: str) -> None:
        """Keys of ours, and their lines; ``lora.*`` is all of a section."""
        gone = fnmatch.filter(self.ours, ours)
        for key in gone:
            del self.ours[key]
        self.lines = [line for line in self.lines if line.ours.partition(": ")[0] not in gone]

    def drop(self, ours: str, why: str) -> None:
        """A value that trainkit refuses."""
        origin = self.origins.pop(ours, "").partition(": ")[2]
        lost = Line("lost", origin or f"{ours}: {shown(self.ours[ours])}", "", why)
        self.remove(ours)
        self.lines.append(lost)

    def _named(self, words: str) -> tuple[str, bool]:
        """Our words as theirs, with their values, and whether their file gives one of them."""
        if words.startswith("--"):  # of the launcher
            return words, True
        names, is_given = [], False
        for word in words.split():
            keys = [key for key in (*self.keys.get(word, ()), word) if key in self.given]
            is_given |= bool(keys)
            self.said.update(keys, self.keys.get(word, ()), (word,))
            for key in keys or ([word] if " " not in words and word not in self.keys else []):
                value = REDACTED if is_secret_name(key) else shown(self.theirs.get(key))
                names.append(f"{key}: {value}" if key in self.theirs else key)
        return ", ".join(dict.fromkeys(names)) or words, is_given


def all_fit(seen: Mapping[str, Any], condition: Mapping[str, Any]) -> bool:
    """Whether each setting is as a condition has it: a value, one of a list, ``re:`` or ``*``."""
    return all(_fits(seen.get(key), wanted) for key, wanted in condition.items())


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, str) and wanted.startswith("re:"):
        return value is not None and re.search(wanted[3:], str(value)) is not None
    if wanted == "*":
        return value not in OFF
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)


def words(value: Any) -> list[str]:
    """``a,b``, ``a b`` and ``[a, b]`` alike."""
    if value is None:
        return []
    parts: Iterable[Any] = value.replace(",", " ").split() if isinstance(value, str) else value
    return [str(part).strip() for part in parts if str(part).strip()]


def shown(value: Any) -> str:
    """A value on one short line."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    text = " ".join(str(value).split())
    return text if len(text) <= 72 else f"{text[:69]}..."
