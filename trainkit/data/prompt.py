"""The prompt of inference, rendered by the very same code that renders training samples."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainkit.data.encode import Encoder
from trainkit.data.formats import parse_messages
from trainkit.data.image_rows import attach, pull
from trainkit.data.images import Image
from trainkit.data.masking import preserved_prompt
from trainkit.data.messages import Conversation, Row, RowError, TokenRow, join_users
from trainkit.data.options import DataOptions
from trainkit.data.template import ByVariables, ChatTemplate
from trainkit.data.vision import NoVision, Vision
from trainkit.errors import DataError


class PromptRenderer:
    """Renders many prompts for one tokenizer; the chat template is asked for by conversations only.

    ``options`` are those of training, so that dates, templates and escapes are the same.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions | None = None,
        vision: Vision | NoVision | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options or DataOptions()
        self._encoder = Encoder(tokenizer)
        self._vision = vision
        words = vision.words if isinstance(vision, Vision) else frozenset()
        self._templates = ByVariables(
            tokenizer, self._options, lambda own: ChatTemplate(tokenizer, own, words)
        )

    def text(self, row: Row) -> str:
        """The prompt as text, up to where the model's answer starts; empty for token ids."""
        if isinstance(row, TokenRow):
            return ""
        if not isinstance(row, Conversation):
            return row.prompt
        return self._rendered(row, generation=True)

    def _rendered(self, conversation: Conversation, *, generation: bool) -> str:
        try:
            # An empty answer may be in a chat; training refuses its row.
            conversation = replace(conversation, messages=join_users(conversation.messages))
            template = self._templates.of(conversation)
            conversation, _ = template.prepare(conversation)

            def render(each: Conversation) -> str:
                messages = [template.as_dict(message) for message in each.messages]
                return template.render(messages, each.tools, generation=generation)

            if self._options.thinking != "preserve":
                return render(conversation)
            return preserved_prompt(conversation, template.style.splits_thinking, render)
        except RowError as error:
            raise DataError(error.detail, where="messages") from error

    def expected(self, conversation: Conversation) -> str:
        """The last turn in the words in which a model would have to write it."""
        if not conversation.messages[-1].tool_calls:
            return conversation.messages[-1].content
        prompt = self.text(conversation.first(len(conversation.messages) - 1))
        whole = self._rendered(conversation, generation=False)
        written = whole.removeprefix(prompt) if whole.startswith(prompt) else whole
        ids = self._tokenizer.encode(written, add_special_tokens=False)
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def input_ids(self, row: Row) -> list[int]:
        if isinstance(row, TokenRow):
            largest, size = max(row.input_ids), len(self._tokenizer)
            if largest >= size:
                raise DataError(f"token id {largest}, but the tokenizer has {size} tokens")
            return list(row.input_ids)
        if images := self.images(row):
            assert isinstance(self._vision, Vision)
            text = self.text(row)
            try:
                self._vision.refuse_unprinted(text, len(images))
                encoded = self._vision.encode(self._encoder, text, [], images)
            except RowError as error:
                raise DataError(error.detail, where="messages") from error
            return [int(token) for token in encoded.input_ids]
        plain = not isinstance(row, Conversation)
        (encoded,) = self._encoder.encode([self.text(row)], [[]], add_special_tokens=plain)
        ids = [int(token) for token in encoded.input_ids]
        return self._without_end(ids) if plain else ids

    def images(self, row: Row) -> tuple[Image, ...]:
        """Those of a row, in order."""
        if not isinstance(row, Conversation) or not any(turn.images for turn in row.messages):
            return ()
        if not isinstance(self._vision, Vision):
            none = self._vision or NoVision("text", "it takes none", "ask a model that sees")
            error = none.error("messages")
            raise DataError(error.what, where=error.where, fix=error.fix)
        try:
            seen, _ = self._vision.load_all(row, Path(), self._options.images)
        except RowError as error:
            raise DataError(error.detail, where="messages") from error
        return tuple(image for turn in seen.messages for image in turn.images)

    def pixels(self, rows: Sequence[Row], device: Any) -> dict[str, Any]:
        """What a model takes of the images of rows where it generates; nothing without any."""
        images = [image for row in rows for image in self.images(row)]
        if not images:
            return {}
        assert isinstance(self._vision, Vision)
        found = {name: each.to(device) for name, each in self._vision.pixels(images).items()}
        return {**found, "kinds": (self._vision.kinds, self._vision.token_id)}

    def _without_end(self, ids: list[int]) -> list[int]:
        """A plain text as training begins it: one bos, and no eos, which would end it here."""
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == bos == ids[1]:
            ids = ids[1:]
        added = self._tokenizer.num_special_tokens_to_add() > 0
        if added and eos is not None and len(ids) > 1 and ids[-1] == eos:
            ids = ids[:-1]
        return ids


def conversation_of(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> Conversation:
    """OpenAI messages and the JSON schemas of tools, as training reads them.

    Images are in parts of messages; ``<image>`` in a lone text is text.
    """
    row: Mapping[str, Any] = {"messages": list(messages), "tools": tools and list(tools)}
    has_parts = any(isinstance(message.get("content"), list) for message in messages)
    try:
        row, found = pull(row) if has_parts else (row, None)
        parsed = parse_messages(row)
        attached = parsed if found is None else attach(parsed, found)
        assert isinstance(attached, Conversation)
        return attached
    except RowError as error:
        raise DataError(error.detail, where="messages") from error
