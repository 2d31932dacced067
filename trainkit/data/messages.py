"""Conversations as trainkit holds them, and the rules a row must keep to become one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.options.data import ROLES

MAX_MESSAGES = 5000
"""More turns than this are a damaged row; the marks of the mask finder also end near there."""

MAX_DEPTH = 100
"""Deepest nesting in tool calls and schemas; templates recurse while printing them."""


class RowError(Exception):
    """One row cannot be used. It goes to the ledger; the run goes on."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        content: its text, with `trainkit.data.images.IMAGE` where an image is; may be empty where
            there are tool calls or thinking.
        tool_calls: ``{"name": str, "arguments": dict | str, "id": str | None}`` each.
        train: this turn's own switch, or None to follow the options.
        is_prompt: the row gives it as part of a prompt, which no mask but its own switch trains.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    train: bool | None = None
    is_prompt: bool = False
    images: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Conversation:
    """The messages of one row.

    Attributes:
        tools: JSON schemas of the tools on offer, or None.
        repairs: what was repaired on the way in, as short codes for the ledger.
        template_kwargs: the row's own variables for the chat template.
        cut: turns behind the last one that could be trained, which were taken off.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    repairs: tuple[str, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    cut: tuple[Message, ...] = ()

    def first(self, count: int) -> "Conversation":
        return replace(self, messages=self.messages[:count])


@dataclass(frozen=True)
class TextRow:
    """Plain text: with a prompt, only ``text`` is trained; without one, all of it.

    Attributes:
        apart: prompt and text are tokenised each by itself, as the prompt is when it is answered.
    """

    text: str
    prompt: str = ""
    apart: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenRow:
    """A row that was tokenised elsewhere.

    Attributes:
        is_masked: whether the row says which ids are trained; without it all of them are.
    """

    input_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    is_masked: bool = True
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Conversations or texts that are held against each other; each becomes a sample of the row.

    Either all of them are kept or none.

    Attributes:
        conversations: in the order of the format, such as the chosen one before the rejected one.
        first: the number of the first of them, a sample's ``part``; 1 is that of a rejected one.
    """

    conversations: tuple[Conversation | TextRow, ...]
    first: int = 0
    ignored: tuple[str, ...] = ()


Row = Conversation | TextRow | TokenRow
"""What one sample, or one question, is made of."""

ParsedRow = Row | Comparison
"""What a format makes of a row of a file."""


def check_text(value: str, place: str) -> str:
    """Return ``value``, or raise if a tokenizer could not take it."""
    if "\x00" in value:
        raise RowError("nul_character", f"{place} holds a NUL character")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RowError(
                "lone_surrogate", f"{place} holds half of a surrogate pair at {error.start}"
            ) from error
    return value


def check_depth(value: Any, place: str) -> None:
    """Raise if ``value`` nests deeper than ``MAX_DEPTH`` or holds unusable text."""
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                deeper.extend(item.values())
                deeper.extend(item)
            elif isinstance(item, (list, tuple)):
                deeper.extend(item)
            elif isinstance(item, str):
                check_text(item, place)
        if not deeper:
            return
        level = deeper
    raise RowError("nested_too_deep", f"{place} nests deeper than {MAX_DEPTH} levels")


def switched(conversation: Conversation, *, mask: str, roles: Collection[str]) -> Conversation:
    """A switch on every turn: its own, which wins under every mask, or what the mask says of it."""
    messages = conversation.messages
    last = max((n for n, m in enumerate(messages) if m.role == "assistant"), default=-1)

    def is_trained(turn: int, message: Message) -> bool:
        if message.train is not None or mask == "none":
            return message.train is not False
        is_meant = message.role in roles and (mask == "assistant" or turn == last)
        return is_meant and not message.is_prompt

    turns = (replace(m, train=is_trained(turn, m)) for turn, m in enumerate(messages))
    return replace(conversation, messages=tuple(turns))


def validate(conversation: Conversation, *, needs_assistant: bool) -> Conversation:
    """Check the rules of a conversation and repair what can be repaired without loss.

    Neighbours of the same role ``user`` and the same switch are joined with a blank line, which is
    written to ``repairs``. Turns behind the last one of an assistant, or that is switched on, are
    cut off, as nothing behind them is trained.
    """
    messages = conversation.messages
    if not messages:
        raise RowError("no_messages", "the list of messages is empty")
    if len(messages) > MAX_MESSAGES:
        raise RowError("too_many_messages", f"{len(messages)} messages, at most {MAX_MESSAGES}")
    for number, message in enumerate(messages, 1):
        _check_message(message, number)
    if conversation.tools is not None:
        check_depth(conversation.tools, "'tools'")
    ends = [i for i, m in enumerate(messages) if m.role == "assistant" or m.train]
    if needs_assistant:
        if not ends:
            raise RowError("no_assistant_turn", "there is no assistant turn to train on")
        messages, cut = messages[: ends[-1] + 1], messages[ends[-1] + 1 :]
        conversation = replace(conversation, messages=messages, cut=cut) if cut else conversation
    joined = join_users(messages)
    if len(joined) == len(messages):
        return conversation
    repairs = (*conversation.repairs, "user_turns_joined")
    return replace(conversation, messages=joined, repairs=repairs)


def _check_message(message: Message, number: int) -> None:
    place = f"turn {number} ({message.role})"
    if message.role not in ROLES:
        raise RowError(
            "unknown_role", f"turn {number} has role {message.role!r}; known are {', '.join(ROLES)}"
        )
    check_text(message.content, place)
    for text in (message.reasoning, message.name, message.tool_call_id):
        if text is not None:
            check_text(text, place)
    if message.tool_calls:
        if message.role != "assistant":
            raise RowError("misplaced_tool_calls", f"{place} has tool calls")
        check_depth(message.tool_calls, place)
    elif message.role == "assistant" and not f"{message.content}{message.reasoning or ''}".strip():
        raise RowError("empty_assistant", f"{place} has no text, no thinking and no tool calls")
    elif message.role == "user" and not message.content.strip():
        raise RowError("empty_user", f"{place} is empty")


def join_users(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Neighbouring turns of the user as one, with a blank line between them."""
    joined: list[Message] = []
    for message in messages:
        alike = joined and joined[-1].train == message.train
        if alike and message.role == "user" == joined[-1].role:
            text = f"{joined[-1].content}\n\n{message.content}"
            images = joined[-1].images + message.images
            joined[-1] = replace(joined[-1], content=text, images=images)
        else:
            joined.append(message)
    return tuple(joined)
