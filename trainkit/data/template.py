"""The tokenizer's own chat template: how it wants its messages, and what it renders.

Everything about a template is found by rendering small probes, never from its name.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from trainkit.data.messages import Conversation, Message, RowError
from trainkit.data.options import DataOptions
from trainkit.errors import DataError, ModelError

RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    RecursionError,
)
"""What a chat template raises on messages it does not take: its own error, or an untested case."""

ESCAPE = "\u200b"
"""A zero-width space behind the first character of a control token makes it plain text."""

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

Rendered = dict[str, Any]


@dataclass(frozen=True)
class Style:
    """How a template wants what the wild writes in several ways.

    Attributes:
        parts: content as ``[{"type": "text", "text": ...}]`` instead of a string.
        string_arguments: the arguments of a tool call as JSON text instead of an object.
        empty_content: the content of a turn that has only tool calls: ``""``, None, or absent
            (``"absent"``).
        reasoning_field: whether reasoning is read from its own field; else it is written into the
            content between ``<think>`` tags.
        developer: whether the role ``developer`` is known; else it becomes ``system``.
    """

    parts: bool = False
    string_arguments: bool = False
    empty_content: str | None = ""
    reasoning_field: bool = False
    developer: bool = False


class ChatTemplate:
    """A tokenizer's chat template with frozen date and known habits.

    Args:
        tokenizer: with a chat template and a fast (Rust) backend.
        options: ``chat_template``, ``template_kwargs``, ``frozen_date``, ``escape_special`` and
            ``stop_token_ids`` are read.

    Raises:
        ModelError: there is no template, or the tokenizer is not a fast one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.text = options.chat_template or own_template(tokenizer)
        self.kwargs: dict[str, Any] = dict(options.template_kwargs)
        self._date = datetime.strptime(options.frozen_date, "%Y-%m-%d")
        self.added: dict[str, int] = {
            token.content: index for index, token in tokenizer.added_tokens_decoder.items()
        }
        self.special = {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        } | set(tokenizer.all_special_tokens)
        self.stop_ids = set(options.stop_token_ids)
        if tokenizer.eos_token_id is not None:
            self.stop_ids.add(int(tokenizer.eos_token_id))
        self.added_pattern = _alternatives(self.added)
        self.style = self._find_style()
        self.notes = self._find_notes()
        structural = {t for t in self.special if t in self._probe_text} | _named_tokens(tokenizer)
        self._escapes = {
            True: _Escaper(structural - {THINK_OPEN, THINK_CLOSE}),
            False: _Escaper(self.special),
        }

    # -- rendering ---------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Rendered],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation: bool = False,
    ) -> str:
        """Render messages in the template's style to text.

        Raises:
            RowError: the template refuses the messages.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                chat_template=self.text,
                add_generation_prompt=generation,
                tokenize=False,
                strftime_now=self._strftime,
                **self.kwargs,
            )
        except RENDER_ERRORS as error:
            kind = type(error).__name__
            raise RowError(
                "template_refuses", f"the chat template raises {kind}: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    def _strftime(self, form: str) -> str:
        return self._date.strftime(form)

    # -- messages in the template's style ---------------------------------------------------------

    def prepare(self, conversation: Conversation) -> tuple[Conversation, int]:
        """Apply the system policy and break up control tokens inside message text.

        Returns:
            the conversation, and how many control tokens were broken up.
        """
        messages = conversation.messages
        policy = self.options.system
        if policy != "keep":
            messages = tuple(m for m in messages if m.role not in ("system", "developer"))
            if policy != "none":
                messages = (Message("system", policy), *messages)
        if not self.style.developer and any(m.role == "developer" for m in messages):
            messages = tuple(
                replace(m, role="system") if m.role == "developer" else m for m in messages
            )
        count = 0
        if self.options.escape_special:
            escaped = [self._escape(message) for message in messages]
            count = sum(number for _, number in escaped)
            if count:
                messages = tuple(message for message, _ in escaped)
        if messages is conversation.messages:
            return conversation, 0
        return replace(conversation, messages=messages), count

    def _escape(self, message: Message) -> tuple[Message, int]:
        escape = self._escapes[message.role == "assistant"]
        content, count = escape(message.content)
        if message.reasoning is not None:
            reasoning, number = escape(message.reasoning)
            message, count = replace(message, reasoning=reasoning), count + number
        if message.tool_calls:
            calls, number = escape.deep(message.tool_calls)
            message, count = replace(message, tool_calls=calls), count + number
        if count:
            message = replace(message, content=content)
        return message, count

    def as_dict(self, message: Message) -> Rendered:
        """One message as this template wants it."""
        style = self.style
        content = message.content
        rendered: Rendered = {"role": message.role}
        if message.reasoning is not None:
            if style.reasoning_field:
                for key in ("reasoning_content", "reasoning", "thinking"):
                    rendered[key] = message.reasoning
            else:
                content = join_reasoning(message.reasoning, content)
        if message.tool_calls:
            rendered["tool_calls"] = [
                self._call(call, place) for place, call in enumerate(message.tool_calls)
            ]
        if content or not message.tool_calls:
            rendered["content"] = [{"type": "text", "text": content}] if style.parts else content
        elif style.empty_content != "absent":
            rendered["content"] = style.empty_content
        if message.name is not None:
            rendered["name"] = message.name
        if message.tool_call_id is not None:
            rendered["tool_call_id"] = message.tool_call_id
        return rendered

    def _call(self, call: Mapping[str, Any], place: int) -> Rendered:
        arguments = call["arguments"]
        if self.style.string_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "type": "function",
            "id": call["id"] or f"call{place:05d}",
            "function": {"name": call["name"], "arguments": arguments},
        }

    # -- probes ----------------------------------------------------------------------------------

    def _find_style(self) -> Style:
        user = {"role": "user", "content": "probe-question"}
        self.style = Style(developer="developer" in self.text)
        for parts in (False, True):
            style = replace(self.style, parts=parts)
            chat = _in_parts([user, {"role": "assistant", "content": "probe-answer"}], parts)
            text = self._try(chat)
            if text is not None and "probe-answer" in text and "probe-question" in text:
                break
        else:
            raise ModelError(
                "the chat template renders neither text nor text parts of a plain question and "
                "answer",
                where="chat_template",
                fix="give a working one with data.chat_template",
            )
        thinking = [user, {"role": "assistant", "content": "probe-answer"}]
        for key in ("reasoning_content", "reasoning", "thinking"):
            thinking[1][key] = "probe-thought"
        text = self._try(_in_parts(thinking, style.parts))
        style = replace(style, reasoning_field=text is not None and "probe-thought" in text)
        return self._find_call_style(user, style)

    def _find_call_style(self, user: Rendered, style: Style) -> Style:
        for string_arguments in (False, True):
            for empty in ("", None, "absent"):
                arguments: Any = {"probe-key": "probe-value"}
                if string_arguments:
                    arguments = json.dumps(arguments)
                call = {"name": "probe_name", "arguments": arguments}
                turn: Rendered = {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "id": "call00000", "function": call}],
                }
                if empty != "absent":
                    turn["content"] = empty
                text = self._try(_in_parts([user, turn], style.parts))
                if text and "probe_name" in text and "probe-value" in text and "None" not in text:
                    return replace(style, string_arguments=string_arguments, empty_content=empty)
        return style

    def _find_notes(self) -> tuple[str, ...]:
        """What a person should know about this template: injected text, dates."""
        notes = []
        user = _in_parts([{"role": "user", "content": "probe-question"}], self.style.parts)
        text = self._try(user) or ""
        prefix = text.partition("probe-question")[0]
        self._probe_text = "".join(
            self._try(_in_parts(chat, self.style.parts)) or "" for chat in PROBE_CHATS
        )
        if len(self.added_pattern.sub("", prefix).split()) > 3:
            notes.append(f"the template puts this before the first question: {prefix!r}")
        if "strftime_now" in self.text or "date_string" in self.text:
            notes.append(f"the template prints a date; it is frozen at {self.options.frozen_date}")
        return tuple(notes)

    def _try(self, messages: Sequence[Rendered]) -> str | None:
        try:
            return self.render(messages)
        except RowError:
            return None


PROBE_CHATS: Sequence[Sequence[Rendered]] = (
    (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ),
    (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ),
)


def own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's default chat template.

    Raises:
        ModelError: it has none.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ModelError(
            "the tokenizer has no chat template, so conversations cannot be rendered",
            where=str(tokenizer.name_or_path),
            fix="use an instruction-tuned model's tokenizer, give data.chat_template, or train "
            'on {"text": ...} rows with mask: none',
        )
    assert isinstance(template, str)
    return template


def join_reasoning(reasoning: str, content: str) -> str:
    """Write reasoning into the content, as the models that think in plain text do."""
    return f"{THINK_OPEN}\n{reasoning.strip()}\n{THINK_CLOSE}\n\n{content.lstrip()}"


def _in_parts(messages: Sequence[Rendered], parts: bool) -> list[Rendered]:
    if not parts:
        return [dict(message) for message in messages]
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


def _named_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    return {str(token) for token in named if token is not None}


def _alternatives(words: Mapping[str, int] | set[str]) -> re.Pattern[str]:
    """A pattern for any of ``words``, longest first; one that never matches when there are none."""
    ordered = sorted((word for word in words if word.strip()), key=lambda word: (-len(word), word))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


class _Escaper:
    """Breaks up control tokens inside text."""

    def __init__(self, tokens: set[str]) -> None:
        self._pattern = _alternatives(tokens)
        self._starts = tuple({token[:2] for token in tokens if token.strip()})

    def __call__(self, text: str) -> tuple[str, int]:
        if not any(start in text for start in self._starts):
            return text, 0
        return self._pattern.subn(lambda match: f"{match[0][0]}{ESCAPE}{match[0][1:]}", text)

    def deep(self, value: Any) -> tuple[Any, int]:
        """Escape every string inside lists, tuples and dicts."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            pairs = [(self.deep(key), self.deep(item)) for key, item in value.items()]
            count = sum(key[1] + item[1] for key, item in pairs)
            return {key[0]: item[0] for key, item in pairs}, count
        if isinstance(value, (list, tuple)):
            items = [self.deep(item) for item in value]
            return type(value)(item for item, _ in items), sum(number for _, number in items)
        return value, 0


def require_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without offsets: masks are found in text and mapped by them.

    Raises:
        DataError: the tokenizer has no Rust backend.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} is a slow tokenizer: it cannot say which characters a "
            "token covers, so masks cannot be proved",
            where=str(tokenizer.name_or_path),
            fix="install tokenizers' conversion (pip install sentencepiece protobuf) or use a "
            "model with a tokenizer.json",
        )
