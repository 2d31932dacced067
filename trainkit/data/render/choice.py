"""Which chat template a conversation takes, and with which variables."""

import re
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainkit.data.options import DataOptions
from trainkit.data.read.messages import Conversation
from trainkit.errors import DataError


def options_for(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> DataOptions:
    """The options of one conversation: its own variables win over those of all rows.

    A tokenizer may have several templates. As in transformers, a conversation with tools then takes
    the one called ``tool_use``, unless the recipe names a template.
    """
    changes: dict[str, Any] = {}
    if conversation.template_kwargs:
        changes["template_kwargs"] = {**options.template_kwargs, **conversation.template_kwargs}
    templates = tokenizer.chat_template
    if conversation.tools is not None and isinstance(templates, dict) and "tool_use" in templates:
        changes["chat_template"] = options.chat_template or templates["tool_use"]
    return options.replace(**changes) if changes else options


def refuse_unread(tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> None:
    """Stop at a variable of ``data.template_kwargs`` that no template of the tokenizer reads.

    Raises:
        DataError: a misspelt one would leave every prompt as it is, and nobody would know.
    """
    templates = tokenizer.chat_template
    texts = list(templates.values()) if isinstance(templates, dict) else [templates or ""]
    words = set(re.findall(r"\w+", options.chat_template or " ".join(texts)))
    for name in options.template_kwargs:
        if name not in words:
            like = get_close_matches(name, words, 1, 0.8)
            raise DataError(
                f"the chat template does not read {name!r}, so it would change nothing",
                where="data.template_kwargs",
                fix=f"did you mean {like[0]}?" if like else "remove it",
            )
