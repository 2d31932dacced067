"""One turn of a conversation with its tool calls, in OpenAI's words or in ShareGPT's."""

from collections.abc import Mapping
from typing import Any

from trainkit.data.read import fields
from trainkit.data.read.fields import parts_switch, read_switch
from trainkit.data.read.messages import Message, RowError


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
    "human": "user",
    "user": "user",
    "prompter": "user",
    "input": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "ai": "assistant",
    "llm": "assistant",
    "chatbot": "assistant",
    "output": "assistant",
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
    "tool_result": "tool",
}
"""Names that other data sets give to the roles. ``function_call`` is handled where it occurs."""

CALL_ROLES = ("function_call", "tool_call")
"""Turns whose text is the JSON of an assistant's calls."""

TEXT_PARTS = (None, "text", "input_text", "output_text")
"""The types of a part of the content whose text is the turn's own."""

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def parse_turn(item: Any, number: int) -> Message:
    """Read ``{role, content, ...}`` or ``{from, value, ...}``.

    Args:
        item: one entry of the list.
        number: its place, from 1.

    Raises:
        RowError: it has no role, an unknown one, no text, or a field of the wrong type.
    """
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
    reasoning = _reasoning(item, number)
    return Message(
        role=_role(name, number),
        content=_content(value, text, number, optional=bool(calls or reasoning)),
        reasoning=reasoning,
        tool_calls=parse_tool_calls(calls, number) if calls else (),
        name=fields.string_or_none(item, "name", number),
        tool_call_id=fields.string_or_none(item, "tool_call_id", number),
        train=_switch(item, value, number),
    )


def _switch(item: Mapping[str, Any], value: Any, number: int) -> bool | None:
    """The turn's own switch, or the one that all parts of its content share."""
    whole = read_switch(item, f"turn {number}")
    parts = parts_switch(value, number) if isinstance(value, list) else None
    if whole is not None and parts is not None and whole != parts:
        raise RowError("switches_disagree", f"turn {number} and its parts have other switches")
    return parts if whole is None else whole


def _role(name: str, number: int) -> str:
    role = ROLE_ALIASES.get(name) or ROLE_ALIASES.get(name.strip().lower())
    if role is None:
        raise RowError(
            "unknown_role",
            f"turn {number} has role {name[:40]!r}; write system, developer, user, assistant or "
            "tool there",
        )
    return role


def _reasoning(item: Mapping[str, Any], number: int) -> str | None:
    found: dict[str, str] = {}
    for key in REASONING_KEYS:
        value = item.get(key)
        if value is None or value == "":
            continue
        if not isinstance(value, str):
            raise RowError(
                "wrong_type", f"turn {number}: {key!r} is {fields.kind(value)}, not text"
            )
        found[key] = value
    if len(set(found.values())) > 1:
        raise RowError(
            "two_reasonings", f"turn {number} has other thoughts in {' and '.join(found)}"
        )
    return next(iter(found.values()), None)


def _content(value: Any, key: str, number: int, *, optional: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and optional:
        return ""
    if not isinstance(value, list):
        raise RowError("wrong_type", f"turn {number}: {key!r} is {fields.kind(value)}, not text")
    return "".join(_part(part, number) for part in value)


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
