"""Texts cut between words have exactly the ids of the whole, whatever the tokenizer splits by."""

import random

import pytest
from tiny import train_bpe
from tokenizers import AddedToken, Regex, normalizers, processors
from tokenizers import pre_tokenizers as cuts
from transformers import PreTrainedTokenizerFast

from trainkit.evals import prompts
from trainkit.evals.prompts import PromptStyle

WORDS = (
    "the",
    "of",
    "and",
    "We'll",
    "it's",
    "I'd",
    "don't",
    "O'Neil",
    "1234567",
    "3.14",
    "x1y2",
    "naïve",
    "Ἀθῆναι",
    "北京大学",
    "e\u0301t\u0301",
    "kata\u0303",
    "...",
    "---",
    "?!",
    "(a)",
    "[b]",
    "\U0001f600",
    "iPhone",
    "HTTPServer",
    "a/b",
    "user@host",
    "<end>",
    "\u00a0",
    "\u2028",
    "z",
    "zebra",
    "abstract",
    "Über",
    "ſ",
)
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
CUT = [
    *({"pre_tokenizer": by(pattern)} for pattern in sorted(prompts._PATTERNS)),
    {"pre_tokenizer": GPT2, "bos": True},
    {"pre_tokenizer": DIGITS, "added": ["abstract", AddedToken("zebra", lstrip=True)]},
    {"pre_tokenizer": GPT2, "normalizer": normalizers.NFC()},
]
WHOLE = [
    {"pre_tokenizer": cuts.ByteLevel(add_prefix_space=True)},
    {"pre_tokenizer": GPT2, "added": [AddedToken("abstract", rstrip=True)]},
    {"pre_tokenizer": GPT2, "added": ["the of"]},
    {"pre_tokenizer": GPT2, "normalizer": normalizers.Replace("the of", "of the")},
    {"pre_tokenizer": by(r"\w+ \w+|\W+|\w+")},
    {"pre_tokenizer": cuts.Metaspace()},
]


@pytest.mark.parametrize("case", [*CUT, *WHOLE], ids=range(len(CUT) + len(WHOLE)))
def test_pieces_have_the_ids_of_the_whole(monkeypatch, case):
    monkeypatch.setattr(prompts, "_STEP", 4)  # cut wherever it may be cut
    tokenizer = make_tokenizer(**case)
    texts = make_texts(20)
    texts += [f"{text}{end}" for text in texts[:10] for end in (" yes", "the", "\nno")]
    assert prompts.cuts_between_words(tokenizer) == any(case is each for each in CUT)
    for adds in (True, False):
        whole = [tokenizer(text, add_special_tokens=adds)["input_ids"] for text in texts]
        assert prompts.encode_texts(tokenizer, texts, add_special_tokens=adds) == whole


def test_a_context_is_tokenised_once_for_all_its_answers(monkeypatch):
    seen = []
    original = prompts._pieces_encoded

    def watched(tokenizer, texts):
        seen.extend(texts)
        return original(tokenizer, texts)

    monkeypatch.setattr(prompts, "_pieces_encoded", watched)
    context = "several words of a passage that goes on for long " * 40
    PromptStyle(make_tokenizer(GPT2)).encode_pairs([(context, f" {each}") for each in "abcd"])
    assert sum(map(len, seen)) < 1.5 * len(context)
    assert len(seen) == len(set(seen))
