"""Which samples a process sees, and when.

The order of an epoch belongs to the dataset and is a pure function of (seed, epoch), independent
of how many processes there are and of how a global batch is cut into micro-batches. So 1 x 8, 8 x 1
and 2 ranks x 4 train on the same samples in every step, and a resumed run counts to its place.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from trainkit.objectives.batches import EpochDataset

LENGTH_BLOCK = 400
"""``group_by_length`` sorts within blocks of so many samples, so that like lengths meet."""


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
    """A DataLoader that passes the epoch on to its batch sampler, and can begin amid one."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        sampler = self.batch_sampler
        assert isinstance(sampler, RankBatchSampler)
        sampler.set_epoch(epoch)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """The micro-batches of an epoch, without loading the first ``skip``."""
        self.set_epoch(epoch)
        if not skip or self.batch_sampler is None:
            return iter(self)
        rest = list(itertools.islice(self.batch_sampler, skip, None))
        kept = ("num_workers", "collate_fn", "pin_memory", "prefetch_factor", "generator")
        options = {name: getattr(self, name) for name in kept}
        return iter(DataLoader(self.dataset, batch_sampler=rest, **options))
