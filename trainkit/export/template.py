"""The chat template as a server needs it: with what the recipe added to it written into it.

A server knows the template and the messages. What else decided a prompt in training (a frozen date,
variables of the recipe, one system prompt for all) would be lost, so it becomes part of the text.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainkit.data import DataOptions
from trainkit.data.render.frozen_date import freeze_dates
from trainkit.data.render.template import ChatTemplate

_NOTHING = '{{ "" }}'  # keeps Jinja from trimming the template's own first line break


def served_template(
    tokenizer: PreTrainedTokenizerBase, options: DataOptions, free: Collection[str] = ()
) -> str:
    """The template that renders plain messages as training rendered them.

    Args:
        tokenizer: of the run.
        options: of the run.
        free: variables that rows of the run set otherwise, so that a request may, too. The others
            are fixed: llama.cpp's server gives ``enable_thinking`` to every template.
    """
    template = ChatTemplate(tokenizer, options)
    text = freeze_dates(template.text, options.frozen_date)
    start = "".join(
        _default(name, value) if name in free else f"{{%- set {name} = {_literal(value)} -%}}"
        for name, value in template.kwargs.items()
    )
    if options.system_policy not in ("keep", "none"):
        start += _system(options.system_policy)
    return f"{start}{_NOTHING}{text}" if start else text


def named_templates(
    tokenizer: PreTrainedTokenizerBase, options: DataOptions, free: Collection[str] = ()
) -> dict[str, str]:
    """The tokenizer's templates besides its default one, by name; none where the run had its own.

    That for tools becomes what training had; the others were not trained with, and stay.
    """
    templates = tokenizer.chat_template
    if options.chat_template or not isinstance(templates, Mapping):
        return {}
    named = {name: str(text) for name, text in templates.items() if name != "default"}
    if text := named.get("tool_use"):
        named["tool_use"] = served_template(tokenizer, options.replace(chat_template=text), free)
    return named


def _default(name: str, value: Any) -> str:
    """A request may say otherwise."""
    return (
        f"{{%- if {name} is not defined -%}}{{%- set {name} = {_literal(value)} -%}}{{%- endif -%}}"
    )


def _system(text: str) -> str:
    first = f"[{{'role': 'system', 'content': {_literal(text)}}}]"
    return (
        "{%- if messages[0]['role'] != 'system' -%}"
        f"{{%- set messages = {first} + messages -%}}{{%- endif -%}}"
    )


def _literal(value: Any) -> str:
    """A JSON value as Jinja writes it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False)
