"""The row formats in the wild, each a function from a decoded row to a :data:`Row`.

A format is recognised by the keys of its rows, and can be named instead. Every function checks the
types it reads: what does not fit raises :class:`RowError`, never anything else.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from trainkit.data import fields
from trainkit.data.calls import parse_tool_calls, parse_tools
from trainkit.data.messages import Conversation, Message, Row, RowError, TextRow, TokenRow

ROLE_ALIASES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Names that other data sets give to the roles. ``function_call`` is handled where it occurs."""

CALL_ROLES = ("function_call", "tool_call")


def parse_messages(row: Mapping[str, Any], key: str = "messages") -> Conversation:
    """OpenAI chat rows: ``messages`` with parts, tool calls, tools, weights."""
    return Conversation(
        tuple(_message(item, number) for number, item in enumerate(fields.items(row, key), 1)),
        tools=parse_tools(row.get("tools")),
    )


def parse_sharegpt(row: Mapping[str, Any]) -> Conversation:
    """``conversations: [{from, value}]`` with ``system`` and ``tools`` beside it."""
    messages: list[Message] = []
    system = fields.optional_text(row, "system")
    if system:
        messages.append(Message("system", system))
    for number, item in enumerate(fields.items(row, "conversations"), 1):
        if not isinstance(item, Mapping):
            raise RowError("wrong_type", f"turn {number} is {fields.kind(item)}, not an object")
        if "from" not in item and "role" in item:
            messages.append(_message(item, number))
            continue
        speaker, value = item.get("from"), item.get("value")
        if not isinstance(speaker, str):
            raise RowError("missing_role", f"turn {number} has no 'from'")
        if not isinstance(value, str):
            raise RowError(
                "wrong_type", f"turn {number}: 'value' is {fields.kind(value)}, not text"
            )
        train = _train_switch(item, number)
        if speaker in CALL_ROLES:
            calls = parse_tool_calls(fields.decoded(value, number), number)
            messages.append(Message("assistant", "", tool_calls=calls, train=train))
        else:
            messages.append(Message(_role(speaker, number), value, train=train))
    return Conversation(tuple(messages), tools=parse_tools(row.get("tools")))


def parse_alpaca(row: Mapping[str, Any]) -> Conversation:
    """``instruction``, ``input``, ``output``, with ``history`` pairs and ``system``."""
    messages = _opening(row)
    question = fields.text(row, "instruction")
    extra = fields.optional_text(row, "input")
    if extra and extra.strip():
        question = f"{question}\n{extra}" if question.strip() else extra
    messages += [Message("user", question), Message("assistant", fields.text(row, "output"))]
    return Conversation(tuple(messages))


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
    return Conversation(tuple(messages))


MOSS_MARK = re.compile(r"^\s*<\|[^|]*\|>:\s*|\s*<eo[a-z]+>\s*$")
MOSS_ROLES = (("Human", "user"), ("Tool Responses", "tool"), ("MOSS", "assistant"))


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
        return TextRow(completion, prompt=prompt)
    asked = [_message(item, n) for n, item in enumerate(fields.items(row, "prompt"), 1)]
    count = len(asked) + 1
    told = [_message(item, n) for n, item in enumerate(fields.items(row, "completion"), count)]
    masked = [
        Message(**{**vars(message), "train": False}) if message.role == "assistant" else message
        for message in asked
    ]
    return Conversation((*masked, *told), tools=parse_tools(row.get("tools")))


def parse_text(row: Mapping[str, Any]) -> TextRow:
    """``text``: every token is trained."""
    text = fields.text(row, "text")
    if not text.strip():
        raise RowError("empty_text", "'text' is empty")
    return TextRow(text)


def parse_tokens(row: Mapping[str, Any]) -> TokenRow:
    """``input_ids`` with ``labels`` (-100 is not trained) or ``loss_mask``."""
    ids = fields.integers(row, "input_ids")
    if not ids:
        raise RowError("no_tokens", "'input_ids' is empty")
    if any(not 0 <= token < 2**31 for token in ids):
        raise RowError("token_out_of_range", "'input_ids' holds a number that is no token id")
    trained = (True,) * len(ids)
    if row.get("labels") is not None:
        labels = fields.integers(row, "labels")
        if len(labels) == len(ids):
            for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
                if label not in (-100, token):
                    raise RowError(
                        "labels_differ",
                        f"label {label} at position {place} is neither -100 nor the input id "
                        f"{token}; labels are given unshifted",
                    )
        trained = tuple(label != -100 for label in labels)
    elif row.get("loss_mask") is not None:
        mask = fields.switches(row, "loss_mask")
        odd = next((value for value in mask if value not in (0, 1)), None)
        if odd is not None:
            raise RowError("bad_weight", f"'loss_mask' holds {odd}; it must be 0 or 1")
        trained = tuple(value == 1 for value in mask)
    if len(trained) != len(ids):
        raise RowError("lengths_differ", f"{len(ids)} input_ids, {len(trained)} labels")
    return TokenRow(ids, trained)


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Row]] = {
    "messages": parse_messages,
    "sharegpt": parse_sharegpt,
    "belle": parse_belle,
    "alpaca": parse_alpaca,
    "moss": parse_moss,
    "leetcode": parse_leetcode,
    "prompt_completion": parse_prompt_completion,
    "text": parse_text,
    "tokens": parse_tokens,
}

FORMAT_ALIASES: Mapping[str, str] = {
    "openai": "messages",
    "chatml": "messages",
    "chat_template": "messages",
    "completion": "text",
    "pretrain": "text",
    "pretokenized": "tokens",
    "input_ids": "tokens",
    "prompt-completion": "prompt_completion",
}


def detect(row: Mapping[str, Any]) -> str | None:
    """The name of the format that ``row``'s keys speak for, or None."""
    if "messages" in row:
        return "messages"
    if "conversations" in row or "conversation" in row:
        return "sharegpt"
    if "input_ids" in row:
        return "tokens"
    if "prompt" in row and "completion" in row:
        return "prompt_completion"
    if "instruction" in row and "output" in row:
        script = row["instruction"]
        if isinstance(script, str) and re.match(r"\s*Human[ \t]*[:：]", script):
            return "belle"
        return "alpaca"
    if isinstance(row.get("chat"), Mapping):
        return "moss"
    if "code_with_problem" in row:
        return "leetcode"
    return "text" if "text" in row else None


def parse_row(row: Any, name: str, columns: Mapping[str, str] | None = None) -> Row:
    """Parse one decoded row.

    Args:
        row: what the container held.
        name: a name of ``FORMATS``, or ``auto`` to go by this row's own keys.
        columns: our column name -> the row's column name.

    Raises:
        RowError: the row does not fit.
    """
    if not isinstance(row, Mapping):
        if isinstance(row, list) and name in ("auto", "messages"):
            return parse_messages({"messages": row})
        raise RowError("not_an_object", f"the row is {fields.kind(row)}, not an object")
    if columns:
        renamed = {theirs: ours for ours, theirs in columns.items()}
        row = {renamed.get(key, key): value for key, value in row.items()}
    if name == "auto":
        found = detect(row)
        if found is None:
            if "chosen" in row and "rejected" in row:
                raise RowError(
                    "unknown_format",
                    "the row compares two answers; to train on the better one, keep it as messages",
                )
            keys = ", ".join(sorted(map(str, row))[:8]) or "none"
            raise RowError("unknown_format", f"no known format has these keys: {keys}")
        name = found
    if name == "sharegpt" and "conversations" not in row and "conversation" in row:
        row = {**row, "conversations": row["conversation"]}
    return FORMATS[name](row)


def _message(item: Any, number: int) -> Message:
    if not isinstance(item, Mapping):
        raise RowError("wrong_type", f"turn {number} is {fields.kind(item)}, not an object")
    role = item.get("role")
    if not isinstance(role, str):
        raise RowError("missing_role", f"turn {number} has no role")
    calls = item.get("tool_calls") or ()
    if item.get("function_call"):
        calls = [item["function_call"]]
    content = _content(item.get("content"), number, optional=bool(calls))
    reasoning = None
    for key in ("reasoning_content", "reasoning", "thinking"):
        value = item.get(key)
        if value is None or value == "":
            continue
        if not isinstance(value, str):
            raise RowError(
                "wrong_type", f"turn {number}: {key!r} is {fields.kind(value)}, not text"
            )
        reasoning = value
        break
    return Message(
        role=_role(role, number),
        content=content,
        reasoning=reasoning,
        tool_calls=parse_tool_calls(calls, number) if calls else (),
        name=fields.string_or_none(item, "name", number),
        tool_call_id=fields.string_or_none(item, "tool_call_id", number),
        train=_train_switch(item, number),
    )


def _role(name: str, number: int) -> str:
    role = ROLE_ALIASES.get(name) or ROLE_ALIASES.get(name.strip().lower())
    if role is None:
        raise RowError("unknown_role", f"turn {number} has role {name[:40]!r}")
    return role


def _content(value: Any, number: int, *, optional: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and optional:
        return ""
    if isinstance(value, list):
        texts: list[str] = []
        for part in value:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                kind = part.get("type") if isinstance(part, Mapping) else fields.kind(part)
                raise RowError("not_text", f"turn {number} has a part that is no text: {kind}")
        return "".join(texts)
    raise RowError("wrong_type", f"turn {number}: 'content' is {fields.kind(value)}, not text")


def _train_switch(item: Mapping[str, Any], number: int) -> bool | None:
    for key in ("train", "weight"):
        value = item.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or (isinstance(value, (int, float)) and value in (0, 1)):
            return bool(value)
        raise RowError("bad_weight", f"turn {number}: {key!r} is {value!r}; it must be 0 or 1")
    return None


def _opening(row: Mapping[str, Any]) -> list[Message]:
    messages: list[Message] = []
    system = fields.optional_text(row, "system")
    if system:
        messages.append(Message("system", system))
    history = row.get("history")
    if history is None or history == "":
        return messages
    for pair in fields.items(row, "history"):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RowError("bad_history", "'history' holds something that is no pair of texts")
        question, answer = pair
        if not isinstance(question, str) or not isinstance(answer, str):
            raise RowError("bad_history", "'history' holds something that is no pair of texts")
        messages += [Message("user", question), Message("assistant", answer)]
    return messages


def _turn_number(name: Any) -> int:
    digits = re.sub(r"\D", "", str(name))
    return int(digits[:9]) if digits else 0
