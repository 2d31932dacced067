"""Best-fit packing: complete samples, full rows, the same every time."""

import numpy as np
import pytest
from chats import chat
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.data import PackedDataset, SampleDataset, pack
from trainkit.data.datasets import efficiency

LENGTHS = np.random.default_rng(0)


def realistic(count):
    return np.clip(LENGTHS.lognormal(5.5, 0.9, count).astype(int), 8, 2048)


@given(st.lists(st.integers(1, 64), max_size=80), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_every_sample_once_and_no_row_too_long(lengths, seed, epoch):
    lengths = np.array(lengths, dtype=np.int64)
    rows = pack(lengths, 64, seed=seed, epoch=epoch)
    assert sorted(np.concatenate([*rows, []]).tolist()) == list(range(len(lengths)))
    assert all(lengths[row].sum() <= 64 for row in rows)
    # Best fit leaves no two rows that would fit into one, but for the last opened.
    fills = sorted(int(lengths[row].sum()) for row in rows)
    assert len(fills) < 2 or fills[0] + fills[1] > 64


def test_rows_are_full_on_a_realistic_mix():
    lengths = realistic(20_000)
    assert efficiency(lengths, 2048) >= 0.98
    assert efficiency(lengths, 4096) >= 0.98


def test_the_fullest_row_with_room_is_taken():
    """Put beside the 6, the 3 would leave no row with room for both of the 2."""
    assert len(pack(np.array([7, 6, 3, 2, 2]), 10, seed=0, epoch=0)) == 2


def test_the_same_again_and_another_in_another_epoch():
    lengths = realistic(500)
    first = pack(lengths, 2048, seed=1, epoch=0)
    again = pack(lengths, 2048, seed=1, epoch=0)
    other = pack(lengths, 2048, seed=1, epoch=1)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(first) == len(other)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_sample_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="exceeds max_length"):
        pack(np.array([5]), 4, seed=0, epoch=0)


def test_two_hundred_thousand_samples_take_a_second():
    import time

    lengths = realistic(200_000)
    started = time.process_time()
    pack(lengths, 2048, seed=0, epoch=0)
    assert time.process_time() - started < 5  # about 0.4 s on an idle core


def test_packed_dataset_holds_whole_samples(write, ready):
    rows = [chat("q" * (n % 9 + 1), "a" * (n % 5 + 1)) for n in range(40)]
    data = ready(write(rows))
    packed = PackedDataset(data, 200, seed=3)
    lengths = [sum(len(s["input_ids"]) for s in row) for row in packed]
    assert lengths == packed.lengths.tolist()
    assert sum(lengths) == int(data.lengths.sum())
    seen = sorted(tuple(s["input_ids"].tolist()) for row in packed for s in row)
    assert seen == sorted(tuple(data[i]["input_ids"].tolist()) for i in range(len(data)))
    before = [row.tolist() for row in packed.rows]
    packed.set_epoch(1)
    assert [row.tolist() for row in packed.rows] != before
    packed.set_epoch(0)
    assert [row.tolist() for row in packed.rows] == before


def test_sample_dataset_in_file_order_without_a_seed(write, ready):
    data = ready(write([chat("q", "a" * n) for n in range(1, 6)]))
    plain = SampleDataset(data)
    assert [len(plain[i]["input_ids"]) for i in range(5)] == data.lengths.tolist()
    mixed = SampleDataset(data, seed=0)
    assert sorted(mixed.lengths) == sorted(data.lengths)
    with pytest.raises(IndexError):
        data[5]
