"""Holding training data out: by conversation, the same for everyone, no duplicate on both sides."""

import hashlib

import numpy as np
import pytest
from chats import chat

from trainkit.data import Source, encode, store
from trainkit.data.datasets import PackedDataset, hold_out
from trainkit.errors import DataError, RecipeError
from trainkit.options import DataSection

KEY = b"trainkit held out"
ROWS = [chat(f"question {n}", f"answer {n}", f"more {n}", f"yes {n}") for n in range(200)]


def texts(data):
    return [tuple(data[index]["input_ids"].tolist()) for index in range(len(data))]


@pytest.mark.parametrize(("amount", "count"), [(0.02, 4), (0.5, 100), (1, 1), (30, 30)])
def test_so_many_conversations_are_held_out(write, ready, amount, count):
    data = ready(write(ROWS))
    trained, held = hold_out(data, amount)
    assert len(held) == count
    assert sorted(texts(trained) + texts(held)) == sorted(texts(data))
    assert held.summary["totals"]["samples"] == count
    assert trained.summary["totals"]["tokens"] == int(trained.lengths.sum())
    assert held.sample_id(0).rpartition(":")[2].isdecimal()


def test_neither_order_nor_files_nor_other_rows_decide(write, ready):
    _, held = hold_out(ready(write(ROWS)), 20)
    shuffled = [ROWS[n] for n in np.random.default_rng(0).permutation(200)]
    two = ready(write(shuffled[:90], "a.jsonl"), write(shuffled[90:], "b.jsonl"))
    _, again = hold_out(two, 20)
    assert sorted(texts(held)) == sorted(texts(again))
    _, fewer = hold_out(ready(write(ROWS[:150], "c.jsonl")), 0.1)
    assert len(set(texts(fewer)) & set(texts(held))) >= 10, "a row keeps its place in the order"


def test_copies_stay_on_one_side(write, ready):
    rows = [ROWS[n % 40] for n in range(200)] + ROWS[40:100]
    trained, held = hold_out(ready(write(rows), write(rows[:50], "again.jsonl")), 0.3)
    assert not set(texts(trained)) & set(texts(held))
    assert held.summary["held_out"]["duplicates"] > 0


def test_the_next_start_takes_the_digests_from_the_cache(write, ready, monkeypatch):
    """Each row's digest is stored, so that a start neither hashes all tokens nor encodes any."""
    path = write(ROWS[:30])
    held = texts(hold_out(ready(path), 5)[1])
    monkeypatch.setattr(encode, "find_ascii_bpe", None)
    monkeypatch.setattr(store, "_row_hash", None)
    data = ready(path)
    assert texts(hold_out(data, 5)[1]) == held
    digests = [
        hashlib.blake2b(data[n]["input_ids"].astype("int32").tobytes(), digest_size=16, key=KEY)
        for n in range(len(data))
    ]
    first = sorted(range(len(data)), key=lambda n: digests[n].digest())[:5]
    assert sorted(held) == sorted(texts(data)[n] for n in first)


def test_the_samples_of_one_row_stay_together(write, ready):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q {n}"},
                {"role": "assistant", "content": f"<think>\nt {n}\n</think>\n\na {n}"},
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": f"<think>\nu {n}\n</think>\n\nb {n}"},
            ]
        }
        for n in range(40)
    ]
    data = ready(write(rows), thinking="split")
    assert len(data) == 80
    trained, held = hold_out(data, 0.25)
    assert len(held) == 20
    sides = [
        {side.sample_id(n).partition("#")[0] for n in range(len(side))} for side in (trained, held)
    ]
    assert not sides[0] & sides[1]


def test_epochs_and_packing_show_the_rest_alone(write, ready):
    path = write(ROWS)
    data = ready(Source(str(path), epochs=2.0))
    trained, held = hold_out(data, 0.1)
    kept_back = set(texts(held))
    packed = PackedDataset(trained, 512, seed=3)
    shown = [tuple(each["input_ids"].tolist()) for row in packed for each in row]
    assert len(shown) == 360
    assert not set(shown) & kept_back


@pytest.mark.parametrize(
    ("rows", "amount"), [(ROWS[:3], 0.01), (ROWS[:3], 3), ([ROWS[0]] * 9, 0.5)]
)
def test_an_empty_side_is_refused(write, ready, rows, amount):
    with pytest.raises(DataError, match="to evaluate on"):
        hold_out(ready(write(rows)), amount)


@pytest.mark.parametrize(
    ("given", "part"),
    [("2%", 0.02), (0.02, 0.02), (500, 500), ("0.5%", 0.005), ("2%.jsonl", None), ([], None)],
)
def test_what_the_recipe_takes(given, part):
    assert DataSection(train="a.jsonl", eval=given).eval_part == part


@pytest.mark.parametrize("given", [0, -1, 1.5, "100%", "0%", True, float("nan")])
def test_what_the_recipe_refuses(given):
    with pytest.raises(RecipeError, match="share such as"):
        DataSection(train="a.jsonl", eval=given)
