"""Marks: private-use characters put around the texts of a conversation, to find them again.

A mark is inside the blanks at a text's ends, so a template that trims text leaves it in place,
and inside ``<think>`` tags, so a template that splits thinking off finds its tags untouched.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.data.read.messages import RowError
from trainkit.data.render.template import REASONING_KEYS, THINK_BLOCK, ChatTemplate, Rendered

MARK_PLANES = (0xF0000, 0x100000)
"""Two planes of 65,534 private-use characters; the second serves rows that use the first."""


@dataclass
class Mark:
    """One mark.

    Attributes:
        turn: of the message it was put into.
        kind: ``content``, ``reasoning`` or ``call``, with ``_end`` behind a text.
        place: where it was found, in characters of the rendering without marks; -1 if nowhere.
        count: how often it was found.
        text: what is between it and the next mark, for a mark before a text.
    """

    turn: int
    kind: str
    place: int = -1
    count: int = 0
    text: str = ""


class Marker:
    """Puts marks around texts and finds them again."""

    def __init__(self, plane: int) -> None:
        self._plane = plane
        self.marks: list[Mark] = []

    def _new(self, turn: int, kind: str, text: str = "") -> str:
        self.marks.append(Mark(turn, kind, text=text))
        if len(self.marks) > 65_000:
            raise RowError("too_many_messages", "more texts than there are marks")
        return chr(self._plane + len(self.marks) - 1)

    def _wrap(self, text: str, turn: int, kind: str) -> str:
        core = text.strip()
        if not core:
            return text
        lead = text[: len(text) - len(text.lstrip())]
        trail = text[len(text.rstrip()) :]
        return f"{lead}{self._new(turn, kind, core)}{core}{self._new(turn, kind + '_end')}{trail}"

    def message(self, message: Rendered, turn: int) -> Rendered:
        """A copy of a message with marks in it."""
        copy = dict(message)
        answer = message["role"] == "assistant"
        if answer:
            if "reasoning_content" in message:
                wrapped = self._wrap(message["reasoning_content"], turn, "reasoning")
                for key in REASONING_KEYS:
                    copy[key] = wrapped
            if "tool_calls" in message:
                copy["tool_calls"] = [
                    {
                        **call,
                        "function": {
                            **call["function"],
                            "name": self._new(turn, "call") + call["function"]["name"],
                        },
                    }
                    for call in message["tool_calls"]
                ]
        content = message.get("content")
        if isinstance(content, str):
            copy["content"] = self._content(content, turn, answer)
        elif content:
            text = self._content(content[0]["text"], turn, answer)
            copy["content"] = [{**content[0], "text": text}]
        return copy

    def _content(self, text: str, turn: int, answer: bool) -> str:
        block = THINK_BLOCK.fullmatch(text) if answer and "</think>" in text else None
        if block is None:
            return self._wrap(text, turn, "content")
        opened, thought, closed, rest = block.groups()
        thought = self._wrap(thought, turn, "reasoning")
        return f"{opened}{thought}{closed}{self._wrap(rest, turn, 'content')}"

    def place(self, text: str) -> str:
        """Fill in where the marks are; return ``text`` without them."""
        pieces: list[str] = []
        last = length = 0
        for match in plane_pattern(self._plane).finditer(text):
            piece = text[last : match.start()]
            pieces.append(piece)
            length += len(piece)
            last = match.end()
            mark = self.marks[ord(match[0]) - self._plane]
            mark.count += 1
            if mark.count == 1:
                mark.place = length
        pieces.append(text[last:])
        return "".join(pieces)


_PATTERNS = {plane: re.compile(f"[{chr(plane)}-{chr(plane + 0xFFFD)}]") for plane in MARK_PLANES}


def plane_pattern(plane: int) -> re.Pattern[str]:
    """A pattern for the marks of a plane."""
    return _PATTERNS[plane]


@dataclass(frozen=True)
class Rendering:
    """A conversation as the template prints it, with its marks placed.

    Attributes:
        template: that printed it.
        messages: in the template's style.
        copies: the same with marks in them.
        tools: of the conversation.
        plain: the rendering without marks.
        marks: in coordinates of ``plain``.
        plane: of the marks.
    """

    template: ChatTemplate
    messages: Sequence[Rendered]
    copies: Sequence[Rendered]
    tools: Any
    plain: str
    marks: Sequence[Mark]
    plane: int

    def behind(
        self, count: int, *, generation: bool = False, more: Sequence[Rendered] = ()
    ) -> tuple[Mark | None, str, str]:
        """Render the first turns alone.

        Args:
            count: how many.
            generation: ask for an answer.
            more: turns behind them.

        Returns:
            their last mark (None without any), what is behind it, and all of it without marks.

        Raises:
            RowError: the template refuses them.
        """
        copies = [*self.copies[:count], *more]
        text = self.template.render(copies, self.tools, generation=generation)
        pattern = plane_pattern(self.plane)
        found = list(pattern.finditer(text))
        if not found:
            return None, text, text
        mark = self.marks[ord(found[-1][0]) - self.plane]
        return mark, text[found[-1].end() :], pattern.sub("", text)
