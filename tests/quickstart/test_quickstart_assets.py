"""The quickstart's task: held-out facts are new, and no answer comes without reading them."""

import collections
import itertools
import json

import pytest

from trainkit import quickstart


@pytest.fixture(scope="module")
def splits():
    train = quickstart.make_conversations(3000, 0, held_out=False)
    held_out = quickstart.make_conversations(quickstart.NUM_HELD_OUT, 0, held_out=True)
    return train, held_out


def asked(conversations):
    """Every question with the facts that decide its answer, read off the text alone."""
    found = set()
    for messages in conversations:
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        told = []
        for message in messages:
            text = message["content"]
            if message["role"] != "user":
                continue
            if text.startswith(("My ", "我的")) and text.endswith((".", "。")):
                told.append(text)
                found.add(("told", frozenset(told)))
            elif text.startswith(("Please", "请")):
                found.add(("words", text))
            elif text.startswith(("What is my", "我的")):
                found.add(("pet", text, frozenset(told)))
            else:
                found.add(("persona", text, system))
    return found


def test_no_conversation_and_no_question_instance_is_in_both_splits(splits):
    train, held_out = splits
    assert {json.dumps(each) for each in train}.isdisjoint(json.dumps(each) for each in held_out)
    kinds = collections.Counter(kind for kind, *_ in asked(held_out))
    assert set(kinds) == {"told", "words", "pet", "persona"}
    assert asked(train).isdisjoint(asked(held_out))


def test_conversations_are_as_promised(splits):
    train, held_out = splits
    assert len({json.dumps(each) for each in train}) == len(train) >= 500
    for messages in (*train, *held_out):
        roles = [message["role"] for message in messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert 2 <= len(turns) // 2 <= 6
    with_system = sum(messages[0]["role"] == "system" for messages in train) / len(train)
    chinese = sum(messages[-1]["content"][-2] > "\u2e80" for messages in train) / len(train)
    assert 0.6 < with_system < 0.73
    assert 0.4 < chinese < 0.6


def test_two_runs_make_the_same():
    first = quickstart.make_conversations(50, 3, held_out=False)
    assert quickstart.make_conversations(50, 3, held_out=False) == first
    assert quickstart.make_conversations(50, 4, held_out=False) != first


def test_the_question_alone_does_not_give_the_answer(splits):
    train, held_out = splits
    answers = collections.defaultdict(collections.Counter)
    for messages in train:
        for question, answer in itertools.pairwise(messages):
            if answer["role"] == "assistant":
                answers[question["content"]][answer["content"]] += 1
    pairs = [
        (question["content"], answer["content"])
        for messages in held_out
        for question, answer in itertools.pairwise(messages)
        if answer["role"] == "assistant"
    ]
    guesses = [answers[q].most_common(1)[0][0] if q in answers else None for q, _ in pairs]
    # The commonest training answer to each question: by chance right for one city in ten.
    right = sum(guess == answer for guess, (_, answer) in zip(guesses, pairs, strict=True))
    assert right / len(pairs) < 0.15


def test_the_tokenizer_makes_words_of_words_and_loses_nothing(splits):
    train, held_out = splits
    tokenizer = quickstart.train_tokenizer(train, quickstart.VOCAB_SIZE)
    for language in quickstart.LANGUAGES:
        space = " " if language.code == "en" else ""
        for word in (*language.words, *language.names):
            assert len(tokenizer(space + word)["input_ids"]) <= (1 if space else len(word))
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    text = tokenizer.apply_chat_template(held_out[0], tokenize=False)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert quickstart.make_model(len(tokenizer), 0).num_parameters() < 600_000
