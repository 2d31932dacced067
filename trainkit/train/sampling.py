"""Which samples a process sees, and when.

The order of an epoch is a pure function of (seed, epoch), independent of how many processes there
are and of how a global batch is cut into micro-batches. So 1 x 8, 8 x 1 and 2 ranks x 4 train on
the same samples in every step, and a resumed run finds its place by counting.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

SAMPLING_STRATEGIES = ("random", "sequential", "group_by_length")


def epoch_order(
    num_samples: int, *, seed: int, epoch: int, strategy: str, lengths: np.ndarray | None = None
) -> np.ndarray:
    """The sample indices of one epoch.

    Args:
        num_samples: how many samples there are.
        seed: the recipe's data seed.
        epoch: counted from 0.
        strategy: ``random``, ``sequential``, or ``group_by_length`` (random, then sorted by length
            within blocks of 400 samples, so that padded batches hold samples of like length).
        lengths: tokens per sample, needed by ``group_by_length``.
    """
    if strategy == "sequential":
        return np.arange(num_samples)
    order = np.random.default_rng([seed, epoch]).permutation(num_samples)
    if strategy == "group_by_length":
        assert lengths is not None
        blocks = [order[start : start + 400] for start in range(0, num_samples, 400)]
        order = np.concatenate(
            [block[np.argsort(-lengths[block], kind="stable")] for block in blocks]
        )
    return order


class RankBatchSampler(Sampler[list[int]]):
    """The micro-batches of one process, as lists of indices.

    Micro-batch ``i`` of rank ``r`` holds the indices from ``(i * world_size + r) * batch_size`` of
    the epoch's order. Every rank yields the same number of micro-batches: nothing is dropped and
    nothing is trained twice, places past the end are filled with ``~index`` (a negative number),
    which stands for "sample ``index`` with nothing trained".
    """

    def __init__(
        self,
        order: Callable[[int], np.ndarray],
        *,
        num_samples: int,
        batch_size: int,
        dist_rank: int,
        world_size: int,
        drop_last: bool = False,
    ) -> None:
        self._order = order
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._dist_rank = dist_rank
        self._world_size = world_size
        self._epoch = 0
        stride = batch_size * world_size
        self._num_batches = num_samples // stride if drop_last else -(-num_samples // stride)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order(self._epoch)
        for index in range(self._num_batches):
            start = (index * self._world_size + self._dist_rank) * self._batch_size
            batch = [int(sample) for sample in order[start : start + self._batch_size]]
            fill = ~int(order[0])
            # Ranks must agree on the number of micro-batches, not on their sizes: the last one may
            # be short, and a rank without any gets one row in which nothing is trained.
            yield batch or [fill]


@dataclass(frozen=True)
class FillingDataset(Dataset[Any]):
    """A map-style dataset that also answers the negative indices of :class:`RankBatchSampler`."""

    samples: Any
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
    """Collates samples and adds what the log needs to know about them, as plain numbers.

    ``num_tokens`` counts real tokens (no padding); ``num_trained_tokens`` counts labels. Both are
    taken out of the batch again before the model sees it.
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
        }


def take_counts(batch: dict[str, Any]) -> Mapping[str, int]:
    """Remove and return the counts that :class:`CountingCollator` put into ``batch``."""
    return {name: int(batch.pop(name)) for name in ("num_tokens", "num_trained_tokens")}
