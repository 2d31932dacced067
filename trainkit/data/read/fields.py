"""Typed reading of decoded rows, and the switches that say what is trained.

Each function returns the wanted type or raises RowError. A turn's switch has many names; every one
is in a table with its meaning. A name that is in none but speaks of training is refused: a switch
that is passed over trains what its author switched off.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from trainkit.data.read.messages import RowError


def decoded(text: str, place: str) -> Any:
    """Decode JSON inside a text; ``place`` names it in the error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError("bad_json", f"{place} holds JSON that cannot be read: {error}") from error


def items(row: Mapping[str, Any], key: str) -> list[Any]:
    """The list under ``key``, which may be written as JSON text."""
    value = row.get(key)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = decoded(value, repr(key))
    if not isinstance(value, list):
        raise RowError("wrong_type", f"{key!r} is {kind(value)}, not a list")
    return value


def text(row: Mapping[str, Any], key: str) -> str:
    """The text under ``key``."""
    value = row.get(key)
    if not isinstance(value, str):
        raise RowError("wrong_type", f"{key!r} is {kind(value)}, not text")
    return value


def optional_text(row: Mapping[str, Any], key: str) -> str | None:
    """The text under ``key``, or None."""
    return None if row.get(key) is None else text(row, key)


def string_or_none(item: Mapping[str, Any], key: str, number: int) -> str | None:
    """The same for a field of turn ``number``."""
    value = item.get(key)
    if value is None or isinstance(value, str):
        return value
    raise RowError("wrong_type", f"turn {number}: {key!r} is {kind(value)}, not text")


def integers(row: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The whole numbers under ``key``."""
    items = switches(row, key)
    if any(isinstance(item, bool) for item in items):
        raise RowError("wrong_type", f"{key!r} holds true or false among numbers")
    return items


def switches(row: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The same, where true and false may stand for 1 and 0."""
    value = row.get(key)
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise RowError("wrong_type", f"{key!r} is {kind(value)}, not a list of whole numbers")
    items = tuple(value)
    if not all(isinstance(item, int) for item in items):
        raise RowError("wrong_type", f"{key!r} holds something that is not an integer")
    return items


def kind(value: Any) -> str:
    """What a value is, in words for an error."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", type(None): "null"}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "a number"
    return "missing" if value is None else names.get(type(value), type(value).__name__)


TRAINS = frozenset(
    [
        "train",  # axolotl
        "training",  # axolotl's message_field_training
        "trained",
        "trainable",
        "weight",  # OpenAI
        "loss",  # ms-swift
        "loss_scale",  # ms-swift
        "loss_weight",  # LLaMA-Factory
        "loss_mask",
        "train_mask",
        "compute_loss",
        "calculate_loss",
        "learn",
        "supervised",
    ]
)
"""Switches where 1 or true means that the turn is trained."""

MASKS = frozenset(
    [
        "masked",
        "is_masked",
        "mask_loss",
        "ignore",
        "ignored",
        "ignore_loss",
        "skip_loss",
        "no_loss",
        "no_train",
        "exclude_from_loss",
    ]
)
"""Switches where 1 or true means that the turn is not trained."""

UNCLEAR: Mapping[str, str] = {
    "mask": "which some read as trained and others as not trained",
    "label": "which may be a class or a switch",
    "train_detail": "which trains parts of a turn; a turn is trained in full or not at all",
    "training_detail": "which trains parts of a turn; a turn is trained in full or not at all",
}
"""Switches that are refused by name, and why."""

ABOUT_TRAINING = re.compile(
    r"(^|_)(loss|losses|train\w*|mask\w*|weights?|supervis\w*|learn\w*|grads?|gradients?|backprop\w*"
    r"|targets?)(_|$)"
)


@lru_cache(maxsize=4096)
def is_switch(name: str) -> bool:
    """Whether a field is a switch, known or not."""
    plain = plain_name(name)
    known = plain in TRAINS or plain in MASKS or plain in UNCLEAR
    return known or ABOUT_TRAINING.search(plain) is not None


def read_switch(item: Mapping[str, Any], place: str) -> bool | None:
    """What the switches of a turn or of a part of one say together.

    Args:
        item: with whatever fields it has.
        place: ``turn 3``, for the error.

    Returns:
        Whether it is trained; None where there is no switch.

    Raises:
        RowError: a value is neither on nor off, two switches disagree, or a name is not understood.
    """
    found: dict[str, bool] = {}
    for name, value in item.items():
        plain = plain_name(str(name))
        if value is None or not is_switch(plain):
            continue
        if plain in TRAINS or plain in MASKS:
            found[str(name)] = on_or_off(value, f"{place}: {name!r}") == (plain in TRAINS)
        elif plain in UNCLEAR and not (plain == "label" and not isinstance(value, bool)):
            raise _refused(name, place, UNCLEAR[plain])
        elif plain not in UNCLEAR and isinstance(value, (bool, int, float, list)):
            raise _refused(name, place, "which is not a switch that trainkit knows")
    if len(set(found.values())) > 1:
        said = ", ".join(f"{name}: {item[name]!r}" for name in found)
        raise RowError("switches_disagree", f"{place} has switches that disagree: {said}")
    return next(iter(found.values()), None)


def parts_switch(parts: Sequence[Any], number: int) -> bool | None:
    """The switch that all parts of a turn's content share; None where they have none.

    Raises:
        RowError: one part is trained and another is not.
    """
    said = {
        read_switch(part, f"turn {number}, a part of its content")
        for part in parts
        if isinstance(part, Mapping)
    }
    if len(said) > 1:
        raise RowError(
            "part_switch",
            f"turn {number} has parts with switches of their own; a turn is trained in full or not "
            "at all",
        )
    return next(iter(said), None)


def on_or_off(value: Any, place: str) -> bool:
    """Read true, false, 1 or 0.

    Raises:
        RowError: it is something else, such as a weight of 0.5.
    """
    if isinstance(value, bool) or (isinstance(value, (int, float)) and value in (0, 1)):
        return bool(value)
    shown = repr(value)[:40] if isinstance(value, (str, int, float)) else kind(value)
    raise RowError("bad_weight", f"{place} is {shown}; it must be 0 or 1, or true or false")


@lru_cache(maxsize=4096)
def plain_name(name: str) -> str:
    """``lossWeight`` and ``loss-weight`` as ``loss_weight``."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return snake.replace("-", "_").lower()


def _refused(name: Any, place: str, why: str) -> RowError:
    return RowError(
        "unknown_switch", f"{place} has {str(name)[:40]!r}, {why}; write train: true or false"
    )
