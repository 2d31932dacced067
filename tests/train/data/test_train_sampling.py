"""The order of samples: the same for every way of cutting a global batch."""

import numpy as np
import pytest
import torch
from lab import ShuffledSamples

from trainkit.train.data import LENGTH_BLOCK, FillingDataset, RankBatchSampler, train_loader


def make(lengths):
    return ShuffledSamples([{"input_ids": range(length)} for length in lengths], seed=7)


def batches(num_samples, batch_size, world_size, *, epoch=0, drop_last=False):
    """Per rank, the micro-batches of an epoch, as indices of samples."""
    ranks = []
    for rank in range(world_size):
        dataset = make([1] * num_samples)
        sampler = RankBatchSampler(
            dataset,
            batch_size=batch_size,
            dist_rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )
        sampler.set_epoch(epoch)
        places = list(sampler)
        assert len(places) == len(sampler)
        ranks.append([[int(dataset.order[p]) if p >= 0 else p for p in batch] for batch in places])
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
    lengths = np.random.default_rng(0).integers(1, 1000, 2 * LENGTH_BLOCK + 100)

    def spread(group_by_length):
        dataset = make(lengths)
        options = {"batch_size": 8, "dist_rank": 0, "world_size": 1}
        sampler = RankBatchSampler(dataset, group_by_length=group_by_length, **options)
        micro = list(sampler)
        assert sorted(place for batch in micro for place in batch) == list(range(len(lengths)))
        return np.mean([np.ptp(dataset.lengths[batch]) for batch in micro])

    assert spread(True) < spread(False) / 10


def test_filling_is_the_sample_with_nothing_trained(lab):
    data = lab.data()
    filling = FillingDataset(data.samples, data.without_training)
    assert np.array_equal(filling[~3]["input_ids"], filling[3]["input_ids"])
    assert filling[3]["loss_mask"].any()
    assert not filling[~3]["loss_mask"].any()


def test_reading_batches_moves_no_random_number_of_the_model(lab):
    """Else a run with dropout that is continued in an epoch would be another."""
    trainer = lab.trainer("run", batch=4)
    before = torch.random.get_rng_state()
    loader = train_loader(trainer.train_data, None, trainer.args, trainer.layout)
    assert len(list(loader.epoch(0))) == 10
    assert torch.equal(torch.random.get_rng_state(), before)
