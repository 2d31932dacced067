"""Which characters of a rendered conversation are trained, for any chat template.

The conversation is rendered twice by the tokenizer's own template: as it is, and with a private-use
character (a mark) at both ends of every text in it. Taking the marks out must give the plain
rendering again, and the text between the marks must be the message's: then the marks say exactly
where each turn went. From there

- a turn starts where the prompt ends that inference would be given (found by rendering the turns
  before it with ``add_generation_prompt``), so role headers are not trained;
- it ends with its end-of-turn token, the first control token behind the text.

Anything that does not fit raises :class:`RowError` and names the turn. Measured reasons for this
method: prefix differences fail on 11 of 27 stock templates, this on none of those that take plain
text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.data.marks import MARK_PLANES, Mark, Marker, plane_pattern
from trainkit.data.messages import Conversation, Message, RowError
from trainkit.data.template import ChatTemplate, Rendered

THINK_TAIL = re.compile(r"<think>\s*(?:</think>\s*)?$|<\|channel>thought\s*(?:<channel\|>\s*)?$")
THINK_OPENED = re.compile(r"<think>\s*\Z")
EMPTY_THINK = re.compile(
    r"\s*(?:<think>\s*</think>|<\|channel>thought\s*<channel\|>)\s*", re.DOTALL
)


@dataclass(frozen=True)
class Span:
    """The trained characters of one turn.

    Attributes:
        turn: index of the message.
        start: first trained character.
        end: one past the last trained character.
        end_of_turn: the token that ends the turn, or None where the template has none.
        content_end: one past the message's own text.
    """

    turn: int
    start: int
    end: int
    end_of_turn: str | None
    content_end: int


@dataclass(frozen=True)
class Masked:
    """A rendered conversation with its trained spans.

    Attributes:
        text: the plain rendering.
        spans: one for each assistant turn, in order; also of those that are not trained.
        stripped: turns whose reasoning the template left out.
    """

    text: str
    spans: tuple[Span, ...]
    stripped: frozenset[int]


@dataclass(frozen=True)
class _Header:
    """What the template puts before an answer when it is asked to generate one.

    Attributes:
        text: all of it, such as ``<|im_start|>assistant\n<think>\n``.
        base: the same without opened thinking.
        lead: when ``text`` is empty: the blanks between the prompt and the answer.
    """

    text: str
    base: str
    lead: str


class MaskFinder:
    """Finds spans; remembers the template's headers and end-of-turn tokens.

    Args:
        template: the template, with its probes done.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.mask_empty_think = template.options.mask_empty_think
        self._headers: dict[str, _Header] = {}
        self._ends: set[str] = set()
        probe = Conversation(
            (
                Message("user", "probe one"),
                Message("assistant", "answer one"),
                Message("user", "probe two"),
                Message("assistant", "answer two"),
            )
        )
        spans = self.find(probe).spans
        self._ends = {span.end_of_turn for span in spans if span.end_of_turn is not None}

    def find(self, conversation: Conversation) -> Masked:
        """Render a conversation and find the spans of its assistant turns.

        Raises:
            RowError: the template refuses the conversation, or a turn cannot be found for certain.
        """
        messages = [self.template.as_dict(message) for message in conversation.messages]
        try:
            plain = self.template.render(messages, conversation.tools)
        except RowError as error:
            turn = self._refused_turn(messages, conversation.tools)
            place = f"turn {turn + 1} ({messages[turn]['role']}): "
            raise RowError(error.reason, place + error.detail) from error
        marked = self._marked(messages, conversation.tools, plain)
        finder = _Conversation(self, conversation, messages, plain, marked)
        return finder.masked()

    def _refused_turn(self, messages: Sequence[Rendered], tools: Any) -> int:
        """The first turn with which the template stops to render the conversation."""
        for turn in range(len(messages) - 1):
            try:
                self.template.render(messages[: turn + 1], tools)
            except RowError:
                return turn
        return len(messages) - 1

    def _marked(
        self, messages: Sequence[Rendered], tools: Any, plain: str
    ) -> tuple[str, list[Mark]]:
        """The marked rendering and its marks, placed in coordinates of the plain one."""
        plane = next((p for p in MARK_PLANES if not plane_pattern(p).search(plain)), None)
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
                return text, marker.marks
        at = _common(stripped, plain)
        turn = max((m.turn for m in marker.marks if 0 <= m.place <= at), default=0)
        raise RowError(
            "mask_unproved",
            f"turn {turn + 1}: the template renders marked text differently, near "
            f"{plain[max(0, at - 30) : at + 30]!r}",
        )

    def header(self, role: str, prefix: Sequence[Rendered], tools: Any, rest: str) -> _Header:
        """The header of an answer after a turn of ``role``.

        Args:
            role: of the turn before.
            prefix: the turns before, rendered to learn a header that is not known yet.
            tools: of the conversation.
            rest: the plain rendering up to the answer's text.
        """
        known = self._headers.get(role)
        if known is not None and (known.text or rest.endswith(known.lead)):
            return known
        try:
            if not prefix:
                raise RowError("template_refuses", "no turn before")
            asked = self.template.render(prefix, tools, generation=True)
            told = self.template.render(prefix, tools)
        except RowError:
            probe = [self.template.as_dict(Message("user", "probe"))]
            asked = self.template.render(probe, tools, generation=True)
            told = self.template.render(probe, tools)
        text = asked[_common(asked, told) :]
        lead = ""
        if not text:
            lead = rest[len(asked) :] if rest.startswith(asked) else ""
            if lead.strip():
                lead = ""
        header = _Header(text, THINK_TAIL.sub("", text), lead)
        self._headers[role] = header
        return header


class _Conversation:
    """One conversation under examination."""

    def __init__(
        self,
        finder: MaskFinder,
        conversation: Conversation,
        messages: Sequence[Rendered],
        plain: str,
        marked: tuple[str, list[Mark]],
    ) -> None:
        self.finder = finder
        self.template = finder.template
        self.conversation = conversation
        self.messages = messages
        self.plain = plain
        self.marked_text, self.marks = marked
        self.by_turn: dict[int, list[Mark]] = {}
        for mark in self.marks:
            self.by_turn.setdefault(mark.turn, []).append(mark)

    def masked(self) -> Masked:
        spans: list[Span] = []
        stripped: set[int] = set()
        done = 0
        for turn, message in enumerate(self.messages):
            if message["role"] != "assistant":
                done = max(done, self._check_context(turn))
                continue
            self._check_turn(turn, stripped)
            span = self._span(turn, done)
            done = span.end
            spans.append(span)
        return Masked(self.plain, tuple(spans), frozenset(stripped))

    def _fail(self, turn: int, reason: str, detail: str) -> RowError:
        role = self.messages[turn]["role"]
        return RowError(reason, f"turn {turn + 1} ({role}): {detail}")

    def _check_context(self, turn: int) -> int:
        """Where the text of a turn that is not trained ends; 0 when it carries no marks."""
        ends = [mark for mark in self.by_turn.get(turn, ()) if mark.kind == "content_end"]
        if not ends:
            return 0
        if ends[0].count == 0:
            raise self._fail(turn, "template_drops_turn", "the template leaves this turn out")
        return ends[0].place if ends[0].count == 1 else 0

    def _check_turn(self, turn: int, stripped: set[int]) -> None:
        """Every text of an assistant turn is there once, unchanged, in order."""
        content = _text_of(self.messages[turn])
        last = -1
        begin: Mark | None = None
        for mark in sorted(self.by_turn.get(turn, ()), key=_order):
            if mark.count == 0:
                if mark.kind.startswith("reasoning"):
                    stripped.add(turn)
                    continue
                raise self._fail(
                    turn,
                    "template_drops_text",
                    "the template leaves the turn's "
                    + ("tool call" if mark.kind == "call" else "text")
                    + " out",
                )
            if mark.kind != "call" and mark.count > 1:
                raise self._fail(turn, "mask_unproved", "the template prints this text twice")
            if mark.kind.endswith("_end"):
                assert begin is not None
                text = self.plain[begin.place : mark.place]
                if (
                    text not in content
                    and text != self.messages[turn].get("reasoning_content", "").strip()
                ):
                    raise self._fail(turn, "mask_unproved", "the template changes this text")
            else:
                begin = mark
            if mark.place < last:
                raise self._fail(turn, "mask_unproved", "the template reorders this turn's texts")
            last = mark.place

    def _span(self, turn: int, done: int) -> Span:
        found = [mark for mark in self.by_turn.get(turn, ()) if mark.count]
        if not found:
            raise self._fail(turn, "mask_unproved", "nothing of this turn is in the rendering")
        first = min(mark.place for mark in found)
        last = max(mark.place for mark in found)
        if first < done:
            raise self._fail(turn, "mask_unproved", "the template prints the turns out of order")
        start = self._start(turn, done, first)
        later = [m.place for m in self.marks if m.turn > turn and m.count and m.kind != "call"]
        limit = min((place for place in later if place >= last), default=len(self.plain))
        if any(mark.kind == "call" for mark in found):
            end, token = self._end_of_call(turn, last, limit)
        else:
            end, token = self._end_of_text(last, limit)
        return Span(turn, start, end, token, last)

    def _start(self, turn: int, done: int, first: int) -> int:
        role = self.messages[turn - 1]["role"] if turn else "none"
        opened = THINK_OPENED.search(self.plain, done, first)
        rest = self.plain[: opened.start() if opened else first]
        header = self.finder.header(role, self.messages[:turn], self.conversation.tools, rest)
        if not header.text:
            return len(rest) - len(header.lead)
        at = self.plain.rfind(header.base, done, first)
        if at < 0:
            raise self._fail(
                turn,
                "mask_unproved",
                f"the generation prompt {header.text!r} is not before this turn's text",
            )
        base_end = at + len(header.base)
        whole = header.text != header.base and self.plain.startswith(header.text, at)
        start = min(at + len(header.text), first) if whole else base_end
        empty = EMPTY_THINK.match(self.plain, base_end, first)
        if self.finder.mask_empty_think and empty:
            return empty.end()
        return start

    def _end_of_text(self, last: int, limit: int) -> tuple[int, str | None]:
        """The end-of-turn token after text.

        It is the first stop token of the run of control tokens that follows, or the run's first.
        """
        place = last
        while place < limit and self.plain[place].isspace():
            place += 1
        first: tuple[int, str] | None = None
        while match := self.template.added_pattern.match(self.plain, place):
            if match.end() > limit:
                break
            if first is None:
                first = (match.end(), match[0])
            if self.template.added[match[0]] in self.template.stop_ids:
                return match.end(), match[0]
            place = match.end()
        return first or (last, None)

    def _end_of_call(self, turn: int, last: int, limit: int) -> tuple[int, str | None]:
        """The end-of-turn token after tool calls, whose text the template makes up."""
        ends = self.finder._ends | {
            token for token, index in self.template.added.items() if index in self.template.stop_ids
        }
        found = [(self.plain.find(token, last, limit), token) for token in ends]
        found = [(place, token) for place, token in found if place >= 0]
        if found:
            place, token = min(found)
            return place + len(token), token
        # The turn ends otherwise than a plain one. Its own text is what does not change when the
        # turns after it are taken away.
        alone = self.template.render(self.messages[: turn + 1], self.conversation.tools)
        common = _common(alone[last:limit], self.plain[last:limit])
        end = last + common
        if end < len(alone.rstrip()):
            tokens = list(self.template.added_pattern.finditer(self.plain, last, end))
            if not tokens:
                raise self._fail(turn, "mask_unproved", "the end of the tool call is not found")
            end = tokens[-1].end()
        follows = self.template.added_pattern.match(self.plain, end)
        if follows and self.template.added[follows[0]] in self.template.stop_ids:
            return follows.end(), follows[0]
        for token in self.template.special:
            if self.plain.endswith(token, last, end):
                return end, token
        if follows and follows[0] in self.template.special:
            return follows.end(), follows[0]
        return end, None


def _order(mark: Mark) -> int:
    return {"reasoning": 0, "reasoning_end": 1, "content": 2, "content_end": 3}.get(mark.kind, 4)


def _text_of(message: Rendered) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return str(content[0]["text"])
    return content or ""


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
