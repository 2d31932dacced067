"""A turn's own switch wins under every mask; what trains is what an oracle of a few lines says."""

import json

import numpy as np
import pytest
from chats import trained_texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainkit.data import DataOptions, Ledger, Source, prepare
from trainkit.data.preview import Authors, measure

TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={"weight": st.sampled_from([0, 1]), "train": st.booleans()},
)
ROWS = st.lists(st.lists(TURN, min_size=1, max_size=6), min_size=1, max_size=6)
MASKS = ("assistant", "last_assistant", "none")


def said(turns):
    """A row, each turn with a word of its own."""
    return {"messages": [{**turn, "content": f"word{n}."} for n, turn in enumerate(turns)]}


def oracle(turns, mask, roles):
    """The words that are to be trained; None where the row is to be dropped."""
    own = [{turn[k] for k in ("weight", "train") if k in turn} for turn in turns]
    if any(len({bool(value) for value in values}) > 1 for values in own):
        return None  # switches that disagree
    answers = [n for n, turn in enumerate(turns) if turn["role"] == "assistant"]
    trained = set()
    for n, turn in enumerate(turns):
        by_mask = turn["role"] in roles and (mask == "assistant" or answers[-1:] == [n])
        by_mask = True if mask == "none" else by_mask
        if bool(*own[n]) if own[n] else by_mask:
            trained.add(n)
    return trained or None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=ROWS,
    mask=st.sampled_from(MASKS),
    roles=st.sampled_from([["assistant"], ["assistant", "user"], ["tool"]]),
)
def test_the_mask_is_the_oracles_and_all_counts_agree(folder, tiny_tokenizer, rows, mask, roles):
    file = folder / "rows.jsonl"
    # One row is always kept, or there would be nothing to prepare.
    rows = [[{"role": "user"}, {"role": "assistant", "train": True}], *rows]
    file.write_text("".join(json.dumps(said(turns)) + "\n" for turns in rows))
    options = DataOptions(mask=mask, roles=roles, cache_dir=str(folder / "cache"), max_length=4096)
    data = prepare([Source(path=str(file))], tiny_tokenizer, options, ledger=Ledger())
    expected = [oracle(turns, mask, roles) for turns in rows]
    found = {data.sample_id(n).rpartition(":")[2]: data[n] for n in range(len(data))}
    assert sorted(map(int, found)) == [n for n, words in enumerate(expected, 1) if words]
    for line, sample in found.items():
        turns, words = rows[int(line) - 1], expected[int(line) - 1]
        ids, is_trained = sample["input_ids"], sample["loss_mask"].astype(bool)
        spaced = np.where(is_trained, ids, tiny_tokenizer.convert_tokens_to_ids("Ġ"))
        text = tiny_tokenizer.decode(spaced)
        assert {n for n in range(len(turns)) if f"word{n}." in text} == words
        if mask != "none":  # nothing but those turns
            assert text.count("word") == len(words)
        for n in set(range(len(turns))) - words:
            assert f"word{n}" not in text, (turns, mask, text)
    stats, totals = measure(data), data.summary["totals"]
    kept = sum(words is not None for words in expected)
    assert (totals["kept"], totals["dropped"]) == (kept, len(rows) - kept)
    assert (stats.rows["kept"], stats.rows["dropped"]) == (kept, len(rows) - kept)
    trained = sum(int(sample["loss_mask"][1:].sum()) for sample in found.values())
    assert trained == stats.trained_tokens == totals["trained_tokens"]
    authors = Authors(data, tiny_tokenizer, options)
    authors.read(list(range(len(data))))
    table = authors.table()
    assert sum(row["trained_tokens"] for row in table) == trained
    assert sum(row["tokens"] for row in table) == stats.tokens == totals["tokens"]
    if mask != "none":
        cut = [
            max(n for n in range(len(t)) if t[n]["role"] == "assistant" or n in words) + 1 < len(t)
            for t, words in zip(rows, expected, strict=True)
            if words
        ]
        assert totals["cut"] == stats.rows["cut"] == sum(cut)


def trained_words(tokenizer, data, words):
    """Which of the words are trained, in all samples together."""
    texts = ["".join(trained_texts(tokenizer, data[n])) for n in range(len(data))]
    return sorted(word for text in texts for word in words if word in text)


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [("assistant", ["ask1", "so1", "so2", "so3"]), ("last_assistant", ["ask1", "so3"])],
)
def test_split_thinking_trains_each_switched_turn_once(write, ready, tiny_tokenizer, mask, wanted):
    turns = []
    for n in (1, 2, 3):
        turns += [{"role": "user", "content": f"ask{n}", "train": True if n == 1 else None}]
        turns += [{"role": "assistant", "content": f"<think>why{n}</think>so{n}"}]
    data = ready(write([{"messages": turns}]), thinking="split", mask=mask)
    words = [f"{word}{n}" for word in ("ask", "so") for n in (1, 2, 3)]
    assert trained_words(tiny_tokenizer, data, words) == wanted


def test_users_with_other_switches_are_not_joined(write, ready, tiny_tokenizer):
    rows = [
        {"role": "user", "content": "first", "train": True},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "answer"},
    ]
    data = ready(write([{"messages": rows}]))
    found = trained_words(tiny_tokenizer, data, ["first", "second", "answer"])
    assert found == ["answer", "first"]


def test_a_prompts_own_switch_wins(write, ready, tiny_tokenizer):
    row = {
        "prompt": [
            {"role": "user", "content": "ask"},
            {"role": "assistant", "content": "early", "weight": 1},
            {"role": "assistant", "content": "other"},
            {"role": "user", "content": "more"},
        ],
        "completion": [{"role": "assistant", "content": "late"}],
    }
    words = ["ask", "early", "late", "more", "other"]
    for mask, wanted in (("assistant", ["early", "late"]), ("none", words)):
        data = ready(write([row]), mask=mask)
        assert trained_words(tiny_tokenizer, data, words) == wanted


def test_labels_of_ids_win_over_mask_none(write, ready):
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, {"input_ids": [5, 6, 7, 8]}]
    data = ready(write(rows), mask="none")
    assert [data[n]["loss_mask"].tolist() for n in (0, 1)] == [[0, 0, 1, 1], [1, 1, 1, 1]]
