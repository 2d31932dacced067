"""Streaming gives the same samples as preparing, one after another."""

import pytest
from conftest import chat

from trainkit.data import DataOptions, Ledger, Source
from trainkit.data.streaming import SampleStream
from trainkit.errors import DataError

ROWS = [chat(f"q{n}", f"a{n}" * (n % 7 + 1)) for n in range(300)]


def stream(tokenizer, path, **settings):
    options = DataOptions(max_length=settings.pop("max_length", 128))
    ledger = settings.pop("ledger", Ledger())
    return SampleStream([Source(str(path))], tokenizer, options, ledger=ledger, **settings)


def ids(samples):
    return [tuple(sample["input_ids"].tolist()) for sample in samples]


def test_the_same_samples_as_prepared(write, ready, tiny_tokenizer):
    path = write([*ROWS, {"x": 1}])
    ledger = Ledger()
    streamed = stream(tiny_tokenizer, path, ledger=ledger)
    data = ready(path, max_length=128)
    assert ids(streamed) == ids(data[i] for i in range(len(data)))
    assert ids(streamed) == ids(streamed)
    assert ledger.num("dropped") == 1


def test_shuffled_in_a_buffer(write, tiny_tokenizer):
    path = write(ROWS)
    plain = ids(stream(tiny_tokenizer, path))
    shuffled = stream(tiny_tokenizer, path, shuffle_buffer=50)
    first = ids(shuffled)
    assert first != plain
    assert sorted(first) == sorted(plain)
    assert ids(shuffled) == first
    shuffled.set_epoch(1)
    assert ids(shuffled) != first


def test_ranks_share_the_rows(write, tiny_tokenizer):
    path = write(ROWS)
    whole = ids(stream(tiny_tokenizer, path))
    shares = [ids(stream(tiny_tokenizer, path, dist_rank=r, world_size=2)) for r in range(2)]
    assert sorted(shares[0] + shares[1]) == sorted(whole)
    assert shares[0]
    assert shares[1]


def test_packed_rows(write, tiny_tokenizer):
    streamed = stream(tiny_tokenizer, write(ROWS), max_length=256)
    rows = list(streamed.packed(window=100))
    assert all(sum(len(s["input_ids"]) for s in row) <= 256 for row in rows)
    assert sorted(ids(s for row in rows for s in row)) == sorted(ids(streamed))


def test_what_streaming_cannot_do_is_refused(write, tiny_tokenizer):
    source = Source(str(write(ROWS)), max_samples=3)
    with pytest.raises(DataError, match="streaming"):
        SampleStream([source], tiny_tokenizer, DataOptions(), ledger=Ledger())
    with pytest.raises(DataError, match="no token"):
        list(stream(tiny_tokenizer, write([{"x": 1}])))
