"""The plain arguments of the data package: which sources, and how to turn them into samples."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from trainkit.data.read.formats import FORMATS
from trainkit.errors import DataError

MaskPolicy = Literal["assistant", "last_assistant", "none"]
Truncation = Literal["drop_turns", "left_turns", "right", "drop", "error"]
Thinking = Literal["template", "split", "preserve"]

MASK_POLICIES: tuple[str, ...] = get_args(MaskPolicy)
TRUNCATIONS: tuple[str, ...] = get_args(Truncation)
THINKING_MODES: tuple[str, ...] = get_args(Thinking)

IGNORE_INDEX = -100
"""The label of a token that is not trained."""

FROZEN_DATE = "2024-07-26"
"""What templates that print today's date print instead, so that the same data gives the same tokens
on every day. It is the date Llama 3.1's own template falls back to."""


@dataclass(frozen=True)
class Source:
    """One data source: a path, and how much of it to use.

    Attributes:
        path: a file, a directory, a glob, a hub name (``org/name`` or ``hf://org/name``); a
            ``#5000`` at the end is the same as ``max_samples=5000``.
        name: the label in summaries and in per-source losses; the path's stem when empty.
        format: a name of ``FORMATS``, or ``auto`` to recognise it by rows.
        split: the split of a hub data set.
        weight: this source's share of the mixture, relative to the other weights. When any source
            has one, all sources count (1.0 where none is given) and an epoch keeps its size; 0
            shows nothing of it.
        max_samples: use this many rows, a stable random choice (not the first ones).
        epochs: how often each row is seen in one training epoch; 0.5 shows half of the rows in one
            epoch and the other half in the next.
        columns: our column name -> the file's column name, where they differ.
        roles: the roles that are trained here; empty means the options' own.
    """

    path: str
    name: str = ""
    format: str = "auto"
    split: str = "train"
    weight: float | None = None
    max_samples: int | None = None
    epochs: float = 1.0
    columns: Mapping[str, str] = field(default_factory=dict)
    roles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.format not in ("auto", *FORMATS):
            raise DataError(
                f"{self.format!r} is not a format; known are auto, {', '.join(FORMATS)}",
                where=self.path,
            )
        if self.weight is not None and not 0 <= self.weight < math.inf:
            raise DataError(f"weight {self.weight} is not a number >= 0", where=self.path)
        if self.max_samples is not None and self.max_samples < 1:
            raise DataError(f"max_samples {self.max_samples} is not at least 1", where=self.path)
        if not 0 < self.epochs < math.inf:
            raise DataError(f"epochs {self.epochs} is not above 0", where=self.path)


@dataclass(frozen=True)
class DataOptions:
    """How rows become samples. All of it, except the last group, enters the cache key.

    Attributes:
        max_length: longest sample, in tokens.
        mask: which turns are trained. ``none`` trains every token (pretraining).
        truncation: what happens to a longer sample. ``drop_turns`` drops whole trailing turns so
            that the last kept one is a finished assistant turn, and the row if not even the first
            exchange fits; ``left_turns`` drops the oldest turns; ``right`` cuts at ``max_length``;
            ``drop`` drops the row; ``error`` stops.
        thinking: ``template`` trains what inference sees (turns whose reasoning the template
            strips are not trained, except the last one); ``split`` makes one sample per assistant
            turn; ``preserve`` keeps all reasoning in place.
        mask_empty_think: do not train an empty ``<think></think>`` that the template adds.
        roles: the roles that are trained.
        system: ``keep`` the rows' system prompts, ``none`` removes them, anything else replaces
            them by this text.
        template_kwargs: extra variables for the chat template, such as ``enable_thinking``.
        chat_template: used instead of the tokenizer's own, which then counts as changed.
        frozen_date: the date (YYYY-MM-DD) given to templates that print today's.
        append_eos: put the tokenizer's eos behind every answer that the template leaves without an
            end-of-turn token.
        escape_special: break up control tokens found inside message text.
        max_row_bytes: longer rows are dropped without being parsed.
        stop_token_ids: what generation stops at, besides the tokenizer's eos (from the model's
            generation_config); an end-of-turn token outside of these is warned about.
        num_embeddings: rows of the model's embedding; a token id beyond them stops the run.
        max_dropped: stop when more rows than this are dropped: a share (0.01), or a count; None
            stops only a run, at 1%.
        num_workers: processes that tokenise; 0 works in this one.
        cache_dir: where prepared data is kept; None means ``$XDG_CACHE_HOME/trainkit/data``.
        seed: chooses the rows of ``max_samples`` and the order of ``mixing``.
    """

    max_length: int = 2048
    mask: MaskPolicy = "assistant"
    truncation: Truncation = "drop_turns"
    thinking: Thinking = "template"
    mask_empty_think: bool = True
    roles: tuple[str, ...] = ("assistant",)
    system: str = "keep"
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    chat_template: str | None = None
    frozen_date: str = FROZEN_DATE
    append_eos: bool = False
    escape_special: bool = True
    max_row_bytes: int = 64 * 2**20
    stop_token_ids: tuple[int, ...] = ()
    num_embeddings: int | None = None
    seed: int = 0

    max_dropped: float | int | None = None
    num_workers: int = 0
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        choices = (
            ("mask", self.mask, MASK_POLICIES),
            ("truncation", self.truncation, TRUNCATIONS),
            ("thinking", self.thinking, THINKING_MODES),
        )
        for key, value, known in choices:
            if value not in known:
                raise DataError(f"{value!r} is not one of {', '.join(known)}", where=f"data.{key}")
        if self.max_length < 2:
            raise DataError(f"max_length {self.max_length} is below 2", where="data.max_length")
