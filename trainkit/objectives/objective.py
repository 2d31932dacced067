"""What an objective is: the rows it takes, their batches, the loss on a model, the figures.

The loop knows these three classes and no objective by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from trainkit.auto_class import without_adapters
from trainkit.data.datasets import PreparedData
from trainkit.options import DistillOptions, EaftOptions, PreferenceOptions
from trainkit.options.data import IGNORE_INDEX

if TYPE_CHECKING:
    from trainkit.data.streaming import SampleStream
    from trainkit.data.vision import NoVision, Vision


@dataclass(frozen=True)
class RowShape:
    """The rows of a batch.

    Attributes:
        max_length: tokens of a packed row, padding included; of a sample, at most.
        sources: what to call each source in the log, where their losses are kept apart.
        vision: how the model takes images, or why none are read for it; None of a model of text.
        shares_prompts: answers to a prompt that follow one another have it once.
    """

    max_length: int
    pad_token_id: int
    packing: bool
    sources: tuple[str, ...] = ()
    multiple: int = 1
    vision: Vision | NoVision | None = None
    shares_prompts: bool = False


@dataclass(frozen=True)
class LossSetup:
    """What a loss is made from.

    Attributes:
        model: what is trained, not wrapped yet.
        takes_num_items: its class divides a sum of losses by a number that it is given
            (transformers' ``accepts_loss_kwargs``).
        chunk_tokens: tokens whose logits exist at a time; None is the kernel's default.
        keeps_gradient: a second backward pass through the loss must be right.
        train_sources, eval_sources: the sources kept apart; empty where they are not.
        preference: how answers are compared; None where the recipe does not say.
        distill: how a teacher is learnt from, likewise.
        eaft: how tokens are weighed by entropy, likewise.
        teacher: the model that is learnt from, or compared with; None where none is at hand.
    """

    model: nn.Module
    takes_num_items: bool
    label_smoothing: float = 0.0
    chunk_tokens: int | None = None
    keeps_gradient: bool = True
    train_sources: tuple[str, ...] = ()
    eval_sources: tuple[str, ...] = ()
    preference: PreferenceOptions | None = None
    distill: DistillOptions | None = None
    eaft: EaftOptions | None = None
    teacher: nn.Module | None = None
    router_aux_loss: float | None = None
    router_z_loss: float = 0.0


@dataclass(frozen=True)
class Step:
    """Which part of an optimizer step a micro-batch is.

    Attributes:
        num_items: what the step's losses are divided by, over all micro-batches and ranks.
        num_ranks: that share ``num_items``; DDP and ZeRO average gradients over them.
        trainer_divides: Trainer divides the returned loss by ``num_micro_batches``.
        trainer_loss: transformers' own ``compute_loss`` of (model, inputs, num_items): the loss
            that the model returns, times ``num_ranks`` where it took the number; and its outputs.
        total: what the ranks that share ``num_items`` have of a sum, together.
    """

    num_items: torch.Tensor | int | None
    num_micro_batches: int
    num_ranks: int
    trainer_divides: bool
    trainer_loss: Callable[
        [nn.Module, dict[str, Any], torch.Tensor | int | None], tuple[torch.Tensor, Any]
    ]
    total: Callable[[torch.Tensor], torch.Tensor] = lambda mine: mine

    def share(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """What ``Loss.training`` returns for a sum of losses: its part of the step's mean."""
        if self.num_items is None:
            raise ValueError("nobody has counted what the step's losses are divided by")
        # A step in which nothing counts has a loss of 0 with gradients attached, not NaN.
        num_items = torch.as_tensor(self.num_items, device=loss_sum.device).clamp(min=1)
        loss = loss_sum * (self.num_ranks / num_items)
        return loss * self.num_micro_batches if self.trainer_divides else loss


@dataclass(frozen=True)
class EvaluatedBatch:
    """The losses of an evaluation batch.

    Attributes:
        loss_sum: 0-d, over the items of the batch.
    """

    loss_sum: torch.Tensor


class Metrics(Protocol):
    """Figures besides the loss, summed on the device until a row is logged.

    Attributes:
        sums: float64 since the last `take`, any shape; None before a batch.
    """

    sums: torch.Tensor | None

    def take(self, device: torch.device) -> torch.Tensor:
        """The sums since the last call, on ``device``, always of the same size."""

    def rows(self, sums: Sequence[float], prefix: str = "") -> dict[str, float]:
        """What the log says: key to value, from the ranks' summed and flattened sums."""


class Sums:
    """Sums on the device since the last `take`, as `Metrics` have them."""

    shape: tuple[int, ...]
    sums: torch.Tensor | None = None

    def put(self, found: torch.Tensor) -> None:
        self.sums = found if self.sums is None else self.sums + found

    def take(self, device: torch.device) -> torch.Tensor:
        """Of ``shape``; zeros if there was no batch."""
        sums, self.sums = self.sums, None
        return torch.zeros(self.shape, dtype=torch.float64, device=device) if sums is None else sums


class Loss(Protocol):
    """An objective at work on one model."""

    @property
    def train_metrics(self) -> Metrics | None:
        """Figures of training; `training` adds to them."""

    @property
    def eval_metrics(self) -> Metrics | None:
        """Figures of an evaluation; `evaluate` adds to them."""

    def num_items(self, batch: dict[str, Any], num_trained_tokens: int) -> int:
        """How many items the mean over a batch is taken of; called once, before it is moved.

        Args:
            batch: from the collator; what the loss needs besides may be put into it.
            num_trained_tokens: labels in it.
        """

    def training(
        self, model: nn.Module, inputs: dict[str, Any], step: Step
    ) -> tuple[torch.Tensor, Any]:
        """A micro-batch's part of the step's loss (`Step.share`), and the model's outputs."""

    def evaluate(self, model: nn.Module, inputs: dict[str, Any], num_items: int) -> EvaluatedBatch:
        """The losses of an evaluation batch; without gradients."""


class Ahead(Loss, Protocol):
    """A loss that must know something of a whole step before the first gradient of it.

    Attributes:
        seen: the sum of what `ahead` has said of the step's micro-batches, over all ranks.
    """

    seen: torch.Tensor | None

    def ahead(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """What is added up, of a micro-batch on the device; without gradients."""


@dataclass(frozen=True)
class Objective:
    """One row of the table: what is optimised.

    Attributes:
        format: its row in ``OBJECTIVE_FORMATS``; None takes what is not in there.
        packs: it can train on rows of several samples.
        streams: it can train on samples straight from their files.
        num_together: samples that belong together, so a packed row is so many times as long.
        looks_ahead: its loss is an `Ahead`.
        scalar_head: the model gets a head that gives a text a number.
        splits_rows: several ranks can share a row: its loss is a sum over tokens.
        dataset: prepared samples, the shape of rows and a seed (None: the files' order) to items.
        collator: the shape of rows to what makes a list of items a batch with ``labels``.
    """

    name: str
    format: str | None
    packs: bool
    streams: bool
    dataset: Callable[[PreparedData, RowShape, int | None], EpochDataset]
    collator: Callable[[RowShape], Callable[[Sequence[Any]], dict[str, Any]]]
    loss: Callable[[LossSetup], Loss]
    looks_ahead: bool = False
    scalar_head: bool = False
    splits_rows: bool = False
    takes_images: bool = False
    num_together: int = 1

    def training_data(
        self, samples: EpochDataset, shape: RowShape, stream: SampleStream | None = None
    ) -> TrainingData:
        """Items with the collator that fits them; ``samples`` are a stream's first ones."""
        return TrainingData(
            samples=samples,
            collator=CountingCollator(self.collator(shape), count_tokens),
            without_training=without_training,
            sources=shape.sources,
            stream=stream,
        )


# What an objective's samples are to the loaders: items in the order of an epoch, and a collator.
#
# An item is one row of a batch, or several that belong together: a sample, or a list of them (the
# documents of a packed row, the answers that are compared).


_COUNTS = ("num_tokens", "num_trained_tokens")

SAMPLE_IDS = "sample_ids"
"""The key of a batch for the ids of its samples."""


MAX_EMPTY = 1000
"""Epochs without a row before we stop looking for the next one that has some."""


class EpochDataset(Protocol):
    """Samples in the order of an epoch."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per sample, in the order of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class CountingCollator:
    """Collates samples and adds what the log needs to know about them.

    ``num_tokens`` counts real tokens (no padding); ``num_trained_tokens`` counts labels;
    ``sample_ids`` says which samples they are. All are taken out of the batch again before the
    model sees it.
    """

    collate: Callable[[Sequence[Any]], dict[str, Any]]
    count_tokens: Callable[[Sequence[Any]], int]

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        batch = self.collate(samples)
        labels = batch["labels"][..., 1:]
        return {
            **batch,
            "num_tokens": self.count_tokens(samples),
            "num_trained_tokens": int(torch.count_nonzero(labels != IGNORE_INDEX)),
            SAMPLE_IDS: list(_ids(samples)),
        }


@dataclass(frozen=True)
class TrainingData:
    """A map-style dataset with everything the loaders need to know about it.

    Attributes:
        collator: turns a list of samples into a batch, counts included.
        without_training: turns a sample into one of which nothing is trained.
        sources: what to call each source in the log, where their losses are kept apart; batches
            then have ``source_ids``.
        stream: where the training rows come from instead; ``samples`` are its first ones then.
    """

    samples: EpochDataset
    collator: CountingCollator
    without_training: Callable[[Any], Any]
    sources: tuple[str, ...] = ()
    stream: SampleStream | None = None
    sample_name: Callable[[Any], str] = str
    has_equal_epochs: bool = True

    def longest_batch(self, rows: int) -> dict[str, Any]:
        """The largest batch of so many rows that there can be, counts included."""
        self._come_to_rows()
        longest = np.argsort(-self.samples.lengths, kind="stable")[:rows]
        return self.collator([self.samples[int(index)] for index in longest])

    def first_samples(self) -> Iterator[dict[str, torch.Tensor]]:
        """The ``input_ids`` and ``labels`` of sample after sample, (1, S)."""
        self._come_to_rows()
        for index in range(len(self.samples)):
            batch = self.collator([self.samples[index]])
            yield {name: batch[name] for name in ("input_ids", "labels")}

    def _come_to_rows(self) -> None:
        """Of sources shown in part the first epochs may have no row."""
        for epoch in range(1, MAX_EMPTY):
            if len(self.samples):
                return
            self.samples.set_epoch(epoch)


def _ids(samples: Sequence[Any]) -> Iterator[Any]:
    for sample in samples:
        if isinstance(sample, Mapping):
            yield sample.get("id")
        else:
            yield from _ids(sample)


def take_sample_ids(batch: dict[str, Any]) -> Sequence[Any]:
    """Remove and return the ids that :class:`CountingCollator` put into ``batch``."""
    return [each for each in batch.pop(SAMPLE_IDS, ()) if each is not None]


@dataclass(frozen=True)
class BatchCounts:
    """What is in a batch.

    Attributes:
        num_items: what the objective's mean is taken of.
    """

    num_tokens: int
    num_trained_tokens: int
    num_items: int


def take_counts(
    batch: dict[str, Any], num_items: Callable[[dict[str, Any], int], int]
) -> BatchCounts:
    """Remove and return the counts that :class:`CountingCollator` put into ``batch``.

    Args:
        batch: from the collator.
        num_items: of the objective (``Loss.num_items``).
    """
    batch.pop(SAMPLE_IDS, None)
    num_tokens, num_trained = (int(batch.pop(name)) for name in _COUNTS)
    return BatchCounts(num_tokens, num_trained, num_items(batch, num_trained))


def without_training(item: Any) -> Any:
    if isinstance(item, Mapping):
        return {**item, "loss_mask": np.zeros_like(item["loss_mask"])}
    return [without_training(sample) for sample in item]


def count_tokens(items: Sequence[Any]) -> int:
    return sum(
        len(item["input_ids"]) if isinstance(item, Mapping) else count_tokens(item)
        for item in items
    )


def accepts_num_items(model: nn.Module) -> bool:
    """Whether a model's class divides by a number it is given, as transformers' Trainer decides."""
    base = without_adapters(model)
    known = getattr(base, "accepts_loss_kwargs", None)
    if known is not None:
        return bool(known)
    kinds = [each.kind for each in inspect.signature(base.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds
