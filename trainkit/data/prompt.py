"""The prompt of inference, rendered by the very same code that renders training samples."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainkit.data.encode import Encoder
from trainkit.data.formats import parse_messages
from trainkit.data.messages import RowError
from trainkit.data.options import DataOptions
from trainkit.data.template import ChatTemplate
from trainkit.errors import DataError


class PromptRenderer:
    """Renders many prompts for one tokenizer.

    Args:
        tokenizer: with a chat template.
        options: the same as in training, so that dates, templates and escapes are the same.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: DataOptions | None = None
    ) -> None:
        self._template = ChatTemplate(tokenizer, options or DataOptions())
        self._encoder = Encoder(tokenizer)

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt as text, up to where the model's answer starts.

        Raises:
            DataError: the messages are not well formed, or the template refuses them.
        """
        row = {"messages": list(messages), "tools": None if tools is None else list(tools)}
        try:
            conversation, _ = self._template.prepare(parse_messages(row))
            rendered = [self._template.as_dict(message) for message in conversation.messages]
            return self._template.render(rendered, conversation.tools, generation=True)
        except RowError as error:
            raise DataError(error.detail, where="messages") from error

    def input_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The prompt as token ids."""
        (encoded,) = self._encoder.encode([self.text(messages, tools)], [[]])
        return [int(token) for token in encoded.input_ids]


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: DataOptions | None = None,
) -> list[int]:
    """The token ids of a conversation with the opening of an answer behind it.

    Args:
        tokenizer: with a chat template.
        messages: OpenAI messages, the last one usually the user's.
        tools: JSON schemas of tools.
        options: those of training; their defaults otherwise.

    Raises:
        DataError: the messages are not well formed, or the template refuses them.
    """
    return PromptRenderer(tokenizer, options).input_ids(messages, tools)
