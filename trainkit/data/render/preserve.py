"""Thinking kept in all turns, also where the chat template strips it.

The answers are replaced by opaque words before the template sees them, masked like any text, and
put back, thinking included. So every turn keeps its place, header and end, and the
template gets nothing to strip.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from trainkit.data.read.messages import Conversation, Message, RowError
from trainkit.data.render.masking import MaskFinder
from trainkit.data.render.spans import Masked, Span
from trainkit.data.render.template import THINK_CLOSE, join_reasoning

EMPTY_THINK_TAIL = re.compile(r"(?:<think>\s*)?</think>\s*\Z")
"""An empty thought that the template prints before an answer, or what closes one."""


def find_preserving(
    finder: MaskFinder, conversation: Conversation, others: frozenset[int]
) -> Masked:
    """The same as :meth:`MaskFinder.find`, with all thinking in place.

    Raises:
        RowError: also where the template has its own form of thinking and strips it.
    """
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
    """A prompt with all thinking of earlier turns in place, as `find_preserving` trained it.

    Args:
        conversation: prepared for the template.
        splits: the template has a form of its own for thinking, and nothing can be put back.
        render: a conversation as the template prints it.
    """
    text = render(conversation)
    whole = _thoughtful(conversation)
    thoughts = (_thought(conversation.messages[turn]) for turn in whole)
    if splits or all(thought in text for thought in thoughts):
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


def _thought(message: Message) -> str:
    return (message.reasoning or message.content.partition(THINK_CLOSE)[0]).strip()


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
