"""The row formats in the wild, each a function from a decoded row to a :data:`Row`.

A format is recognised by the keys of its rows, and can be named instead. Every function checks the
types it reads: what does not fit raises :class:`RowError`, never anything else.
"""

import codecs
import contextlib
import functools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainkit.data import fields, image_rows
from trainkit.data.fields import (
    MEDIA,
    parse_distilled,
    parse_tokens,
    parts_switch,
    read_switch,
    short_name,
    template_kwargs,
    unused,
    with_system,
)
from trainkit.data.files import RawRow, decode
from trainkit.data.messages import (
    Comparison,
    Conversation,
    Message,
    ParsedRow,
    Row,
    RowError,
    TextRow,
    check_text,
)
from trainkit.data.placeholders import placeholder_in
from trainkit.data.template import RENDER_ERRORS, patience

# -- a turn, with its tool calls, in OpenAI's words or in ShareGPT's ------------------------------


def parse_tool_calls(calls: Any, number: int) -> tuple[dict[str, Any], ...]:
    """Tool calls as ``{name, arguments, id}``, from OpenAI's and plainer ways to write them."""
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, (list, tuple)):
        raise RowError(
            "wrong_type", f"turn {number}: 'tool_calls' is {fields.kind(calls)}, not a list"
        )
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowError("bad_tool_call", f"turn {number} has a tool call without a name")
        arguments = function.get("arguments", function.get("parameters"))
        if arguments is None:
            arguments = {}
        if isinstance(arguments, str):
            arguments = fields.decoded(arguments, f"turn {number}") if arguments.strip() else {}
        if not isinstance(arguments, Mapping):
            raise RowError(
                "bad_tool_call",
                f"turn {number}: arguments of {function['name'][:40]!r} are "
                f"{fields.kind(arguments)}, "
                "not an object",
            )
        identity = call.get("id")
        found.append(
            {
                "name": function["name"],
                "arguments": dict(arguments),
                "id": identity if isinstance(identity, str) else None,
            }
        )
    return tuple(found)


def parse_tools(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    """The row's ``tools``, or OpenAI's older ``functions``: a list, or JSON text of one."""
    value, functions = row.get("tools"), row.get("functions")
    if functions:
        if value:
            raise RowError("bad_tools", "the row has both 'tools' and 'functions'")
        if isinstance(functions, str):
            functions = fields.decoded(functions, "'functions'")
        if not isinstance(functions, list):
            raise RowError("bad_tools", f"'functions' is {fields.kind(functions)}, not a list")
        value = [{"type": "function", "function": each} for each in functions]
    if value is None or value == "" or value == []:
        return None
    if isinstance(value, str):
        value = fields.decoded(value, "'tools'")
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise RowError("bad_tools", f"'tools' is {fields.kind(value)}, not a list of objects")
    return tuple(dict(tool) for tool in value) or None


ROLE_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("human", "user", "prompter", "input"), "user"),
    **dict.fromkeys(("gpt", "assistant", "ai", "llm", "chatbot", "output"), "assistant"),
    **dict.fromkeys(("chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    **{"system": "system", "developer": "developer"},
    **dict.fromkeys(("tool", "function", "ipython", "observation"), "tool"),
    **dict.fromkeys(("function_response", "tool_response", "tool_result"), "tool"),
}
"""Names that other data sets give to the roles. ``function_call`` is handled where it occurs."""

CALL_ROLES = ("function_call", "tool_call")
"""Turns whose text is the JSON of an assistant's calls."""

TEXT_PARTS = (None, "text", "input_text", "output_text")
"""The types of a part of the content whose text is the turn's own."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def parse_turn(item: Any, number: int) -> Message:
    """Read ``{role, content, ...}`` or ``{from, value, ...}``."""
    if not isinstance(item, Mapping):
        raise RowError("wrong_type", f"turn {number} is {fields.kind(item)}, not an object")
    speaker, text = ("from", "value") if "from" in item else ("role", "content")
    name = item.get(speaker)
    if not isinstance(name, str):
        raise RowError("missing_role", f"turn {number} has no role")
    calls = item.get("tool_calls") or ()
    if item.get("function_call"):
        calls = [item["function_call"]]
    value = item.get(text)
    if name.strip().lower() in CALL_ROLES:
        if isinstance(value, str):
            value = fields.decoded(value, f"turn {number}")
        name, calls, value = "assistant", value, None
    thoughts = {key: item[key] for key in REASONING_KEYS if item.get(key) not in (None, "")}
    for key, thought in thoughts.items():
        if not isinstance(thought, str):
            raise RowError(
                "wrong_type", f"turn {number}: {key!r} is {fields.kind(thought)}, not text"
            )
    if len(set(thoughts.values())) > 1:
        raise RowError(
            "two_reasonings", f"turn {number} has other thoughts in {' and '.join(thoughts)}"
        )
    reasoning = next(iter(thoughts.values()), None)
    role = ROLE_ALIASES.get(name) or ROLE_ALIASES.get(name.strip().lower())
    if role is None:
        raise RowError(
            "unknown_role",
            f"turn {number} has role {name[:40]!r}; write system, developer, user, assistant or "
            "tool there",
        )
    # The turn's own switch, or the one that all parts of its content share.
    train = read_switch(item, f"turn {number}")
    if isinstance(value, list):
        parts = parts_switch(value, number)
        if train is not None and parts is not None and train != parts:
            raise RowError("switches_disagree", f"turn {number} and its parts have other switches")
        train = parts if train is None else train
        content = "".join(_part(part, number) for part in value)
    elif isinstance(value, str):
        content = value
    elif value is None and (calls or reasoning):
        content = ""
    else:
        raise RowError("wrong_type", f"turn {number}: {text!r} is {fields.kind(value)}, not text")
    return Message(
        role=role,
        content=content,
        reasoning=reasoning,
        tool_calls=parse_tool_calls(calls, number) if calls else (),
        name=fields.string_or_none(item, "name", number),
        tool_call_id=fields.string_or_none(item, "tool_call_id", number),
        train=train,
    )


def _part(part: Any, number: int) -> str:
    """The text of one part; LLaMA-Factory has it as ``value``."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else fields.kind(part)
    if isinstance(part, Mapping) and kind in TEXT_PARTS:
        text = part.get("text", part.get("value"))
        if isinstance(text, str):
            return text
    raise RowError("not_text", f"turn {number} has a part that is not a text: {str(kind)[:40]}")


# -- formats --------------------------------------------------------------------------------------


def parse_messages(row: Mapping[str, Any]) -> Conversation:
    """OpenAI chat rows: ``messages`` with parts, tool calls, tools, switches."""
    return _conversation(row, fields.items(row, "messages"))


def parse_sharegpt(row: Mapping[str, Any]) -> Conversation:
    """``conversations: [{from, value}]`` with ``system`` and ``tools`` next to it."""
    key = "conversation" if row.get("conversations") is None else "conversations"
    return _conversation(row, fields.items(row, key))


def _conversation(row: Mapping[str, Any], turns: Sequence[Any]) -> Conversation:
    if turns and all(isinstance(item, Mapping) and {*item} == {*fields.EXCHANGE} for item in turns):
        turns = [{"from": who, "value": item[who]} for item in turns for who in fields.EXCHANGE]
    messages = [parse_turn(item, number) for number, item in enumerate(turns, 1)]
    return Conversation(tuple(with_system(row, messages)), tools=parse_tools(row))


def pair_of(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The columns of a row's question and answer, where there is but one of each.

    None where another column may belong to the question: a row would be trained without it.
    """
    found = [
        [name for name in names if isinstance(row.get(name), str)] for names in (QUESTIONS, ANSWERS)
    ]
    if [len(names) for names in found] != [1, 1] or any(row.get(name) for name in CONTEXTS):
        return None
    return found[0][0], found[1][0]


QUESTIONS = ("instruction", "query", "question", "prompt", "human", "user")
ANSWERS = ("output", "response", "answer", "assistant")
CONTEXTS = ("context", "passage", "document", "choices", "options", "thinking", "reasoning", "cot")
"""What else a question, or an answer, may be made of."""


def parse_alpaca(row: Mapping[str, Any]) -> Conversation:
    """``instruction``, ``input``, ``output``, with ``history`` pairs and ``system``."""
    messages = _opening(row)
    question = fields.text(row, "instruction")
    extra = fields.optional_text(row, "input")
    if extra and extra.strip():
        question = f"{question}\n{extra}" if question.strip() else extra
    messages += [Message("user", question), Message("assistant", fields.text(row, "output"))]
    return Conversation(tuple(messages), tools=parse_tools(row))


BELLE_TURN = re.compile(r"(?:^|\n)[ \t]*(Human|Assistant)[ \t]*[:：][ \t]*")


def parse_belle(row: Mapping[str, Any]) -> Conversation:
    """Belle multi-turn: ``instruction`` is a ``Human:/Assistant:`` script, ``output`` its end."""
    script = fields.text(row, "instruction")
    marks = list(BELLE_TURN.finditer(script))
    if not marks or script[: marks[0].start()].strip():
        raise RowError("not_belle", "'instruction' does not start with 'Human:'")
    messages = _opening(row)
    ends = [mark.start() for mark in marks[1:]] + [len(script)]
    for mark, end in zip(marks, ends, strict=True):
        role = "user" if mark[1] == "Human" else "assistant"
        text = script[mark.end() : end].strip("\n")
        if role == "assistant" and end == len(script) and not text.strip():
            break
        messages.append(Message(role, text))
    if messages and messages[-1].role == "assistant":
        raise RowError(
            "not_belle", "'instruction' ends with an answer, so 'output' answers nothing"
        )
    messages.append(Message("assistant", fields.text(row, "output")))
    return Conversation(tuple(messages), tools=parse_tools(row))


MOSS_MARK = re.compile(r"^\s*<\|[^|]*\|>:\s*|\s*<eo[a-z]+>\s*$")


def parse_moss(row: Mapping[str, Any]) -> Conversation:
    """MOSS: ``chat: {turn_1: {Human, Inner Thoughts, Commands, Tool Responses, MOSS}}``."""
    chat = row.get("chat")
    if not isinstance(chat, Mapping):
        raise RowError("wrong_type", f"'chat' is {fields.kind(chat)}, not an object")
    messages: list[Message] = []
    system = fields.optional_text(row, "meta_instruction")
    if system and system.strip():
        messages.append(Message("system", system.strip()))
    for name in sorted(chat, key=_turn_number):
        turn = chat[name]
        if not isinstance(turn, Mapping):
            raise RowError("wrong_type", f"{name} is {fields.kind(turn)}, not an object")
        said = {key: MOSS_MARK.sub("", fields.optional_text(turn, key) or "") for key in turn}
        thought = said.get("Inner Thoughts", "")
        reasoning = None if thought.strip() in ("", "None") else thought
        command = said.get("Commands", "")
        if command.strip() not in ("", "None"):
            calls = ({"name": "command", "arguments": {"call": command}, "id": None},)
            messages.append(Message("user", said.get("Human", "")))
            messages.append(Message("assistant", "", reasoning=reasoning, tool_calls=calls))
            messages.append(Message("tool", said.get("Tool Responses", ""), name="command"))
            messages.append(Message("assistant", said.get("MOSS", "")))
        else:
            messages.append(Message("user", said.get("Human", "")))
            messages.append(Message("assistant", said.get("MOSS", ""), reasoning=reasoning))
    return Conversation(tuple(messages))


def parse_leetcode(row: Mapping[str, Any]) -> Conversation:
    """Leetcode: the problem is ``code_with_problem`` up to its code; code and words answer it."""
    problem = fields.text(row, "code_with_problem").split("```", 1)[0].strip()
    answer = fields.text(row, "code_only").strip()
    explanation = fields.optional_text(row, "explanation_only")
    if explanation and explanation.strip():
        answer = f"{answer}\n\n{explanation.strip()}"
    return Conversation((Message("user", problem), Message("assistant", answer)))


def parse_prompt_completion(row: Mapping[str, Any]) -> Row:
    """``prompt`` and ``completion``: two texts, or two lists of messages."""
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise RowError("empty_completion", "'completion' is empty")
        _refuse_system(row)
        return TextRow(completion, prompt=prompt)
    prompts = [parse_turn(item, n) for n, item in enumerate(fields.items(row, "prompt"), 1)]
    count = len(prompts) + 1
    answers = [parse_turn(item, n) for n, item in enumerate(fields.items(row, "completion"), count)]
    answers = _without(prompts, answers, is_text=False)
    before = [replace(message, is_prompt=True) for message in with_system(row, prompts)]
    return Conversation((*before, *answers), tools=parse_tools(row))


def _refuse_system(row: Mapping[str, Any]) -> None:
    if str(row.get("system") or "").strip():
        raise RowError("wrong_type", "'system' and a 'prompt' of plain text: write it as turns")


def parse_text(row: Mapping[str, Any]) -> TextRow:
    """``text``: every token is trained."""
    text = fields.text(row, "text")
    if not text.strip():
        raise RowError("empty_text", "'text' is empty")
    return TextRow(text)


# -- two answers to one prompt: what both share is the prompt, and is there once ----------------


def parse_preference(row: Mapping[str, Any]) -> Comparison:
    """A better and a worse answer.

    - TRL: ``prompt``, ``chosen``, ``rejected``: three texts, or lists of messages; without a prompt
      it is what the two conversations have in common.
    - UltraFeedback: ``prompt`` is a text with which both conversations begin.
    - LLaMA-Factory: ``conversations`` or ``instruction`` and ``input``, and the two answers.
    - axolotl: ``messages``, and the two answers.
    - OpenAI: ``input``, ``preferred_output``, ``non_preferred_output``.
    - ms-swift: ``messages``, and ``rejected_response`` for its last turn or ``rejected_messages``.
    """
    if row.get("preferred_output") is not None:
        given = row.get("input")
        if not isinstance(given, Mapping):
            raise RowError("wrong_type", f"'input' is {fields.kind(given)}, not an object")
        row = {
            **given,
            "chosen": row["preferred_output"],
            "rejected": row.get("non_preferred_output"),
        }
    others = [key for key in ("rejected_response", "rejected_messages") if row.get(key) is not None]
    if others:
        given = {key: value for key, value in row.items() if key not in ("messages", *others)}
        if len(others) > 1 or "chosen" in given:
            raise RowError("wrong_type", f"{' and '.join(others)}: give one, and no 'chosen'")
        meant, other = fields.items(row, "messages"), row[others[0]]
        if others == ["rejected_response"]:
            other = [*meant[:-1], {"role": "assistant", "content": other}]
        row = {**given, "chosen": meant, "rejected": other}
    prompt, sides = row.get("prompt"), [row.get(key) for key in ("chosen", "rejected")]
    if sides[0] == sides[1] and sides[0] is not None:
        raise RowError("same_answers", "'chosen' and 'rejected' are the same")
    if isinstance(prompt, str) and all(isinstance(side, str) for side in sides):
        if not all(sides) or not prompt:
            raise RowError("empty_completion", "'prompt', 'chosen' or 'rejected' is empty")
        _refuse_system(row)
        better, worse = (TextRow(str(side), prompt=prompt) for side in sides)
        return Comparison((better, worse))
    question = _question(row)
    answers = [_turns(row, key) for key in ("chosen", "rejected")]
    if question is None:
        shared = 0
        while shared < min(map(len, answers)) and answers[0][shared] == answers[1][shared]:
            shared += 1
        question, answers = answers[0][:shared], [turns[shared:] for turns in answers]
        if any(turns and turns[0].role != "assistant" for turns in answers):
            what = "'chosen' and 'rejected' have other turns before their first answers that differ"
            raise RowError("prompt_differs", what)
    else:
        answers = [_without(question, turns, isinstance(prompt, str)) for turns in answers]
    if answers[0] == answers[1]:
        raise RowError("same_answers", "'chosen' and 'rejected' are the same")
    before, tools = with_system(row, question), parse_tools(row)
    return Comparison(
        tuple(
            _answering(Conversation((*before, *turns), tools=tools), len(before))
            for turns in answers
        )
    )


def _question(row: Mapping[str, Any]) -> list[Message] | None:
    for key in ("prompt", "conversations", "messages"):
        value = row.get(key)
        if isinstance(value, str) and not value.lstrip().startswith("["):
            return [Message("user", value)]
        if value is not None:
            return [parse_turn(item, n) for n, item in enumerate(fields.items(row, key), 1)]
    if row.get("instruction") is None:
        return None
    texts = [fields.text(row, "instruction"), fields.optional_text(row, "input") or ""]
    return [Message("user", "\n".join(text for text in texts if text.strip()))]


def _turns(row: Mapping[str, Any], key: str) -> list[Message]:
    value = row.get(key)
    if isinstance(value, Mapping):
        return [parse_turn(value, 1)]
    if isinstance(value, str) and not value.lstrip().startswith("["):
        if _question(row) is None:
            raise RowError("no_prompt", f"{key!r} is a text, and the row has no prompt")
        return [Message("assistant", value)]
    if not isinstance(value, str | list):
        what = f"{key!r} is {fields.kind(value)}; an answer is a text, a turn or a list of turns"
        raise RowError("wrong_type", what)
    return [parse_turn(item, n) for n, item in enumerate(fields.items(row, key), 1)]


def _without(prompt: list[Message], turns: list[Message], is_text: bool) -> list[Message]:
    same = [(turn.role, turn.content.strip()) for turn in prompt]
    first = [(turn.role, turn.content.strip()) for turn in turns]
    start = next((n for n, turn in enumerate(first) if turn[0] != "system"), 0) if is_text else 0
    if first[start : start + len(same)] == same:
        return turns[start + len(same) :]
    if turns and turns[0].role != "assistant" and prompt and prompt[-1].role in ("user", "tool"):
        raise RowError(
            "prompt_differs",
            "an answer begins with a turn of "
            f"the {turns[0].role} that is not the row's prompt; give the answers alone, or whole "
            "conversations without a prompt",
        )
    return turns


def _answering(conversation: Conversation, start: int) -> Conversation:
    """Of the turns from ``start`` on those of an assistant are compared, and no others trained."""
    turns = [
        turn if number >= start and turn.role == "assistant" else replace(turn, train=False)
        for number, turn in enumerate(conversation.messages)
    ]
    is_idle = any(
        old.train and not new.train for old, new in zip(conversation.messages, turns, strict=True)
    )
    idle = ("a switch that trains a turn which is not compared",) if is_idle else ()
    return replace(conversation, messages=tuple(turns), ignored=idle)


def parse_rated(row: Mapping[str, Any]) -> Comparison:
    """An answer that is good or bad: TRL's ``label``, LLaMA-Factory's ``kto_tag``.

    The rest is a row of prompt_completion, messages, sharegpt or alpaca. Of whole conversations the
    last answer is the one that is meant.
    """
    marks = [fields.spelt(row[key]) for key in fields.RATINGS if row.get(key) is not None]
    if len(marks) != 1 or marks[0] not in (True, False):
        raise RowError("no_label", "give 'label' or 'kto_tag', true or false")
    rest = {key: value for key, value in row.items() if key not in fields.RATINGS}
    name = detect(rest)
    if name not in ("prompt_completion", "messages", "sharegpt", "alpaca"):
        raise RowError("no_answer", "the row has no prompt with an answer, and no messages")
    parsed = FORMATS[name](rest)
    assert isinstance(parsed, Conversation | TextRow)
    if isinstance(parsed, Conversation):
        turns = enumerate(parsed.messages)
        if name == "prompt_completion":
            start = sum(turn.is_prompt for turn in parsed.messages)
        else:
            start = max((n for n, turn in turns if turn.role == "assistant"), default=0)
        parsed = _answering(parsed, start)
    return Comparison((parsed,), first=0 if marks[0] else 1)


class _Absent(jinja2.StrictUndefined):
    """A column that a row does not have: a template may ask for it, and not print it."""

    def __bool__(self) -> bool:  # type: ignore[override]
        return False


@functools.lru_cache(maxsize=64)
def _compiled(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(undefined=_Absent, keep_trailing_newline=True)
    return environment.from_string(text)


def parse_template(row: Mapping[str, Any]) -> TextRow:
    """What the templates of `columns` made of a row; without a prompt every token is trained."""
    prompt, completion = fields.optional_text(row, "prompt"), fields.text(row, "completion")
    if not completion.strip():
        raise RowError("empty_completion", "the template makes an empty completion")
    return TextRow(completion, prompt=prompt or "", apart=bool(prompt))


def is_template(text: str) -> bool:
    """Whether a value of `columns` makes a text of a row, and is no name of a column."""
    return re.search(r"\{[{%#]", text) is not None


def _made(row: Mapping[str, Any], columns: Mapping[str, str], *, is_text: bool) -> dict[str, Any]:
    """A row of what `columns` names or makes, and of nothing else.

    To a template a column without a value is not there. Turns and tools are made as JSON. A row for
    which ``where`` is false or empty is left out.
    """
    given = {str(key): value for key, value in row.items() if value is not None}
    made = {ours: row.get(text) for ours, text in columns.items()}
    try:
        with patience(
            what="a template of `columns`", where="data: columns", fix="give one that ends there"
        ):
            for ours, text in columns.items():
                if is_text or is_template(text):
                    rendered = _compiled(text).render(given)
                    made[ours] = rendered if is_text else _objects(rendered)
    except RENDER_ERRORS as error:
        raise RowError("template", f"the template of `columns` fails: {error}") from error
    if str(made.pop("where", "yes")).strip() in ("", "False", "None"):
        raise RowError("not_wanted", "`where` of `columns` does not hold for it")
    return made


def _objects(value: str) -> Any:
    """A list of objects that is written as JSON; anything else as it is."""
    if value.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(value)
            if found and all(isinstance(each, dict) for each in found):
                return found
    return value


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], ParsedRow]] = {
    "messages": parse_messages,
    "sharegpt": parse_sharegpt,
    "belle": parse_belle,
    "alpaca": parse_alpaca,
    "moss": parse_moss,
    "leetcode": parse_leetcode,
    "prompt_completion": parse_prompt_completion,
    "text": parse_text,
    "tokens": parse_tokens,
    "template": parse_template,
    "preference": parse_preference,
    "rated": parse_rated,
    "distilled": parse_distilled,
}


def detect(row: Mapping[str, Any]) -> str | None:
    """The name of the format that ``row``'s keys speak for, or None; one that is null is absent."""
    keys = {key for key, value in row.items() if value is not None}
    if "messages" in keys:
        return "messages"
    if "conversations" in keys or "conversation" in keys:
        return "sharegpt"
    if "input_ids" in keys:
        return "tokens"
    if "prompt" in keys and "completion" in keys:
        return "prompt_completion"
    if "instruction" in keys and "output" in keys:
        script = row["instruction"]
        if isinstance(script, str) and re.match(r"\s*Human[ \t]*[:：]", script):
            return "belle"
        return "alpaca"
    if isinstance(row.get("chat"), Mapping):
        return "moss"
    if "code_with_problem" in keys:
        return "leetcode"
    return "text" if "text" in keys else "alpaca" if pair_of(row) else None


UNREAD = "(unread)"
_ANSWER_COLUMNS: Mapping[str, str] = {
    "alpaca": "output",
    "belle": "output",
    "leetcode": "code_only",
    "prompt_completion": "completion",
}
"""Where a format keeps its answer, for those formats that cannot be read without one."""


def _answered(row: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], str]:
    """A row that may lack its answer, with ``UNREAD`` as one, and its format."""
    if name == "auto":
        name = (
            detect(row)
            or detect({**row, **dict.fromkeys(_ANSWER_COLUMNS.values(), UNREAD)})
            or name
        )
    answer = _ANSWER_COLUMNS.get(name)
    if answer is None or row.get(answer) or (name == "alpaca" and pair_of(row)):
        return row, name
    is_text = name != "prompt_completion" or isinstance(row.get("prompt"), str)
    return {**row, answer: UNREAD if is_text else [{"role": "assistant", "content": UNREAD}]}, name


def parse_row(
    row: Any,
    name: str,
    columns: Mapping[str, str] | None = None,
    *,
    asks: bool = False,
    images: bool = False,
) -> ParsedRow:
    """Parse one decoded row."""
    if isinstance(row, list) and name in ("auto", "messages", "sharegpt"):
        _refuse_array(row)
        row, name = {"messages": row}, "messages"
    if not isinstance(row, Mapping):
        raise RowError("not_an_object", f"the row is {fields.kind(row)}, not an object")
    if columns and (name == "template" or any(map(is_template, columns.values()))):
        row = _made(row, columns, is_text=name == "template")
    elif columns:
        renamed = {theirs: ours for ours, theirs in columns.items()}
        row = {renamed.get(key, key): value for key, value in row.items()}
    if asks:
        row, name = _answered(row, name)
    if name == "auto":
        name = detect(row) or _unknown(row)
    pair = pair_of(row) if name == "alpaca" else None
    if pair is not None:
        ours = dict(zip(pair, ("instruction", "output"), strict=True))
        row = {ours.get(key, key): value for key, value in row.items()}
    row, found = image_rows.pull(row) if images else (row, None)
    ignored = unused(row, name)
    parsed, kwargs = FORMATS[name](row), template_kwargs(row, name)
    if isinstance(parsed, Comparison):
        ignored += tuple({field for each in parsed.conversations for field in each.ignored})
    parsed = parsed if found is None else image_rows.attach(parsed, found)
    if kwargs and isinstance(parsed, Conversation):
        parsed = replace(parsed, template_kwargs=kwargs)
    elif kwargs and isinstance(parsed, Comparison):
        each = (
            replace(one, template_kwargs=kwargs) if isinstance(one, Conversation) else one
            for one in parsed.conversations
        )
        parsed = replace(parsed, conversations=tuple(each))
    return replace(parsed, ignored=ignored) if ignored else parsed


def _refuse_array(row: Sequence[Any]) -> None:
    """Several rows in one: a whole JSON array on a line of a file of lines."""
    whole = [item for item in row if isinstance(item, list) or _is_row(item)]
    if whole:
        raise RowError(
            "array_of_rows",
            f"this one row is a JSON array of {len(row)} rows; name the file .json, or write one "
            "row a line (jq -c '.[]')",
        )


def _is_row(item: Any) -> bool:
    return isinstance(item, Mapping) and detect(item) is not None


def _unknown(row: Mapping[str, Any]) -> str:
    if "chosen" in row and "rejected" in row:
        raise RowError(
            "unknown_format",
            "the row compares two answers; objective: dpo trains on them; to train on the better "
            "one alone, keep it as messages",
        )
    keys = ", ".join(sorted(map(short_name, row))[:8]) or "none"
    nested = next((k for k, v in row.items() if isinstance(v, list) and any(map(_is_row, v))), None)
    hint = ""
    if nested is not None:
        hint = f"; its {short_name(nested)!r} is a list of rows: make that list the file"
    raise RowError("unknown_format", f"no known format has these keys: {keys}{hint}")


_ASKS = re.compile(r"quest|frage|query|prompt|instr|input|user|human|ask|problem|(?:^|_)q$", re.I)
_NO_TEXTS = re.compile(r"(^|_)(id|idx|index|uuid|url|date|time|hash)$", re.I)
_ANSWERS = re.compile(r"answ|antwort|respon|reply|output|complet|assist|solution|(?:^|_)a$", re.I)


def guess_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Columns to propose for a row of no known format; empty where no name speaks for one."""
    texts = [str(key) for key, value in row.items() if isinstance(value, str) and value]
    texts = [key for key in texts if not _NO_TEXTS.search(key)]
    if len(texts) == 1:
        return {"text": texts[0]}
    asks = next((key for key in texts if _ASKS.search(key)), None)
    answer = next((key for key in texts if key != asks and _ANSWERS.search(key)), None)
    rest = [key for key in texts if key not in (asks, answer)]
    other = max(rest, key=lambda key: len(row[key]), default=None)  # an id is short
    if not (asks or answer) or not (asks or other) or not (answer or other):
        return {}
    return {"instruction": str(asks or other), "output": str(answer or other)}


def _opening(row: Mapping[str, Any]) -> list[Message]:
    messages = with_system(row, [])
    history = row.get("history")
    if history is None or history == "":
        return messages
    for pair in fields.items(row, "history"):
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise RowError("bad_history", "'history' holds something that is not a pair of texts")
        messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    return messages


def _turn_number(name: Any) -> int:
    digits = re.sub(r"\D", "", str(name))
    return int(digits[:9]) if digits else 0


def decode_row(raw: RawRow) -> Any:
    if raw.payload is None:
        raise RowError(*(raw.problem or ("unreadable", "the row cannot be read")))
    try:
        return decode(raw.payload)
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} of the row is not UTF-8"
        begins = raw.payload[:2] if isinstance(raw.payload, bytes) else b""
        if begins in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            detail += "; it begins as UTF-16 or UTF-32 do: iconv -f UTF-16 -t UTF-8 converts it"
        raise RowError("not_utf8", detail) from error
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # as some of Python's sentences end
        place = f"{what} at column {error.colno}"
        if error.lineno > 1:
            place += f", {error.lineno - 1} lines further"
        if isinstance(raw.payload, bytes) and b"\0" in raw.payload:
            place += (
                "; it holds NUL bytes, as UTF-16 does (iconv -f UTF-16LE -t UTF-8 converts it), "
            )
            place += "or a file whose writer crashed"
        elif isinstance(raw.payload, bytes) and raw.payload.strip() in (b"{", b"["):
            place += (
                "; a row is one line, and this one is spread over lines (jq -c . puts it on one)"
            )
        elif isinstance(raw.payload, bytes) and b"\r{" in raw.payload:
            place += "; its lines end in CR alone (tr '\\r' '\\n' converts it)"
        raise RowError("bad_json", place) from error
    except ValueError as error:
        raise RowError("bad_json", str(error)) from error
    except RecursionError as error:
        raise RowError("nested_too_deep", "the JSON nests too deep to be read") from error


def read_row(
    row: Any,
    name: str,
    columns: Mapping[str, str] | None = None,
    *,
    asks: bool = False,
    images: bool = False,
    known: Collection[str] = (),
) -> ParsedRow:
    """Parse a decoded row and check its plain text; conversations are checked by ``validate``.

    What reads its images judges the placeholders that are ``known``.
    """
    parsed = parse_row(row, name, columns, asks=asks, images=images)
    for text_row in parsed.conversations if isinstance(parsed, Comparison) else (parsed,):
        if isinstance(text_row, TextRow):
            check_text(text_row.prompt, "'prompt'")
            check_text(text_row.text, "the text")
    said_so = isinstance(row, Mapping) and any(row.get(key) == [] for key in MEDIA)
    for place, text in () if said_so else _texts(parsed):
        if found := placeholder_in(text, known):
            raise RowError(
                "media_placeholder",
                f"{place} has {found}, which stands for what is not text, and would be trained "
                "letter by letter; where it is meant as text, write it in backticks, or give the "
                'row "images": []',
            )
    return parsed


def _texts(parsed: ParsedRow) -> Iterator[tuple[str, str]]:
    if isinstance(parsed, TextRow):
        yield from (("the prompt", parsed.prompt), ("the text", parsed.text))
    elif isinstance(parsed, Comparison):
        for conversation in parsed.conversations:
            yield from _texts(conversation)
    elif isinstance(parsed, Conversation):
        for number, message in enumerate(parsed.messages, 1):
            yield f"turn {number} ({message.role})", message.content
            yield f"the thinking of turn {number}", message.reasoning or ""
