"""Where the images of a row are, in all the ways that rows say it.

One rule: the placeholders of a row, in order, are its images, in order. A part of a message may
bring its image along; ``<image>`` in a text, or a part without one, takes the next of the row's
``images``. Rows with images and no placeholder have them before the user's first words.
"""

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainkit.data import fields
from trainkit.data.images import IMAGE
from trainkit.data.messages import Conversation, Message, ParsedRow, RowError
from trainkit.data.placeholders import outside_code

Source = str | bytes
_LISTED = ("images", "image")
_TURNS = ("messages", "conversations", "conversation", "prompt", "completion")
_TEXTS = ("instruction", "input", "output", "system")
_PARTS = ("image", "image_url", "input_image")
_SOURCES = ("image_url", "image", "path", "url", "base64", "bytes", "source")
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")


@dataclass
class Found:
    """The images of one row.

    Attributes:
        slots: what each placeholder brings along, in order; None takes the next of ``listed``.
    """

    slots: list[Source | None] = field(default_factory=list)
    listed: list[Source] = field(default_factory=list)


def pull(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], Found | None]:
    """A row whose texts have `IMAGE` for each image, and no other trace of them."""
    given = [key for key in _LISTED if row.get(key) not in (None, "")]
    if len(given) > 1:
        raise RowError("image_count", "the row has both 'images' and 'image'")
    if given and row[given[0]] == []:
        return row, None
    found = Found()
    if given:
        value = row[given[0]]
        values = value if isinstance(value, list) else [value]
        found.listed = [_source(each, f"'{given[0]}'") for each in values]
    rest = {key: value for key, value in row.items() if key not in given}
    for key in _TURNS:
        if isinstance(rest.get(key), list):
            rest[key] = [_turn(turn, found, n) for n, turn in enumerate(rest[key], 1)]
    for key in _TEXTS:
        if isinstance(rest.get(key), str):
            rest[key] = _text(rest[key], found)
    if isinstance(rest.get("history"), list):
        rest["history"] = [
            [_text(each, found) if isinstance(each, str) else each for each in pair]
            if isinstance(pair, list | tuple)
            else pair
            for pair in rest["history"]
        ]
    if not found.slots and not found.listed:
        return row, None
    return rest, found


def has_images(row: Any) -> bool:
    """Whether a row brings images along; words that may stand for some are none."""
    found = pull(row)[1] if isinstance(row, Mapping) else None
    return found is not None and (bool(found.listed) or any(map(bool, found.slots)))


def _turn(turn: Any, found: Found, number: int) -> Any:
    if not isinstance(turn, Mapping):
        return turn
    turn = dict(turn)
    for key in ("content", "value", "human", "assistant"):
        value = turn.get(key)
        if isinstance(value, str):
            turn[key] = _text(value, found)
        elif isinstance(value, list):
            turn[key] = [_part(part, found, number) for part in value]
    return turn


def _part(part: Any, found: Found, number: int) -> Any:
    if isinstance(part, str):
        return _text(part, found)
    if not isinstance(part, Mapping):
        return part
    if part.get("type", "image" if "image" in part else None) not in _PARTS:
        texts = [key for key in ("text", "value") if isinstance(part.get(key), str)]
        return {**part, **{key: _text(part[key], found) for key in texts}}
    brought = {key: part[key] for key in _SOURCES if part.get(key) not in (None, "")}
    if sized := next((key for key in _SIZES if part.get(key) is not None), None):
        what = f"turn {number}: {sized}: the model's image processor decides the size; remove it"
        raise RowError("image_size", what)
    found.slots.append(_source(brought, f"turn {number}") if brought else None)
    switches = {key: value for key, value in part.items() if fields.is_switch(str(key))}
    return {"type": "text", "text": IMAGE, **switches}


def _text(text: str, found: Found) -> str:
    if IMAGE in text:
        raise RowError("private_use", "a text holds U+FDD0, which stands for images here")
    text, count = outside_code("image", text, IMAGE)
    found.slots += [None] * count
    return text


def _source(value: Any, place: str) -> Source:
    """One image: a path, a URI, base64 text, bytes; or an object with one of them."""
    if isinstance(value, Mapping):
        known = dict.fromkeys(("bytes", *_SOURCES, "data"))
        keys = [key for key in known if value.get(key)]
        others = [key for key in keys if key != "path" or "bytes" not in keys]
        if len(others) > 1:
            what = f"{place}: an image has {' and '.join(others)}: remove one of them"
            raise RowError("image_count", what)
        key = keys[0] if keys else None
        if key is not None and isinstance(value[key], Mapping):
            return _source(value[key], place)
        is_base64 = key in ("base64", "data") and isinstance(value[key], str)
        value = None if key is None else f"data:;base64,{value[key]}" if is_base64 else value[key]
    if isinstance(value, str | bytes) and value:
        return value
    raise RowError(
        "image_unreadable",
        f"{place}: an image is {fields.kind(value)}; a path, a data URI or bytes are read",
    )


def attach(parsed: ParsedRow, found: Found) -> ParsedRow:
    """The parsed row, with its images in its messages."""
    if not isinstance(parsed, Conversation):
        raise RowError(
            "image_without_turns",
            "the row has images and is no conversation; write it as turns: messages",
        )
    messages, slots, listed = list(parsed.messages), found.slots, list(found.listed)
    if not slots and listed:
        messages, slots = _in_front(messages, len(listed)), [None] * len(listed)
    open_slots = sum(slot is None for slot in slots)
    if open_slots != len(listed):
        raise RowError(
            "image_count",
            f"the row has {open_slots} placeholders for {len(listed)} images; where <image> is "
            "meant as text, write it in backticks",
        )
    rest = iter(listed)
    images = [next(rest) if slot is None else slot for slot in slots]
    counts = [message.content.count(IMAGE) for message in messages]
    if sum(counts) != len(images):
        raise RowError("image_count", "a placeholder is in a field that has no place for images")
    for turn, count in enumerate(counts):
        if count and messages[turn].role == "assistant":
            what = f"turn {turn + 1} (assistant) has an image, and answers are text"
            raise RowError("image_in_answer", what)
        messages[turn] = replace(messages[turn], images=tuple(images[:count]))
        images = images[count:]
    return replace(parsed, messages=tuple(messages))


def located(conversation: Conversation, *folders: Path) -> Conversation:
    """The same with images as whole paths and URIs, which any directory can read.

    A path starts at the first of the folders that has it.
    """

    def whole(source: Source) -> str:
        if isinstance(source, bytes):
            return f"data:;base64,{base64.b64encode(source).decode()}"
        if "://" in source or source.startswith("data:"):
            return source
        places = [str(folder / Path(source).expanduser()) for folder in folders]
        return next(filter(os.path.lexists, places), places[0])

    turns = conversation.messages
    if not any(turn.images for turn in turns):
        return conversation
    moved = (replace(turn, images=tuple(map(whole, turn.images))) for turn in turns)
    return replace(conversation, messages=tuple(moved))


def as_turn(message: Message) -> dict[str, Any]:
    fields = ("name", "tool_call_id", "train")
    known = {"reasoning_content": message.reasoning} | {k: getattr(message, k) for k in fields}
    turn: dict[str, Any] = {"role": message.role, "content": _content_of(message)}
    turn |= {key: value for key, value in known.items() if value is not None}
    for call in message.tool_calls:
        called: dict[str, Any] = {"type": "function"} | ({"id": call["id"]} if call["id"] else {})
        called["function"] = {"name": call["name"], "arguments": call["arguments"]}
        turn.setdefault("tool_calls", []).append(called)
    return turn


def _content_of(message: Message) -> str | list[dict[str, str]]:
    if not message.images:
        return message.content
    first, *others = message.content.split(IMAGE)
    parts = [{"type": "text", "text": first}] if first else []
    for source, text in zip(message.images, others, strict=True):
        key = "url" if source.startswith("data:") else "path"
        parts.append({"type": "image", key: source})
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _in_front(messages: Sequence[Message], count: int) -> list[Message]:
    first = next((n for n, each in enumerate(messages) if each.role == "user"), None)
    if first is None:
        raise RowError("image_count", "the row has images, and no turn of a user to put them in")
    found = list(messages)
    found[first] = replace(found[first], content=IMAGE * count + found[first].content)
    return found
