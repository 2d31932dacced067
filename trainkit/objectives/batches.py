"""What an objective's samples are to the loaders: items in the order of an epoch, and a collator.

An item is one row of a batch, or several that belong together: a sample, or a list of them (the
documents of a packed row, the answers that are compared).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from trainkit.data.serve.streaming import SampleStream

_COUNTS = ("num_tokens", "num_trained_tokens")

SAMPLE_IDS = "sample_ids"
"""The key of a batch for the ids of its samples."""


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
            "num_trained_tokens": int(torch.count_nonzero(labels != -100)),
            SAMPLE_IDS: list(_ids(samples)),
        }


@dataclass(frozen=True)
class TrainingData:
    """A map-style dataset with everything the loaders need to know about it.

    Attributes:
        samples: in the order of an epoch.
        collator: turns a list of samples into a batch, counts included.
        without_training: turns a sample into one of which nothing is trained.
        sources: what to call each source in the log, where their losses are kept apart; batches
            then have ``source_ids``.
        stream: where the training rows come from instead; ``samples`` are its first ones then.
        sample_name: what to call a sample in a message, from its id.
        has_equal_epochs: every epoch has as many rows as the first one.
    """

    samples: EpochDataset
    collator: CountingCollator
    without_training: Callable[[Any], Any]
    sources: tuple[str, ...] = ()
    stream: SampleStream | None = None
    sample_name: Callable[[Any], str] = str
    has_equal_epochs: bool = True

    def one_batch(self) -> dict[str, torch.Tensor]:
        """The ``input_ids`` and ``labels`` of the first sample, for a look at the model."""
        return next(self.first_samples())

    def longest_batch(self, rows: int) -> dict[str, Any]:
        """The largest batch of so many rows that there can be, counts included."""
        longest = np.argsort(-self.samples.lengths, kind="stable")[:rows]
        return self.collator([self.samples[int(index)] for index in longest])

    def first_samples(self) -> Iterator[dict[str, torch.Tensor]]:
        """The ``input_ids`` and ``labels`` of sample after sample, (1, S)."""
        for index in range(len(self.samples)):
            batch = self.collator([self.samples[index]])
            yield {name: batch[name] for name in ("input_ids", "labels")}


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
        num_tokens: padding left out.
        num_trained_tokens: labels.
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
    """Tokens of items, padding left out."""
    return sum(
        len(item["input_ids"]) if isinstance(item, Mapping) else count_tokens(item)
        for item in items
    )
