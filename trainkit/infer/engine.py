"""A loaded model that answers conversations as it was trained to."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from trainkit.checkpoint.adapter import vocabulary_rows
from trainkit.checkpoint.manifest import verify_model
from trainkit.data import DataOptions, PromptRenderer
from trainkit.data.masking import MaskFinder
from trainkit.data.messages import RowError
from trainkit.data.template import ChatTemplate
from trainkit.errors import CheckpointError
from trainkit.infer.base_proof import prove_base
from trainkit.infer.place import ModelPlace, trained_stop_ids, training_options
from trainkit.infer.sampling import SamplingOptions
from trainkit.infer.stream import TextStream
from trainkit.lora.adapter import load_adapter
from trainkit.lora.quant import quantization_config
from trainkit.train.loading import (
    DTYPES,
    ModelSource,
    check_exists,
    load_config,
    load_model,
    load_tokenizer,
)

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        text: without stop tokens; with the opening of its reasoning where the prompt gave it.
        input_ids: of the prompt.
        output_ids: as generated, the stop token included.
        finish: ``stop``, ``length``, or ``interrupted``.
    """

    text: str
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish: str


class Engine:
    """A model, its tokenizer, its prompts and its stop tokens."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        """Put them together.

        Args:
            model: a transformers or peft model, in evaluation mode.
            tokenizer: with a chat template.
            options: how training rendered conversations; the defaults otherwise.
            stop_ids: tokens that end an answer, besides those that the model, the tokenizer and
                the chat template name.

        Raises:
            ModelError: the tokenizer has no chat template.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.options = options or DataOptions()
        self._renderer = PromptRenderer(tokenizer, self.options)
        own = model.generation_config.eos_token_id
        ids = [*stop_ids, *_as_list(own), *_as_list(tokenizer.eos_token_id)]
        self.stop_ids = tuple(dict.fromkeys([*ids, *_template_ends(tokenizer, self.options)]))
        pad = tokenizer.pad_token_id
        self.pad_id: int | None = pad if pad is not None else next(iter(self.stop_ids), None)

    def keep_system_prompts(self) -> None:
        """From now on render the system prompts of conversations, whatever the run did to them."""
        self.options = replace(self.options, system="keep")
        self._renderer = PromptRenderer(self.tokenizer, self.options)

    def prompt_ids(self, messages: Messages) -> list[int]:
        """The token ids of a conversation with the opening of an answer, as in training.

        Raises:
            DataError: the messages are not well formed.
        """
        return self._renderer.input_ids(messages)

    def answer(
        self,
        messages: Messages,
        sampling: SamplingOptions,
        *,
        on_text: Callable[[str], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Answer:
        """Answer one conversation.

        Args:
            messages: the last one is usually the user's.
            sampling: how to choose tokens.
            on_text: called with each new piece of text; with beams, once at the end.
            should_stop: asked after each token.
        """
        stream = None
        if on_text is not None and sampling.num_beams == 1:
            stream = TextStream(self.tokenizer, self.stop_ids, on_text)
        (answer,) = self._generate([list(messages)], sampling, stream, should_stop)
        if stream is None and on_text is not None:
            on_text(answer.text)
        return answer

    def answer_batch(
        self, conversations: Sequence[Messages], sampling: SamplingOptions
    ) -> list[Answer]:
        """Answer several conversations at once, padded on the left."""
        return self._generate(conversations, sampling, None, None)

    @torch.inference_mode()
    def _generate(
        self,
        conversations: Sequence[Messages],
        sampling: SamplingOptions,
        stream: TextStream | None,
        should_stop: Callable[[], bool] | None,
    ) -> list[Answer]:
        prompts = [self.prompt_ids(messages) for messages in conversations]
        width = max(map(len, prompts))
        device = self.model.device
        input_ids = torch.full((len(prompts), width), self.pad_id or 0, device=device)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
            attention_mask[row, width - len(prompt) :] = 1
        asked = _AskToStop(should_stop)
        output = self.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=sampling.generation_config(
                self.model.generation_config, self.stop_ids, self.pad_id
            ),
            streamer=stream,
            stopping_criteria=StoppingCriteriaList([asked] if should_stop is not None else []),
        )
        rows = output[:, width:].tolist()
        pairs = zip(conversations, prompts, rows, strict=True)
        return [self._answer(m, prompt, ids, asked.was_asked) for m, prompt, ids in pairs]

    def _answer(
        self, messages: Messages, prompt: Sequence[int], ids: Sequence[int], was_asked: bool
    ) -> Answer:
        end = next((i + 1 for i, token in enumerate(ids) if token in self.stop_ids), len(ids))
        is_stopped = end > 0 and ids[end - 1] in self.stop_ids
        spoken = ids[: end - 1] if is_stopped else ids[:end]
        text = str(self.tokenizer.decode(spoken, skip_special_tokens=True))
        if self._renderer.text(messages).rstrip().endswith("<think>"):
            text = f"<think>\n{text}"  # the template opened it; the message must hold it whole
        finish = "stop" if is_stopped else "interrupted" if was_asked else "length"
        return Answer(text, tuple(prompt), tuple(ids[:end]), finish)


def load_engine(
    place: ModelPlace,
    *,
    dtype: str = "auto",
    quantize: str | None = None,
    device: str = "auto",
    system: str | None = None,
    verify: bool = True,
    any_base: bool = False,
    say: Callable[[str], None] = logger.warning,
) -> Engine:
    """Load what ``find_place`` found.

    Args:
        place: model, adapter and tokenizer.
        dtype: of the weights in memory: bfloat16, float16, float32, or auto (as saved).
        quantize: ``nf4`` to load the base in 4 bits, as a QLoRA run did.
        device: ``cpu``, ``cuda``, ``cuda:1``, or auto.
        system: the system prompt that the caller puts into conversations itself; it goes before a
            system policy of the run.
        verify: compare the files with the manifests that trainkit wrote beside them.
        any_base: put an adapter over other weights than those that it was trained over.
        say: told in a line what could not be compared.

    Raises:
        ModelError: something cannot be loaded.
        CheckpointError: files were altered, or the adapter belongs to another base.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in (place.model, place.tokenizer):
        check_exists(ModelSource(name))  # the hub's client would retry for a minute
    if verify:
        _verify(place)
    if place.adapter is not None:
        prove_base(place.adapter, place.model, say, any_base=any_base)
    tokenizer = load_tokenizer(ModelSource(place.tokenizer))
    packing = None
    if quantize is not None:
        packing = quantization_config(quantize, DTYPES.get(dtype, torch.bfloat16))
    model = load_model(
        ModelSource(place.model, dtype=dtype),
        attention=_attention(place.model),
        quantization=packing,
        device=torch.device(device),
    )
    if place.adapter is not None:
        rows = vocabulary_rows(place.adapter)
        if rows not in (None, model.get_input_embeddings().weight.shape[0]):
            model.resize_token_embeddings(rows, mean_resizing=False)  # as before training
        model = load_adapter(model, place.adapter)
    model.eval()
    model.config.use_cache = True
    options = DataOptions(**training_options(place.run))
    if system is not None:
        options = replace(options, system="keep")
    return Engine(model, tokenizer, options, trained_stop_ids(place.run))


def _verify(place: ModelPlace) -> None:
    """Compare every file that will be read with its manifest, where there is one."""
    places = (place.adapter, place.directory, Path(place.model).expanduser())
    for directory in dict.fromkeys(path for path in places if path is not None):
        try:
            verify_model(directory)
        except CheckpointError as error:
            fix = "put the files back, or take them as they are with --no-verify"
            raise CheckpointError(error.what, where=error.where, fix=fix) from None


def _attention(name: str) -> str | None:
    """What keeps the model's own mathematics: transformers' choice for its class, as a rule.

    SDPA knows no cap of the scores and drops it without a word.
    """
    config = load_config(ModelSource(name)).get_text_config()
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "eager" if is_capped else None


class _AskToStop(StoppingCriteria):
    """Asks after each token whether the user has had enough."""

    def __init__(self, should_stop: Callable[[], bool] | None) -> None:
        self._should_stop = should_stop
        self.was_asked = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.was_asked = self._should_stop is not None and self._should_stop()
        return torch.full((input_ids.shape[0],), self.was_asked, device=input_ids.device)


def _template_ends(tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> list[int]:
    """The tokens with which the chat template ends an answer."""
    from trainkit.data.messages import Conversation, Message

    turns = (Message("user", "question"), Message("assistant", "answer"))
    try:
        masked = MaskFinder(ChatTemplate(tokenizer, options)).find(Conversation(turns))
    except RowError:
        return []  # a template that cannot be trained on still makes prompts
    ends = {span.end_of_turn for span in masked.spans if span.end_of_turn is not None}
    return [int(tokenizer.convert_tokens_to_ids(end)) for end in sorted(ends)]


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list | tuple) else [int(value)]
