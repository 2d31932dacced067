"""A conversation that grows by questions and answers, and can be trained on afterwards."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.errors import DataError


@dataclass
class ChatHistory:
    """Messages so far."""

    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def with_question(self, text: str, images: Sequence[str] = ()) -> list[dict[str, Any]]:
        """The messages to answer; nothing is kept until ``add`` is called."""
        return [*self.all(), _turn(text, images)]

    def add(
        self, question: str, answer: str, images: Sequence[str] = (), *, is_whole: bool = True
    ) -> None:
        """Keep a question and its answer.

        Args:
            question: the user's text.
            images: paths of the images in front of it.
            answer: the model's.
            is_whole: an answer that was cut short is kept for the context, and marked so that
                training on the saved conversation leaves it out.
        """
        reply: dict[str, Any] = {"role": "assistant", "content": answer}
        if not is_whole:
            reply["train"] = False
        self.messages += [_turn(question, images), reply]

    def all(self) -> list[dict[str, Any]]:
        start = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*start, *self.messages]

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages.clear()

    def undo(self) -> bool:
        """Forget the last question and its answer.

        Returns:
            Whether there was one.
        """
        had_one = bool(self.messages)
        del self.messages[-2:]
        return had_one

    def save(self, path: Path) -> int:
        """Add the conversation to a messages file, one JSON object a line.

        Returns:
            How many conversations the file holds now.
        """
        if not self.messages:
            raise DataError("there is nothing to save yet", where=str(path))
        try:
            before = path.read_bytes().decode("utf-8") if path.exists() else ""
            lines = [line for line in before.split("\n") if line.strip()]
            if not all("messages" in json.loads(line) for line in lines):
                raise ValueError
            line = json.dumps({"messages": self.all()}, ensure_ascii=False)
            text = "".join(f"{row}\n" for row in [*lines, line])
            partial = path.with_name(f".{path.name}.partial")
            partial.write_text(text, encoding="utf-8")
            partial.rename(path)
        except (ValueError, TypeError):
            raise DataError(
                "this file exists and is not a messages file (one JSON object a line)",
                where=str(path),
                fix="give another name",
            ) from None
        except OSError as error:
            raise DataError(f"it cannot be written: {error.strerror}", where=str(path)) from error
        return len(lines) + 1


def _turn(text: str, images: Sequence[str]) -> dict[str, Any]:
    """A turn of the user; its images go before its text."""
    parts = [{"type": "image", "path": path} for path in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}
