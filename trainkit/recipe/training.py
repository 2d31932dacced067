"""``training:`` TrainingArguments, field for field: THE TABLE of what each field does here.

All that is known of a field is its row in ``training.json``. It acts, has one value (``fixed`` says
why), or is set another way (``elsewhere`` says how). A test holds the rows to the fields of every
transformers that is supported; a field without a row is refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from trainkit.options.optimizers import (
    OPTIMIZERS,
    SERVED,
    Optimizer,
    nearest_of,
    optimizer_row,
    parts_of,
    served_as,
)
from trainkit.options.section import ask, broken_rule, nearest, nearest_choice
from trainkit.recipe.document import read_scalar

Broken = tuple[str, str | None, str | None]
"""A field, the rule that it breaks (None: there is no such field), and what to write instead."""

LARGEST_COUNT = 2**31 - 1
_KINDS: Mapping[str, tuple[Any, str, dict[str, Any]]] = {
    "str": (str, "text", {"type": "string"}),
    "int": (int, "a whole number", {"type": "integer"}),
    "float": ((float, int), "a number", {"type": "number"}),
    "bool": (bool, "true or false", {"type": "boolean"}),
    "false": ((), "false", {"const": False}),
    "null": (type(None), "null", {"type": "null"}),
    "dict": (dict, "a mapping", {"type": "object"}),
    "list": (list, "a list", {"type": "array"}),
}
"""The types of a row: in Python, in words, and in a JSON schema."""


@dataclass(frozen=True)
class Field:
    """A row.

    Attributes:
        type: names of ``_KINDS`` with ``|`` between.
        theirs: transformers' own default, where trainkit's is chosen here.
        whole_above_one: a share of all steps below 1, a number of steps from there on.
        without: words of transformers' that are not served here, each with what to do instead.
        derived: what decides the value where nobody does.
        idle_with: fields with values as written (null: nothing) next to which it is refused.
        acts_with: keys with the values it needs (true: any that is on); a run tells if it idles.
        elsewhere: what to write instead; ``{value}`` stands for what was given.
        on_resume: see ``trainkit.options.section.OnResume``.
    """

    name: str
    type: str
    default: Any
    theirs: Any = ...
    help: str = ""
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float = LARGEST_COUNT
    whole_above_one: bool = False
    off: float | None = None
    choices: tuple[str, ...] = ()
    without: Mapping[str, str] | None = None
    keys: tuple[str, ...] = ()
    needs: str = ""
    derived: str = ""
    idle_with: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    acts_with: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    fixed: str = ""
    elsewhere: str = ""
    since: str = "5.0"
    on_resume: str = "acts"

    @property
    def is_ours(self) -> bool:
        return self.theirs is not ... or bool(self.fixed)

    @property
    def rule(self) -> str:
        """The type in words: ``a number or null``."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return " or ".join(_KINDS[kind][1] for kind in self.type.split("|"))

    @property
    def about(self) -> str:
        if self.fixed:
            return f"Cannot be changed: {self.fixed}."
        notes = {"Needs": self.needs, "By default": self.derived}
        return " ".join([self.help, *(f"{say} {what}." for say, what in notes.items() if what)])

    def schema(self) -> dict[str, Any]:
        if self.fixed:
            return {"enum": [self.default], "description": self.about}
        options = [dict(_KINDS[kind][2]) for kind in self.type.split("|")]
        limits = {
            "minimum": self.at_least,
            "exclusiveMinimum": self.above,
            "exclusiveMaximum": self.below,
            "maximum": self.at_most if self.at_most != LARGEST_COUNT else None,
        }
        for option in options:
            if option.get("type") == "string" and self.choices:
                option["enum"] = [*self.choices]
            if option.get("type") in ("integer", "number") and self.off is None:
                option |= {key: limit for key, limit in limits.items() if limit is not None}
        described: dict[str, Any] = {"description": self.about}
        if self.default is not None:
            described["default"] = self.default
        return described | (options[0] if len(options) == 1 else {"anyOf": options})

    def accepts(self, value: Any) -> bool:
        """Whether a value is of the type, and a word one of the choices."""
        kinds = self.type.split("|")
        if isinstance(value, bool):
            return "bool" in kinds or ("false" in kinds and not value)
        if isinstance(value, str) and self.choices:
            return all(word in self.choices for word in self._words(value))
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            return False
        return any(isinstance(value, _KINDS[kind][0]) for kind in kinds)

    def problems(self, value: Any) -> Iterator[Broken]:
        name = f"training.{self.name}"
        if self.fixed:
            if value != self.default or type(value) is not type(self.default):
                yield self.name, f"{name} cannot be changed: {self.fixed}", "remove it"
        elif words := list(self._unknown_words(value)):
            yield from words
        elif not self.accepts(value):
            yield self.name, f"{name}: {value!r} must be {self.rule}", self._meant(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if rule := self._broken_bound(value):
                yield self.name, f"{name}: {value} must be {rule}", None
        elif self.name == "optim_args" and isinstance(value, str):
            for part in map(str.strip, value.split(",")):
                if part.count("=") != 1:
                    yield self.name, f"{name}: {part!r} must be name=value", None
        elif self.keys and value is not None:
            yield from self._unknown_keys(value)

    def _broken_bound(self, value: float) -> str | None:
        if value == self.off:
            return None
        unless = "" if self.off is None else f", or {self.off}"
        if self.at_least is not None and not value >= self.at_least:  # nan is not
            words = "0 or more" if self.at_least == 0 else f"at least {self.at_least}"
            return f"{words}{unless}"
        if self.above is not None and not value > self.above:
            return f"above {self.above}{unless}"
        if value != value or value in (float("inf"), float("-inf")):
            return "finite"
        if self.below is not None and not value < self.below:
            return f"below {self.below}"
        if not value <= self.at_most:
            return f"at most {self.at_most}"
        if self.whole_above_one and value > 1 and value != int(value):
            return "a share of all steps below 1, or a whole number of steps"
        return None

    def _words(self, value: Any) -> list[str]:
        if isinstance(value, str):
            return value.split() if self.name == "debug" else [value]
        items = value if isinstance(value, list) else []
        return [item for item in items if isinstance(item, str)]

    def _unknown_words(self, value: Any) -> Iterator[Broken]:
        """Words inside a value that transformers would only refuse, or pass over, in training."""
        for word in self._words(value) if self.choices else ():
            if word in self.choices:
                continue
            what = f"training.{self.name}: {word!r} must be one of {', '.join(self.choices)}"
            fix = ask(nearest_choice(word, self.choices))
            if word in (self.without or {}):
                verb = "is not served" if self.name == "optim" else "does nothing"
                what = f"training.{self.name}: {word} {verb} here"
                fix = (self.without or {})[word]
            elif self.name == "optim" and (same := served_as(word, SERVED)):
                fix = f"write {same}, which is the same"
            elif self.name == "optim" and (near := nearest_of(word)):
                fix = f"it is not served; the nearest is {near}"
            yield self.name, what, fix

    def _meant(self, value: Any) -> str | None:
        if isinstance(value, str):
            number = read_scalar(value)
            is_number = number is not value and self.accepts(number)
            return f"write {value} without quotes" if is_number else None
        if isinstance(value, float) and value.is_integer() and self.accepts(int(value)):
            return f"write {int(value)}"
        return None

    def _unknown_keys(self, value: Any) -> Iterator[Broken]:
        if not isinstance(value, dict):
            yield self.name, f"training.{self.name}: {value!r} must be a mapping", None
            return
        for key, item in value.items():
            dotted = f"training.{self.name}.{key}"
            is_accelerate = self.name == "accelerator_config"
            if key not in self.keys:
                what = f"training.{self.name}: {key!r} must be one of {', '.join(self.keys)}"
                if is_accelerate:
                    what = f"{dotted} does nothing here: trainkit deals out the rows itself"
                yield self.name, what, ask(nearest(str(key), self.keys))
            elif is_accelerate and set(item or {}) - {"sync_each_batch"}:
                what = f"{dotted} may hold sync_each_batch only: the rest is accelerate's own"
                yield self.name, what, None


TRANSFORMERS = version("transformers")


def _fields() -> Iterator[Field]:
    installed = [int(part) for part in TRANSFORMERS.split(".")[:2]]
    rows = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    rows["optim"] |= {
        "choices": SERVED,
        "without": {name: row.instead for name, row in OPTIMIZERS.items() if row.instead},
    }
    plain = [each for each in (None, *SERVED) if optimizer_row(each).per_rank_bytes is None]
    rows["optim_target_modules"]["idle_with"] = {"optim": plain}
    for name, row in rows.items():
        made = Field(name, **row)
        if [int(part) for part in made.since.split(".")] <= installed:
            yield made


EVERY: Mapping[str, Field] = {field.name: field for field in _fields()}
"""All fields of the installed TrainingArguments."""

FIELDS: Mapping[str, Field] = {name: row for name, row in EVERY.items() if not row.elsewhere}
"""The keys of ``training:``."""

CHECKPOINTING = (
    "activation_checkpointing",
    "gradient_checkpointing",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
)
"""The fields that ``recompute`` sets; the first two are names of one, the new one first."""


def complete_training(training: Mapping[str, Any]) -> dict[str, Any]:
    """A ``training`` section with trainkit's own defaults and fixed values in it."""
    if broken := check_training(training):
        raise ValidationError.from_exception_data(
            "training",
            [
                InitErrorDetails(
                    type="extra_forbidden"
                    if what is None
                    else broken_rule(f"training.{name}", what, fix),
                    loc=(name,),
                    input=training[name],
                )
                for name, what, fix in broken
            ],
        )
    ours = {name: row.default for name, row in FIELDS.items() if row.theirs is not ...}
    return {**ours, **training}


def check_training(training: Mapping[str, Any]) -> list[Broken]:
    """What is wrong with a ``training`` section: each value, then what they say together."""
    found: list[Broken] = []
    for name, value in training.items():
        found += FIELDS[name].problems(value) if name in FIELDS else [(name, None, None)]
    return found or list(_disagreeing(training))


def _disagreeing(training: Mapping[str, Any]) -> Iterator[Broken]:
    """Fields that contradict each other, or that act only with another one."""
    if training.get("bf16") and training.get("fp16"):
        yield "fp16", "training.bf16 and training.fp16 are both on", "keep one"
    for name in filter(training.get, training):
        for other, values in FIELDS[name].idle_with.items():
            if training.get(other) in values:
                what = f"training.{name} does nothing without {FIELDS[name].needs}"
                yield name, what, "remove it, or set the other one"
    yield from _unread_by(optimizer_row(training.get("optim")), training)


def _unread_by(row: Optimizer, training: Mapping[str, Any]) -> Iterator[Broken]:
    """What of the fields of optimizers the one at hand does not obey, or cannot."""
    for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if name in training and name not in row.reads:
            yield name, f"training.{name} does nothing with {row.name}", "remove it"
    given, said = training.get("optim_args") or "", "training.optim_args:"
    parts = parts_of(given)
    known = {argument.name: argument for argument in row.arguments}
    for number, (word, value) in enumerate(parts):
        if word not in known:
            others = f"it takes {', '.join(known)}" if known else "it takes none: remove it"
            if word == "bf16_stochastic_round":
                others = "write model.master_weights: false, which rounds every rank alike"
            yield "optim_args", f"{said} {word} does nothing with {row.name}", others
            continue
        if rule := known[word].broken_rule(value):
            yield "optim_args", f"{said} {word}={value}: {word} {rule}", "change it, or remove it"
        if word in (each for each, _ in parts[:number]):
            yield "optim_args", f"{said} {word} is said twice", "keep one"
        if (same := known[word].like) in training:
            yield "optim_args", f"{said} {word} and training.{same} say the same", "keep one"
    if row.name == "sgd":  # torch's needs a momentum for these, or refuses one with them
        values = row.read(given)
        if values.get("nesterov") and values.get("dampening"):
            yield "optim_args", f"{said} nesterov takes no dampening", "keep one"
        for name in ("nesterov", "dampening"):
            if values.get(name) and not values.get("momentum"):
                fix = "set momentum=0.9 in it, or remove it"
                yield "optim_args", f"{said} {name} does nothing without momentum", fix
