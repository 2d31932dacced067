"""Rules of the data files at work: settings that are read together, and rows of data sets.

A rule is a mapping; what its ``if`` does not hold for is passed over, and the rest is done in the
order of the table in ``Rules.run``. Expressions are Jinja's, over the tool's words.
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

from trainkit.errors import RecipeError
from trainkit.options.optimizers import OPTIMIZERS, SERVED, served_as
from trainkit.options.training import PREFERENCE_LOSSES
from trainkit.options.vision import VISION
from trainkit.recipe.translate.draft import OFF, Draft, all_fit, shown, table, words
from trainkit.recipe.translate.read import beside

_JINJA = jinja2.Environment(undefined=jinja2.ChainableUndefined, extensions=["jinja2.ext.do"])
_JINJA.tests["none"] = lambda value: value is None or isinstance(value, jinja2.Undefined)


@jinja2.pass_context
def _whole(names: jinja2.runtime.Context, value: Any, default: int = 0) -> int:
    """Jinja's ``int``, which takes any word for 0."""
    if isinstance(value, str) and not re.fullmatch(
        r"\s*([-+]?[\d_.]*\d([eE][-+]?\d+)?)?\s*", value
    ):
        keys = "".join(f"{key}: " for key, each in names["given"].items() if each == value)
        raise RecipeError(
            f"{keys}'{value}' is given where a whole number is meant", fix="correct it there"
        )
    return jinja2.filters.do_int(value, default)


_JINJA.filters["int"] = _whole


@functools.cache
def _compiled(expression: str) -> Any:
    return _JINJA.compile_expression(expression, undefined_to_none=True)


class Rules:
    """Rules over a draft.

    Attributes:
        names: what expressions know: the tool's words, what ``set`` gave, and functions.
    """

    def __init__(self, draft: Draft, rows: Mapping[str, Any]) -> None:
        self.draft = draft
        self.names: dict[str, Any] = {word: draft.get(word) for word in draft.keys}
        self.names |= {key: draft.get(key) for key in draft.theirs}
        self.names |= {"tool": rows, "ours": draft.ours, "given": draft.given, "keys": draft.keys}
        self.names |= {"program": draft.launcher.get("program") or "", "launcher": draft.launcher}
        self.names |= {
            "on": lambda word: self.names.get(word) not in OFF,
            "off": lambda value: value in OFF,
            "get": self.names.get,
            "words": words,
            "shown": shown,
            "found": lambda pattern, text: re.search(pattern, str(text)) is not None,
            "sub": lambda pattern, to, text: re.sub(pattern, to, str(text)),
            "fitting": self._fitting,
            "fits": lambda condition: all_fit(draft.theirs, condition),
            "file": self._file,
            "read": self._read,
            "globs": globs,
            "marked": lambda mark, many: [f"{mark}{each}" for each in many],
            "renamed": renamed,
            "quoted": repr,
            "chats_only": draft.chats_only,
            "served": lambda name: served_as(str(name), SERVED) or name,
            "shards": lambda name: getattr(OPTIMIZERS.get(str(name)), "shards", None),
            "preference_losses": PREFERENCE_LOSSES,
            "vision_types": [*VISION],
            "templates": table("templates"),
            "families": table("rules")["families"],
        }

    def run(self, rules: Iterable[Mapping[str, Any]]) -> None:
        for rule in rules:
            self._rule(rule)

    def _rule(self, rule: Mapping[str, Any]) -> bool:
        draft = self.draft
        if not self.value(rule.get("if", "true")):
            return False
        if "each" in rule:
            names, _, many = rule["each"].partition(" in ")
            for item in list(self.value(many) or ()):
                parts = names.split(", ")
                self.names |= dict(zip(parts, item if len(parts) > 1 else [item], strict=True))
                self.run(rule["do"])
            return True
        for name, expression in rule.get("set", {}).items():
            held, dot, key = self.text(name).partition(".")
            value = self.value(expression)
            if not dot:
                self.names[held] = value
            elif value not in (None, "", [], {}):
                self.names[held][key] = value
        for key in self.text(rule.get("drop", "")).split():
            draft.remove(key)
        for key, expression in rule.get("put", {}).items():
            draft.ours[key] = self.value(expression)
        for key in words(rule.get("said")):
            draft.said.update(draft.keys.get(key, ()), (key,))
        if "take" in rule:
            ours = {self.text(k): self.value(each) for k, each in rule.get("ours", {}).items()}
            more = rule.get("more", ())
            for each in [more] if isinstance(more, str) else more:
                ours |= self.value(each) or {}
            draft.take(self.text(rule["take"]), ours, self.text(rule.get("note", "")))
        for kind in ("lose", "leave"):
            if kind in rule:
                getattr(draft, kind)(self.text(rule[kind]), self.text(rule["why"]))
        any(self._rule(each) for each in rule.get("first", ()))
        self.run(rule.get("do", ()))
        if "use" in rule:
            self.run(self.names["tool"].get(rule["use"]) or table("rules")[rule["use"]])
        return True

    def value(self, expression: Any) -> Any:
        """What an expression is; what is no text is itself."""
        return _compiled(expression)(self.names) if isinstance(expression, str) else expression

    def text(self, text: str) -> str:
        return _JINJA.from_string(text).render(self.names) if "{{" in text else text

    def _fitting(self, options: Mapping[str, Any] | None, text: Any) -> Any:
        """The value of the first pattern that is found in a text."""
        found = (to for sign, to in (options or {}).items() if re.search(sign, str(text)))
        return next(found, None)

    def _file(self, name: Any) -> str | None:
        found = beside(self.draft.folder / "x", str(name))
        return None if found is None else str(found)

    def _read(self, name: Any) -> Any:
        """What a file next to the recipe holds: JSON, YAML or lines of JSON (the first one)."""
        found = self._file(name)
        if found is None:
            return None
        text = Path(found).read_text(encoding="utf-8")
        if found.endswith((".yaml", ".yml")):
            return yaml.safe_load(text) or {}
        with contextlib.suppress(ValueError):
            return json.loads(text)
        lines = [line for line in text.split("\n") if line.strip()]
        with contextlib.suppress(ValueError, IndexError):
            return [json.loads(lines[0])] * len(lines)
        return None


def globs(expression: str) -> list[str | None]:
    """A simple regular expression as names with ``*``; None of one that is not.

    A digit out of several becomes a name each.
    """
    some = re.search(r"\[(\d)-(\d)\]\+?", expression)
    if some:
        digits = range(int(some[1]), int(some[2]) + 1)
        each = [f"{expression[: some.start()]}{n}{expression[some.end() :]}" for n in digits]
        return [name for one in each for name in globs(one)]
    plain = expression.removeprefix("^").removesuffix("$").replace("\\.", ".").replace(".*", "*")
    if re.search(r"[\\\[\](){}+?|^$]", plain):
        return [None]
    return [plain if expression.endswith("$") or plain.endswith("*") else f"{plain}*"]


def renamed(template: str, names: Mapping[str, str]) -> str:
    """A template with a row's own names of columns."""
    pattern = rf"\b({'|'.join(map(re.escape, names))})\b"
    return re.sub(pattern, lambda match: names[match[1]], template)
