"""The tokenizer's own chat template: how it expects its messages, and what it renders.

Everything about a template is found by rendering small probes, never from its name.
"""

import contextlib
import json
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from difflib import get_close_matches
from types import FrameType
from typing import Any, Generic, TypeVar

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from trainkit.data.images import IMAGE
from trainkit.data.messages import Conversation, Message, RowError
from trainkit.data.options import DataOptions
from trainkit.errors import DataError, ModelError

ESCAPE = "\u200b"
"""A zero-width space behind the first character of a control token makes it plain text."""


def alternatives(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of ``words``, longest first; one that never matches when there are none."""
    ordered = sorted((word for word in words if word.strip()), key=lambda word: (-len(word), word))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


class Escaper:
    """Breaks up control tokens inside text."""

    def __init__(self, tokens: set[str]) -> None:
        self._pattern = alternatives(tokens)
        self._starts = tuple({token[:2] for token in tokens if token.strip()})

    def __call__(self, text: str) -> tuple[str, int]:
        """The text with its control tokens broken up, and how many there were."""
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


STRFTIME = re.compile(r"strftime_now\(\s*([\"'])(.*?)\1\s*\)")


FROZEN_DATE = date(2024, 7, 26)
"""What templates that print today's date print instead, so that the same data gives the same tokens
on every day. It is the date Llama 3.1's own template falls back to."""


def freeze_dates(template: str) -> str:
    """Put a fixed date into a template that asks for today's.

    A macro of the same name hides transformers' ``strftime_now``; it knows the formats that the
    template asks for.
    """
    if "strftime_now" not in template:
        return template
    known = {form: FROZEN_DATE.strftime(form) for _, form in STRFTIME.findall(template)}
    answer = f"{{{{ {json.dumps(known)}.get(format, '{FROZEN_DATE}') }}}}"
    # The empty expression keeps Jinja from trimming the template's own first line break.
    return f'{{% macro strftime_now(format) -%}}{answer}{{%- endmacro %}}{{{{ "" }}}}{template}'


MOST_VARIANTS = 16
"""So many sets of row variables are kept at work; rows with more of them only take longer."""

Made = TypeVar("Made")


class ByVariables(Generic[Made]):
    """What is made of a chat template, for the variables of each conversation.

    Args:
        tokenizer: with one template or several. As in transformers, a conversation with tools takes
            the one called ``tool_use``, unless the recipe names a template.
        options: those of all rows; a conversation's own variables win.
        make: something of one template with its variables.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        make: Callable[[DataOptions], Made],
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._make = make
        self._made: dict[str, Made] = {}

    def has_own(self, conversation: Conversation) -> bool:
        """Whether it is not rendered as all others are."""
        return self._options_of(conversation) is not self._options

    def of(self, conversation: Conversation) -> Made:
        options = self._options_of(conversation)
        key = json.dumps([options.template_kwargs, options.chat_template], sort_keys=True)
        if key not in self._made:
            made = self._make(options)
            while len(self._made) >= MOST_VARIANTS:
                self._made.pop(next(iter(self._made)))
            self._made[key] = made
        return self._made[key]

    def _options_of(self, conversation: Conversation) -> DataOptions:
        options, templates = self._options, self._tokenizer.chat_template
        changes: dict[str, Any] = {}
        if conversation.template_kwargs:
            own = {**options.template_kwargs, **conversation.template_kwargs}
            changes["template_kwargs"] = own
        has_tools = conversation.tools is not None and isinstance(templates, dict)
        if has_tools and "tool_use" in templates:
            changes["chat_template"] = options.chat_template or templates["tool_use"]
        return options.replace(**changes) if changes else options


def refuse_unread(tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> None:
    """Stop at a variable of ``data.template_kwargs`` that no template of the tokenizer reads."""
    templates = tokenizer.chat_template
    texts = list(templates.values()) if isinstance(templates, dict) else [templates or ""]
    words = set(re.findall(r"\w+", options.chat_template or " ".join(texts)))
    for name in options.template_kwargs:
        if name not in words:
            like = get_close_matches(name, words, 1, 0.8)
            raise DataError(
                f"the chat template does not read {name!r}, so it would change nothing",
                where="data.template_kwargs",
                fix=f"did you mean {like[0]}?" if like else "remove it",
            )


THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

THINK_BLOCK = re.compile(r"(\s*(?:<think>)?)(.*?)(</think>)(.*)", re.DOTALL)

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""The names under which templates look for reasoning; all are given."""

PRESERVING_SWITCHES = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
}
"""Variables that make templates keep the thinking of earlier turns."""

Rendered = dict[str, Any]


@dataclass(frozen=True)
class Style:
    """How a template expects what is written in several ways elsewhere.

    Attributes:
        parts: content as ``[{"type": "text", "text": ...}]`` instead of a string.
        string_arguments: the arguments of a tool call as JSON text instead of an object.
        empty_content: the content of a turn that has only tool calls: ``""``, None, or absent
            (``"absent"``).
        reasoning_field: whether reasoning is read from its own field; else it is written into the
            content between ``<think>`` tags.
        splits_thinking: whether ``<think>`` tags inside the content have to be taken out and given
            as the reasoning field, because the template would print them as mere text.
        developer: whether the role ``developer`` is known; else it becomes ``system``.
    """

    parts: bool = False
    string_arguments: bool = False
    empty_content: str | None = ""
    reasoning_field: bool = False
    splits_thinking: bool = False
    developer: bool = False


class ChatTemplate:
    """A tokenizer's chat template with frozen date and known habits.

    Args:
        tokenizer: with a chat template and a fast (Rust) backend.
        options: ``chat_template``, ``template_kwargs``, ``escape_special`` and
            ``stop_token_ids`` are read.
        words: control tokens that no text may hold, whoever has written it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        words: frozenset[str] = frozenset(),
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.text = options.chat_template or own_template(tokenizer)
        self.kwargs: dict[str, Any] = dict(options.template_kwargs)
        if options.thinking == "preserve":
            switches = {k: v for k, v in PRESERVING_SWITCHES.items() if k in self.text}
            self.kwargs = {**switches, **self.kwargs}
        self._frozen = freeze_dates(self.text)
        self.added: dict[str, int] = {
            token.content: index for index, token in tokenizer.added_tokens_decoder.items()
        }
        self.special = {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        } | set(tokenizer.all_special_tokens)
        bos = tokenizer.bos_token
        self.bos = None if bos is None else str(bos)
        self.stop_ids = set(options.stop_token_ids)
        if tokenizer.eos_token_id is not None:
            self.stop_ids.add(int(tokenizer.eos_token_id))
        self.added_pattern = alternatives(self.added)
        self.style = self._find_style()
        self.notes = self._find_notes()
        named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
        structural = {t for t in self.special if t in self._probe_text}
        structural |= {str(token) for token in named if token is not None}
        self._escapes = {
            True: Escaper((structural - {THINK_OPEN, THINK_CLOSE}) | words),
            False: Escaper(self.special | words),
        }

    # -- rendering ---------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Rendered],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation: bool = False,
    ) -> str:
        try:
            with patience():
                text = self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=None if tools is None else list(tools),
                    chat_template=self._frozen,
                    add_generation_prompt=generation,
                    tokenize=False,
                    **self.kwargs,
                )
        except RENDER_ERRORS as error:
            kind = type(error).__name__
            raise RowError(
                "template_refuses", f"the chat template raises {kind}: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    # -- messages in the template's style ---------------------------------------------------------

    def prepare(self, conversation: Conversation) -> tuple[Conversation, int]:
        """Apply the system policy and break up control tokens inside message text.

        Returns:
            the conversation, and how many control tokens were broken up.
        """
        messages = conversation.messages
        policy = self.options.system_policy
        if policy != "keep":
            messages = tuple(m for m in messages if m.role not in ("system", "developer"))
            if policy != "none":
                messages = (Message("system", policy), *messages)
        if not self.style.developer and any(m.role == "developer" for m in messages):
            messages = tuple(
                replace(m, role="system") if m.role == "developer" else m for m in messages
            )
        if self.style.splits_thinking:
            split = tuple(split_thinking(message) for message in messages)
            messages = messages if split == messages else split
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
        style = self.style
        content = message.content
        rendered: Rendered = {"role": message.role}
        if message.reasoning is not None:
            if style.reasoning_field:
                for key in REASONING_KEYS:
                    rendered[key] = message.reasoning
            else:
                content = join_reasoning(message.reasoning, content)
        if message.tool_calls:
            rendered["tool_calls"] = [
                self._call(call, place) for place, call in enumerate(message.tool_calls)
            ]
        if message.images:
            rendered["content"] = _with_images(content)
        elif content or not message.tool_calls:
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
        refusal = "it prints neither their text nor their text parts"
        for parts in (False, True):
            style = replace(self.style, parts=parts)
            chat = _in_parts([user, {"role": "assistant", "content": "probe-answer"}], parts)
            try:
                text = self.render(chat)
            except RowError as error:
                refusal = error.detail
                continue
            if "probe-answer" in text and "probe-question" in text:
                break
        else:
            raise ModelError(
                f"the chat template does not render a plain question and answer: {refusal}",
                where=str(self.tokenizer.name_or_path) or "chat_template",
                fix="give a working one with data.chat_template",
            )
        in_field = {"role": "assistant", "content": "probe-answer"}
        for key in REASONING_KEYS:
            in_field[key] = "probe-thought"
        in_text = {"role": "assistant", "content": join_reasoning("probe-thought", "probe-answer")}
        by_field = self._try(_in_parts([user, in_field], style.parts)) or ""
        by_text = self._try(_in_parts([user, in_text], style.parts)) or ""
        if "probe-thought" in by_field:
            same = "".join(by_field.split()) == "".join(by_text.split())
            style = replace(style, reasoning_field=True, splits_thinking=not same)
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
            notes.append(f"the template prints a date; it is frozen at {FROZEN_DATE}")
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
    template, what = tokenizer.chat_template, "no chat template"
    if isinstance(template, dict):
        what = f"no default chat template, only {', '.join(sorted(template))}"
        template = template.get("default")
    if not template:
        raise ModelError(
            f"the tokenizer has {what}, so conversations cannot be rendered",
            where=str(tokenizer.name_or_path),
            fix="use an instruction-tuned model's tokenizer, give data.chat_template, or train "
            'on {"text": ...} rows with mask: none',
        )
    assert isinstance(template, str)
    return template


def join_reasoning(reasoning: str, content: str) -> str:
    """Write reasoning into the content, as the models that think in plain text do."""
    return f"{THINK_OPEN}\n{reasoning.strip()}\n{THINK_CLOSE}\n\n{without_blank_lines(content)}"


def without_blank_lines(text: str) -> str:
    """A text without the empty lines it begins with; the first line keeps its indentation."""
    return text[max(text.rfind("\n", 0, len(text) - len(text.lstrip())) + 1, 0) :]


def split_thinking(message: Message) -> Message:
    """Move the thinking of an assistant turn out of its content, into its own field."""
    if message.role != "assistant" or message.reasoning or THINK_CLOSE not in message.content:
        return message
    block = THINK_BLOCK.fullmatch(message.content)
    if block is None or not block[2].strip():
        return message
    return replace(message, reasoning=block[2].strip(), content=without_blank_lines(block[4]))


def _with_images(content: str) -> list[dict[str, str]]:
    first, *others = content.split(IMAGE)
    parts = [{"type": "text", "text": first}]
    for text in others:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]


def _in_parts(messages: Sequence[Rendered], parts: bool) -> list[Rendered]:
    if not parts:
        return [dict(message) for message in messages]
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    RecursionError,
    ArithmeticError,
    MemoryError,
)
"""What a template raises on a row it does not take: its own error, or an untested case."""

SECONDS = 10.0
"""Longer than any conversation takes to render: a thousand turns take about 0.1 s."""


MEMORY = 2**28
"""Bytes that a row may take besides: a megabyte of conversation takes a few."""


@contextlib.contextmanager
def patience(
    seconds: float | None = None,
    *,
    what: str = "the chat template",
    where: str = "the tokenizer's chat_template, or data.chat_template",
    fix: str = "give one that ends with data.chat_template",
) -> Iterator[None]:
    """Raise a DataError in the body when it takes too long, a MemoryError when it takes too much.

    Only in a process's main thread, where signals arrive; elsewhere the body runs as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    limit = SECONDS if seconds is None else seconds

    def stop(number: int, frame: FrameType | None) -> None:
        raise DataError(
            f"{what} was still rendering one row after {limit:g} s", where=where, fix=fix
        )

    before = signal.signal(signal.SIGALRM, stop)
    # And again after: Jinja takes any error of a constant for one that it should not fold.
    signal.setitimer(signal.ITIMER_REAL, limit, min(limit, 1.0))
    try:
        with _little_memory():
            yield
    except MemoryError:
        raise MemoryError(f"one row takes more than {MEMORY >> 20} MiB") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_may_limit_memory = True


def leave_memory_alone() -> None:
    """From now on a row is held to its seconds alone.

    The limit is the process's: threads that save or pin would fail while a row is rendered.
    """
    global _may_limit_memory
    _may_limit_memory = False


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Within, a step that would fill the machine fails at once; where the system says its size."""
    if not _may_limit_memory:
        yield
        return
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - of every row
            taken = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    at_most = [size for size in before if size != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([taken + MEMORY, *at_most]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
