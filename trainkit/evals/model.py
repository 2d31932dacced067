"""A loaded model as the harness asks it, in the words and token ids that training used."""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from trainkit.data.encode import Encoder, threads_of_tokenizers
from trainkit.data.options import DataOptions
from trainkit.data.prompt import PromptRenderer, conversation_of
from trainkit.data.template import THINK_CLOSE, THINK_OPEN, own_template
from trainkit.errors import DataError, ModelError
from trainkit.evals.answers import Prompt, Writer, room_for
from trainkit.evals.likelihood import Pair, Scorer
from trainkit.evals.scores import Ranks

_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""The variables by which chat templates switch thinking."""


@dataclass
class PromptStyle:
    """How prompts are made.

    Attributes:
        tokenizer: with a chat template, where ``chat`` is on.
        chat: render with the chat template; else texts are plain.
        thinking: switch it on or off where the template can; None leaves it as it was trained.
    """

    tokenizer: PreTrainedTokenizerBase
    options: DataOptions = field(default_factory=DataOptions)
    chat: bool = False
    thinking: bool | None = None

    def __post_init__(self) -> None:
        self._keeps_system = self.options.system_policy == "keep"
        self._encoder = Encoder(self.tokenizer)
        self._renderer = PromptRenderer(self.tokenizer, self._switched(self.thinking))
        # A letter that is scored behind the prompt is no place to think.
        self._at_once = PromptRenderer(self.tokenizer, self._switched(False))

    def _switched(self, thinking: bool | None) -> DataOptions:
        if thinking is None or not self.chat:
            return self.options
        template = self.options.chat_template or own_template(self.tokenizer)
        names = [name for name in _THINKING_SWITCHES if name in template]
        if not names and self.thinking:
            raise ModelError(
                "its chat template has no switch for thinking",
                where="--thinking on",
                fix="leave it out: a model that always thinks does so without it",
            )
        kwargs = {**self.options.template_kwargs, **dict.fromkeys(names, thinking)}
        return self.options.replace(template_kwargs=kwargs)

    def text(
        self, messages: Sequence[Mapping[str, Any]], *, is_scored: bool, continues: bool = False
    ) -> str:
        """A conversation up to where the model goes on.

        ``is_scored``: answers are scored behind the prompt, not generated. ``continues``: the last
        message is the beginning of the model's answer.
        """
        renderer = self._at_once if is_scored else self._renderer
        begun = str(messages[-1]["content"]) if continues else ""
        before = list(messages[:-1] if continues else messages)
        rendered = self._rendered(renderer, before)
        if is_scored and rendered.rstrip().endswith(THINK_OPEN):
            rendered = f"{rendered.rstrip()}\n\n{THINK_CLOSE}\n\n"
        return rendered + begun

    def _rendered(self, renderer: PromptRenderer, messages: list[Mapping[str, Any]]) -> str:
        has_system = messages[0]["role"] == "system"
        # A run that sets the system prompt itself would drop a task's description.
        attempts = [messages] if self._keeps_system or not has_system else []
        if has_system:  # its text at the beginning of the first question
            system, first, *rest = messages
            content = f"{system['content'].rstrip()}\n\n{first['content']}"
            attempts.append([{**first, "content": content}, *rest])
        refused: DataError | None = None
        for attempt in attempts:
            try:
                return renderer.text(conversation_of(attempt))
            except DataError as error:
                refused = error
        assert refused is not None
        raise ModelError(
            f"the chat template does not take the task's prompt: {refused.what}",
            fix="--no-chat-template asks in plain text",
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids with one bos where the tokenizer has it, and never an eos behind the text."""
        before, behind = ([], []) if self.chat else self._around
        with threads_of_tokenizers(True):  # nothing is forked here
            encoded = self._encoder.encode(texts, [[]] * len(texts))
        ids = [[*before, *each.input_ids.tolist(), *behind] for each in encoded]
        if self.chat:
            return ids
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        adds = self.tokenizer.num_special_tokens_to_add() > 0
        for each in ids:
            if bos is not None and len(each) > 1 and each[0] == bos == each[1]:
                del each[0]
            if adds and eos is not None and len(each) > 1 and each[-1] == eos:
                del each[-1]
        return ids

    @functools.cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before a text and behind it."""
        plain, whole = (
            self._encoder.encode(["a"], [[]], add_special_tokens=adds)[0].input_ids.tolist()
            for adds in (False, True)
        )
        starts = [at for at in range(len(whole)) if whole[at : at + len(plain)] == plain]
        return whole[: starts[0]], whole[starts[0] + len(plain) :]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Contexts and continuations as the harness splits them: each pair tokenised whole.

        Blanks at the end of a context belong to the continuation.
        """
        split = []
        for context, continuation in pairs:
            kept = context.rstrip()
            split.append((kept, context[len(kept) :] + continuation))
        texts = dict.fromkeys(text for a, b in split for text in (a, a + b) if a)
        ids = dict(zip(texts, self.encode(list(texts)), strict=True))
        return [
            (ids[a], ids[a + b][len(ids[a]) :]) if a else self._unconditional(b) for a, b in split
        ]

    def _unconditional(self, text: str) -> tuple[list[int], list[int]]:
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        prefix = self.prefix_id
        return ([prefix], ids) if ids[0] != prefix else (ids[:1], ids[1:])

    @property
    def prefix_id(self) -> int:
        """What stands before a text without context: bos, or eos where there is none."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return int(bos if bos is not None else eos)


class AskedAsTrained:
    """Goes before a model class of the harness: its prompts become those of training."""

    def ask_with(self, prompts: PromptStyle) -> None:
        self.prompts = prompts
        self.record = PromptRecord()
        self.written: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._is_scored = False

    def prepare_for(self, task: Any) -> None:
        """Know whether a task's answers are scored or written: prompts of the two differ."""
        self._is_scored = task.OUTPUT_TYPE != "generate_until"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as training renders it, up to where the model goes on."""
        return self.prompts.text(
            chat_history, is_scored=self._is_scored, continues=not add_generation_prompt
        )

    def tok_encode(
        self, string: str | list[str], add_special_tokens: bool | None = None, **kwargs: Any
    ) -> Any:
        del add_special_tokens, kwargs
        ids = self.prompts.encode([string] if isinstance(string, str) else string)
        return ids[0] if isinstance(string, str) else ids

    def encode_pairs(self, requests: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
        """Contexts and continuations of requests; they are noted."""
        pairs = self.prompts.encode_pairs([request.args[:2] for request in requests])
        for request, (context, continuation) in zip(requests, pairs, strict=True):
            self.record.add(request, context, continuation)
        return pairs

    def note_written(self, request: Any, text: str, *, is_whole: bool) -> None:
        """Keep all of what was written, which the harness does not see."""
        key = (request.task_name, request.doc_id)
        self.written.setdefault(key, []).append({"text": text, "is_whole": is_whole})


class PromptRecord:
    """A hash of every prompt's token ids, by task: equal hashes, equal prompts."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[str, str]] = {}
        self._last: tuple[Sequence[int], Any] = ((), hashlib.sha256())

    def add(self, request: Any, context: Sequence[int], continuation: Sequence[int] = ()) -> None:
        """Note one request's prompt, a scored continuation included."""
        if context is not self._last[0]:  # answers of one question share it
            self._last = (context, hashlib.sha256(",".join(map(str, context)).encode()))
        whole = self._last[1].copy()
        whole.update("".join(f",{each}" for each in continuation).encode())
        digest = whole.hexdigest()
        key = f"{request.doc_id}.{request.idx}"
        self.hashes.setdefault(str(request.task_name), {})[key] = digest

    @staticmethod
    def joined(records: Sequence[Mapping[str, Mapping[str, str]]]) -> dict[str, str]:
        """One hash a task, from the records of all ranks."""
        whole: dict[str, dict[str, str]] = {}
        for record in records:
            for task, hashes in record.items():
                whole.setdefault(task, {}).update(hashes)
        return {
            task: hashlib.sha256(
                "\n".join(f"{key} {each}" for key, each in sorted(hashes.items())).encode()
            ).hexdigest()
            for task, hashes in whole.items()
        }


MAX_NEW_TOKENS = 256
"""Where a task does not say; the harness's own."""


class TrainedModel(AskedAsTrained, TemplateLM):
    """A loaded model for `lm_eval.evaluate`."""

    def __init__(
        self,
        model: Any,
        prompts: PromptStyle,
        *,
        stop_ids: Sequence[int],
        max_length: int,
        batch_size: int | None = None,
        max_new_tokens: int | None = None,
        shares_beginnings: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = prompts.tokenizer
        self.ask_with(prompts)
        self._model = model
        self._max_length = max_length
        self._max_new_tokens = max_new_tokens
        self._ranks = ranks or Ranks()
        self._rank, self._world_size = self._ranks.rank, self._ranks.size
        self._device = torch.device("cpu")  # of what the harness gathers
        pad = prompts.tokenizer.pad_token_id
        self._scorer = Scorer(
            model,
            max_length=max_length,
            pad_id=int(pad if pad is not None else prompts.prefix_id),
            batch_size=batch_size,
            shares_beginnings=shares_beginnings,
        )
        self._writer = Writer(
            model,
            prompts.tokenizer,
            stop_ids=stop_ids,
            max_length=max_length,
            batch_size=batch_size,
        )

    @property
    def num_truncated(self) -> int:
        """Prompts that lost their beginning because the context is too short."""
        return self._scorer.num_truncated + self._writer.num_truncated

    # -- prompts ------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's cache, which is not used."""
        return str(self.prompts.tokenizer.name_or_path).replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        return int(self.prompts.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        return self.prompts.prefix_id

    # -- requests -----------------------------------------------------------------------------

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """How likely each continuation is, and whether greedy decoding would write it."""
        del disable_tqdm
        pairs = self.encode_pairs(requests)
        return self._loglikelihood_tokens([(("", ""), *pair) for pair in pairs])

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        scored = self._scorer.score([(tuple(one), tuple(other)) for _, one, other in requests])
        if any(math.isnan(log_probability) for log_probability, _ in scored):
            raise ModelError(
                "the model scores with numbers that are not finite",
                where=self.tokenizer_name,
                fix="try --dtype float32 or bfloat16",
            )
        return scored

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of whole texts, in windows of the model's context."""
        del disable_tqdm
        pairs: list[Pair] = []
        counts = []
        for request in requests:
            ids = self.prompts.encode([request.args[0]])[0]
            self.record.add(request, ids)
            windows = get_rolling_token_windows(
                token_list=ids,
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length,
                context_len=1,
            )
            before = len(pairs)
            pairs += [(tuple(a), tuple(b)) for a, b in map(make_disjoint_window, windows)]
            counts.append(len(pairs) - before)
        scored = iter(self._scorer.score(pairs))
        return [sum(log for log, _ in islice(scored, count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, read behind their thoughts and up to the first text that ends them."""
        del disable_tqdm
        ids = self.prompts.encode([request.args[0] for request in requests])
        eos = self.prompts.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        todo = []
        for request, own in zip(requests, ids, strict=True):
            self.record.add(request, own)
            todo.append(self._prompt(request.args[0], own, request.args[1], str(eos)))
        answers = self._writer.write(todo)
        for request, answer in zip(requests, answers, strict=True):
            self.note_written(request, answer.text, is_whole=answer.is_whole)
        return [answer.answer for answer in answers]

    def _prompt(self, text: str, ids: list[int], settings: Mapping[str, Any], eos: str) -> Prompt:
        plain = dict(normalize_gen_kwargs(dict(settings), MAX_NEW_TOKENS))
        stops = handle_stop_sequences(plain.pop("until", None), eos=eos)
        max_new_tokens = int(plain.pop("max_gen_toks"))
        plain.pop("max_length", None)
        opens = text.rstrip().endswith(THINK_OPEN)
        thinks = opens or bool(self.prompts.thinking)
        room = room_for(max_new_tokens, thinks=thinks, max_length=self._max_length)
        return Prompt(tuple(ids), tuple(stops), self._max_new_tokens or room, plain, opens)

    # -- ranks --------------------------------------------------------------------------------

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """As if all ranks had as many requests: the harness would fill up, which nobody needs."""
        return torch.stack([torch.as_tensor(tensor)] * self._ranks.size)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """A value of every rank, on one of them."""
        found = self._ranks.gather(obj)
        return found if self._rank == dst else None

    def barrier(self) -> None:
        """Wait for nobody: the ranks meet when they gather what they found."""
