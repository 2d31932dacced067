"""Answers to a file of prompts, in batches, going on where an earlier attempt stopped."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainkit.errors import DataError
from trainkit.infer.engine import Answer, Engine
from trainkit.infer.sampling import SamplingOptions

Messages = list[dict[str, Any]]
_FORM = "give one JSON object a line, or a .txt file with one prompt a line"


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: ``file:line``.
        messages: the conversation to be continued.
    """

    id: str
    messages: Messages


def read_prompts(path: Path, system: str | None = None) -> list[Prompt]:
    """Read prompts.

    Args:
        path: ``.jsonl`` with ``{"messages": [...]}`` or ``{"prompt": "..."}`` a line, or a text
            file with a prompt a line. A trailing assistant message is left out: it is what the
            model is asked to write.
        system: goes before conversations that have no system prompt.

    Raises:
        DataError: with file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the prompts cannot be read: {error}", where=str(path)) from error
    is_text = path.suffix not in (".jsonl", ".json", ".ndjson")
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            messages = [{"role": "user", "content": line}] if is_text else _messages(line, where)
            if system is not None and messages[0].get("role") != "system":
                messages = [{"role": "system", "content": system}, *messages]
            prompts.append(Prompt(f"{path.name}:{number}", messages))
    if not prompts:
        raise DataError("there is no prompt in it", where=str(path))
    return prompts


def _messages(line: str, where: str) -> Messages:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"this line is not JSON: {error}", where=where, fix=_FORM) from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if messages is None and isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise DataError(
            'neither {"messages": [...]} nor {"prompt": "..."}',
            where=where,
            fix=_FORM,
        )
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError("there is no question in it", where=where)
    return messages


def generate_file(
    load: Callable[[], Engine],
    prompts: list[Prompt],
    target: Path,
    sampling: SamplingOptions,
    *,
    batch_size: int,
    settings: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Answer all prompts into a file of JSON lines.

    Finished batches are kept in ``.<name>.partial`` beside the target, which appears when all
    prompts are answered. A later call with the same settings goes on from there; each batch has a
    seed of its own, so the result is that of one uninterrupted call.

    Args:
        load: called when there is something left to do.
        prompts: in the order of the output.
        target: the file to appear.
        sampling: how to choose tokens.
        batch_size: prompts at once.
        settings: what else the answers depend on (the model), as plain JSON values.
        progress: told how many of how many are done.

    Returns:
        How many answers were there already.

    Raises:
        DataError: a file from a call with other settings is in the way, the file cannot be written,
            or a prompt is no conversation that the template can render.
    """
    content = [prompt.messages for prompt in prompts]
    key = _digest([dict(settings), sampling.to_dict(), batch_size, content])
    partial = target.with_name(f".{target.name}.partial")
    with _writing(target):
        if target.exists():
            _check_same(list(_rows(target)), key, target, num_rows=len(prompts))
            return len(prompts)
        done = _finished_rows(partial, key, batch_size, len(prompts))
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(partial, "".join(_line(row) for row in done))
    engine = load() if len(done) < len(prompts) else None
    if engine is not None:
        _check_prompts(engine, prompts[len(done) :])
    for start in range(len(done), len(prompts), batch_size):
        assert engine is not None
        batch = prompts[start : start + batch_size]
        torch.manual_seed(sampling.seed + start)
        answers = engine.answer_batch([prompt.messages for prompt in batch], sampling)
        rows = [_row(p, a, key) for p, a in zip(batch, answers, strict=True)]
        with _writing(target), partial.open("a", encoding="utf-8") as stream:
            stream.writelines(_line(row) for row in rows)
            stream.flush()
            os.fsync(stream.fileno())
        if progress is not None:
            progress(start + len(batch), len(prompts))
    with _writing(target):
        partial.rename(target)
    return len(done)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """A disk that is full or a place that is no place: told in a sentence."""
    try:
        yield
    except OSError as error:
        raise DataError(f"it cannot be written: {error.strerror}", where=str(target)) from error


def _check_prompts(engine: Engine, prompts: list[Prompt]) -> None:
    """Render all before the first is answered, so that a bad one does not wait for its turn."""
    for prompt in prompts:
        try:
            engine.prompt_ids(prompt.messages)
        except DataError as error:
            raise DataError(error.what, where=prompt.id, fix=error.fix) from None


def _replace(path: Path, text: str) -> None:
    """Rewrite a file without a moment in which its lines could be lost."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.rename(path)


def _row(prompt: Prompt, answer: Answer, key: str) -> dict[str, Any]:
    reply = {"role": "assistant", "content": answer.text}
    return {
        "id": prompt.id,
        "messages": [*prompt.messages, reply],
        "answer": answer.text,
        "finish": answer.finish,
        "num_prompt_tokens": len(answer.input_ids),
        "num_answer_tokens": len(answer.output_ids),
        "settings": key,
    }


def _finished_rows(
    partial: Path, key: str, batch_size: int, num_prompts: int
) -> list[dict[str, Any]]:
    """What an earlier attempt finished, whole batches only."""
    if not partial.exists():
        return []
    rows = list(_rows(partial))
    _check_same(rows, key, partial)
    whole = len(rows) if len(rows) == num_prompts else len(rows) // batch_size * batch_size
    return rows[:whole]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Complete lines; a kill may have cut the last one."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            return
        if not isinstance(row, dict) or not line.endswith("\n"):
            return
        yield row


def _check_same(
    rows: list[dict[str, Any]], key: str, path: Path, num_rows: int | None = None
) -> None:
    is_whole = num_rows is None or len(rows) == num_rows
    if not is_whole or any(row.get("settings") != key for row in rows):
        raise DataError(
            "it was made from other prompts, another model or other options",
            where=str(path),
            fix="give another --out, or remove it",
        )


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
