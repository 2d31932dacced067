"""Where each turn went in a rendering: proved texts, starts and ends."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.data.headers import Headers, common_length
from trainkit.data.marks import Mark
from trainkit.data.messages import Conversation, RowError
from trainkit.data.template import Rendered

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
    """

    turn: int
    start: int
    end: int
    end_of_turn: str | None


@dataclass(frozen=True)
class Masked:
    """A rendered conversation with its trained spans.

    Attributes:
        text: the plain rendering.
        spans: of every assistant turn, trained or not, and of other turns that were asked for.
        stripped: turns whose reasoning the template left out.
    """

    text: str
    spans: tuple[Span, ...]
    stripped: frozenset[int]


class TurnFinder:
    """Finds the turns of one conversation.

    Args:
        headers: of the template.
        ends: end-of-turn tokens of plain turns.
        conversation: what was rendered.
        messages: the same in the template's style.
        plain: the rendering.
        marks: of the marked rendering, in coordinates of the plain one.
    """

    def __init__(
        self,
        headers: Headers,
        ends: frozenset[str],
        conversation: Conversation,
        messages: Sequence[Rendered],
        plain: str,
        marks: Sequence[Mark],
    ) -> None:
        self.headers = headers
        self.ends = ends
        self.template = headers.template
        self.mask_empty_think = self.template.options.mask_empty_think
        self.conversation = conversation
        self.messages = messages
        self.plain = plain
        self.marks = marks
        self.by_turn: dict[int, list[Mark]] = {}
        for mark in self.marks:
            self.by_turn.setdefault(mark.turn, []).append(mark)
        # next_place[turn]: the first mark of any later turn.
        self.next_place = [len(plain)] * len(messages)
        for turn in range(len(messages) - 2, -1, -1):
            found = [
                m.place for m in self.by_turn.get(turn + 1, ()) if m.count and m.kind != "call"
            ]
            self.next_place[turn] = min([self.next_place[turn + 1], *found])

    def find(self, others: frozenset[int]) -> Masked:
        """Check every turn and find the spans of assistant turns and of ``others``."""
        spans: list[Span] = []
        stripped: set[int] = set()
        done = 0
        for turn, message in enumerate(self.messages):
            if message["role"] != "assistant":
                begin, end = self._check_context(turn)
                if turn in others and end > begin:
                    stop, token = self._end_of_text(end, self._limit(turn, end))
                    spans.append(Span(turn, begin, stop, token))
                    end = stop
                done = max(done, end)
                continue
            self._check_turn(turn, stripped)
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
        for mark in sorted(self.by_turn.get(turn, ()), key=_order):
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
        start = self._start(turn, done, first)
        limit = self._limit(turn, last)
        if any(mark.kind == "call" for mark in found):
            end, token = self._end_of_call(turn, last, limit)
        else:
            end, token = self._end_of_text(last, limit)
        return Span(turn, start, end, token)

    def _start(self, turn: int, done: int, first: int) -> int:
        role = self.messages[turn - 1]["role"] if turn else "none"
        opened = THINK_OPENED.search(self.plain, done, first)
        rest = self.plain[: opened.start() if opened else first]
        message = self.messages[turn]
        if "reasoning_content" not in message:  # else the turn does not begin with its text
            rest = self.headers.without_own_blanks(rest, text_of(message))
        header = self.headers.find(role, self.messages[:turn], self.conversation.tools, rest)
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
        if self.mask_empty_think and empty:
            return empty.end()
        return start

    def _end_of_text(self, last: int, limit: int) -> tuple[int, str | None]:
        """The end-of-turn token after text.

        It is the first stop token of the run of control tokens that follows, or the run's first
        that does not begin a text.
        """
        place = last
        while place < limit and self.plain[place].isspace():
            place += 1
        first: tuple[int, str] | None = None
        while match := self.template.added_pattern.match(self.plain, place):
            if match.end() > limit:
                break
            if first is None and match[0] != self.template.bos:
                first = (match.end(), match[0])
            if self.template.added[match[0]] in self.template.stop_ids:
                return match.end(), match[0]
            place = match.end()
        return first or (last, None)

    def _end_of_call(self, turn: int, last: int, limit: int) -> tuple[int, str | None]:
        """The end-of-turn token after tool calls, whose text the template makes up."""
        ends = self.ends | {
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
        common = common_length(alone[last:limit], self.plain[last:limit])
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


def text_of(message: Rendered) -> str:
    """The content of a message in a template's style."""
    content = message.get("content")
    if isinstance(content, list):
        return str(content[0]["text"])
    return content or ""
