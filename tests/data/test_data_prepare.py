"""Preparing: counts that add up, limits, choices, the cache, crashes, several processes."""

import hashlib
import json
import os
import signal
import time

import numpy as np
import pytest
from chats import chat
from ranks import RankFailure, run_ranks
from tiny import make_tokenizer

from trainkit.data import DataOptions, Ledger, Source, prepare
from trainkit.digests import remembered_digest
from trainkit.errors import DataError
from trainkit.quickstart import CHAT_TEMPLATE

ROWS = [chat(f"question {n}", f"answer {n}") for n in range(40)]


CASE = "data.test_data_prepare"


def prepared_once(path, cache, progress=None):
    """Runs in a process of its own: whether the store was there already, and its samples."""
    given = {"ledger": Ledger(), "progress": progress}
    data = prepare([Source(path)], make_tokenizer(), DataOptions(cache_dir=cache), **given)
    return data.summary["sources"][0]["cached"], len(data)


def killed(path, cache):
    def progress(step):
        if step.rows > 500:
            os.kill(os.getpid(), signal.SIGKILL)

    prepared_once(path, cache, progress)


def ids_of(data):
    return [tuple(data[i]["input_ids"].tolist()) for i in range(len(data))]


def test_rows_are_kept_or_in_the_ledger(write, ready, dropped):
    lines = [json.dumps(row) for row in ROWS]
    lines[3] = "{broken"
    lines[7] = json.dumps(chat("only a question"))
    path = write("\n".join(lines).encode())
    data = ready(path)
    assert isinstance(data.parts[0].store.input_ids, np.memmap)
    assert (data[0]["input_ids"].dtype, data[0]["loss_mask"].dtype) == (np.int32, np.uint8)
    (row,) = data.summary["files"]
    assert (row["rows"], row["kept"], row["dropped"], row["samples"]) == (40, 38, 2, 38)
    assert row["reasons"] == {"bad_json": 1, "no_assistant_turn": 1}
    assert row["formats"] == {"messages": 39}
    assert row["tokens"] == int(data.lengths.sum())
    assert row["trained_tokens"] == int(data.num_trained.sum())
    entries = dropped()
    assert [(e["file"], e["line"], e["reason"]) for e in entries] == [
        (str(path), 4, "bad_json"),
        (str(path), 8, "no_assistant_turn"),
    ]
    assert data.sample_id(3) == f"{path}:5"


def test_rows_of_one_line_are_told_apart(write, ready):
    data = ready(write(json.dumps(ROWS).encode(), "x.json"))
    assert data.summary["totals"]["kept"] == 40
    order = data.epoch_order(seed=0, epoch=0)
    assert sorted(order) == list(range(40))
    assert order.tolist() != list(range(40))


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"", "holds no rows"), (b"\n\n", "holds no rows"), (b"{}\n", "unknown_format: 1")],
)
def test_a_file_without_anything_to_train_stops(write, ready, text, message):
    good = write(ROWS, "good.jsonl")
    with pytest.raises(DataError, match=message) as error:
        ready(good, write(text, "bad.jsonl"))
    assert "bad.jsonl" in str(error.value)


@pytest.mark.parametrize(("limit", "stops"), [(0.05, True), (0.5, False), (1, True), (2, False)])
def test_max_dropped(write, ready, limit, stops):
    path = write([*ROWS[:18], {"x": 1}, {"x": 2}])
    if stops:
        with pytest.raises(DataError, match="2 of 20 rows were dropped"):
            ready(path, max_dropped=limit)
    else:
        assert len(ready(path, max_dropped=limit)) == 18


def test_max_samples_is_a_stable_random_choice(write, ready):
    path = write(ROWS, "data#5.jsonl")  # a name may hold a hash
    some = ready(Source(str(path), max_samples=10))
    assert len(some) == 10
    assert ids_of(some) != ids_of(ready(path))[:10]
    assert ids_of(ready(f"{path}#10")) == ids_of(some)
    assert some.summary["totals"]["not_chosen"] == 30
    more = ready(Source(str(path), max_samples=20))
    assert set(ids_of(some)) < set(ids_of(more))
    assert ids_of(ready(Source(str(path), max_samples=10), seed=1)) != ids_of(some)
    assert len(ready(Source(str(path), max_samples=1000))) == 40


class TestMixing:
    def order(self, data, epoch=0, seed=0):
        return [data.sample_id(int(i)) for i in data.epoch_order(seed=seed, epoch=epoch)]

    def test_adding_a_source_or_rows_does_not_reorder_the_others(self, write, ready):
        a, b = write(ROWS, "a.jsonl"), write(ROWS, "b.jsonl")
        alone, both = self.order(ready(a)), self.order(ready(a, b))
        assert [name for name in both if "a.jsonl" in name] == alone
        assert len(both) == 80
        assert [place for place, name in enumerate(both) if name in alone] != list(range(40))
        fewer = self.order(ready(write(ROWS[:30], "a.jsonl")))
        assert [name for name in alone if name in fewer] == fewer

    def test_epochs_and_seeds_differ(self, write, ready):
        data = ready(write(ROWS))
        assert self.order(data) == self.order(data)
        assert self.order(data) != self.order(data, epoch=1)
        assert self.order(data) != self.order(data, seed=1)

    def test_epochs_of_a_source(self, write, ready):
        a, b = write(ROWS, "a.jsonl"), write(ROWS, "b.jsonl")
        data = ready(Source(str(a), epochs=2.5), Source(str(b), epochs=0.5))
        first, second = self.order(data, 0), self.order(data, 1)
        for name in ("a.jsonl", "b.jsonl"):
            both = [n for n in first + second if name in n]
            counts = {n: both.count(n) for n in both}
            assert len(counts) == 40
            assert set(counts.values()) == {5 if name == "a.jsonl" else 1}
        assert len(first) == len(second) == 120

    def test_weights_share_out_the_epoch(self, write, ready):
        a, b = write(ROWS, "a.jsonl"), write(ROWS[:20], "b.jsonl")
        data = ready(Source(str(a), weight=1), Source(str(b), weight=2))
        order = self.order(data)
        assert len(order) == 60
        assert sum("b.jsonl" in name for name in order) == 40


class TestCache:
    def prepared(self, path, directory, **options):
        options = DataOptions(cache_dir=str(directory), **options)
        ledger = Ledger()
        data = prepare([Source(str(path))], make_tokenizer(), options, ledger=ledger)
        return data, data.summary["sources"][0]["cached"], ledger

    def test_second_time_is_read_from_disk_and_named_anew_where_it_moved(self, write, tmp_path):
        path = write([*ROWS, {"x": 1}])
        first, cached, ledger = self.prepared(path, tmp_path / "c")
        again, cached_again, ledger_again = self.prepared(path, tmp_path / "c")
        assert (cached, cached_again) == (False, True)
        assert ids_of(first) == ids_of(again)
        assert ledger.counts == ledger_again.counts == {("dropped", "unknown_format"): 1}
        assert first.summary["files"] == again.summary["files"]
        moved = path.rename(tmp_path / "moved.jsonl")
        data, cached, _ = self.prepared(moved, tmp_path / "c")
        assert cached
        assert data.sample_id(0) == f"{moved}:1"

    @pytest.mark.parametrize(
        "options",
        [
            {"max_length": 100},
            {"mask": "last_assistant"},
            {"system_policy": "x"},
            {"chat_template": CHAT_TEMPLATE + " "},
        ],
    )
    def test_options_make_another_store(self, write, tmp_path, options):
        path = write(ROWS)
        self.prepared(path, tmp_path / "c")
        assert not self.prepared(path, tmp_path / "c", **options)[1]

    def test_another_tokenizer_makes_another_store(self, write, ready):
        path = write(ROWS)
        ready(path)
        other = make_tokenizer()
        other.add_tokens(["answer"])
        data = ready(path, tokenizer=other)
        assert not data.summary["sources"][0]["cached"]
        assert other.convert_tokens_to_ids("answer") in data[0]["input_ids"]
        assert ready(path).summary["sources"][0]["cached"]

    def test_changed_bytes_make_another_store_whatever_the_times_say(self, write, tmp_path):
        path = write(ROWS)
        times = path.stat()
        self.prepared(path, tmp_path / "c")
        text = path.read_text()
        path.write_text(text.replace("answer 7", "answer X"))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        data, cached, _ = self.prepared(path, tmp_path / "c")
        assert not cached
        assert "answer X" in make_tokenizer().decode(data[7]["input_ids"])

    def test_the_memory_of_digests_is_not_trusted_for_young_files(self, tmp_path, monkeypatch):
        monkeypatch.setattr("trainkit.digests._BLOCK_BYTES", 2)
        monkeypatch.setattr("trainkit.digests._SETTLED_SECONDS", 1.0)
        file = tmp_path / "x"
        file.write_text("abc")
        one = hashlib.sha256(b"abc").hexdigest()
        assert remembered_digest(file, hashlib.sha256, tmp_path / "memo") == one
        assert not (tmp_path / "memo").exists()
        old = time.time() - 10
        os.utime(file, (old, old))
        time.sleep(1.1)  # the change time cannot be set back
        assert remembered_digest(file, hashlib.sha256, tmp_path / "memo") == one
        assert len(list((tmp_path / "memo").iterdir())) == 1
        file.write_text("b")
        os.utime(file, (old, old))
        assert remembered_digest(file, hashlib.sha256, tmp_path / "memo") != one

    def test_a_killed_process_leaves_nothing_that_counts(self, write, tmp_path):
        path = write(ROWS * 50)
        with pytest.raises(RankFailure):
            run_ranks(f"{CASE}:killed", world_size=1, path=str(path), cache=str(tmp_path / "c"))
        assert list((tmp_path / "c").glob("tmp-*"))
        data, cached, _ = self.prepared(path, tmp_path / "c")
        assert not cached
        assert len(data) == 2000

    def test_leftovers_are_swept_when_they_are_old(self, write, tmp_path):
        leftover = tmp_path / "c" / "tmp-dead"
        leftover.mkdir(parents=True)
        (leftover / "input_ids.npy").touch()
        self.prepared(write(ROWS), tmp_path / "c")
        assert leftover.exists()
        for file in (leftover / "input_ids.npy", leftover):
            os.utime(file, (0, 0))
        self.prepared(write(ROWS), tmp_path / "c", max_length=99)
        assert not leftover.exists()

    def test_several_processes_do_the_work_once(self, write, tmp_path):
        path = write(ROWS * 50)
        said = run_ranks(f"{CASE}:prepared_once", path=str(path), cache=str(tmp_path / "c"))
        assert sorted(said) == [[False, 2000], [True, 2000]]


def test_sources_are_named_and_formats_told(write, ready):
    a = write(ROWS, "a.jsonl")
    b = write([{"instruction": "i", "output": "o"}], "b.v2.jsonl")
    data = ready(Source(str(a), name="first"), b)
    assert data.source_names == ("first", "b")
    assert [row["formats"] for row in data.summary["files"]] == [{"messages": 40}, {"alpaca": 1}]
    assert json.loads(json.dumps(data.summary)) == data.summary


def _die(rows, source, folder):
    os._exit(1)


def test_a_dead_worker_is_an_error_that_says_so(write, ready, monkeypatch):
    from trainkit.data import sources

    monkeypatch.setattr(sources, "_build", _die)
    with pytest.raises(DataError, match="process died"):
        ready(write(ROWS * 30), num_workers=2)
