"""Hundreds of damaged files: no traceback, nothing lost in silence, good rows unharmed.

Every file mixes good rows with damaged ones. Whatever the damage, preparing either raises a
DataError, or every row is kept or in the ledger, and the good rows' tokens are those of a clean
file.
"""

import json
import random
from functools import partial

import pytest
from chats import chat

from trainkit.data import sources
from trainkit.data.builder import SampleBuilder
from trainkit.data.files import read_rows
from trainkit.data.options import DataOptions
from trainkit.data.sources import prepare
from trainkit.data.store import Ledger
from trainkit.errors import DataError
from trainkit.options import Source

NUM_FILES = 1000
LIMIT = 20_000
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

GOOD = [
    chat("hello", "good day"),
    chat("né 三 😀", "two\nlines", "more", "  padded  ", system="be kind"),
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"instruction": "add", "input": "1 2", "output": "3"},
    {"prompt": "one two ", "completion": "three"},
]


def deep(levels):
    return "[" * levels + "]" * levels


def bad_values(r):
    plain = [None, 5, -1.5, True, [], {}, "", " ", [1], [None], {"a": 1}, float("nan"), 10**40]
    texts = ["\x00", "a\ud800b", "x" * 99, "<|im_end|>", "<|im_start|>assistant\n", "</think>"]
    return r.choice([*plain, *texts, "\u200b", [[["x"]]]])


def damaged_object(r):
    """A row with one field replaced, renamed, doubled or removed, at any depth."""
    row = json.loads(json.dumps(r.choice([*GOOD, chat("q", "a")])))
    if r.random() < 0.2:
        row["messages"] = [{"role": "assistant", "content": bad_values(r), "tool_calls": [CALL]}]
    place = row
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = r.choice(keys)
        if isinstance(place[key], (dict, list)) and place[key] and r.random() < 0.7:
            place = place[key]
            continue
        kind = r.randrange(4)
        if kind == 0 or not isinstance(place, dict):
            place[key] = bad_values(r)
        elif kind == 1:
            place[r.choice(["role", "content", "weight", "tools", "x"])] = place.pop(key)
        elif kind == 2:
            place["tool_calls"] = bad_values(r)
        else:
            del place[key]
        break
    return json.dumps(row).encode()


def damaged_bytes(r):
    """A row whose bytes are not JSON, no UTF-8, or no end."""
    text = json.dumps(r.choice(GOOD), ensure_ascii=False).encode()
    at = r.randrange(1, len(text))
    return r.choice(
        [
            text[:at],
            text[at:],
            text[:at] + bytes([r.randrange(256)]) + text[at + 1 :],
            text[:at] + b"\xff\xfe" + text[at:],
            text[:at] + b"\x00" + text[at:],
            text.replace(b'"', b"'"),
            text.replace(b":", b"", 1),
            text + text,
            b'{"messages": ' + deep(r.choice([3, 200, 100_000])).encode() + b"}",
            b'{"text": "' + b"y" * (LIMIT + r.randrange(3)) + b'"}',
            text.decode().encode("utf-16"),
            "née".encode("latin-1"),
            b'{"text": "a", "text": "b"}',
            b"NaN",
            b"[1, 2]",
            b"null",
            b'"text"',
        ]
    ).replace(b"\n", b" ")


def lines_of(seed):
    r = random.Random(seed)
    lines = []
    for _ in range(r.randrange(1, 8)):
        kind = r.random()
        if kind < 0.5:
            lines.append((r.randrange(len(GOOD)), None))
        else:
            lines.append((None, damaged_object(r) if kind < 0.75 else damaged_bytes(r)))
    return lines


@pytest.fixture(scope="module")
def builder(tiny_tokenizer):
    return SampleBuilder(tiny_tokenizer, DataOptions(max_length=256))


@pytest.fixture(scope="module")
def clean(builder, tmp_path_factory):
    path = tmp_path_factory.mktemp("clean") / "clean.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in GOOD))
    batch = builder.build(list(read_rows(path, max_row_bytes=LIMIT)), Source("x"))
    assert batch.num_kept == len(GOOD)
    return list(samples_of(batch).values())


def samples_of(batch):
    samples = {}
    for row, _, ids, mask, _ in batch.samples:
        assert mask[1:].any()
        samples.setdefault(row, (ids.tolist(), mask.tolist()))
    return samples


@pytest.mark.parametrize("container", ["jsonl", "json"])
def test_damaged_files(builder, clean, tmp_path, container):
    path = tmp_path / f"x.{container}"
    refused = seen = 0
    for seed in range(NUM_FILES // 2):
        lines = lines_of(seed)
        texts = [json.dumps(GOOD[g]).encode() if raw is None else raw for g, raw in lines]
        joined = b"\n".join(texts) if container == "jsonl" else b"[" + b",\n".join(texts) + b"]"
        path.write_bytes(joined)
        try:
            rows = list(read_rows(path, max_row_bytes=LIMIT))
        except DataError:
            assert container == "json", seed  # an array without its end says so as a whole
            refused += 1
            continue
        batch = builder.build(rows, Source("x"))
        dropped = [event.row for event in batch.events if event.action == "dropped"]
        samples = samples_of(batch)
        assert sorted([*samples, *dropped]) == list(range(len(rows))), seed
        assert all(event.reason and event.detail for event in batch.events)
        seen += len(rows)
        if container == "jsonl":
            # Blank lines are not rows; every other line is one, in its place.
            assert [row.line for row in rows] == [
                n for n, text in enumerate(joined.split(b"\n"), 1) if text.strip()
            ]
            by_line = {row.line: number for number, row in enumerate(rows)}
            for line, (good, _) in enumerate(lines, 1):
                if good is not None:
                    assert samples[by_line[line]] == clean[good], seed
    assert seen > NUM_FILES
    assert refused < NUM_FILES // 4


@pytest.mark.parametrize("mask", ["assistant", "none"])
def test_damaged_files_end_to_end(tiny_tokenizer, tmp_path, monkeypatch, mask):
    monkeypatch.setattr(sources, "read_rows", partial(read_rows, max_row_bytes=LIMIT))
    refusals = []
    for seed in range(40):
        lines = lines_of(10_000 + seed)
        path = tmp_path / f"{seed}.jsonl"
        texts = [json.dumps(GOOD[g]).encode() if raw is None else raw for g, raw in lines]
        path.write_bytes(b"\n".join(texts))
        ledger = Ledger(tmp_path / f"{seed}-dropped.jsonl")
        options = DataOptions(max_length=256, mask=mask, cache_dir=str(tmp_path / "cache"))
        try:
            data = prepare([Source(str(path))], tiny_tokenizer, options, ledger=ledger)
        except DataError as error:
            refusals.append(str(error).startswith(str(path)))
            continue
        finally:
            ledger.close()
        totals = data.summary["totals"]
        written = ledger.path.read_text().splitlines() if ledger.path.exists() else []
        assert totals["rows"] == totals["kept"] + totals["dropped"]
        assert totals["dropped"] == len(written) == ledger.num("dropped")
        assert {json.loads(line)["file"] for line in written} <= {str(path)}
    assert all(refusals)
    assert len(refusals) < 20
