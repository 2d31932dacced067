"""Text as it is generated, token by token, without half characters."""

from collections.abc import Callable, Collection
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

_HALF_CHARACTER = "�"  # what a decoder shows for the first bytes of a character


class TextStream(BaseStreamer):
    """Takes tokens from ``generate`` and gives text to a callback."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Collection[int],
        on_text: Callable[[str], None],
    ) -> None:
        """Start a new answer.

        Args:
            tokenizer: decodes.
            stop_ids: tokens that end an answer and are not shown.
            on_text: called with each new piece.
        """
        self._tokenizer, self._stop_ids, self._on_text = tokenizer, stop_ids, on_text
        self._is_prompt = True
        # Decoding starts a little before the new tokens: many tokenizers decode a token
        # differently at the start of a text.
        self._tokens: list[int] = []
        self._shown = ""

    def put(self, value: Any) -> None:
        """Take the prompt (first call), then one token a call."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self._tokens += [token for token in value.flatten().tolist() if token not in self._stop_ids]
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        if not text.endswith(_HALF_CHARACTER):
            self._show(text)

    def end(self) -> None:
        """Show what is left."""
        self._show(str(self._tokenizer.decode(self._tokens, skip_special_tokens=True)))

    def _show(self, text: str) -> None:
        new = text[len(self._shown) :]
        if new:
            self._on_text(new)
            self._shown = text
            if "\n" in new:
                self._forget()

    def _forget(self) -> None:
        """Drop the lines that are shown, so that decoding stays cheap in a long answer."""
        keep = self._tokens[-8:]
        tail = str(self._tokenizer.decode(keep, skip_special_tokens=True))
        if self._shown.endswith(tail) and not tail.startswith(_HALF_CHARACTER):
            self._tokens, self._shown = keep, tail
