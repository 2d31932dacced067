"""What is exported: the trained weights, and what else decided the prompts in training."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainkit.checkpoint.whole.manifest import MANIFEST_NAME, verify_directory
from trainkit.data import DataOptions
from trainkit.data.read.messages import Conversation
from trainkit.data.render.template import ChatTemplate, freeze_dates
from trainkit.errors import ModelError
from trainkit.export.certificate import Reference, ask_trained
from trainkit.export.conversations import conversations_of
from trainkit.export.served import release
from trainkit.infer.engine import Engine, load_engine
from trainkit.infer.locate import ModelPaths, is_trained_on_texts

# -- The chat template as a server needs it: with what the recipe added to it written into it
# A server knows the template and the messages. What else decided a prompt in training (a frozen
# date, variables of the recipe, one system prompt for all) would be lost, so it becomes part of
# the text.


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


@dataclass(frozen=True)
class Held:
    """How a run held its base model, and what is taken on trust.

    Attributes:
        quantize: ``nf4``, ``fp8`` or None.
        dtype: of the weights in memory, or None.
        any_base: merge into other weights than the adapter's own base.
    """

    quantize: str | None = None
    dtype: str | None = None
    any_base: bool = False


@dataclass(frozen=True)
class Source:
    """A trained model that is about to be exported.

    Attributes:
        paths: where it is.
        quantize: how its base was packed in training, or None.
        compute_dtype: what a packed base was unpacked to, or None.
        any_base: the adapter may be merged into other weights.
        template: what the server gets; None for a model of plain texts.
        named_templates: the tokenizer's others, such as ``tool_use``, which servers take for
            conversations with tools.
        variables: of the template, with their defaults, that rows of the run set otherwise.
        stop_ids: tokens that end an answer, the trained ones first.
        stop_tokens: the same as text.
        system: the system prompt that all of training had, or None.
        reference: what the trained model says.
        notes: for the certificate.
    """

    paths: ModelPaths
    quantize: str | None
    compute_dtype: str | None
    any_base: bool
    template: str | None
    named_templates: Mapping[str, str]
    variables: Mapping[str, Any]
    stop_ids: tuple[int, ...]
    stop_tokens: tuple[str, ...]
    system: str | None
    reference: Reference
    notes: tuple[str, ...]

    @property
    def kinds(self) -> set[str]:
        """The kinds of conversations that the trained model was asked."""
        return {kind for prompt in self.reference.prompts for kind in prompt.kinds}


def open_source(paths: ModelPaths, held: Held, say: Callable[[str], None]) -> Source:
    """Load the trained model, ask it what the export will be asked, and let go of it.

    Args:
        paths: of ``find_model``.
        held: how the run held its base.
        say: called with one line about each stage.

    Raises:
        ModelError: it cannot be loaded.
        CheckpointError: files were altered, or the adapter belongs to another base.
    """
    for directory in (paths.directory, paths.adapter):
        if directory is not None and (directory / MANIFEST_NAME).exists():
            verify_directory(directory)
    say("asking the trained model")
    has_adapter = paths.adapter is not None
    quantize = held.quantize if has_adapter else None
    engine = load_engine(
        paths,
        dtype="auto" if quantize == "nf4" else "float32",
        quantize=quantize if quantize == "nf4" else None,
        any_base=held.any_base,
        say=say,
    )
    is_text = is_trained_on_texts(paths.run) or not engine.tokenizer.chat_template
    prompts = conversations_of(paths.run, engine, is_text=is_text)
    if not prompts:
        raise ModelError(
            "the chat template renders none of the conversations that it was tried on",
            where=paths.tokenizer,
        )
    reference = ask_trained(engine, prompts, has_adapter=has_adapter)
    source = _described(paths, held, engine, reference, is_text=is_text)
    del engine
    release()
    return source


def _described(
    paths: ModelPaths, held: Held, engine: Engine, reference: Reference, *, is_text: bool
) -> Source:
    options, tokenizer = engine.options, engine.tokenizer
    policy = options.system_policy
    notes = []
    if not any(not prompt.id.startswith("made:") for prompt in reference.prompts):
        notes.append("the run's own data was not at hand; the conversations were made")
    if policy == "none":
        notes.append("the run removed system prompts: what a system prompt does was not trained")
    elif policy != "keep":
        notes.append("the run gave every conversation one system prompt; it is in the template")
    if held.quantize == "nf4":
        notes.append("trained over a base in 4 bits; merged into its weights as training saw them")
    ends = engine.stop_ids
    rows = [prompt.row for prompt in reference.prompts if isinstance(prompt.row, Conversation)]
    set_by_rows = {name for row in rows for name in row.template_kwargs}
    variables = {k: v for k, v in options.template_kwargs.items() if k in set_by_rows}
    return Source(
        paths=paths,
        quantize=held.quantize if paths.adapter is not None else None,
        compute_dtype=held.dtype if held.dtype != "auto" else None,
        any_base=held.any_base,
        template=None if is_text else served_template(tokenizer, options, variables),
        named_templates={} if is_text else named_templates(tokenizer, options, variables),
        variables=variables,
        stop_ids=ends,
        stop_tokens=tuple(str(tokenizer.convert_ids_to_tokens(end)) for end in ends),
        system=policy if policy not in ("keep", "none") else None,
        reference=reference,
        notes=tuple(notes),
    )
