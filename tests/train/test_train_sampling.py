"""The order of samples: the same for every way of cutting a global batch."""

import numpy as np
import pytest

from trainkit.train.sampling import RankBatchSampler, epoch_order


def batches(num_samples, batch_size, world_size, *, epoch=0, drop_last=False):
    """Per rank, the micro-batches of an epoch."""
    ranks = []
    for rank in range(world_size):
        sampler = RankBatchSampler(
            lambda epoch: epoch_order(num_samples, seed=7, epoch=epoch, strategy="random"),
            num_samples=num_samples,
            batch_size=batch_size,
            dist_rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
        assert len(ranks[-1]) == len(sampler)
    return ranks


def global_batches(ranks, accumulate):
    """The set of real samples in each optimizer step."""
    num_micro = len(ranks[0])
    steps = []
    for start in range(0, num_micro, accumulate):
        step = [
            index for rank in ranks for batch in rank[start : start + accumulate] for index in batch
        ]
        steps.append(sorted(index for index in step if index >= 0))
    return steps


@pytest.mark.parametrize("num_samples", [64, 61, 9, 1])
@pytest.mark.parametrize(
    ("batch_size", "world_size", "accumulate"), [(1, 1, 8), (4, 2, 1), (2, 4, 1), (2, 2, 2)]
)
def test_every_cut_of_a_global_batch_holds_the_same_samples(
    num_samples, batch_size, world_size, accumulate
):
    one_by_eight = global_batches(batches(num_samples, 8, 1), 1)
    assert global_batches(batches(num_samples, batch_size, world_size), accumulate) == one_by_eight


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("num_samples", [1, 5, 16, 33])
def test_an_epoch_holds_every_sample_once_and_ranks_agree_in_number(num_samples, world_size):
    ranks = batches(num_samples, 4, world_size)
    assert len({len(rank) for rank in ranks}) == 1
    assert all(batch for rank in ranks for batch in rank)
    seen = [index for rank in ranks for batch in rank for index in batch if index >= 0]
    assert sorted(seen) == list(range(num_samples))


def test_epochs_differ_and_repeat_exactly():
    first, second = batches(32, 4, 1, epoch=0), batches(32, 4, 1, epoch=1)
    assert first != second
    assert first == batches(32, 4, 1, epoch=0)


def test_drop_last_leaves_only_full_global_batches():
    ranks = batches(33, 4, 2, drop_last=True)
    assert [len(batch) for rank in ranks for batch in rank] == [4] * 8


def test_grouping_by_length_keeps_every_sample_and_narrows_batches():
    lengths = np.random.default_rng(0).integers(1, 1000, 1000)
    order = epoch_order(1000, seed=0, epoch=0, strategy="group_by_length", lengths=lengths)
    assert sorted(order) == list(range(1000))

    def spread(indices):
        return np.mean([np.ptp(lengths[indices[i : i + 8]]) for i in range(0, 1000, 8)])

    random = epoch_order(1000, seed=0, epoch=0, strategy="random")
    assert spread(order) < spread(random) / 10
