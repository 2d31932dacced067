"""What is exported: the trained weights, and what else decided the prompts in training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.checkpoint.whole.manifest import MANIFEST_NAME, verify_directory
from trainkit.data.read.messages import Conversation
from trainkit.errors import ModelError
from trainkit.export.certificate import Reference, ask_trained
from trainkit.export.conversations import conversations_of
from trainkit.export.served import release
from trainkit.export.template import named_templates, served_template
from trainkit.infer.engine import Engine, load_engine
from trainkit.infer.locate import ModelPaths, is_trained_on_texts


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
