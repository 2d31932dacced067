"""The fast way through BPE gives the backend's ids, or is not taken."""

import random

import pytest
from tiny import train_bpe
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from trainkit.data import encode
from trainkit.data.encode import PATTERNS, Encoder, find_ascii_bpe

TEXT = [
    "The quick brown fox, aged 42, isn't lazy; it's 2026 and they're THERE.\n\nIs it?  No!",
    "def f(x):\n    return x + 1  # we'll see\n\tprint('done')\r\n" * 3,
    "Größe naïve café 三个词 😀 “quotes” – dash… 1234567 I’m",
]
MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def modern(digits):
    split = pre_tokenizers.Split(Regex(MODERN.format(digits=digits)), behavior="isolated")
    return pre_tokenizers.Sequence([split, BYTES])


KNOWN = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "gpt2 with single digits": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "qwen2": modern(""),
    "llama3": modern("{1,3}"),
    "many digits": modern("+"),
}
OTHERS = {
    "prefix space": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "whole text": BYTES,
    "blanks": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTES]),
}


def trained(pre_tokenizer, normalizer=None):
    special = ["<|im_start|>", "<|im_end|>"]
    return train_bpe(TEXT * 5, pre_tokenizer, size=600, special=special, normalizer=normalizer)


def random_texts(count):
    draw = random.Random(1)
    words = "word Word 12 7 's 'LL <|im_end|> <|im_start|> é 三 😀 ’ cafe Größe"
    others = ("e\u0301", "\u00a0", "  ", "\n\n", " “x” ", "user\n", "\nB")
    pieces = [*" \n\t\r'.,!?\"()", *words.split(), *others]
    return ["".join(draw.choices(pieces, k=draw.randrange(1, 30))) for _ in range(count)]


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()], ids=["as is", "nfc"])
def test_known_patterns_are_found_and_equal(name, normalizer):
    core = trained(KNOWN[name], normalizer)
    fast = find_ascii_bpe(core)
    assert fast is not None
    assert fast._words.pattern == PATTERNS[list(KNOWN).index(name)]
    for text in [*TEXT, *random_texts(800)]:
        assert fast.encode(text).input_ids.tolist() == core.encode(text).ids, repr(text)


@pytest.mark.parametrize("name", OTHERS)
def test_other_tokenizers_are_left_alone(name):
    assert find_ascii_bpe(trained(OTHERS[name])) is None
    assert find_ascii_bpe(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None


def test_ranges_are_those_of_the_offsets():
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained(KNOWN["qwen2"]))
    fast, plain = Encoder(tokenizer), Encoder(tokenizer)
    plain._ascii = None
    assert fast._ascii is not None
    draw = random.Random(2)
    texts = [text for text in [*TEXT, *random_texts(400)] if text]
    spans = []
    for text in texts:
        cuts = sorted(draw.sample(range(len(text) + 1), min(4, len(text) + 1) // 2 * 2))
        spans.append(list(zip(cuts[::2], cuts[1::2], strict=True)))
    for text, one, other in zip(
        texts, fast.encode(texts, spans), plain.encode(texts, spans), strict=True
    ):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.ranges == other.ranges, repr(text)
        assert one.num_straddling == other.num_straddling


def test_the_proof_is_for_data_that_repays_it(monkeypatch):
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr(encode, "PROVED_FROM", 100)
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=trained(KNOWN["gpt2"])))
    for _ in range(4):  # of 25 characters: the fourth makes a hundred
        assert "_ascii" not in vars(encoder)
        encoder.encode(["One row of some 25 letters"[:25]], [[]])
    assert encoder._ascii is not None


def test_an_answer_after_line_breaks_takes_the_fast_way_whatever_is_in_it():
    core = trained(KNOWN["llama3"])
    fast = find_ascii_bpe(core)
    text = "<|im_start|>user\n\nthat’s “x”, isn't it?<|im_end|>\nnaïve <|im_end|>"
    words = fast.encode(text)
    offsets = core.encode(text).offsets
    for piece in ("that", " it", "<|im_end|>"):
        start = text.index(piece)
        first, last = words.tokens(start, len(text))
        assert offsets[first][0] == start
        assert last == len(offsets)
    assert words.tokens(text.index("’"), len(text)) is None
    assert fast.encode("<|im_start|>\n\n三<|im_end|>").tokens(14, 15) is not None


def test_the_memory_of_words_is_bounded(monkeypatch):
    from trainkit.data import encode

    core = trained(KNOWN["gpt2"])
    fast = find_ascii_bpe(core)
    monkeypatch.setattr(encode, "MAX_WORDS", 50)
    for number in range(300):
        text = f"w{number} é{number} x"
        assert fast.encode(text).input_ids.tolist() == core.encode(text).ids
    assert len(fast._known) < 60
    assert len(fast._known_chunks) < 60


def test_a_single_token_over_a_border_decides_the_pattern():
    """One merge of a blank and a digit, in a tokenizer that cuts between them."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate([*alphabet, "Ġ1"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "1")]))
    cut = Regex(r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|[^\r\n\p{L}\p{N}]?\p{L}+|\s+(?!\S)|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(cut, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast = find_ascii_bpe(backend)
    text = "a 12 b 1"
    ids = backend.encode(text).ids
    assert fast is None or fast.encode(text).input_ids.tolist() == ids
