"""Answers to a file of questions, in batches, going on where an earlier attempt stopped."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from trainkit.data.messages import Conversation, Message
from trainkit.data.questions import Question
from trainkit.errors import DataError
from trainkit.infer.engine import Answer, Engine, PromptTooLongError
from trainkit.infer.sampling import SamplingOptions

TooLong = Literal["error", "drop", "left_turns"]
"""What is done with a prompt that leaves no room for an answer: the whole file is refused, the row
is written without an answer, or the oldest exchanges of the conversation are left out."""


@dataclass(frozen=True)
class BatchOptions:
    """How a file is answered.

    Attributes:
        batch_size: questions at once.
        too_long: what is done with a prompt that does not fit the context.
        settings: what else the answers depend on (the model), as plain JSON values.
    """

    batch_size: int
    settings: Mapping[str, Any]
    too_long: TooLong = "error"


@dataclass(frozen=True)
class FittedQuestion:
    """A question as the model gets it.

    Attributes:
        question: as it was read, or shortened.
        problem: why it is not answered, or None.
        num_turns_dropped: messages that were left out at the left.
    """

    question: Question
    problem: str | None = None
    num_turns_dropped: int = 0


def generate_file(
    load: Callable[[], Engine],
    questions: Sequence[Question],
    target: Path,
    sampling: SamplingOptions,
    options: BatchOptions,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Answer all questions into a file of JSON lines.

    Each line holds the fields of its question and, in their own keys, the answer and how it ended.
    Finished batches are kept in ``.<name>.partial`` next to the target, which appears when all
    questions are answered. A later call with the same settings goes on from there; each batch has a
    seed of its own, so the result is that of one uninterrupted call.

    Args:
        load: called when there is something left to do.
        questions: in the order of the output.
        target: the file to appear.
        sampling: how to choose tokens.
        options: see there.
        progress: called with the number done and the number of all.

    Returns:
        How many answers were there already.

    Raises:
        DataError: a file from a call with other settings is in the way, the file cannot be written,
            or a question cannot be rendered or does not fit.
    """
    content = [(question.id, asdict(question.row), question.fields) for question in questions]
    how = [dict(options.settings), sampling.to_dict(), options.batch_size, options.too_long]
    key = _digest([*how, content])
    partial = target.with_name(f".{target.name}.partial")
    with _writing(target):
        if target.exists():
            _check_same(list(_rows(target)), key, target, num_rows=len(questions))
            return len(questions)
        done = _finished_rows(partial, key, options.batch_size, len(questions))
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(partial, b"".join(_line(row) for row in done))
    if len(done) < len(questions):
        engine = load()
        # All are rendered before the first is answered: a bad one does not wait for its turn.
        fitted = [
            _fitted(engine, question, options.too_long) for question in questions[len(done) :]
        ]
    for start in range(len(done), len(questions), options.batch_size):
        batch = fitted[start - len(done) :][: options.batch_size]
        torch.manual_seed(sampling.seed + start)
        rows = _answered(engine, batch, sampling, key)
        with _writing(target), partial.open("ab") as stream:
            stream.writelines(_line(row) for row in rows)
            stream.flush()
            os.fsync(stream.fileno())
        if progress is not None:
            progress(start + len(batch), len(questions))
    with _writing(target):
        partial.rename(target)
    return len(done)


@dataclass(frozen=True)
class Outcome:
    """How the questions of a finished file were answered.

    Attributes:
        num_answers: with an answer.
        num_too_long: without one: there was no room.
        num_shortened: answered without their oldest exchanges.
        num_cut: answers that end at the longest length, or where the context does.
    """

    num_answers: int
    num_too_long: int
    num_shortened: int
    num_cut: int

    def in_words(self) -> list[str]:
        """What a reader of the answers must know, one phrase each."""
        phrases = {
            "cut at --max-new-tokens or at the model's context": self.num_cut,
            "to questions without their oldest exchanges": self.num_shortened,
            "questions too long for an answer": self.num_too_long,
        }
        return [f"{number} {phrase}" for phrase, number in phrases.items() if number]


def outcome_of(target: Path) -> Outcome:
    """Count what a file of `generate_file` holds."""
    rows = list(_rows(target))
    ends = [row["finish"] for row in rows]
    return Outcome(
        num_answers=len(rows) - ends.count("too_long"),
        num_too_long=ends.count("too_long"),
        num_shortened=sum("num_turns_dropped" in row for row in rows),
        num_cut=ends.count("length") + ends.count("context"),
    )


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """A disk that is full or a path that cannot be written to, as one sentence."""
    try:
        yield
    except OSError as error:
        raise DataError(f"it cannot be written: {error.strerror}", where=str(target)) from error


def _fitted(engine: Engine, question: Question, too_long: TooLong) -> FittedQuestion:
    """The question as it fits the context.

    Raises:
        DataError: it cannot be rendered, or does not fit and nothing is to be done about that.
    """
    try:
        engine.check_fit(question.row)
    except PromptTooLongError as error:
        shorter = _shortened(engine, question) if too_long == "left_turns" else None
        if shorter is not None:
            return shorter
        if too_long == "error":
            fix = "shorten it, or give --too-long drop or left_turns"
            raise DataError(error.what, where=question.id, fix=fix) from None
        return FittedQuestion(question, problem=error.what)
    except DataError as error:
        raise DataError(error.what, where=question.id, fix=error.fix) from None
    return FittedQuestion(question)


def _shortened(engine: Engine, question: Question) -> FittedQuestion | None:
    """The most turns from the right that fit, behind the system prompt; None where none do."""
    conversation = question.row
    if not isinstance(conversation, Conversation):
        return None
    messages = conversation.messages
    head = 0
    while head < len(messages) and messages[head].role in ("system", "developer"):
        head += 1
    for start in range(head + 1, len(messages)):
        if messages[start].role != "user":
            continue
        shorter = replace(conversation, messages=messages[:head] + messages[start:])
        try:
            engine.check_fit(shorter)
        except PromptTooLongError:
            continue
        return FittedQuestion(replace(question, row=shorter), num_turns_dropped=start - head)
    return None


def _answered(
    engine: Engine, batch: Sequence[FittedQuestion], sampling: SamplingOptions, key: str
) -> list[dict[str, Any]]:
    fitting = [each.question.row for each in batch if each.problem is None]
    answers = iter(engine.answer_batch(fitting, sampling) if fitting else ())
    return [_row(each, None if each.problem else next(answers), key) for each in batch]


def _row(fitted: FittedQuestion, answer: Answer | None, key: str) -> dict[str, Any]:
    """A line of the output: the question's own fields first, whatever they are called.

    Where one has the name of a key of ours and another value, it is kept under ``row``.
    """
    question = fitted.question
    ours: dict[str, Any] = {"id": question.fields.get("id", question.id)}
    if isinstance(question.row, Conversation):
        messages = [_message(message) for message in question.row.messages]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer.text})
        ours["messages"] = messages
        if question.fields.get("messages") == messages[: len(messages) - (answer is not None)]:
            question = replace(question, fields={**question.fields, "messages": messages})
    ours["answer"] = None if answer is None else answer.text
    ours["finish"] = "too_long" if answer is None else answer.finish
    if fitted.problem is not None:
        ours["problem"] = fitted.problem
    if fitted.num_turns_dropped:
        ours["num_turns_dropped"] = fitted.num_turns_dropped
    if answer is not None:
        ours["num_prompt_tokens"] = len(answer.input_ids)
        ours["num_answer_tokens"] = len(answer.output_ids)
    ours["settings"] = key
    hidden = {k: v for k, v in question.fields.items() if k in ours and ours[k] != v}
    row = {**ours, **{k: v for k, v in question.fields.items() if k not in ours}}
    if hidden:
        row["row"] = {**hidden, **({"row": row["row"]} if "row" in row else {})}
    return row


def _message(message: Message) -> dict[str, Any]:
    """One turn as a row of messages has it, so that the output trains again."""
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "type": "function",
                **({"id": call["id"]} if call["id"] else {}),
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in message.tool_calls
        ]
    for key in ("name", "tool_call_id", "train"):
        if getattr(message, key) is not None:
            result[key] = getattr(message, key)
    return result


def _replace(path: Path, content: bytes) -> None:
    """Rewrite a file without a moment in which its lines could be lost."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    fresh.rename(path)


def _finished_rows(
    partial: Path, key: str, batch_size: int, num_prompts: int
) -> list[dict[str, Any]]:
    """What an earlier attempt finished, complete batches only."""
    if not partial.exists():
        return []
    rows = list(_rows(partial))
    _check_same(rows, key, partial)
    whole = len(rows) if len(rows) == num_prompts else len(rows) // batch_size * batch_size
    return rows[:whole]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Complete lines; a kill may have cut the last one.

    Only a newline ends a line of JSON: texts may hold any other separator.
    """
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            return
        if not isinstance(row, dict):
            return
        yield row


def _check_same(
    rows: list[dict[str, Any]], key: str, path: Path, num_rows: int | None = None
) -> None:
    is_whole = num_rows is None or len(rows) == num_rows
    if not is_whole or any(row.get("settings") != key for row in rows):
        raise DataError(
            "it was made from other questions, another model or other options",
            where=str(path),
            fix="give another --out, or remove it",
        )


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair in one of the row's fields
        return json.dumps(row).encode() + b"\n"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
