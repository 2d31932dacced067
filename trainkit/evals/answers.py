"""Texts that a model writes: in batches, stopped row by row, read behind its thoughts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from trainkit.data.template import THINK_CLOSE, THINK_OPEN
from trainkit.models.generation import generate_rows

GPU_TOKENS, CPU_TOKENS = 65536, 8192
"""Tokens of a batch, those to be written included."""

_CLOSE_TOKENS = 16
"""The end of thoughts is written in at most so many tokens."""

THINKING_TOKENS = 8192
"""Room for an answer of a model that thinks, where the context has it: a task's own few hundred
would end in the middle of its thoughts."""


@dataclass(frozen=True)
class Prompt:
    """What is to be answered.

    Attributes:
        ids: token ids; the first are left out where the model's context is too short.
        stops: texts that end the answer.
        settings: how tokens are chosen, in transformers' words; empty is greedily.
        thinks: the prompt ends within thoughts.
    """

    ids: tuple[int, ...]
    stops: tuple[str, ...] = ()
    max_new_tokens: int = 256
    settings: Mapping[str, Any] = field(default_factory=dict)
    thinks: bool = False

    @property
    def manner(self) -> tuple[Any, ...]:
        """What all prompts of a batch have alike."""
        return self.stops, self.max_new_tokens, str(self.settings), self.thinks


@dataclass(frozen=True)
class Written:
    """What a model has written.

    Attributes:
        answer: what counts: after the thoughts, before the first stop.
        is_whole: it came to an end, and out of its thoughts.
    """

    answer: str
    text: str
    is_whole: bool


class Writer:
    """Answers prompts with a causal language model in evaluation mode."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: Sequence[int],
        max_length: int,
        batch_size: int | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._stop_ids = tuple(stop_ids)
        self._max_length = max_length
        self._batch_size = batch_size
        pad = tokenizer.pad_token_id
        self._pad_id = int(pad if pad is not None else next(iter(stop_ids), 0))
        self._budget = GPU_TOKENS if model.device.type == "cuda" else CPU_TOKENS
        self.num_truncated = 0

    @torch.no_grad()
    def write(self, prompts: Sequence[Prompt]) -> list[Written]:
        """Answer prompts, in their order; a batch that does not fit is tried again in halves."""
        found: dict[int, Written] = {}
        fitted = [self._fitted(prompt) for prompt in prompts]
        places = range(len(fitted))
        waiting = sorted(places, key=lambda at: (fitted[at].manner, -len(fitted[at].ids)))
        while waiting:
            first = fitted[waiting[0]]
            most = max(self._budget // (len(first.ids) + first.max_new_tokens), 1)
            most = min(most, self._batch_size or most)
            batch = [at for at in waiting[:most] if fitted[at].manner == first.manner]
            try:
                written = self._batch([fitted[at] for at in batch])
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                torch.cuda.empty_cache()
                self._budget //= 2
                continue
            found.update(zip(batch, written, strict=True))
            waiting = waiting[len(batch) :]
        return [found[place] for place in places]

    def _fitted(self, prompt: Prompt) -> Prompt:
        """A prompt that leaves room for its answer: at most half of the context."""
        room = min(prompt.max_new_tokens, self._max_length // 2)
        length = self._max_length - room
        self.num_truncated += len(prompt.ids) > length
        return replace(prompt, ids=prompt.ids[-length:], max_new_tokens=room)

    def _batch(self, prompts: Sequence[Prompt]) -> list[Written]:
        first, ids = prompts[0], [prompt.ids for prompt in prompts]
        stop = _StopAtTexts(self._tokenizer, first.stops, max(map(len, ids)), first.thinks)
        rows = generate_rows(
            self._model,
            ids,
            self._pad_id,
            generation_config=self._config(first),
            stopping_criteria=StoppingCriteriaList([stop] if first.stops else []),
        )
        return [self._read(row, first) for row in rows]

    def _config(self, prompt: Prompt) -> Any:
        own = self._model.generation_config
        config = type(own).from_dict(own.to_dict())
        settings = dict(prompt.settings)
        # As the harness has it: a temperature of 0 is greedy, whatever else is said.
        is_sampled = bool(settings.pop("do_sample", False)) and settings.get("temperature") != 0
        if not is_sampled:
            settings = {"temperature": None, "top_p": None, "top_k": None}
        config.update(
            **settings,
            do_sample=is_sampled,
            num_beams=1,
            repetition_penalty=1.0,
            max_length=None,
            max_new_tokens=prompt.max_new_tokens,
            eos_token_id=list(self._stop_ids) or None,
            pad_token_id=self._pad_id,
            use_cache=True,
        )
        return config

    def _read(self, ids: Sequence[int], prompt: Prompt) -> Written:
        end = next((at for at, token in enumerate(ids) if token in self._stop_ids), len(ids))
        text = str(self._tokenizer.decode(ids[:end], skip_special_tokens=False))
        is_thinking, answer = after_thinking(text, thinks=prompt.thinks)
        if not is_thinking and THINK_CLOSE not in text:
            answer = str(self._tokenizer.decode(ids[:end], skip_special_tokens=True))
        else:
            for token in self._tokenizer.all_special_tokens:
                answer = answer.replace(str(token), "")
        cut = _first_stop(answer, prompt.stops)
        is_ended = end < len(ids) or cut is not None
        return Written(answer[:cut], text, is_ended and not is_thinking)


def after_thinking(text: str, *, thinks: bool) -> tuple[bool, str]:
    """Whether a text ends within thoughts, and what it says after them.

    ``thinks``: the prompt has opened the thoughts.
    """
    opened = thinks or text.lstrip().startswith(THINK_OPEN)
    if THINK_CLOSE in text:
        return False, text.rpartition(THINK_CLOSE)[2].lstrip()
    return (True, "") if opened else (False, text)


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    places = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return min(places) if places else None


class _StopAtTexts(StoppingCriteria):
    """Ends each row of a batch at the first stop text behind its thoughts."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], width: int, thinks: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._width = width
        self._thinks = thinks
        # A token is a byte at least; a stop may begin inside of the one before.
        self._tail = max((len(stop.encode()) for stop in self._stops), default=0) + 8
        self._thinking: dict[int, bool] = {}

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        new = input_ids[:, self._width :].tolist()
        done = [self._is_done(row, ids) for row, ids in enumerate(new)]
        return torch.tensor(done, device=input_ids.device)

    def _is_done(self, row: int, ids: list[int]) -> bool:
        thinking = self._thinking.get(row, True if self._thinks else None)
        if thinking is None:
            begun = str(self._tokenizer.decode(ids)).lstrip()
            if begun and THINK_OPEN.startswith(begun[: len(THINK_OPEN)]):
                if len(begun) < len(THINK_OPEN):
                    return False  # this may become the opening of thoughts
                thinking = True
            elif begun:
                thinking = False
        if thinking and THINK_CLOSE not in str(self._tokenizer.decode(ids[-_CLOSE_TOKENS:])):
            self._thinking[row] = True
            return False
        if thinking is not None:
            self._thinking[row] = False
        text = str(self._tokenizer.decode(ids[-self._tail :]))
        if THINK_CLOSE in text:
            text = text.rpartition(THINK_CLOSE)[2].lstrip()
        return _first_stop(text, self._stops) is not None


def room_for(max_new_tokens: int, *, thinks: bool, max_length: int) -> int:
    """Tokens for an answer: more for one that is thought about."""
    if not thinks:
        return max_new_tokens
    return min(max(max_new_tokens, THINKING_TOKENS), math.ceil(max_length / 2))
