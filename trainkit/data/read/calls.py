"""Tool calls and tool schemas, in the ways the wild writes them."""

from collections.abc import Mapping
from typing import Any

from trainkit.data.read import fields
from trainkit.data.read.messages import RowError


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
