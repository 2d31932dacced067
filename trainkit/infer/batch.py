"""Answers to a file of questions, in batches, going on where an earlier attempt stopped."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch

from trainkit.data.image_rows import as_turn
from trainkit.data.messages import Conversation
from trainkit.data.questions import Question
from trainkit.errors import DataError
from trainkit.infer.engine import Answer, Engine, PromptTooLongError
from trainkit.infer.sampling import SamplingOptions
from trainkit.options.data import IGNORE_INDEX

TooLong = Literal["error", "drop"]
"""What is done with a prompt that leaves no room for an answer: the whole file is refused, or the
row is written without an answer."""


def generate_file(
    load: Callable[[], Engine],
    questions: Sequence[Question],
    target: Path,
    sampling: SamplingOptions,
    *,
    batch_size: int,
    settings: Mapping[str, Any],
    too_long: TooLong = "error",
    logprobs: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Answer all questions into a file of JSON lines.

    Each line holds the fields of its question and, in their own keys, the answer and how it ended.
    Finished batches are kept in ``.<name>.partial`` next to the target, which appears when all
    questions are answered. A later call with the same settings goes on from there; each batch has a
    seed of its own, so the result is that of one uninterrupted call.

    ``load`` is called when there is something left to do; ``settings`` are what else the answers
    depend on.

    Returns:
        How many answers were there already.
    """
    content = [(question.id, asdict(question.row), question.fields) for question in questions]
    key = _digest([dict(settings), asdict(sampling), batch_size, too_long, logprobs, content])
    partial = target.with_name(f".{target.name}.partial")
    with _writing(target):
        if target.exists():
            _check_same(list(_rows(target)), key, target, num_rows=len(questions))
            return len(questions)
        done = list(_rows(partial)) if partial.exists() else []
        _check_same(done, key, partial)
        if len(done) < len(questions):  # complete batches only
            del done[len(done) // batch_size * batch_size :]
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = partial.with_name(f"{partial.name}.new")  # no moment in which lines could be lost
        fresh.write_bytes(b"".join(_line(row) for row in done))
        fresh.rename(partial)
    if len(done) < len(questions):
        engine = load()
        # All are rendered before the first is answered: a bad one does not wait for its turn.
        problems = [_problem(engine, each, too_long) for each in questions[len(done) :]]
    for start in range(len(done), len(questions), batch_size):
        batch = questions[start : start + batch_size]
        torch.manual_seed(sampling.seed + start)
        rows = _answered(engine, batch, problems[start - len(done) :], sampling, key, logprobs)
        with _writing(target), partial.open("ab") as stream:
            stream.writelines(_line(row) for row in rows)
            stream.flush()
            os.fsync(stream.fileno())
        progress(start + len(batch), len(questions))
    with _writing(target):
        partial.rename(target)
    return len(done)


def outcome_of(target: Path) -> dict[str, int]:
    """How the questions of a file of `generate_file` were answered.

    Returns:
        ``num_answers``; ``num_too_long``, without one because there was no room; ``num_cut``, that
        end at the longest length or where the context does.
    """
    ends = [row["finish"] for row in _rows(target)]
    too_long = ends.count("too_long")
    return {
        "num_answers": len(ends) - too_long,
        "num_too_long": too_long,
        "num_cut": ends.count("length") + ends.count("context"),
    }


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """A disk that is full or a path that cannot be written to, as one sentence."""
    try:
        yield
    except OSError as error:
        raise DataError(f"it cannot be written: {error.strerror}", where=str(target)) from error


def _problem(engine: Engine, question: Question, too_long: TooLong) -> str | None:
    try:
        engine.check_fit(question.row)
    except DataError as error:
        is_too_long = isinstance(error, PromptTooLongError)
        if is_too_long and too_long == "drop":
            return error.what
        fix = "shorten it, or give --too-long drop" if is_too_long else error.fix
        raise DataError(error.what, where=question.id, fix=fix) from None
    return None


def _answered(
    engine: Engine,
    batch: Sequence[Question],
    problems: Sequence[str | None],
    sampling: SamplingOptions,
    key: str,
    logprobs: int,
) -> list[dict[str, Any]]:
    pairs = list(zip(batch, problems, strict=False))
    fitting = [question.row for question, problem in pairs if problem is None]
    answers = iter(engine.answer_batch(fitting, sampling) if fitting else ())
    rows = []
    for question, problem in pairs:
        answer = None if problem else next(answers)
        row = _row(question, problem, answer, key)
        if logprobs and answer is not None and answer.output_ids:
            ids, logs = engine.top_logprobs(answer, logprobs)
            row |= {
                "input_ids": [*answer.input_ids, *answer.output_ids],
                "labels": [*[IGNORE_INDEX] * len(answer.input_ids), *answer.output_ids],
                "teacher_ids": ids,
                "teacher_logprobs": logs,
            }
        rows.append(row)
    return rows


def _row(
    question: Question, problem: str | None, answer: Answer | None, key: str
) -> dict[str, Any]:
    """A line of the output: the question's own fields first, whatever they are called.

    Where one has the name of a key of ours and another value, it is kept under ``row``.
    """
    ours: dict[str, Any] = {"id": question.fields.get("id", question.id)}
    if isinstance(question.row, Conversation):
        messages = [as_turn(message) for message in question.row.messages]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer.text})
        ours["messages"] = messages
        if question.fields.get("messages") == messages[: len(messages) - (answer is not None)]:
            question = replace(question, fields={**question.fields, "messages": messages})
    ours["answer"] = None if answer is None else answer.text
    ours["finish"] = "too_long" if answer is None else answer.finish
    if problem is not None:
        ours["problem"] = problem
    if answer is not None:
        ours["num_prompt_tokens"] = len(answer.input_ids)
        ours["num_answer_tokens"] = len(answer.output_ids)
    ours["settings"] = key
    hidden = {k: v for k, v in question.fields.items() if k in ours and ours[k] != v}
    row = {**ours, **{k: v for k, v in question.fields.items() if k not in ours}}
    if hidden:
        row["row"] = {**hidden, **({"row": row["row"]} if "row" in row else {})}
    return row


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
