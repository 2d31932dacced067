"""Which samples a process sees, and when.

The order of an epoch belongs to the dataset and is a pure function of (seed, epoch), independent
of how many processes there are and of how a global batch is cut into micro-batches. So 1 x 8, 8 x 1
and 2 ranks x 4 train on the same samples in every step, and a resumed run counts to its place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from trainkit.data.serve.streaming import SampleStream

SAMPLE_IDS = "sample_ids"
"""The key of a batch for the ids of its samples."""

LENGTH_BLOCK = 400
"""``group_by_length`` sorts within blocks of so many samples, so that like lengths meet."""


class EpochDataset(Protocol):
    """Samples in the order of an epoch."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per sample, in the order of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class RankBatchSampler(Sampler[list[int]]):
    """The micro-batches of one process, as lists of places in the dataset's order.

    Micro-batch ``i`` of rank ``r`` holds the places from ``(i * world_size + r) * batch_size``.
    Every rank yields the same number of micro-batches: nothing is dropped and nothing is trained
    twice, places past the end are filled with ``~place`` (a negative number), which stands for "the
    sample at ``place`` with nothing trained".
    """

    def __init__(
        self,
        dataset: EpochDataset,
        *,
        batch_size: int,
        dist_rank: int,
        world_size: int,
        drop_last: bool = False,
        group_by_length: bool = False,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._dist_rank = dist_rank
        self._world_size = world_size
        self._drop_last = drop_last
        self._group_by_length = group_by_length

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self._dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Micro-batches of the chosen epoch; where sources are shown in part, epochs differ."""
        stride, num_samples = self._batch_size * self._world_size, len(self._dataset)
        return num_samples // stride if self._drop_last else -(-num_samples // stride)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for index in range(len(self)):
            start = (index * self._world_size + self._dist_rank) * self._batch_size
            batch = [int(place) for place in order[start : start + self._batch_size]]
            # Ranks must agree on the number of micro-batches, not on their sizes: the last one may
            # be short, and a rank without any gets one row in which nothing is trained.
            yield batch or [~0]

    def _order(self) -> np.ndarray:
        order = np.arange(len(self._dataset))
        if not self._group_by_length:
            return order
        lengths = self._dataset.lengths
        starts = range(LENGTH_BLOCK, len(order), LENGTH_BLOCK)
        blocks = np.split(order, list(starts))
        return np.concatenate(
            [block[np.argsort(-lengths[block], kind="stable")] for block in blocks]
        )


@dataclass(frozen=True)
class FillingDataset(Dataset[Any]):
    """A map-style dataset that also answers the negative indices of :class:`RankBatchSampler`."""

    samples: EpochDataset
    without_training: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index >= 0:
            return self.samples[index]
        return self.without_training(self.samples[~index])


class EpochDataLoader(DataLoader[Any]):
    """A DataLoader that passes the epoch on to its batch sampler, as the Trainer asks it to."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        sampler = self.batch_sampler
        assert isinstance(sampler, RankBatchSampler)
        sampler.set_epoch(epoch)


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
        """Collate and count."""
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
        batch = self.collator([self.samples[0]])
        return {name: batch[name] for name in ("input_ids", "labels")}


def _ids(samples: Sequence[Any]) -> Iterator[Any]:
    """The ids of samples, or of the samples in packed rows."""
    for sample in samples:
        if isinstance(sample, Mapping):
            yield sample.get("id")
        else:
            yield from _ids(sample)


def take_sample_ids(batch: dict[str, Any]) -> Sequence[Any]:
    """Remove and return the ids that :class:`CountingCollator` put into ``batch``."""
    return [each for each in batch.pop(SAMPLE_IDS, ()) if each is not None]


def take_counts(batch: dict[str, Any]) -> Mapping[str, int]:
    """Remove and return the counts that :class:`CountingCollator` put into ``batch``."""
    batch.pop(SAMPLE_IDS, None)
    return {name: int(batch.pop(name)) for name in ("num_tokens", "num_trained_tokens")}
