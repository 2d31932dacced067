"""Texts have the tokenizer's own ids, whatever it splits by."""

import random

import pytest
from tiny import train_bpe
from tokenizers import AddedToken, Regex, normalizers, processors
from tokenizers import pre_tokenizers as cuts
from transformers import PreTrainedTokenizerFast

from trainkit.evals.model import PromptStyle

WORDS = (
    "the", "of", "and", "We'll", "it's", "I'd", "don't", "O'Neil", "1234567", "3.14", "x1y2",
    "naïve", "Ἀθῆναι", "北京大学", "e\u0301t\u0301", "kata\u0303", "...", "---", "?!", "(a)", "[b]",
    "\U0001f600", "iPhone", "HTTPServer", "a/b", "user@host", "<end>", "\u00a0", "\u2028", "z",
    "zebra", "abstract", "Über", "ſ",
)  # fmt: skip
BLANKS = [" "] * 12 + ["  ", "\n", " \n", "\n\n ", "\t", "\r\n", " - ", ". ", ", "]


def make_texts(count, seed=0):
    draw = random.Random(seed)
    return [
        "".join(draw.choice(WORDS) + draw.choice(BLANKS) for _ in range(draw.randint(1, 120)))
        for _ in range(count)
    ]


def make_tokenizer(pre_tokenizer, *, added=(), normalizer=None, bos=False):
    core = train_bpe(
        make_texts(20, seed=1),
        pre_tokenizer,
        size=400,
        special=["<s>", "<end>"],
        normalizer=normalizer,
    )
    core.add_tokens(list(added))
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A <end>", special_tokens=[("<s>", 0), ("<end>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<end>")


def by(pattern):
    split = cuts.Split(Regex(pattern), "isolated")
    return cuts.Sequence([split, cuts.ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = cuts.ByteLevel(add_prefix_space=False)
DIGITS = cuts.Sequence([cuts.Digits(individual_digits=True), GPT2])
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASES = [
    {"pre_tokenizer": by(rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{LETTERS}")},
    {"pre_tokenizer": by(LETTERS)},
    {"pre_tokenizer": GPT2, "bos": True},
    {"pre_tokenizer": DIGITS, "added": ["abstract", AddedToken("zebra", lstrip=True)]},
    {"pre_tokenizer": GPT2, "normalizer": normalizers.NFC()},
    {"pre_tokenizer": cuts.ByteLevel(add_prefix_space=True)},
    {"pre_tokenizer": GPT2, "added": [AddedToken("abstract", rstrip=True)]},
    {"pre_tokenizer": GPT2, "added": ["the of"]},
    {"pre_tokenizer": GPT2, "normalizer": normalizers.Replace("the of", "of the")},
    {"pre_tokenizer": by(r"\w+ \w+|\W+|\w+")},
    {"pre_tokenizer": cuts.Metaspace(), "bos": True},
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_texts_have_the_ids_of_the_tokenizer(case):
    tokenizer = make_tokenizer(**case)
    tokenizer.chat_template = "{{ messages }}"
    texts = make_texts(20)
    texts += [f"{text}{end}" for text in texts[:10] for end in (" yes", "the", "\nno")]
    for chat in (True, False):
        whole = [tokenizer(text, add_special_tokens=not chat)["input_ids"] for text in texts]
        whole = [ids[:-1] if "bos" in case and not chat else ids for ids in whole]
        assert PromptStyle(tokenizer, chat=chat).encode(texts) == whole
