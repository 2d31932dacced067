"""Streaming gives the same samples as preparing, from any position on, in bounded memory."""

import gzip
import itertools
import json
from collections import Counter

import pytest
from chats import chat

from trainkit.data import DataOptions, Source
from trainkit.data.streaming import Position, SampleStream, first_look, sampled_digest
from trainkit.errors import DataError

ROWS = [chat(f"q{n}", f"a{n}" * (n % 7 + 1)) for n in range(350)]


def stream(tokenizer, *paths, packing=False, buffer=100, shuffle=True, **options):
    options = DataOptions(**{"max_length": 128, **options})
    sources = [Source(str(path)) for path in paths]
    return SampleStream(
        sources, tokenizer, options, packing=packing, buffer=buffer, shuffle=shuffle
    )


def epoch(streamed, number=0, **shard):
    """The rows of one epoch."""
    rows = itertools.dropwhile(lambda row: row.position.epoch < number, streamed.rows(**shard))
    return list(itertools.takewhile(lambda row: row.position.epoch == number, rows))


def ids(rows):
    return [tuple(sample["input_ids"].tolist()) for row in rows for sample in row.samples]


def test_the_same_samples_as_prepared_and_the_ledger_once(write, ready, tiny_tokenizer):
    path = write([{"x": 1}, *ROWS, {"x": 2}])
    streamed = stream(tiny_tokenizer, path, shuffle=False)
    data = ready(path, max_length=128)
    first = epoch(streamed)
    assert ids(first) == [tuple(data[i]["input_ids"].tolist()) for i in range(len(data))]
    entries = [entry for row in first for entry in row.entries]
    assert [(entry.line, entry.action) for entry in entries] == [(1, "dropped"), (352, "dropped")]
    assert sum(row.num_rows for row in first) == 352
    assert sum(row.num_dropped for row in first) == 2
    again = epoch(streamed, 1)
    assert ids(again) == ids(first)
    assert not any(row.entries or row.num_rows for row in again)


def test_blocks_are_shuffled_by_seed_and_epoch(write, tiny_tokenizer):
    path = write(ROWS)
    plain = ids(epoch(stream(tiny_tokenizer, path, shuffle=False)))
    shuffled = stream(tiny_tokenizer, path)
    first = ids(epoch(shuffled))
    assert first != plain
    assert sorted(first) == sorted(plain)
    assert ids(epoch(shuffled)) == first
    assert sorted(ids(epoch(shuffled, 1))) == sorted(first)
    assert ids(epoch(shuffled, 1)) != first
    assert ids(epoch(stream(tiny_tokenizer, path, seed=1))) != first


@pytest.mark.parametrize("num_shards", [2, 3])
def test_shares_are_disjoint_and_whole(write, tiny_tokenizer, num_shards):
    streamed = stream(tiny_tokenizer, write(ROWS))
    shards = [ids(epoch(streamed, shard=n, num_shards=num_shards)) for n in range(num_shards)]
    assert all(shards)
    assert sorted(itertools.chain(*shards)) == sorted(ids(epoch(streamed)))


@pytest.mark.sample("one-16", "two-3", "many-16")
@pytest.mark.parametrize("num_shards", [3, 16])
@pytest.mark.parametrize(
    "sizes", [[1248], [1000, 61], [3] * 40 + [500]], ids=["one", "two", "many"]
)
def test_shares_are_equal(write, tiny_tokenizer, num_shards, sizes):
    for n, size in enumerate(sizes):
        write([chat(f"{n}q{k}" + "x" * (k % 90), "a") for k in range(size)], f"d/{n:03d}.jsonl")
    streamed = stream(tiny_tokenizer, write([], "d/.hidden").parent, buffer=2000)
    shares = []
    for n in range(num_shards):
        epochs = (row.position.epoch for row in streamed.rows(shard=n, num_shards=num_shards))
        shares.append(Counter(itertools.takewhile(lambda number: number < 2, epochs)))
    for number in (0, 1):
        rows = [share[number] for share in shares]
        assert sum(rows) == sum(sizes)
        assert max(rows) - min(rows) <= 1


def test_a_share_of_a_few_bad_rows_does_not_condemn_a_file(write, tiny_tokenizer):
    streamed = stream(tiny_tokenizer, write([*ROWS[:15], {"bad": 1}]))
    shards = [len(epoch(streamed, shard=n, num_shards=8)) for n in range(8)]
    assert sorted(shards) == [1] + [2] * 7


def test_every_share_sees_every_source(write, tiny_tokenizer):
    # Two sources of one size are read in turn: dealt out in turn, each shard would get one of them.
    paths = [
        write([chat(f"{name}{n}", "a") for n in range(1000)], f"{name}.jsonl") for name in "ab"
    ]
    streamed = stream(tiny_tokenizer, *paths, buffer=2000)
    for shard in range(2):
        rows = epoch(streamed, shard=shard, num_shards=2)
        from_a = sum(sample["source"] == 0 for row in rows for sample in row.samples)
        # 1000 rows drawn with even chances: 0.016 is one standard deviation.
        assert 0.4 < from_a / len(rows) < 0.6
        # Nor every other row of a file.
        odd = sum(int(s["id"].rpartition(":")[2]) % 2 for row in rows for s in row.samples)
        assert 0.4 < odd / len(rows) < 0.6


def test_packed_rows(write, tiny_tokenizer):
    path = write(ROWS)
    rows = epoch(stream(tiny_tokenizer, path, packing=True, max_length=256))
    sizes = [sum(len(sample["input_ids"]) for sample in row.samples) for row in rows]
    assert max(sizes) <= 256
    assert sum(sizes) / (256 * len(sizes)) > 0.9  # blocks of 100 samples only
    assert sorted(ids(rows)) == sorted(ids(epoch(stream(tiny_tokenizer, path))))


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "two files"])
def test_a_stream_goes_on_from_any_position(write, tmp_path, tiny_tokenizer, kind):
    """Across blocks, files and epochs; a position survives JSON."""
    rows = [{"bad": 1}, *ROWS[:150], {"bad": 2}, {"bad": 3}, *ROWS[150:260], {"bad": 4}]
    paths = [write(rows)]
    if kind == "jsonl.gz":
        paths = [tmp_path / "packed.jsonl.gz"]
        paths[0].write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
    elif kind == "json":
        paths = [tmp_path / "array.json"]
        paths[0].write_text(json.dumps(rows, indent=1))
    elif kind == "two files":
        paths = [write(rows[:90], "a.jsonl"), write(rows[90:], "b.jsonl")]

    def taken(start=None, count=None):
        streamed = stream(tiny_tokenizer, *paths, packing=True, buffer=40)
        return list(itertools.islice(streamed.rows(start, shard=1, num_shards=2), count))

    whole = taken(count=130)
    assert whole[-1].position.epoch >= 2
    for place in (0, 5, 23, 24, 60, 90):
        start = Position.from_dict(json.loads(json.dumps(whole[place].position.to_dict())))
        rest = taken(start, 130 - place - 1)
        assert [ids([row]) for row in rest] == [ids([row]) for row in whole[place + 1 :]]
        assert [row.position for row in rest] == [row.position for row in whole[place + 1 :]]
        assert [row.entries for row in rest] == [row.entries for row in whole[place + 1 :]]


def test_a_plain_file_is_read_on_from_the_byte(write, tiny_tokenizer):
    """What lies before the position is not even looked at."""
    path = write(ROWS)
    rows = epoch(stream(tiny_tokenizer, path, buffer=50))
    number, place = next((n, r.position) for n, r in enumerate(rows) if r.position.block == 4)
    damaged = bytearray(path.read_bytes())
    start = place.places[0].next.offset
    assert start > len(damaged) / 3
    damaged[:start] = b"\0" * start
    path.write_bytes(bytes(damaged))
    rest = list(itertools.islice(stream(tiny_tokenizer, path, buffer=50).rows(place), 20))
    assert ids(rest) == ids(rows[number + 1 : number + 21])


def test_sources_are_read_side_by_side(write, tiny_tokenizer):
    """Each at about the same fraction of its bytes, so that both end together."""
    small = write(ROWS[:300], "small.jsonl")
    large = write(ROWS * 3, "large.jsonl")
    rows = epoch(stream(tiny_tokenizer, small, large, shuffle=False))
    sources = [sample["source"] for row in rows for sample in row.samples]
    assert sources.count(0) == 300
    half = sources[: len(sources) // 2]
    assert 0.3 < half.count(0) / 300 < 0.7


def test_memory_is_two_blocks(write, tiny_tokenizer, monkeypatch):
    from trainkit.data import streaming

    alive = []
    make = streaming.Block.__init__

    def counting(self, *args, **options):
        make(self, *args, **options)
        alive.append(self)

    monkeypatch.setattr(streaming.Block, "__init__", counting)
    rows = stream(tiny_tokenizer, write(ROWS), buffer=50).rows()
    for number, row in enumerate(itertools.islice(rows, 300)):
        read = sum(len(block._samples) for block in alive[-2:])
        # A block ends with the run that fills it: 64 rows more at most.
        assert read <= 2 * (50 + 64), number
        assert row.position.epoch == 0


def test_dropped_rows_are_held_against_the_limit_while_reading(write, tiny_tokenizer):
    rows = [row if n % 10 else {"bad": n} for n, row in enumerate(ROWS * 3)]
    path = write(rows)
    limited = stream(tiny_tokenizer, path, max_dropped=0.05).rows()
    with pytest.raises(DataError, match=r"max_dropped 0\.05"):
        list(itertools.islice(limited, 1300))
    counted = stream(tiny_tokenizer, path, max_dropped=20).rows()
    with pytest.raises(DataError, match="26 of the 256 rows"):
        list(itertools.islice(counted, 2000))
    # Two passes over the same file do not count twice.
    fine = stream(tiny_tokenizer, path, max_dropped=0.11).rows()
    assert len(list(itertools.islice(fine, 2500))) == 2500
    # A file too short to judge on the way is judged at its end.
    short = stream(tiny_tokenizer, write(rows[:200], "short.jsonl"), max_dropped=0.05).rows()
    with pytest.raises(DataError, match="20 of the 200 rows"):
        list(itertools.islice(short, 500))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"x": 1}] * 5, "no token of this file"),
        ([], "holds no rows"),
        ([{"x": n} for n in range(3000)], "none of 1024 rows"),
    ],
    ids=["nothing trained", "empty", "endless dirt"],
)
def test_files_that_train_nothing(write, tiny_tokenizer, rows, message):
    with pytest.raises(DataError, match=message):
        next(stream(tiny_tokenizer, write(rows)).rows())


def test_what_streaming_cannot_do_is_refused(write, tiny_tokenizer):
    path = str(write(ROWS[:64]))
    options = DataOptions(max_length=128)

    def refused(source, message):
        with pytest.raises(DataError, match=message):
            SampleStream([source], tiny_tokenizer, options, packing=False)

    refused(Source(path, max_samples=3), "streaming does not")
    refused(Source(path + "#3"), "streaming does not")
    refused(Source(path, weight=1.0), "streaming does not")
    refused(Source(path, epochs=2), "streaming does not")
    refused(Source("org/name"), "hub")
    single = stream(tiny_tokenizer, write(ROWS[:1], "single.jsonl"))
    with pytest.raises(DataError, match=r"shard \d of 2 got no sample"):  # whichever it is
        list(map(next, [single.rows(shard=n, num_shards=2) for n in range(2)]))
    long = write([chat("q", "a " * 500)], "long.jsonl")
    with pytest.raises(DataError, match=r"long\.jsonl:1: the row has"):
        next(stream(tiny_tokenizer, long, truncation="error").rows())


@pytest.mark.parametrize("size", [10, 1 << 16, (1 << 20) - 7, 1 << 20])
def test_every_byte_of_a_small_file_counts(tmp_path, size):
    file = tmp_path / "x"
    seen = set()
    for place in (None, 0, size // 3, size // 2, size - 1):
        data = bytearray(size)
        if place is not None:
            data[place] = 1
        file.write_bytes(data)
        seen.add(sampled_digest(file))
    assert len(seen) == 5


def test_a_large_file_is_sampled_and_its_ends_always_count(tmp_path):
    file = tmp_path / "x"
    with file.open("wb") as hollow:
        hollow.truncate(1 << 40)  # would take an hour to read
    before = [sampled_digest(file, count) for count in (1, 10**5)]
    for place in (0, (1 << 40) - 1):
        with file.open("r+b") as hollow:
            hollow.seek(place)
            hollow.write(b"x")
        after = [sampled_digest(file, count) for count in (1, 10**5)]
        assert not set(before) & set(after)
        before = after


def test_changed_content_of_the_same_size_is_another_stream(write, tiny_tokenizer):
    def parts(rows):
        streamed = stream(tiny_tokenizer, write(rows))
        return first_look(streamed, tiny_tokenizer, num_shards=1)[2]

    assert parts(ROWS) == parts(ROWS)
    changed = [*ROWS[:200], chat("q200", "b200" * 5), *ROWS[201:]]
    assert len(json.dumps(changed)) == len(json.dumps(ROWS))
    assert parts(ROWS)["files"] != parts(changed)["files"]
