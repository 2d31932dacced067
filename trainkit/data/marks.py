"""Where texts and turns are in a rendering: marks, the prompt's end, the answer's end.

Marks are private-use characters put around the texts of a conversation, to find them again. A mark
is inside the blanks at a text's ends, so a template that trims text leaves it in place, and inside
``<think>`` tags, so a template that splits thinking off finds its tags untouched.

An answer starts behind the prompt that inference would be given. Nothing is learnt from rows, so a
conversation's mask depends on that conversation alone: either the template's own text shows that
its generation prompt is the same for all, or the prompt of this very answer is rendered. An answer
ends behind the token that stops generation, with all text before it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from trainkit.data.messages import Message, RowError
from trainkit.data.template import REASONING_KEYS, THINK_BLOCK, THINK_CLOSE, ChatTemplate, Rendered

MARK_PLANES = (0xF0000, 0x100000)
"""Two planes of 65,534 private-use characters; the second serves rows that use the first."""


@dataclass
class Mark:
    """One mark.

    Attributes:
        kind: ``content``, ``reasoning`` or ``call``, with ``_end`` behind a text.
        place: where it was found, in characters of the rendering without marks; -1 if nowhere.
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
        copy = dict(message)
        answer = message["role"] == "assistant"
        if answer:
            if "reasoning_content" in message:
                wrapped = self._wrap(message["reasoning_content"], turn, "reasoning")
                for key in REASONING_KEYS:
                    copy[key] = wrapped
            if "tool_calls" in message:
                copy["tool_calls"] = []
                for call in message["tool_calls"]:
                    name = self._new(turn, "call") + call["function"]["name"]
                    copy["tool_calls"].append(
                        {**call, "function": {**call["function"], "name": name}}
                    )
        content = message.get("content")
        if isinstance(content, str):
            copy["content"] = self._content(content, turn, answer)
        elif content and len(content) == 1 and "text" in content[0]:
            text = self._content(content[0]["text"], turn, answer)
            copy["content"] = [{**content[0], "text": text}]
        elif content:
            copy["content"] = self._parts(content, turn)
        return copy

    def _parts(self, parts: Sequence[Rendered], turn: int) -> list[Rendered]:
        """Texts with images between them: marked before the first text and behind the last."""
        found = [dict(part) for part in parts]
        texts = [part for part in found if part.get("text", "").strip()]
        if texts:
            begin, end = self._new(turn, "content"), self._new(turn, "content_end")
            head = texts[0]["text"]
            core = head.lstrip()
            texts[0]["text"] = f"{head[: len(head) - len(core)]}{begin}{core}"
            core = texts[-1]["text"].rstrip()
            texts[-1]["text"] = f"{core}{end}{texts[-1]['text'][len(core) :]}"
        return found

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
        for match in PATTERNS[self._plane].finditer(text):
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


PATTERNS = {plane: re.compile(f"[{chr(plane)}-{chr(plane + 0xFFFD)}]") for plane in MARK_PLANES}
"""The marks of a plane."""


@dataclass(frozen=True)
class Rendering:
    """A conversation as the template prints it, with its marks placed.

    Attributes:
        marks: in coordinates of ``plain``.
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

        Returns:
            their last mark (None without any), what is behind it, and all of it without marks.
        """
        copies = [*self.copies[:count], *more]
        text = self.template.render(copies, self.tools, generation=generation)
        pattern = PATTERNS[self.plane]
        found = list(pattern.finditer(text))
        if not found:
            return None, text, text
        mark = self.marks[ord(found[-1][0]) - self.plane]
        return mark, text[found[-1].end() :], pattern.sub("", text)


THINK_TAIL = re.compile(r"<think>\s*(?:</think>\s*)?$|<\|channel>thought\s*(?:<channel\|>\s*)?$")

ASKING = "add_generation_prompt"


@dataclass(frozen=True)
class Start:
    """Where the model begins to write.

    Attributes:
        opening: what the prompt has behind ``place`` but this rendering has not: opened thinking.
    """

    place: int
    base: int
    opening: str = ""


class Headers:
    """Finds the end of the prompt before an answer."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        probe = [template.as_dict(Message("user", "probe"))]
        self._probe = _header(template.render(probe, generation=True), template.render(probe))
        self._fixed = self._probe if self._probe and is_same_for_all(template.text) else ""

    def find(self, rendering: Rendering, turn: int, done: int, first: int) -> Start | None:
        """The start of an answer; None where it is not known."""
        if self._fixed:
            found = _at_header(rendering.plain, self._fixed, done, first)
            if found is not None:
                return found
        if not turn:
            return self._of_first(rendering.plain, done, first)
        try:
            mark, tail, prompt = rendering.behind(turn, generation=True)
        except RowError:
            return self._of_first(rendering.plain, done, first)
        plain, found = rendering.plain, None
        if mark is not None and mark.count == 1:
            found = _behind(plain, mark.place, tail, done, first)
        found = found or _behind(plain, 0, prompt, done, first)
        if found is not None:
            # Some templates ask for nothing behind a tool's answer, yet print a role header there.
            bare = THINK_TAIL.sub("", self._probe)
            is_header = bool(bare) and plain.startswith(bare, found.place)
            printed = _at_header(plain, self._probe, found.place, first) if is_header else None
            return printed or found
        _, _, rendered = rendering.behind(turn)
        header = _header(prompt, rendered)
        return _at_header(rendering.plain, header, done, first) if header else None

    def before(self, plain: str, done: int, first: int) -> int:
        """Where the header of an answer begins; ``first`` where none is found."""
        bare = THINK_TAIL.sub("", self._probe)
        at = plain.rfind(bare, done, first) if bare.strip() else -1
        return at if at >= 0 else first

    def _of_first(self, plain: str, done: int, first: int) -> Start | None:
        """The start of an answer that no prompt can be rendered for: nothing asks before it."""
        found = _at_header(plain, self._probe, done, first)
        if found is not None:
            return found
        gap = plain[done:first]
        bos = self.template.bos or ""
        place = done + (len(bos) if bos and gap.startswith(bos) else 0)
        return None if plain[place:first].strip() else Start(place, place)


def _header(prompt: str, rendered: str) -> str:
    """What a rendering that asks for an answer has more than one that does not."""
    common = common_length(prompt, rendered)
    text, tail = prompt[common:], rendered[common:]
    return text.removesuffix(tail) if tail.isspace() else text  # blanks that end every rendering


def _at_header(plain: str, header: str, done: int, first: int) -> Start | None:
    bare = THINK_TAIL.sub("", header)
    at = plain.rfind(bare, done, first)
    if at < 0 or not bare:
        return None
    base = at + len(bare)
    if header != bare and plain.startswith(header, at):
        return Start(min(at + len(header), first), base)
    return Start(base, base, header[len(bare) :])


def _behind(plain: str, place: int, prompt: str, done: int, first: int) -> Start | None:
    """The end of a prompt that goes on at ``place``, with or without the thinking it opens."""
    bare = THINK_TAIL.sub("", prompt)
    for text in (prompt, bare):
        end = place + len(text)
        if done <= end <= first and plain.startswith(text, place):
            return Start(end, place + len(bare), prompt[len(text) :])
    return None


# -- the template's own text -----------------------------------------------------------------------


class _GenerationTag(Extension):
    """The tag ``{% generation %}`` of transformers, read as if it were not there."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_PARSER = jinja2.Environment(  # never renders, so there is nothing to escape
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
)


def is_same_for_all(source: str) -> bool:
    """Whether a template's generation prompt is the same for every conversation.

    It is where ``add_generation_prompt`` is read once, as the condition of a block outside of all
    others, and nothing that a conversation or the template itself sets is read in there.
    """
    try:
        tree = _PARSER.parse(source)
    except jinja2.TemplateError:
        return False
    names = list(tree.find_all(nodes.Name))
    changing = {"messages", "tools", "documents"} | {n.name for n in names if n.ctx != "load"}
    changing |= {macro.name for macro in tree.find_all(nodes.Macro)}
    asking = [node for node in names if node.name == ASKING]
    for block in tree.body:
        if isinstance(block, nodes.If) and not block.elif_ and not block.else_:
            read = {node.name for node in block.find_all(nodes.Name)}
            if len(asking) == 1 and ASKING in read:
                return not read & changing
    return False


def common_length(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


THOUGHT_ENDS = frozenset({THINK_CLOSE, "<channel|>"})
"""Tokens behind a thought: the answer itself is still to come."""

BOUNDARIES = "<[{("
"""What markup begins with."""


class Ends:
    """Finds the end of turns."""

    def __init__(
        self,
        template: ChatTemplate,
        plain: frozenset[str] = frozenset(),
        thought: frozenset[str] = frozenset(),
    ) -> None:
        self.template = template
        self.plain = plain
        self.thought = THOUGHT_ENDS | thought
        self._stops = {t for t, index in template.added.items() if index in template.stop_ids}

    def of_text(
        self, rendering: Rendering, turn: int, last: int, limit: int
    ) -> tuple[int, str | None]:
        """The end of a turn and its end-of-turn token; None where it has none."""
        found = self._run(rendering.plain, last, limit)
        if found is not None:
            return found
        closing, token = self._closing(rendering, turn, last, limit)
        if token is not None:
            return closing, token
        found = self._run(rendering.plain, closing, limit)
        # Behind other text, a control token that never ends a turn opens the next one.
        return found if found and found[1] in self._stops | self.plain else (closing, None)

    def _run(self, plain: str, place: int, limit: int) -> tuple[int, str] | None:
        """The end-of-turn token of the run of control tokens behind a text.

        It is the run's first stop token, or its first that does not begin a text.
        """
        while place < limit and plain[place].isspace():
            place += 1
        first: tuple[int, str] | None = None
        while match := self.template.added_pattern.match(plain, place):
            token = match[0]
            if match.end() > limit:
                break
            if token in self._stops:
                return match.end(), token
            if token not in self.template.special or token in self.thought:
                break  # mere markup
            if first is None and token != self.template.bos:
                first = (match.end(), token)
            place = match.end()
        return first

    def _closing(
        self, rendering: Rendering, turn: int, last: int, limit: int
    ) -> tuple[int, str | None]:
        """The end of the text that the template puts behind a turn, such as ``</assistant></s>``.

        It is the text that is there whether or not another turn follows, or what ends in a stop
        token.
        """
        gap = rendering.plain[last:limit]
        if not gap.strip():
            return last, None
        try:
            mark, tail, _ = rendering.behind(turn + 1)
        except RowError:
            return last, None
        if mark is None or mark.turn != turn:
            return last, None
        agreed = common_length(tail, gap)
        stops = [tail.find(token, 0, agreed) for token in self._stops]
        stops = [at for at in stops if at >= 0]
        if stops:
            at = min(stops)
            token = max((t for t in self._stops if tail.startswith(t, at)), key=len)
            return last + at + len(token), token
        if turn == len(rendering.messages) - 1:
            agreed = min(agreed, self._if_it_went_on(rendering, turn, tail))
        while 0 < agreed < len(tail.rstrip()) and not _is_boundary(tail, agreed):
            agreed -= 1
        closing = tail[:agreed].rstrip()
        end = last + len(closing)
        for match in self.template.added_pattern.finditer(closing):
            if match.end() == len(closing) and match[0] not in self.thought:
                return end, match[0]
        return end, None

    def _if_it_went_on(self, rendering: Rendering, turn: int, tail: str) -> int:
        """How much of what is behind the last turn would be there with another turn, too."""
        question = self.template.as_dict(Message("user", "probe"))
        try:
            mark, longer, _ = rendering.behind(turn + 1, more=[question])
        except RowError:
            return len(tail)
        return common_length(tail, longer) if mark is not None and mark.turn == turn else len(tail)

    def of_call(
        self, rendering: Rendering, turn: int, last: int, limit: int
    ) -> tuple[int, str | None] | None:
        """The same for a turn whose text the template makes up of tool calls.

        ``last`` is the place of the last call's name. None where the end is not found.
        """
        plain = rendering.plain
        found = [(plain.find(token, last, limit), token) for token in self.plain | self._stops]
        found = [(place, token) for place, token in found if place >= 0]
        if found:
            place, token = min(found)
            return place + len(token), token
        # The turn ends otherwise than a plain one. Its own text is what does not change when the
        # turns after it are taken away.
        mark, tail, _ = rendering.behind(turn + 1)
        if mark is None or mark.place != last:
            return None
        agreed = common_length(tail[: limit - last], plain[last:limit])
        end = last + agreed
        if agreed < len(tail.rstrip()):
            tokens = list(self.template.added_pattern.finditer(plain, last, end))
            if not tokens:
                return None
            end = tokens[-1].end()
        follows = self.template.added_pattern.match(plain, end)
        if follows and follows[0] in self._stops:
            return follows.end(), follows[0]
        for token in self.template.special:
            if plain.endswith(token, last, end):
                return end, token
        if follows and follows[0] in self.template.special:
            return follows.end(), follows[0]
        return end, None


def _is_boundary(text: str, place: int) -> bool:
    """Whether one piece of markup may end before a character and another begin with it."""
    return text[place - 1].isspace() or text[place].isspace() or text[place] in BOUNDARIES
