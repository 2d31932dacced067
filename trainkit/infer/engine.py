"""A loaded model that answers conversations as it was trained to."""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from trainkit.auto_class import empty_model
from trainkit.checkpoint.weights.adapter import is_of_text_alone, vocabulary_rows
from trainkit.checkpoint.weights.base_fingerprint import base_on_disk
from trainkit.checkpoint.weights.reader import refuse_not_finite
from trainkit.checkpoint.whole.manifest import UNPROVED, verify_model
from trainkit.data import DataOptions
from trainkit.data.images import Image
from trainkit.data.masking import MaskFinder
from trainkit.data.messages import Conversation, Message, Row, RowError, TextRow, TokenRow
from trainkit.data.prompt import PromptRenderer, conversation_of
from trainkit.data.template import ChatTemplate
from trainkit.data.vision import NoVision, Vision
from trainkit.errors import CheckpointError, DataError, ModelError
from trainkit.infer.base import pack, prove_base
from trainkit.infer.locate import ModelPaths, run_settings, trained_stop_ids, training_options
from trainkit.infer.sampling import SamplingOptions
from trainkit.models.context import context_of
from trainkit.models.generation import generate_rows
from trainkit.models.linears import not_finite, packed_kind, quantization_config
from trainkit.models.loading import TORCH_DTYPES, device_named, load_model, set_use_cache
from trainkit.models.tokenizer import (
    check_exists,
    check_settings,
    load_config,
    load_tokenizer,
    stop_token_ids,
)
from trainkit.options import LoraOptions, ModelOptions
from trainkit.train.images import vision_of

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
Question = Row | Messages
"""A row without its answer, or OpenAI messages."""


class PromptTooLongError(DataError):
    """A prompt leaves no room for an answer in the model's context."""


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        text: without stop tokens; with the opening of its reasoning where the prompt gave it.
        output_ids: as generated, the stop token included.
        finish: ``stop``, ``length`` (of the answer), ``context`` (the model's was full), or
            ``interrupted``.
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
        vision: Vision | NoVision | None = None,
    ) -> None:
        """Put them together.

        ``stop_ids`` end an answer besides those that the model, the tokenizer and the template
        name.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.options = options or DataOptions()
        self.vision = vision
        self._renderer = PromptRenderer(tokenizer, self.options, vision)
        check_settings(model.generation_config, str(model.config.name_or_path))
        own = model.generation_config.eos_token_id
        ids = [*stop_ids, *_as_list(own), *_as_list(tokenizer.eos_token_id)]
        self.stop_ids = tuple(dict.fromkeys([*ids, *_template_ends(tokenizer, self.options)]))
        self.context = context_of(model.config.to_dict())
        pad = tokenizer.pad_token_id
        self.pad_id: int | None = pad if pad is not None else next(iter(self.stop_ids), None)

    def keep_system_prompts(self) -> None:
        """From now on render the system prompts of conversations, whatever the run did to them."""
        self.options = self.options.replace(system_policy="keep")
        self._renderer = PromptRenderer(self.tokenizer, self.options, self.vision)

    def prompt_ids(self, question: Question) -> list[int]:
        """The token ids of a question with the opening of an answer, as in training."""
        return self._renderer.input_ids(_as_row(question))

    def images(self, question: Question) -> tuple[Image, ...]:
        """Those of a question, in order; what cannot be read or is not taken is refused."""
        return self._renderer.images(_as_row(question))

    def expected(self, conversation: Conversation) -> str:
        """The last turn of a conversation as the model would have to write it."""
        return self._renderer.expected(conversation)

    def check_fit(self, question: Question) -> None:
        """Refuse a question that leaves no room for an answer."""
        length = len(self.prompt_ids(question))
        if self.context is not None and length >= self.context:
            raise PromptTooLongError(
                f"the prompt has {length} tokens; the model's context holds {self.context}, the "
                "answer included"
            )

    def answer(
        self,
        question: Question,
        sampling: SamplingOptions,
        *,
        on_text: Callable[[str], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Answer:
        """Answer one question.

        ``on_text`` is called with each new piece of text; with beams, once at the end.
        """
        self.check_fit(question)
        stream = None
        if on_text is not None and sampling.num_beams == 1:
            stream = TextStream(self.tokenizer, self.stop_ids, on_text)
        (answer,) = self._generate([question], sampling, stream, should_stop)
        if stream is None and on_text is not None:
            on_text(answer.text)
        return answer

    def answer_batch(
        self, questions: Sequence[Question], sampling: SamplingOptions
    ) -> list[Answer]:
        """Answer several questions at once, padded on the left; each of them fits the context."""
        return self._generate(questions, sampling, None, None)

    @torch.inference_mode()
    def top_logprobs(self, answer: Answer, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """At each token of an answer the likeliest tokens, and their log-probabilities.

        They are the model's own, whatever temperature the answer was sampled at.
        """
        ids = torch.tensor([[*answer.input_ids, *answer.output_ids]], device=self.model.device)
        logits = self.model(input_ids=ids).logits[0, len(answer.input_ids) - 1 : -1]
        found = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]))
        values = [[round(value, 5) for value in row] for row in found.values.tolist()]
        return found.indices.tolist(), values

    @torch.inference_mode()
    def next_logits(self, question: Question) -> torch.Tensor:
        """What predicts the first token of an answer: (vocabulary,), float32, on the CPU."""
        ids = torch.tensor([self.prompt_ids(question)], device=self.model.device)
        seen = self._renderer.pixels([_as_row(question)], self.model.device)
        name, token = seen.pop("kinds", (None, 0))
        seen |= {} if name is None else {name: (ids == token).long()}
        logits: torch.Tensor = self.model(input_ids=ids, **seen, use_cache=False).logits[0, -1]
        return logits.float().cpu()

    @torch.inference_mode()
    def _generate(
        self,
        questions: Sequence[Question],
        sampling: SamplingOptions,
        stream: "TextStream | None",
        should_stop: Callable[[], bool] | None,
    ) -> list[Answer]:
        prompts = [self.prompt_ids(question) for question in questions]
        stopping = _StopOnRequest(should_stop)
        criteria: list[StoppingCriteria] = [] if should_stop is None else [stopping]
        with _no_router_losses(self.model.config):
            rows = generate_rows(
                self.model,
                prompts,
                self.pad_id or 0,
                self.context,
                **self._seen(questions, sampling),
                generation_config=sampling.generation_config(
                    self.model.generation_config, self.stop_ids, self.pad_id
                ),
                streamer=stream,
                logits_processor=LogitsProcessorList([_OnlyNumbers()]),
                stopping_criteria=StoppingCriteriaList(criteria),
            )
        triples = zip(questions, prompts, rows, strict=True)
        return [self._answer(q, prompt, ids, stopping.was_requested) for q, prompt, ids in triples]

    def _seen(self, questions: Sequence[Question], sampling: SamplingOptions) -> dict[str, Any]:
        found = self._renderer.pixels([_as_row(each) for each in questions], self.model.device)
        if found and sampling.num_beams > 1:
            raise DataError("beams have not been tried with images", fix="ask with one beam")
        return found

    def _answer(
        self, question: Question, prompt: Sequence[int], ids: Sequence[int], was_stopped: bool
    ) -> Answer:
        room = None if self.context is None else self.context - len(prompt)
        ids = ids[:room]  # behind the end of a full row there is padding
        end = next((i + 1 for i, token in enumerate(ids) if token in self.stop_ids), len(ids))
        is_stopped = end > 0 and ids[end - 1] in self.stop_ids
        spoken = ids[: end - 1] if is_stopped else ids[:end]
        text = str(self.tokenizer.decode(spoken, skip_special_tokens=True))
        row = _as_row(question)
        if isinstance(row, Conversation) and self._renderer.text(row).rstrip().endswith("<think>"):
            text = f"<think>\n{text}"  # the template opened it; the message must hold all of it
        finish = "interrupted" if was_stopped else "context" if len(ids) == room else "length"
        finish = "stop" if is_stopped else finish
        return Answer(text, tuple(prompt), tuple(ids[:end]), finish)


_HALF_CHARACTER = "�"  # what a decoder shows for the first bytes of a character


class TextStream(BaseStreamer):
    """Takes tokens from ``generate`` and gives text to a callback."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Collection[int],
        on_text: Callable[[str], None],
    ) -> None:
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


@contextlib.contextmanager
def _no_router_losses(config: Any) -> Iterator[None]:
    """The routers' auxiliary loss is training's; with a cache, transformers fails to compute it."""
    text = config.get_text_config()
    if not getattr(text, "output_router_logits", False):
        yield
        return
    text.output_router_logits = False
    try:
        yield
    finally:
        text.output_router_logits = True


def load_engine(
    paths: ModelPaths,
    *,
    dtype: str = "auto",
    quantize: str | None = None,
    device: str = "auto",
    system: str | None = None,
    verify: bool = True,
    any_base: bool = False,
    say: Callable[[str], None] = logger.warning,
) -> Engine:
    """Load what ``find_model`` found.

    ``quantize``: ``nf4`` holds the base in 4 bits, ``int8`` in 8, ``fp8`` in 8 what its run had
    so, None as it was saved. ``system`` is the prompt that the caller puts into conversations
    itself; it goes before a system policy of the run.
    """
    place = device_named(device)
    source = paths.source.replace(dtype=dtype)
    of_tokenizer = paths.at(paths.tokenizer)
    for each in (source, of_tokenizer):  # the hub's client would retry for a minute
        check_exists(each, is_model=False)
    if verify:
        verify_files(paths, say)
    check_exists(source)
    stop_token_ids(source)  # a damaged generation_config.json would be passed over
    tokenizer = load_tokenizer(of_tokenizer)
    if paths.adapter is not None:
        prove_base(paths.adapter, source, say, any_base=any_base)
    packing, late, lora = None, False, run_settings(paths.run).lora
    if quantize is not None:
        with contextlib.suppress(OSError):  # codes do not show what they were made of
            refuse_not_finite(base_on_disk(source.name_or_path, source.revision))
        from trainkit.lora.quant import packs_experts

        if lora.quantize != quantize:
            lora = LoraOptions(quantize=quantize)
        empty = empty_model(load_config(source), trust_remote_code=source.trust_remote_code)
        packs = packs_experts(empty, lora)
        late = packed_kind(quantize).convert is not None or packs
        packing = (
            None if late else quantization_config(quantize, TORCH_DTYPES.get(dtype, torch.bfloat16))
        )
    model: Any = load_model(
        source,
        attention=own_attention(source),
        quantization=packing,
        lora=lora,
        device=None if late else place,
        alone=paths.adapter is not None and is_of_text_alone(paths.adapter),
    )
    _refuse_not_finite(model, source)
    if quantize is not None and late:
        model = pack(model, lora, place, paths.run)
    if paths.adapter is not None:
        refuse_not_finite(paths.adapter)
        model = with_adapter(model, paths.adapter)
    model.eval()
    set_use_cache(model.config, True)
    options = DataOptions(**training_options(paths.run))
    if system is not None:
        options = options.replace(system_policy="keep")
    vision = vision_of(source, tokenizer, options.images)
    return Engine(model, tokenizer, options, trained_stop_ids(paths.run), vision)


def with_adapter(model: Any, adapter: Path) -> Any:
    # Only here: peft brings bitsandbytes and torch's compiler, a third of the time of a start.
    from trainkit.lora.adapter import load_adapter

    rows = vocabulary_rows(adapter)
    if rows not in (None, model.get_input_embeddings().weight.shape[0]):
        model.resize_token_embeddings(rows, mean_resizing=False)  # as before training
    return load_adapter(model, adapter)


def verify_files(paths: ModelPaths, say: Callable[[str], None]) -> None:
    """Compare every file that will be read with its manifest, where there is one."""
    directories = (paths.adapter, paths.directory, Path(paths.model).expanduser())
    for directory in dict.fromkeys(path for path in directories if path is not None):
        try:
            known = verify_model(directory)
        except CheckpointError as error:
            fix = "put the files back, or take them as they are with --no-verify"
            raise CheckpointError(error.what, where=error.where, fix=fix) from None
        if known is None and paths.run is not None and directory == paths.directory:
            say(f"{directory} {UNPROVED}")


def _refuse_not_finite(model: Any, source: ModelOptions) -> None:
    wrong = not_finite(model)
    if wrong is None:
        return
    with contextlib.suppress(OSError):  # the file that holds it, where it can be read here
        refuse_not_finite(base_on_disk(source.name_or_path, source.revision))
    raise CheckpointError(
        f"{wrong} is not finite in {str(model.dtype).removeprefix('torch.')}",
        where=source.name_or_path,
        fix="fetch the file again, or hold the weights otherwise: --dtype float32",
    )


class _OnlyNumbers(LogitsProcessor):
    """Stops where the model's numbers overflow: the likeliest of NaNs is token 0."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not scores.amax(-1).isfinite().all():
            raise ModelError(
                "the model answers with numbers that are not finite",
                where=f"token {input_ids.shape[1]}",
                fix="try --dtype float32 or bfloat16; if it stays, the weights or the settings in "
                "config.json are damaged",
            )
        return scores


def own_attention(source: ModelOptions) -> str | None:
    """What keeps the model's own mathematics: transformers' choice for its class, as a rule.

    SDPA knows no cap of the scores and drops it without a word.
    """
    config = load_config(source).get_text_config()
    return "eager" if getattr(config, "attn_logit_softcapping", None) is not None else None


class _StopOnRequest(StoppingCriteria):
    """Asks after each token whether the user has had enough."""

    def __init__(self, should_stop: Callable[[], bool] | None) -> None:
        self._should_stop = should_stop
        self.was_requested = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.was_requested = self._should_stop is not None and self._should_stop()
        return torch.full((input_ids.shape[0],), self.was_requested, device=input_ids.device)


def _as_row(question: Question) -> Row:
    if isinstance(question, Conversation | TextRow | TokenRow):
        return question
    return conversation_of(question)


def _template_ends(tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> list[int]:
    turns = (Message("user", "question"), Message("assistant", "answer"))
    try:
        masked = MaskFinder(ChatTemplate(tokenizer, options)).find(Conversation(turns))
    except (RowError, ModelError):
        return []  # a template that cannot be trained on still makes prompts
    ends = {span.end_of_turn for span in masked.spans if span.end_of_turn is not None}
    return [int(tokenizer.convert_tokens_to_ids(end)) for end in sorted(ends)]


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list | tuple) else [int(value)]
