"""Rows as questions: what a trained model is given, cut off where training would let it begin.

Rows are read by the very code that reads them for training, in every format of ``FORMATS``. An
answer that a row brings along is left out, and a row may come without one.
"""

import base64
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from trainkit.data.files import (
    DAMAGED,
    TEXT,
    RawRow,
    container,
    is_json,
    open_bytes,
    read_rows,
    resolve_files,
)
from trainkit.data.formats import FORMATS, UNREAD, decode_row, read_row
from trainkit.data.image_rows import located
from trainkit.data.messages import (
    Comparison,
    Conversation,
    Message,
    ParsedRow,
    Row,
    RowError,
    TextRow,
    TokenRow,
    validate,
)
from trainkit.errors import DataError


@dataclass(frozen=True)
class Question:
    """One row to be answered.

    Attributes:
        id: ``file:line``; the second row of one line has ``#2`` behind it.
        row: the row without its answer: a conversation, a text that goes on, or token ids.
        fields: the row as it was given; an ``{"id": ...}`` in it goes before ``id``.
    """

    id: str
    row: Row
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class QuestionOptions:
    """How rows become questions.

    Attributes:
        format: a name of ``FORMATS``, or ``auto`` to go by each row's keys.
        columns: our column name -> the row's column name.
        plain_prompts: a lone ``prompt`` is a text that goes on (as after training on texts with
            completions), and not the message of a user.
        images: questions may have some; whoever asks knows whether the model sees.
    """

    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    plain_prompts: bool = False
    images: bool = False


def read_questions(path: str, options: QuestionOptions | None = None) -> list[Question]:
    """Read a file of questions, or several.

    Of a ``.txt`` each line is a question.
    """
    options = options or QuestionOptions()
    questions: list[Question] = []
    seen: Counter[str] = Counter()
    for file in resolve_files(path):
        for line, row in _rows(file):
            try:
                fields_, parsed = row if isinstance(row, tuple) else read_question(row, options)
                if isinstance(parsed, Conversation):
                    parsed = located(_with_system(parsed, options.system), file.absolute().parent)
                elif options.system is not None:
                    raise RowError("no_conversation", "a plain text has no system prompt")
            except RowError as error:
                raise DataError(
                    error.detail,
                    where=f"{file}:{line}",
                    fix="give rows as for training, with or without their answers; "
                    f"formats: {', '.join(FORMATS)}; or a .txt file with a question a line",
                ) from None
            name = f"{file.name}:{line}"
            seen[name] += 1
            name += f"#{seen[name]}" if seen[name] > 1 else ""
            questions.append(Question(name, parsed, fields_))
    if not questions:
        raise DataError("there is no question in it", where=path)
    return questions


def _rows(file: Path) -> Iterator[tuple[int, RawRow | tuple[dict[str, Any], Conversation]]]:
    if container(file)[0] != TEXT:
        for row in read_rows(file):
            yield row.line, row
        return
    try:
        with open_bytes(file) as stream:
            text = stream.read().decode("utf-8-sig")
    except (*DAMAGED, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"the questions cannot be read: {error}", where=str(file)) from error
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line.strip()]
    if lines and all(line.startswith("{") and is_json(line) for _, line in lines):
        raise DataError(
            "every line of this text is a JSON object", where=str(file), fix="rename it to .jsonl"
        )
    for number, line in lines:
        yield number, ({}, Conversation((Message("user", line),)))


def read_question(raw: RawRow, options: QuestionOptions) -> tuple[dict[str, Any], Row]:
    row = decode_row(raw)
    fields_ = dict(row) if isinstance(row, Mapping) else {"messages": row}
    return as_json(fields_), question_of(_parse(row, options))


def as_json(value: Any) -> Any:
    """A value as a line of JSON can hold it: a parquet file has dates, decimals and bytes."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, date) else str(value)


def question_of(parsed: ParsedRow) -> Row:
    if isinstance(parsed, TextRow):
        return TextRow("", prompt=parsed.prompt or parsed.text)
    if isinstance(parsed, TokenRow):
        first = parsed.trained.index(True) if any(parsed.trained) else 0
        ids = parsed.input_ids[:first] if first else parsed.input_ids
        return TokenRow(ids, (False,) * len(ids))
    if isinstance(parsed, Comparison):
        return question_of(parsed.conversations[0])
    # Neighbours are joined, or not, as in training of the whole row without switches.
    messages = tuple(replace(message, train=None) for message in parsed.messages)
    while messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    if not messages:
        raise RowError("no_question", "there is no question in it")
    return validate(replace(parsed, messages=messages), needs_assistant=False)


def _parse(row: Any, options: QuestionOptions) -> ParsedRow:
    """Parse a row; an answer that is not there yet is put in and cut off later."""
    parsed = read_row(row, options.format, options.columns, asks=True, images=options.images)
    is_message = options.format == "auto" and not options.plain_prompts
    if is_message and isinstance(parsed, TextRow) and parsed.text is UNREAD:
        return Conversation((Message("user", parsed.prompt),))
    return parsed


def _with_system(conversation: Conversation, system: str | None) -> Conversation:
    messages = conversation.messages
    if system is None or messages[0].role in ("system", "developer"):
        return conversation
    return replace(conversation, messages=(Message("system", system), *messages))
