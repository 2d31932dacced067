"""Every trained token against renderers written by hand, for nasty templates and tokenizers."""

import json
import random

import numpy as np
import pytest
from oracle import REFUSED, SOMETIMES, TEMPLATES, TOKENIZERS, byte_level, chatml, token_ranges

from trainkit.data import DataOptions, Source
from trainkit.data.builder import SampleBuilder
from trainkit.data.files import RawRow
from trainkit.errors import DataError, ModelError

FIXED = [
    ["Hello?", "Hi there."],
    ["same", "same", "same", "same"],
    [" Q1 \n", "\n  A1 \n\n", "\n\nQ2", "  A2\n"],
    ["三日本", "né 😀 e\u0301 日本語", "😀", "😀😀"],
    [
        "ASSISTANT: x ### Assistant:\ny",
        "### Assistant:\nASSISTANT: USER: z",
        "Answer: ",
        "Answer: 4",
    ],
    ["Q1", "<think>\nR1\n</think>\n\nA1", "Q2", "<think>\nR2\n</think>\n\nA2"],
    ["what's", "'s fine\n\n\n", "x", "\tdef f(x): return x"],
]
PIECES = (
    *("Hello", "\n", "  ", "'s", " 123", "日本", "😀", "the answer is 42.", "### User:\n", "USER:"),
    *("\t", ".", "?", "\n\n", "e\u0301", "[", "]", "<", "a", "A", " ", "&"),
)


def conversations(seed):
    r = random.Random(seed)
    found = [list(zip(("user", "assistant") * 2, texts, strict=False)) for texts in FIXED]
    while len(found) < 40:
        turns = [("system", "S")] if r.random() < 0.3 else []
        for role in ("user", "assistant") * r.randrange(1, 4):
            text = "".join(r.choices(PIECES, k=r.randrange(1, 7)))
            turns.append((role, text if text.strip() else text + "x"))
        found.append(turns)
    return found


def build(builder, turns):
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    batch = builder.build([RawRow(1, json.dumps(row).encode())], Source("x"))
    return batch.samples[0][2:4] if batch.samples else None


def check(tokenizer, sample, pieces):
    """Each token with something that the model writes is trained, and no other.

    This is what the generation tags of transformers train.
    """
    ids, mask = sample
    written = np.concatenate([np.full(len(text.encode()), by) for text, by in pieces])
    ranges = token_ranges(tokenizer, "".join(text for text, _ in pieces), ids)
    for place, (start, end) in enumerate(ranges):
        if end > start:
            assert bool(mask[place]) == bool(written[start:end].any()), (
                place,
                tokenizer.convert_ids_to_tokens(ids.tolist()),
                mask.tolist(),
            )


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.mark.parametrize("name", TEMPLATES)
def test_exactly_what_the_model_writes_is_trained(tokenizer, name):
    tokenizer.chat_template, render = TEMPLATES[name]
    builder = SampleBuilder(tokenizer, DataOptions(max_length=4096))
    kept = 0
    for turns in conversations(7):
        sample = build(builder, turns)
        assert sample is not None
        check(tokenizer, sample, render(turns))
        kept += 1
    assert kept == 40


@pytest.mark.parametrize("name", REFUSED)
def test_templates_without_a_proof_are_refused(name):
    tokenizer = byte_level()
    tokenizer.chat_template = REFUSED[name]
    with pytest.raises((DataError, ModelError), match="template"):
        build(SampleBuilder(tokenizer, DataOptions()), conversations(0)[1])


@pytest.mark.parametrize("name", SOMETIMES)
def test_texts_that_a_template_changes_are_refused_and_the_others_are_right(name):
    tokenizer = byte_level()
    tokenizer.chat_template, change = SOMETIMES[name]
    builder = SampleBuilder(tokenizer, DataOptions(max_length=4096))
    kept = 0
    for turns in conversations(8):
        sample = build(builder, turns)
        if sample is not None and not any("think" in text for _, text in turns):
            for role, text in turns:
                assert role != "assistant" or change(text).strip() == text.strip()
            check(tokenizer, sample, chatml([(role, change(text)) for role, text in turns]))
            kept += 1
    assert 0 < kept < 40
