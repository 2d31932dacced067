"""Several sources: each draws by itself, keeps its share in every order, and is read once."""

import gzip
import shutil

import pytest
from chats import chat

from trainkit.data import DataOptions, PackedDataset, SampleDataset, Source
from trainkit.data.datasets import stream_names
from trainkit.data.streaming import SampleStream, first_look
from trainkit.data.summary import trained_and_evaluated, verdict
from trainkit.objectives.objective import TrainingData
from trainkit.train.data import parts_of

ROWS = [chat(f"ask {n}", f"say {n}") for n in range(40)]


def lines_of(data, order, part):
    """The line numbers of one source in an epoch's order."""
    return [
        int(data.sample_id(int(i)).rpartition(":")[2])
        for i in order
        if data.find(int(i))[0] == part
    ]


def test_sources_whose_files_share_a_name_draw_by_themselves(write, ready):
    for given in ({}, {"max_samples": 20}):
        sources = [
            Source(path=str(write(ROWS, f"{at}/train.jsonl")), **given) for at in ("en", "zh")
        ]
        data = ready(*sources)
        order = data.epoch_order(seed=0, epoch=0)
        en, zh = (lines_of(data, order, part) for part in (0, 1))
        assert en != zh
        if given:
            assert set(en) != set(zh)


def test_files_of_one_glob_that_share_a_name_draw_by_themselves(write, ready, tmp_path):
    for at in ("en", "zh"):
        write(ROWS, f"{at}/train.jsonl")
    data = ready(f"{tmp_path}/*/train.jsonl")
    ids = [data.sample_id(int(i)) for i in data.epoch_order(seed=0, epoch=0)]
    en, zh = ([i.rpartition(":")[2] for i in ids if f"/{at}/" in i] for at in ("en", "zh"))
    assert en != zh


def test_the_order_survives_a_move_and_is_told_from_that_of_older_runs(write, ready, tmp_path):
    for at in ("en", "zh"):
        write(ROWS, f"old/{at}/train.jsonl")
    shutil.copytree(tmp_path / "old", tmp_path / "new" / "place")
    before, after = (
        ready(*(f"{tmp_path}/{root}/{at}/train.jsonl" for at in ("en", "zh")))
        for root in ("old", "new/place")
    )
    order = before.epoch_order(seed=3, epoch=1).tolist()
    assert order == after.epoch_order(seed=3, epoch=1).tolist()
    parts = parts_of(before, packing=False, shuffle=True)
    assert parts["streams"] == ["en/train.jsonl", "zh/train.jsonl"]
    alone = parts_of(ready(f"{tmp_path}/old/en/train.jsonl"), packing=False, shuffle=True)
    assert "streams" not in alone


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a.jsonl", "b.jsonl"], ["a", "b"]),
        (["en/a.jsonl", "zh/a.jsonl", "b.jsonl"], ["en/a.jsonl", "zh/a.jsonl", "b"]),
        (["a.jsonl", "a.jsonl", "a.jsonl"], ["a.jsonl", "a.jsonl#2", "a.jsonl#3"]),
        (["d/a.jsonl", "/x/d/a.jsonl"], ["d/a.jsonl", "x/d/a.jsonl"]),
        (["a.json", "a.jsonl"], ["a.json", "a.jsonl"]),
    ],
)
def test_what_sources_draw_by(paths, names):
    assert stream_names([Source(path=path).label for path in paths], paths) == names


@pytest.mark.parametrize("packing", [False, True])
def test_the_files_order_keeps_weights_and_epochs(write, ready, packing):
    def shown(**shares):
        sources = [Source(path=str(write(ROWS, f"{n}.jsonl")), **s) for n, s in shares.items()]
        data = ready(*sources)
        made = PackedDataset(data, 256, seed=None) if packing else SampleDataset(data, seed=None)
        items = [each for item in made for each in (item if packing else [item])]
        return [[s["id"] for s in items if s["source"] == part] for part in range(len(sources))]

    for part, wanted in enumerate([120, 40]):
        assert len(shown(a={"epochs": 3}, b={})[part]) == wanted
    zero, all_of_it = shown(a={"weight": 0}, b={"weight": 1})
    assert (len(zero), len(all_of_it)) == (0, 80)
    assert len(shown(a={"epochs": 0.5}, b={})[0]) == 20
    if not packing:
        assert shown(a={"epochs": 2}, b={})[0] == [*range(40), *range(40)]


def test_a_file_that_is_listed_twice_is_named(write, ready, tmp_path, monkeypatch, tiny_tokenizer):
    path = write(ROWS)
    (tmp_path / "link.jsonl").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    listed = ["data.jsonl", str(path), "link.jsonl"]
    summary = ready(*listed).summary
    stream = SampleStream(
        [Source(path=p) for p in listed], tiny_tokenizer, DataOptions(), packing=True
    )
    streamed = first_look(stream, tiny_tokenizer, num_shards=1)[1]
    for each in (summary, streamed):
        (warning,) = each["listed_twice"]
        assert warning in each["warnings"]
        assert all(f"{p} (source {Source(path=p).label})" in warning for p in listed)
        assert warning in [finding.detail for finding in verdict(each)]
    assert ready(path).summary["listed_twice"] == []


def test_a_compressed_copy_is_the_same_file(write, ready, tiny_tokenizer):
    path, packed = write(ROWS), write(b"", "copy.jsonl.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    sources = [Source(path=str(path)), Source(path=str(packed))]
    stream = SampleStream(sources, tiny_tokenizer, DataOptions(), packing=True)
    streamed = first_look(stream, tiny_tokenizer, num_shards=1)[1]
    for each in (ready(path, packed).summary, streamed):
        (warning,) = each["listed_twice"]
        assert str(path) in warning
        assert str(packed) in warning
    assert str(packed) in trained_and_evaluated(streamed, ready(packed))[0]
    other = write(ROWS[:1], "other.jsonl")
    assert not trained_and_evaluated(streamed, ready(other))


def test_a_first_epoch_without_a_row_is_passed_for_a_look(write, ready):
    data = ready(Source(path=str(write(ROWS[:4])), epochs=0.1))
    samples = SampleDataset(data, seed=0)
    assert not len(samples)
    looked = TrainingData(samples, list, lambda row: row)
    assert len(looked.longest_batch(1)) == len(samples) == 1
