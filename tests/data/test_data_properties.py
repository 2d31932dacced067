"""What decides which prepared data is found again, and what a share of it holds."""

import random
from collections import Counter

import pytest
from chats import chat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import make_tokenizer

from trainkit.data import DataOptions, Source
from trainkit.data.datasets import hold_out
from trainkit.data.store import store_key, tokenizer_digest

QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
READ = {
    "format": st.sampled_from(["auto", "alpaca", "messages"]),
    "columns": st.dictionaries(st.sampled_from(["instruction", "output"]), st.sampled_from("ab")),
    "roles": st.lists(st.sampled_from(["assistant", "user", "tool"]), min_size=1, unique=True),
}


@QUICK
@given(
    one=st.fixed_dictionaries(READ), other=st.fixed_dictionaries(READ), key=st.sampled_from([*READ])
)
def test_sources_that_are_read_alike_share_a_store_and_no_others(one, other, key):
    other = {**one, key: other[key]}
    keys = [
        store_key(Source("p", **each), ("", []), [("jsonl", "0")], "t", DataOptions(), "c")
        for each in (one, other)
    ]
    plain = [{**each, "roles": set(each["roles"])} for each in (one, other)]
    assert (keys[0] == keys[1]) == (plain[0] == plain[1])


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "pad_token", "unk_token"])
def test_a_special_token_of_another_role_is_another_tokenizer(name):
    tokenizers = make_tokenizer(), make_tokenizer()
    first, other = map(tokenizer_digest, tokenizers)
    assert first == other
    tokens = [each.content for each in tokenizers[1].added_tokens_decoder.values()]
    before = getattr(tokenizers[1], name)
    setattr(tokenizers[1], name, next(each for each in tokens if each != before))
    assert tokenizer_digest(tokenizers[1]) != first


@QUICK
@given(seed=st.integers(0, 99), share=st.sampled_from([0.2, 0.5, 7]))
def test_what_is_left_over_does_not_fit_into_what_is_held_out(write, ready, seed, share):
    roll = random.Random(seed)
    copies = [roll.choice([1, 1, 2, 5, 20]) for _ in range(12)]
    rows = [chat(f"q{seed} {n}", f"a{n}") for n, count in enumerate(copies) for _ in range(count)]
    roll.shuffle(rows)
    wanted = round(len(rows) * share) if share < 1 else share
    trained, held = hold_out(ready(write(rows)), share)
    sides = [
        Counter(tuple(each[n]["input_ids"]) for n in range(len(each))) for each in (trained, held)
    ]
    assert not sides[0].keys() & sides[1].keys()
    assert sorted((sides[0] + sides[1]).values()) == sorted(copies)
    assert 0 <= wanted - len(held) < min(sides[0].values())
