"""What is exported: the trained weights, and what else decided the prompts in training."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trainkit.checkpoint.merge.merge import own_base
from trainkit.checkpoint.whole.manifest import MANIFEST_NAME, verify_directory
from trainkit.data import DataOptions
from trainkit.data.messages import Conversation
from trainkit.data.template import ChatTemplate, freeze_dates
from trainkit.data.vision import NoVision, Vision
from trainkit.errors import ModelError
from trainkit.export.certificate import (
    MIN_AGREEMENT,
    Reference,
    Served,
    ask_trained,
    certify,
    released,
)
from trainkit.export.conversations import Prompt, conversations_of, made_pictures
from trainkit.infer.engine import load_engine
from trainkit.infer.locate import ModelPaths, is_trained_on_texts, run_settings
from trainkit.options import LoraOptions

# -- The chat template as a server needs it: with what the recipe added to it written into it
# A server knows the template and the messages. What else decided a prompt in training (a frozen
# date, variables of the recipe, one system prompt for all) would be lost, so it becomes part of
# the text.


_NOTHING = '{{ "" }}'  # keeps Jinja from trimming the template's own first line break


def served_template(
    tokenizer: PreTrainedTokenizerBase, options: DataOptions, free: Collection[str] = ()
) -> str:
    """The template that renders plain messages as training rendered them.

    ``free`` are variables that rows of the run set otherwise, so that a request may, too. The
    others are fixed: llama.cpp's server gives ``enable_thinking`` to every template.
    """
    template = ChatTemplate(tokenizer, options)
    text = freeze_dates(template.text)
    start = ""
    for name, value in template.kwargs.items():
        setting = f"{{%- set {name} = {_literal(value)} -%}}"
        if name in free:  # a request may say otherwise
            setting = f"{{%- if {name} is not defined -%}}{setting}{{%- endif -%}}"
        start += setting
    if options.system_policy not in ("keep", "none"):
        first = f"[{{'role': 'system', 'content': {_literal(options.system_policy)}}}]"
        start += (
            "{%- if messages[0]['role'] != 'system' -%}"
            f"{{%- set messages = {first} + messages -%}}{{%- endif -%}}"
        )
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


def _literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Source:
    """A trained model that is about to be exported.

    Attributes:
        quantize: how its base was packed in training, or None.
        compute_dtype: what a packed base was unpacked to, or None.
        template: what the server gets; None for a model of plain texts.
        named_templates: the tokenizer's others, such as ``tool_use``, which servers take for
            conversations with tools.
        variables: of the template, with their defaults, that rows of the run set otherwise.
        stop_ids: tokens that end an answer, the trained ones first.
        pictures: logits of the first token of answers to `made_pictures`, where the model sees.
        picture_tokens: of the longest of their prompts.
        limits: the fewest and the most tokens of an image, where its size decides how many.
    """

    paths: ModelPaths
    quantize: str | None
    lora: LoraOptions
    compute_dtype: str | None
    template: str | None
    named_templates: Mapping[str, str]
    variables: Mapping[str, Any]
    stop_ids: tuple[int, ...]
    stop_tokens: tuple[str, ...]
    reference: Reference
    notes: tuple[str, ...]
    pictures: Tensor | None = None
    picture_tokens: int = 0
    limits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """What the command line says.

    Attributes:
        out: where the result will be; nothing is written there directly.
        dtype: of a plain model's weights; None keeps each tensor's own.
        excepted: kinds of conversations whose prompts may differ from training's.
        min_agreement: the share of greedy tokens that must agree; None is 99% for plain weights,
            and stated only for quantised ones.
    """

    out: Path
    say: Callable[[str], None]
    name: str = "model"
    type: str = "f16"
    dtype: str | None = None
    as_adapter: bool = False
    any_base: bool = False
    excepted: tuple[str, ...] = ()
    system: str | None = None
    min_agreement: float | None = None

    def certify(
        self, source: Source, served: Served, *notes: str, is_quantized: bool
    ) -> dict[str, Any]:
        required = self.min_agreement
        if required is None and not is_quantized:
            required = MIN_AGREEMENT
        return certify(
            source.reference, served, required=required, excepted=self.excepted, notes=notes
        )


@dataclass(frozen=True)
class Written:
    """What a target has written."""

    certificate: Mapping[str, Any]
    command: str
    notes: Sequence[str] = ()


def open_source(
    paths: ModelPaths, any_base: bool, say: Callable[[str], None], *, shows_pictures: bool = False
) -> Source:
    """Load the trained model, ask it what the export will be asked, and let go of it."""
    for directory in (paths.directory, paths.adapter):
        if directory is not None and (directory / MANIFEST_NAME).exists():
            verify_directory(directory)
    say("asking the trained model")
    held = run_settings(paths.run)
    quantize = held.quantize if paths.adapter is not None else None
    is_packed = own_base(quantize) == "dequantized"
    with released():
        engine = load_engine(
            paths,
            dtype="auto" if is_packed else "float32",
            quantize=quantize if is_packed else None,
            any_base=any_base,
            say=say,
        )
        is_text = is_trained_on_texts(paths.run) or not engine.tokenizer.chat_template
        prompts = conversations_of(paths.run, engine, is_text=is_text)
        if not prompts:
            raise ModelError(
                "the chat template renders none of the conversations that it was tried on",
                where=paths.tokenizer,
            )
        reference = ask_trained(engine, prompts, has_adapter=paths.adapter is not None)
        sees = shows_pictures and isinstance(engine.vision, Vision) and not is_text
        made = made_pictures() if sees else []
        pictures = torch.stack([engine.next_logits(row) for row in made]) if made else None
        picture_tokens = max((len(engine.prompt_ids(row)) for row in made), default=0)
        limits = _limits(engine.vision) if made else ()
        blind = engine.vision.why if isinstance(engine.vision, NoVision) else None
        options, tokenizer, ends = engine.options, engine.tokenizer, engine.stop_ids
        del engine
    rows = [prompt.row for prompt in prompts if isinstance(prompt.row, Conversation)]
    set_by_rows = {name for row in rows for name in row.template_kwargs}
    variables = {k: v for k, v in options.template_kwargs.items() if k in set_by_rows}
    return Source(
        paths=paths,
        quantize=quantize,
        lora=held.lora,
        compute_dtype=held.dtype if held.dtype != "auto" else None,
        template=None if is_text else served_template(tokenizer, options, variables),
        named_templates={} if is_text else named_templates(tokenizer, options, variables),
        variables=variables,
        stop_ids=ends,
        stop_tokens=tuple(str(tokenizer.convert_ids_to_tokens(end)) for end in ends),
        reference=reference,
        notes=tuple(_notes(prompts, options.system_policy, quantize, blind)),
        pictures=pictures,
        picture_tokens=picture_tokens,
        limits=limits,
    )


def _limits(vision: Any) -> tuple[int, ...]:
    if vision.family.processor != "patches":
        return ()
    images = vision.images
    each = (images.patch_size * images.merge_size) ** 2
    sizes = (images.size["shortest_edge"], images.size["longest_edge"])
    return tuple(max(size // each, 1) for size in sizes)


def _notes(
    prompts: Sequence[Prompt], policy: str, quantize: str | None, blind: str | None
) -> Iterator[str]:
    if blind is not None:
        yield f"no picture was shown to it: {blind}"
    if all(prompt.id.startswith("made:") for prompt in prompts):
        yield "the run's own data was not at hand; the conversations were made"
    if policy == "none":
        yield "the run removed system prompts: what a system prompt does was not trained"
    elif policy != "keep":
        yield "the run gave every conversation one system prompt; it is in the template"
    if own_base(quantize) == "dequantized":
        bits = 4 if quantize == "nf4" else 8
        yield f"trained over a base in {bits} bits; merged into its weights as training saw them"
