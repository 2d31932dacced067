"""Rows that the recipe leaves out, which nothing is wrong with: copies, and short ones."""

import json

import pytest
from chats import chat

from trainkit.data import DataOptions, Ledger, Source, prepare
from trainkit.data.datasets import hold_out
from trainkit.data.summary import notes_of, verdict
from trainkit.errors import DataError, RecipeError
from trainkit.options import DataSection

ROWS = [chat(f"question {n}", f"answer {n}", f"more {n}", f"yes {n}") for n in range(20)]


def samples(data):
    each = (data[index] for index in range(len(data)))
    return [(tuple(row["input_ids"].tolist()), tuple(row["loss_mask"].tolist())) for row in each]


def test_the_first_of_rows_with_the_same_tokens_and_mask_stays(write, ready, dropped):
    """As axolotl's `_deduplicate_dataset` does over its tokenised rows, in their order."""
    other = json.loads(json.dumps(ROWS[3]))
    other["messages"][1]["train"] = False
    first = write([*ROWS[:6], ROWS[2], other, ROWS[0]], "a.jsonl")
    second = write([ROWS[19], *ROWS[4:8]], "b.jsonl")
    plain = ready(first, second)
    assert not plain.summary["totals"]["left_out"]
    wanted = list(dict.fromkeys(samples(plain)))
    data = ready(first, second, deduplicate=True, max_dropped=0)
    assert samples(data) == wanted
    lines = [(line["file"].rpartition("/")[2], line["line"], line["reason"]) for line in dropped()]
    assert lines == [("a.jsonl", 7, "duplicate"), ("a.jsonl", 9, "duplicate")] + [
        ("b.jsonl", line, "duplicate") for line in (2, 3)
    ]
    totals = data.summary["totals"]
    assert (totals["rows"], totals["kept"], totals["left_out"], totals["dropped"]) == (14, 10, 4, 0)
    assert totals["samples"] == len(data) == 10
    assert totals["tokens"] == int(data.lengths.sum())
    assert totals["trained_tokens"] == int(data.num_trained.sum())
    assert [source["samples"] for source in data.summary["sources"]] == [7, 3]
    assert [row["reasons"] for row in data.summary["files"]] == [{"duplicate": 2}] * 2
    rows = next(each for each in verdict(data.summary) if each.check == "rows")
    assert (rows.status, "4 left out" in rows.detail) == ("ok", True)
    assert notes_of(data.summary, "data")[0].startswith("data: 4 of 14 rows are left out\n")
    again = ready(first, second, deduplicate=True)
    assert all(source["cached"] for source in again.summary["sources"])
    assert samples(again) == wanted
    shown = again.epoch_order(seed=0, epoch=0)
    assert sorted(shown.tolist()) == list(range(10))


def test_no_trained_row_is_evaluated_on(write, ready, tiny_tokenizer, tmp_path):
    train, held = write([*ROWS[:9], ROWS[0]], "a.jsonl"), write(ROWS[7:12] * 2, "b.jsonl")
    options = DataOptions(cache_dir=str(tmp_path / "cache"), deduplicate=True)
    book, seen = Ledger(None), set()
    parts = [
        prepare([Source(str(path))], tiny_tokenizer, options, ledger=book, seen=seen)
        for path in (train, held)
    ]
    assert samples(parts[1]) == samples(ready(write(ROWS[9:12], "c.jsonl")))
    with pytest.raises(DataError, match="every row is a copy of a trained one"):
        prepare([Source(str(held))], tiny_tokenizer, options, ledger=book, seen=seen)
    kept, held_out = hold_out(parts[0], 3)
    assert sorted(samples(kept) + samples(held_out)) == sorted(samples(ready(write(ROWS[:9]))))
    assert held_out.sample_id(0).rpartition(":")[2].isdecimal()


def test_answers_that_are_compared_are_copies_in_their_order_alone(write, ready):
    good, bad = ([{"role": "assistant", "content": text}] for text in ("yes", "no"))
    asked = [{"role": "user", "content": "so?"}]
    rows = [{"prompt": asked, "chosen": good, "rejected": bad}] * 2
    rows.append({"prompt": asked, "chosen": bad, "rejected": good})
    rated = [{"prompt": asked, "completion": good, "label": label} for label in (True, False, True)]
    assert len(ready(Source(str(write(rows)), format="preference"), deduplicate=True)) == 4
    assert len(ready(Source(str(write(rated, "b.jsonl")), format="rated"), deduplicate=True)) == 2


def test_short_samples_are_left_out_by_their_tokens(write, ready, dropped, tiny_tokenizer):
    path = write(ROWS[:10] + [chat("a", "b")] * 3)
    lengths = ready(path).lengths
    least = int(lengths[:10].min())
    data = ready(path, min_length=least, max_dropped=0)
    assert data.lengths.tolist() == lengths[:10].tolist()
    said = [(line["line"], line["reason"], line["detail"]) for line in dropped()]
    assert said == [
        (line, "too_short", f"{lengths[10]} tokens, at least {least}") for line in (11, 12, 13)
    ]
    totals = data.summary["totals"]
    assert (totals["left_out"], totals["dropped"], totals["trained_tokens_lost"]) == (3, 0, 0)
    assert len(ready(path, min_length=int(lengths[10]))) == 13


def test_a_stream_leaves_short_rows_out_and_cannot_know_copies(write, tiny_tokenizer):
    from trainkit.data.streaming import SampleStream

    path = write(ROWS[:10] + [chat("a", "b")] * 10)
    options = DataOptions(min_length=20, max_dropped=0)
    stream = SampleStream([Source(str(path))], tiny_tokenizer, options, packing=False)
    rows = stream.rows()
    first = [next(rows) for _ in range(10)]
    assert min(len(row.samples[0]["input_ids"]) for row in first) >= 20
    assert (first[0].num_rows, first[0].num_dropped) == (20, 0)
    with pytest.raises(RecipeError, match="a stream does not keep what it has read"):
        DataSection(train=["a.jsonl"], streaming=True, deduplicate=True)


def test_rows_for_which_a_template_is_false_are_left_out(write, ready):
    path = write([{**row, "kind": "ab"[n % 2]} for n, row in enumerate(ROWS)], "a.jsonl")
    columns = {"messages": "messages", "where": "{{ kind == 'a' }}"}
    data = ready(Source(path=str(path), columns=columns), max_dropped=0)
    assert samples(data) == samples(ready(write(ROWS[::2], "b.jsonl")))
    assert data.summary["totals"]["left_out"] == 10


def test_rows_that_switch_themselves_off_are_left_out(write, ready):
    path = write([{**row, "weight": n % 2} for n, row in enumerate(ROWS)], "a.jsonl")
    data = ready(path, max_dropped=0)
    assert samples(data) == samples(ready(write(ROWS[1::2], "b.jsonl")))
    totals = data.summary["totals"]
    assert (totals["left_out"], totals["dropped"]) == (10, 0)
