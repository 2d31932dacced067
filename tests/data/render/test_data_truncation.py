"""Rows longer than max_length: what is cut, by which policy, and that it is all counted."""

import pytest
from chats import chat, trained_texts

from trainkit.errors import DataError

END = "<|im_end|>"


def tokens_of(tokenizer, row):
    return len(tokenizer.apply_chat_template(row["messages"], tokenize=True)["input_ids"])


ROW = chat("q" * 10, "a" * 10, "r" * 10, "b" * 10, "s" * 10, "c" * 10, system="sys")


def test_drop_turns_keeps_finished_exchanges(write, ready, dropped, tiny_tokenizer):
    whole = tokens_of(tiny_tokenizer, ROW)
    shorter = tokens_of(tiny_tokenizer, {"messages": ROW["messages"][:5]})
    data = ready(write([ROW]), max_length=whole - 2)
    assert trained_texts(tiny_tokenizer, data[0]) == ["a" * 10 + END, "b" * 10 + END]
    assert len(data[0]["input_ids"]) == shorter
    (entry,) = dropped("changed.jsonl")
    assert (entry["action"], entry["reason"], entry["line"]) == ("cut", "turns_dropped", 1)
    assert (entry["tokens"], entry["trained_tokens"]) == (whole - shorter, 11)
    totals = data.summary["totals"]
    assert (totals["cut"], totals["dropped"], totals["trained_tokens_lost"]) == (1, 0, 11)


def test_an_untrained_tail_is_cut_without_loss(write, ready, dropped, tiny_tokenizer):
    whole = tokens_of(tiny_tokenizer, ROW)
    data = ready(write([ROW]), max_length=whole - 1)
    assert len(trained_texts(tiny_tokenizer, data[0])) == 3
    (entry,) = dropped("changed.jsonl")
    assert (entry["reason"], entry["tokens"], entry["trained_tokens"]) == ("untrained_tail", 1, 0)


def test_a_row_without_room_for_one_exchange_is_dropped(write, ready, dropped):
    data = ready(write([ROW, chat("q", "a")]), max_length=50)
    assert len(data) == 1
    (entry,) = dropped()
    assert (entry["reason"], entry["trained_tokens"]) == ("too_long", 33)


def test_left_turns_keeps_the_system_and_the_last_exchanges(write, ready, tiny_tokenizer):
    whole = tokens_of(tiny_tokenizer, ROW)
    data = ready(write([ROW]), max_length=whole - 2, truncation="left_turns")
    text = tiny_tokenizer.decode(data[0]["input_ids"])
    assert "sys" in text
    assert "q" * 10 not in text
    assert trained_texts(tiny_tokenizer, data[0]) == ["b" * 10 + END, "c" * 10 + END]


def test_right_cuts_tokens(write, ready, tiny_tokenizer):
    whole = tokens_of(tiny_tokenizer, ROW)
    data = ready(write([ROW]), max_length=whole - 5, truncation="right")
    assert len(data[0]["input_ids"]) == whole - 5
    assert trained_texts(tiny_tokenizer, data[0])[-1] == "c" * 7


def test_a_row_that_just_fits_is_left_alone_and_a_longer_one_goes(write, ready, tiny_tokenizer):
    whole = tokens_of(tiny_tokenizer, ROW)
    for room, dropped in ((0, 0), (-2, 1)):
        data = ready(write([ROW, chat("q", "a")]), max_length=whole + room, truncation="drop")
        assert (data.summary["totals"]["cut"], data.summary["totals"]["dropped"]) == (0, dropped)


def test_turns_that_just_fit_are_kept(write, ready, tiny_tokenizer):
    """Behind the end of the last turn that fits, the template has a line break, which may go."""
    shorter = tokens_of(tiny_tokenizer, {"messages": ROW["messages"][:5]})
    data = ready(write([ROW]), max_length=shorter - 1)
    assert trained_texts(tiny_tokenizer, data[0]) == ["a" * 10 + END, "b" * 10 + END]


def test_error_stops_and_names_the_row(write, ready):
    with pytest.raises(DataError, match=r"data.jsonl:2: the row has"):
        ready(write([chat("q", "a"), ROW]), max_length=60, truncation="error")


def test_last_assistant_is_not_moved_to_an_earlier_turn_by_split(write, ready, dropped):
    row = chat("q", "<think>\nx\n</think>\n\na", "r", "<think>\n" + "y" * 90 + "\n</think>\n\nb")
    data = ready(write([row]), thinking="split", max_length=100)
    assert len(data) == 1
    assert data.summary["totals"]["kept"] == 1
    assert dropped("dropped.jsonl") == []
    (entry,) = dropped("changed.jsonl")
    assert entry["reason"] == "too_long"


def test_tokens_in_and_out_are_all_accounted_for(write, ready):
    rows = [chat(*["word " * (n % 9 + 1)] * (2 * (n % 4) + 2)) for n in range(60)]
    whole = ready(write(rows), max_length=10_000).summary["totals"]
    cut = ready(write(rows), max_length=90).summary["totals"]
    assert cut["rows"] == cut["kept"] + cut["dropped"] == 60
    assert cut["tokens"] + cut["tokens_lost"] == whole["tokens"]
    assert cut["trained_tokens"] + cut["trained_tokens_lost"] == whole["trained_tokens"]
    assert cut["cut"] > 0
    assert cut["dropped"] > 0
