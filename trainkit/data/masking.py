"""Which characters of a rendered conversation are trained, for any chat template.

The conversation is rendered twice by the tokenizer's own template: as it is, and with a private-use
character (a mark) at both ends of every text in it. Taking the marks out must give the plain
rendering again, and the text between the marks must be the message's: then the marks say exactly
where each turn went. From there

- a turn starts where the prompt ends that inference would be given (the turns before it rendered
  with ``add_generation_prompt``), so role headers are not trained;
- it ends with its end-of-turn token, with whatever the template puts between the text and it.

Anything that does not fit raises :class:`RowError` and names the turn. Measured reasons for this
method: prefix differences fail on 11 of 27 stock templates, this on none of those that take plain
text.

Thinking can be kept in all turns, also where the template strips it: the answers are replaced by
opaque words before the template sees them, masked like any text, and put back, thinking included.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainkit.data.marks import (
    MARK_PLANES,
    PATTERNS,
    Ends,
    Headers,
    Mark,
    Marker,
    Rendering,
    Start,
    common_length,
)
from trainkit.data.messages import Conversation, Message, RowError
from trainkit.data.template import THINK_CLOSE, ChatTemplate, Rendered, join_reasoning

EMPTY_THINK = re.compile(r"\s*(?:<think>\s*</think>|<\|channel>thought\s*<channel\|>)")


@dataclass(frozen=True)
class Span:
    """The trained characters of one turn.

    Attributes:
        end_of_turn: the token that ends the turn, or None where the template has none.
        opening: what the prompt of inference has behind ``start``, but this turn has not: the
            thinking that it opens.
    """

    turn: int
    start: int
    end: int
    end_of_turn: str | None
    opening: str = ""


@dataclass(frozen=True)
class Masked:
    """A rendered conversation with its trained spans.

    Attributes:
        spans: of every assistant turn, trained or not, and of other turns that were asked for; a
            turn of which nothing is left has none.
        stripped: turns whose reasoning the template left out.
    """

    text: str
    spans: tuple[Span, ...]
    stripped: frozenset[int]


class TurnFinder:
    """Finds the turns of one conversation."""

    def __init__(
        self, headers: Headers, ends: Ends, conversation: Conversation, rendering: Rendering
    ) -> None:
        self.headers = headers
        self.ends = ends
        self.template = headers.template
        self.conversation = conversation
        self.rendering = rendering
        self.messages = rendering.messages
        self.plain = plain = rendering.plain
        self.marks = rendering.marks
        self.by_turn: dict[int, list[Mark]] = {}
        for mark in self.marks:
            self.by_turn.setdefault(mark.turn, []).append(mark)
        # next_place[turn]: the first mark of any later turn.
        self.next_place = [len(plain)] * len(self.messages)
        for turn in range(len(self.messages) - 2, -1, -1):
            found = [
                m.place for m in self.by_turn.get(turn + 1, ()) if m.count and m.kind != "call"
            ]
            self.next_place[turn] = min([self.next_place[turn + 1], *found])

    def find(self, others: frozenset[int]) -> Masked:
        spans: list[Span] = []
        stripped: set[int] = set()
        done = 0
        for turn, message in enumerate(self.messages):
            if message["role"] != "assistant":
                begin, end = self._check_context(turn)
                if turn in others and end > begin:
                    stop, token = self.ends.of_text(
                        self.rendering, turn, end, self._limit(turn, end)
                    )
                    spans.append(Span(turn, begin, stop, token))
                    end = stop
                done = max(done, end)
                continue
            self._check_turn(turn, stripped)
            if turn in stripped and not any(mark.count for mark in self.by_turn[turn]):
                continue  # nothing but thinking, which the template leaves out
            span = self._span(turn, done)
            done = span.end
            spans.append(span)
        return Masked(self.plain, tuple(spans), frozenset(stripped))

    def _fail(self, turn: int, reason: str, detail: str) -> RowError:
        role = self.messages[turn]["role"]
        return RowError(reason, f"turn {turn + 1} ({role}): {detail}")

    def _check_context(self, turn: int) -> tuple[int, int]:
        """Where the text of a turn begins and ends; both 0 where no marks can tell."""
        found = [m for m in self.by_turn.get(turn, ()) if m.kind in ("content", "content_end")]
        if not found:
            return 0, 0
        if found[0].count == 0:
            raise self._fail(turn, "template_drops_turn", "the template leaves this turn out")
        once = all(mark.count == 1 for mark in found)
        return (found[0].place, found[1].place) if once else (0, 0)

    def _check_turn(self, turn: int, stripped: set[int]) -> None:
        """Every text of an assistant turn is there once, unchanged, in order."""
        last = -1
        begin: Mark | None = None
        for mark in sorted(self.by_turn.get(turn, ()), key=lambda mark: _ORDER.index(mark.kind)):
            if mark.count == 0:
                if mark.kind.startswith("reasoning"):
                    stripped.add(turn)
                    continue
                what = "tool call" if mark.kind == "call" else "text"
                detail = f"the template leaves the turn's {what} out"
                raise self._fail(turn, "template_drops_text", detail)
            if mark.kind != "call" and mark.count > 1:
                raise self._fail(turn, "mask_unproved", "the template prints this text twice")
            if not mark.kind.endswith("_end"):
                begin = mark
            elif begin is None or self.plain[begin.place : mark.place] != begin.text:
                raise self._fail(turn, "mask_unproved", "the template changes this text")
            if mark.place < last:
                raise self._fail(turn, "mask_unproved", "the template reorders this turn's texts")
            last = mark.place

    def _limit(self, turn: int, last: int) -> int:
        """Where the next turn's text begins."""
        near = self.next_place[turn]
        if near >= last:
            return near
        later = (m.place for m in self.marks if m.turn > turn and m.count and m.kind != "call")
        return min((place for place in later if place >= last), default=len(self.plain))

    def _span(self, turn: int, done: int) -> Span:
        found = [mark for mark in self.by_turn.get(turn, ()) if mark.count]
        if not found:
            raise self._fail(turn, "mask_unproved", "nothing of this turn is in the rendering")
        first = min(mark.place for mark in found)
        last = max(mark.place for mark in found)
        if first < done:
            raise self._fail(turn, "mask_unproved", "the template prints the turns out of order")
        for before in range(turn - 1, -1, -1):
            # Where marks could not be used, the text itself says where the turns before end.
            if before in self.by_turn:
                break
            core = text_of(self.messages[before]).strip()
            at = self.plain.rfind(core, done, first) if core else -1
            done = max(done, at + len(core)) if at >= 0 else done
        start = self.headers.find(self.rendering, turn, done, first)
        if start is None:
            detail = "the prompt that inference would be given is not before this turn's text"
            raise self._fail(turn, "mask_unproved", detail)
        limit = self._limit(turn, last)
        if self.messages[turn + 1 :] and self.messages[turn + 1]["role"] == "assistant":
            # The header of the next answer ends nothing: no user and no tool is asked.
            limit = self.headers.before(self.plain, last, limit)
        if any(mark.kind == "call" for mark in found):
            ended = self.ends.of_call(self.rendering, turn, last, limit)
            if ended is None:
                raise self._fail(turn, "mask_unproved", "the end of the tool call is not found")
        else:
            ended = self.ends.of_text(self.rendering, turn, last, limit)
        place = self._behind_empty_think(turn, start, first)
        opening = start.opening if place == start.place else ""
        return Span(turn, place, *ended, opening=opening)

    def _behind_empty_think(self, turn: int, start: Start, first: int) -> int:
        """The start without an empty thought; the blanks that the answer begins with stay in."""
        empty = EMPTY_THINK.match(self.plain, start.base, first)
        if empty is None:
            return start.place
        blanks = num_blanks(self.plain[empty.end() : first])
        text = text_of(self.messages[turn])
        if text != text.lstrip() and "reasoning_content" not in self.messages[turn]:
            # How many blanks are the template's own shows the same answer without its blanks.
            bare = with_text(self.messages[turn], text.lstrip())
            messages = [*self.messages[:turn], bare, *self.messages[turn + 1 :]]
            other = self.template.render(messages, self.conversation.tools)
            if other.startswith(self.plain[: empty.end()]):
                blanks = min(blanks, num_blanks(other[empty.end() :]))
        return empty.end() + blanks


_ORDER = ("reasoning", "reasoning_end", "content", "content_end", "call")
"""Of the marks of a turn."""


def text_of(message: Rendered) -> str:
    """The content of a message in a template's style."""
    content = message.get("content")
    if isinstance(content, list):
        return next((str(part["text"]) for part in reversed(content) if "text" in part), "")
    return content or ""


def num_blanks(text: str) -> int:
    return len(text) - len(text.lstrip())


def with_text(message: Rendered, text: str) -> Rendered:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [{**content[0], "text": text}]}
    return {**message, "content": text}


class MaskFinder:
    """Finds spans. What it knows comes from the template alone, never from rows before."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.headers = Headers(template)
        self.ends = Ends(template)
        probe = Conversation(
            (
                Message("user", "probe one"),
                Message("assistant", "answer one"),
                Message("user", "probe two"),
                Message("assistant", "answer two"),
            )
        )
        spans = self.find(probe).spans
        plain = frozenset(span.end_of_turn for span in spans if span.end_of_turn is not None)
        self.ends = Ends(template, plain, self._thought_ends() - plain)

    def _thought_ends(self) -> frozenset[str]:
        """The tokens between a thought and its answer, where the template prints thoughts."""
        thinking = Message("assistant", "probe answer", reasoning="probe thought")
        messages = [self.template.as_dict(m) for m in (Message("user", "probe"), thinking)]
        try:
            plain = self.template.render(messages)
            marks = self._marked(messages, None, plain).marks
        except RowError:
            return frozenset()
        places = {mark.kind: mark.place for mark in marks if mark.turn == 1}
        begin, end = places.get("reasoning_end", -1), places.get("content", -1)
        between = plain[begin:end] if 0 <= begin < end else ""
        return frozenset(self.template.added_pattern.findall(between))

    def find(self, conversation: Conversation, others: frozenset[int] = frozenset()) -> Masked:
        """Render a conversation and find the spans of its assistant turns.

        ``others`` are turns of other roles that need a span too.
        """
        messages = [self.template.as_dict(message) for message in conversation.messages]
        try:
            plain = self.template.render(messages, conversation.tools)
        except RowError as error:
            turn = self._refused_turn(messages, conversation.tools)
            place = f"turn {turn + 1} ({messages[turn]['role']}): "
            raise RowError(error.reason, place + error.detail) from error
        rendering = self._marked(messages, conversation.tools, plain)
        return TurnFinder(self.headers, self.ends, conversation, rendering).find(others)

    def _refused_turn(self, messages: Sequence[Rendered], tools: Any) -> int:
        """The first turn with which the template stops to render the conversation."""
        for turn in range(len(messages) - 1):
            try:
                self.template.render(messages[: turn + 1], tools)
            except RowError:
                return turn
        return len(messages) - 1

    def _marked(self, messages: Sequence[Rendered], tools: Any, plain: str) -> Rendering:
        plane = next((p for p in MARK_PLANES if not PATTERNS[p].search(plain)), None)
        if plane is None:
            raise RowError("private_use", "the text uses both planes of private-use characters")
        for everyone in (True, False):
            marker = Marker(plane)
            copies = [
                marker.message(message, turn)
                if everyone or message["role"] == "assistant"
                else message
                for turn, message in enumerate(messages)
            ]
            try:
                text = self.template.render(copies, tools)
            except RowError:
                if everyone:
                    continue
                raise
            stripped = marker.place(text)
            if stripped == plain:
                return Rendering(self.template, messages, copies, tools, plain, marker.marks, plane)
        at = common_length(stripped, plain)
        turn = max((m.turn for m in marker.marks if 0 <= m.place <= at), default=0)
        raise RowError(
            "mask_unproved",
            f"turn {turn + 1}: the template renders marked text differently, near "
            f"{plain[max(0, at - 30) : at + 30]!r}",
        )


EMPTY_THINK_TAIL = re.compile(r"(?:<think>\s*)?</think>\s*\Z")
"""An empty thought that the template prints before an answer, or what closes one."""


def find_preserving(
    finder: MaskFinder, conversation: Conversation, others: frozenset[int]
) -> Masked:
    """The same as :meth:`MaskFinder.find`, with all thinking in place."""
    masked = finder.find(conversation, others)
    if not masked.stripped:
        return masked
    if finder.template.style.splits_thinking:
        turn = min(masked.stripped)
        raise RowError(
            "thinking_stripped",
            f"turn {turn + 1}: the template strips this turn's thinking and has its own form of "
            "it, so it cannot be put back; use thinking: split",
        )
    whole = _thoughtful(conversation)
    hidden, names = _hidden(conversation, whole)
    return _put_back(finder.find(hidden, others), whole, names)


def preserved_prompt(
    conversation: Conversation, splits: bool, render: Callable[[Conversation], str]
) -> str:
    """A prompt with all thinking of earlier turns in place, as `find_preserving` trained it."""
    text = render(conversation)
    whole = _thoughtful(conversation)
    turns = (conversation.messages[turn] for turn in whole)
    thoughts = (turn.reasoning or turn.content.partition(THINK_CLOSE)[0] for turn in turns)
    if splits or all(thought.strip() in text for thought in thoughts):
        return text
    hidden, names = _hidden(conversation, whole)
    rest, pieces = render(hidden), []
    for turn, answer in whole.items():
        before, _, rest = rest.partition(names[turn])
        empty = EMPTY_THINK_TAIL.search(before)
        pieces += [before[: empty.start()] if empty else before, answer]
    return "".join([*pieces, rest])


def _thoughtful(conversation: Conversation) -> dict[int, str]:
    """The answers with thinking, by turn, as plain text with the thinking in it."""
    return {
        turn: join_reasoning(message.reasoning, message.content)
        if message.reasoning
        else message.content
        for turn, message in enumerate(conversation.messages)
        if message.role == "assistant" and (message.reasoning or THINK_CLOSE in message.content)
    }


def _hidden(
    conversation: Conversation, whole: Mapping[int, str]
) -> tuple[Conversation, dict[int, str]]:
    """The conversation with opaque words for those answers, and the words by turn."""
    everything = "".join(message.content for message in conversation.messages)
    word = next(w for w in (f"opaque{'x' * n}" for n in range(10**6)) if w not in everything)
    names = {turn: f"{word}-{turn}-" for turn in whole}
    hidden = tuple(
        replace(message, content=names[turn], reasoning=None) if turn in whole else message
        for turn, message in enumerate(conversation.messages)
    )
    return replace(conversation, messages=hidden), names


def _put_back(masked: Masked, whole: dict[int, str], names: dict[int, str]) -> Masked:
    pieces: list[str] = []
    spans: list[Span] = []
    shift = copied = 0
    for span in masked.spans:
        if span.turn not in whole:
            spans.append(replace(span, start=span.start + shift, end=span.end + shift))
            continue
        place = masked.text.index(names[span.turn], copied)
        before = masked.text[copied:place]
        empty = EMPTY_THINK_TAIL.search(before)
        if empty:
            before = before[: empty.start()]
        text = whole[span.turn]
        at = copied + shift + len(before)  # where the text goes
        start = min(span.start + shift, at)
        if start == at and text.startswith(span.opening):
            start += len(span.opening)  # the prompt of inference opens the thinking itself
        pieces += [before, text]
        copied = place + len(names[span.turn])
        shift = at + len(text) - copied
        spans.append(replace(span, start=start, end=span.end + shift))
    pieces.append(masked.text[copied:])
    return Masked("".join(pieces), tuple(spans), frozenset())
