"""Two answers to one prompt, a better and a worse one, as the tools that train on them write rows.

What both answers share is the prompt, wherever the row has it, and is there once. Of an answer only
the assistant's turns are trained.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainkit.data.read import fields
from trainkit.data.read.messages import Comparison, Conversation, Message, RowError, TextRow
from trainkit.data.read.row_fields import with_system
from trainkit.data.read.turns import parse_tools, parse_turn


def parse_preference(row: Mapping[str, Any]) -> Comparison:
    """A better and a worse answer.

    - TRL: ``prompt``, ``chosen``, ``rejected``: three texts, or lists of messages; without a prompt
      it is what the two conversations have in common.
    - UltraFeedback: ``prompt`` is a text with which both conversations begin.
    - LLaMA-Factory: ``conversations`` or ``instruction`` and ``input``, and the two answers.
    - axolotl: ``messages``, and the two answers.
    - OpenAI: ``input``, ``preferred_output``, ``non_preferred_output``.

    Raises:
        RowError: something is missing or of another type, an answer does not begin with the row's
            prompt, or the two answers are the same.
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
    prompt, sides = row.get("prompt"), [row.get(key) for key in ("chosen", "rejected")]
    if sides[0] == sides[1] and sides[0] is not None:
        raise RowError("same_answers", "'chosen' and 'rejected' are the same")
    if isinstance(prompt, str) and all(isinstance(side, str) for side in sides):
        if not all(sides) or not prompt:
            raise RowError("empty_completion", "'prompt', 'chosen' or 'rejected' is empty")
        better, worse = (TextRow(str(side), prompt=prompt) for side in sides)
        return Comparison((better, worse))
    question = _question(row)
    answers = [_turns(row, key) for key in ("chosen", "rejected")]
    if question is None:
        shared = 0
        while shared < min(map(len, answers)) and answers[0][shared] == answers[1][shared]:
            shared += 1
        question, answers = answers[0][:shared], [turns[shared:] for turns in answers]
    else:
        answers = [_without(question, turns, isinstance(prompt, str)) for turns in answers]
    if answers[0] == answers[1]:
        raise RowError("same_answers", "'chosen' and 'rejected' are the same")
    before = [replace(turn, train=False) for turn in with_system(row, question)]
    tools = parse_tools(row)
    return Comparison(
        tuple(Conversation((*before, *map(_answering, turns)), tools=tools) for turns in answers)
    )


def _question(row: Mapping[str, Any]) -> list[Message] | None:
    """The prompt, where the row has one."""
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
    """An answer: turns, one turn, or its text."""
    value = row.get(key)
    if isinstance(value, Mapping):
        return [parse_turn(value, 1)]
    if isinstance(value, str) and not value.lstrip().startswith("["):
        if _question(row) is None:
            raise RowError("no_prompt", f"{key!r} is a text, and the row has no prompt")
        return [Message("assistant", value)]
    return [parse_turn(item, n) for n, item in enumerate(fields.items(row, key), 1)]


def _without(prompt: list[Message], turns: list[Message], is_text: bool) -> list[Message]:
    """An answer without the prompt that it begins with."""
    same = [(turn.role, turn.content.strip()) for turn in prompt]
    first = [(turn.role, turn.content.strip()) for turn in turns]
    start = next((n for n, turn in enumerate(first) if turn[0] != "system"), 0) if is_text else 0
    if first[start : start + len(same)] == same:
        return turns[start + len(same) :]
    if turns and turns[0].role != "assistant" and prompt and prompt[-1].role != "assistant":
        raise RowError(
            "prompt_differs",
            "an answer begins with a turn of "
            f"the {turns[0].role} that is not the row's prompt; give the answers alone, or whole "
            "conversations without a prompt",
        )
    return turns


def _answering(turn: Message) -> Message:
    return turn if turn.role == "assistant" else replace(turn, train=False)
