"""What a template puts before an answer when it is asked to generate one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.data.messages import Message, RowError
from trainkit.data.template import ChatTemplate, Rendered

THINK_TAIL = re.compile(r"<think>\s*(?:</think>\s*)?$|<\|channel>thought\s*(?:<channel\|>\s*)?$")


@dataclass(frozen=True)
class Header:
    """The end of a prompt of inference.

    Attributes:
        text: all of it, such as ``<|im_start|>assistant\n<think>\n``.
        base: the same without opened thinking.
        lead: when ``text`` is empty: the blanks between the prompt and the answer.
    """

    text: str
    base: str
    lead: str


class Headers:
    """Learns the header of answers after each role.

    Args:
        template: renders the prompts they are learnt from.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._known: dict[str, Header] = {}
        self._keeps_blanks: bool | None = None

    def without_own_blanks(self, rest: str, text: str) -> str:
        """``rest``, which goes up to a text, without the blanks that the text itself begins with.

        Args:
            rest: a rendering up to the first character of ``text`` that is not blank.
            text: of a message.
        """
        own = text[: len(text) - len(text.lstrip())]
        if not own or not rest.endswith(own):
            return rest
        if self._keeps_blanks is None:
            question = self.template.as_dict(Message("user", "probe"))
            answer = self.template.as_dict(Message("assistant", " \n probe answer"))
            try:
                rendered = self.template.render([question, answer])
                self._keeps_blanks = " \n probe answer" in rendered
            except RowError:
                self._keeps_blanks = False
        return rest.removesuffix(own) if self._keeps_blanks else rest

    def known(self, role: str) -> Header:
        """The header after a turn of ``role``, if an answer was found there; else an empty one."""
        return self._known.get(role, Header("", "", ""))

    def find(self, role: str, prefix: Sequence[Rendered], tools: Any, rest: str) -> Header:
        """The header of an answer after a turn of ``role``.

        Args:
            role: of the turn before.
            prefix: the turns before, rendered to learn a header that is not known yet.
            tools: of the conversation.
            rest: the plain rendering up to the answer's text.
        """
        known = self._known.get(role)
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
        common = common_length(asked, told)
        text, tail = asked[common:], told[common:]
        if tail.isspace():
            text = text.removesuffix(tail)  # blanks that end every rendering
        lead = ""
        if not text:
            lead = rest[len(asked) :] if rest.startswith(asked) else ""
            if lead.strip():
                lead = ""
        header = Header(text, THINK_TAIL.sub("", text), lead)
        self._known[role] = header
        return header


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
