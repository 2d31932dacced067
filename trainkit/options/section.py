"""What all sections are: frozen, strict, and refused with a sentence that says the rule."""

import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticKnownError

from trainkit.errors import RecipeError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
    from typing_extensions import Self  # typing's own from Python 3.11 on
else:
    ModelMetaclass = type(BaseModel)  # it has no public name


def broken_rule(key: str, what: str, fix: str | None) -> PydanticCustomError:
    """A rule about more than one key, reported at the line of ``key``."""
    return PydanticCustomError("rule", "{what}", {"key": key, "what": what, "fix": fix})


class _Explained(ModelMetaclass):
    """Says what is wrong with a section that Python code makes as a recipe's loader would.

    The loader validates mappings and never comes here: it knows the lines, and says all at once.
    """

    def __call__(cls: type["Section"], *first: Any, **values: Any) -> Any:  # type: ignore[misc]
        """Make a section; the value of its first key may be given by position."""
        values |= dict(zip([*cls.model_fields][:1], first, strict=True)) if first else {}
        try:
            return ModelMetaclass.__call__(cls, **values)
        except ValidationError as error:
            raise _refused(cls, error.errors(include_url=False)[0]) from error


ACTS, CONSENT = "acts", "consent"
OTHER_STATE = "the saved state of the optimizer and the adapters does not fit another one"


@dataclass(frozen=True)
class OnResume:
    """What a continued run does with another value of a key that is annotated with it.

    Attributes:
        rule: `ACTS`, `CONSENT` where the rest would be another run (``--allow-changed``), or why it
            is refused.
    """

    rule: str


UNION_TAGS = frozenset({"bool", "word", "section", "sources", "part"})
"""Names for the forms of a value, which pydantic adds to where an error is."""


class Section(BaseModel, metaclass=_Explained):
    """A part of a recipe: unknown keys and wrong types are errors, values never change.

    Attributes:
        at: the dotted key of the section, for errors; ``[]`` for the item of a list.
        on_resume: the rule of :class:`OnResume` for its keys that have none of their own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    at: ClassVar[str] = ""
    on_resume: ClassVar[str] = ACTS

    def replace(self, **values: Any) -> "Self":
        """The same with other values, held against the rules again."""
        kept = {key: getattr(self, key) for key in self.model_fields_set}
        return type(self)(**{**kept, **values})


def section_in(annotation: Any, *, in_list: bool = False) -> tuple[type[BaseModel], bool] | None:
    """The section class inside an annotation, and whether it is the item of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, in_list
    origin = get_origin(annotation)
    if origin in (Annotated, list, Union, types.UnionType):
        for part in get_args(annotation):
            found = section_in(part, in_list=in_list or origin is list)
            if found is not None:
                return found
    return None


def _refused(section: type[Section], error: ErrorDetails) -> RecipeError:
    parts = [part for part in error["loc"] if not isinstance(part, int)]
    key = ".".join(part for part in parts if part not in UNION_TAGS)
    where = ".".join(part for part in (section.at, key) if part)
    if error["type"] == "rule":
        context = error["ctx"]
        return RecipeError(context["what"], where=context["key"], fix=context["fix"])
    if error["type"] == "extra_forbidden":
        fix = did_you_mean(key, list(section.model_fields))
        return RecipeError(f"{section.__name__} has no {key}", where=where, fix=fix)
    if error["type"] == "missing":
        return RecipeError(f"{section.__name__} needs {key}", where=where)
    return RecipeError(f"{error['input']!r} {rule_of(error)}", where=where, fix=advice_of(error))


# -- What is said of a value: the rule in words, and the nearest that is known -------------------


# difflib's ratio. Among a few words a loose match is safe; among all keys it misleads.
CLOSE = 0.6
VERY_CLOSE = 0.8
# Two candidates whose ratios differ by less are both named.
_AS_CLOSE = 0.05

# pydantic's error types in words; {name} comes from the error's context.
_RULES: Mapping[str, str] = {
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "may hold letters, digits, `_`, `-` and `.` only",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "too_short": "must not be empty",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "model_type": "must be a section, which is a mapping",
    "model_attributes_type": "must be a section, which is a mapping",
}

# What other tools call them.
_ALSO_CALLED: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "openai": "messages",
    "chatml": "messages",
    "chat_template": "messages",
    "chat": "messages",
    "conversation": "sharegpt",
    "conversations": "sharegpt",
    "instruction": "alpaca",
    "completion": "text",
    "pretrain": "text",
    "pretraining": "text",
    "pretokenized": "tokens",
    "input_ids": "tokens",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "human": "user",
    "function": "tool",
    "observation": "tool",
}


def rule_of(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    rule = _RULES.get(error["type"], "").format(**context)
    return rule or (str(context["error"]) if "error" in context else error["msg"])


def advice_of(error: ErrorDetails) -> str | None:
    """The nearest of the words that a key takes, as a question; None where it takes no words."""
    value = error["input"]
    if error["type"] != "literal_error" or not isinstance(value, str):
        return None
    return did_you_mean(value, re.findall(r"'([^']*)'", error["ctx"]["expected"]))


def one_of(name: str, known: Iterable[str]) -> str:
    """``name``, a word that a table decides; for a validator."""
    words = [repr(word) for word in known]
    if repr(name) not in words:
        expected = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
        raise PydanticKnownError("literal_error", {"expected": expected})
    return name


def did_you_mean(word: str, choices: Sequence[str]) -> str | None:
    """``did you mean a or b?`` by what others call it, or by spelling; None where nothing is."""
    full = _ALSO_CALLED.get(word.lower())
    return ask([full] if full and full in choices else nearest(word, choices))


def nearest(name: str, known: Iterable[str], cutoff: float = CLOSE) -> list[str]:
    """The known words closest to ``name``: none, one, or two that are about as close."""
    word = name.lower().replace("-", "_")
    matches = get_close_matches(word, list(known), 2, cutoff)
    closeness = [SequenceMatcher(None, match, word).ratio() for match in matches]
    if len(matches) == 2 and closeness[0] - closeness[1] > _AS_CLOSE:
        return matches[:1]
    return matches


def nearest_choice(word: str, choices: Sequence[str]) -> list[str]:
    """What a mistyped word may stand for: ``adamm`` is near to adamw_torch, not to adalomo."""
    whole = nearest(word, choices, VERY_CLOSE)
    head = [] if whole else nearest(word, {choice.partition("_")[0] for choice in choices})
    begun = [choice for choice in choices if head and choice.partition("_")[0] == head[0]]
    return whole or begun[:2] or nearest(word, choices)


def ask(words: Iterable[str]) -> str | None:
    """``did you mean a or b?``, or nothing to say."""
    text = " or ".join(words)
    return f"did you mean {text}?" if text else None
