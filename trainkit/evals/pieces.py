"""Many texts to token ids at once: what they share is tokenised once, on all cores.

The questions of a set begin with the same examples, and a context is asked for with each of its
answers. A text is cut at places where the tokenizer cuts it too, so the ids of the pieces, one
after the other, are those of the whole text. Pieces that come again are not tokenised again.

Where a tokenizer is not known to cut there, texts are tokenised whole.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

_CUT = re.compile("(?<=[a-z]) (?=[a-z])")
"""Before a blank between two words."""

_STEP = 256
"""Characters of a piece at least: shorter ones share more, and are more to put together."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LATER = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END"
)
_PATTERNS = {
    # GPT-2
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # Llama 3, Qwen 2 to 3, Qwen 3.5
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LATER}",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LATER}",
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LATER}",
    # gpt-oss and Mistral's later ones
    _CASED.replace("END", f"{_CONTRACTIONS}?")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LATER}",
    _CASED.replace("END", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LATER}",
}
"""Patterns that never look back, and match a blank before a word only at their beginning."""


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids, exactly those of ``tokenizer(text)``.

    Args:
        tokenizer: a fast one shares pieces; any other takes the texts whole.
        texts: any number.
        add_special_tokens: those that the tokenizer adds to a text by itself.
    """
    around = _around(tokenizer, add_special_tokens) if cuts_between_words(tokenizer) else None
    if around is None:
        return _encoded(tokenizer, texts, add_special_tokens=add_special_tokens)
    before, behind = around
    cut = [list(_pieces(text)) for text in texts]
    unique = list(dict.fromkeys(chain.from_iterable(cut)))
    known = dict(zip(unique, _pieces_encoded(tokenizer, unique), strict=True))
    return [
        [*before, *chain.from_iterable(known[piece] for piece in pieces), *behind] for pieces in cut
    ]


def cuts_between_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text's ids are those of its part before a blank between words and of the rest."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    model = backend.model
    is_plain = (
        type(model).__name__ == "BPE"
        and not model.dropout
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
    )
    normalizer = backend.normalizer
    is_local = normalizer is None or type(normalizer).__name__ == "NFC"
    added = backend.get_added_tokens_decoder().values()
    if getattr(tokenizer, "split_special_tokens", False):
        return False
    reaches = any(each.rstrip or _CUT.search(each.content) for each in added)
    return is_plain and is_local and not reaches and _splits(_state(backend.pre_tokenizer))


def _state(part: Any) -> Mapping[str, Any]:
    """A part of a tokenizer as in ``tokenizer.json``."""
    state: Mapping[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _splits(state: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer cuts before a blank between words, and does nothing beyond a cut."""
    steps = state["pretokenizers"] if state.get("type") == "Sequence" else [state]
    return all(map(_is_known, steps)) and any(map(_has_pattern, steps))


def _is_known(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Split":
        return _has_pattern(step) and step["behavior"] == "Isolated" and not step["invert"]
    return kind == "Digits" or (kind == "ByteLevel" and not step["add_prefix_space"])


def _has_pattern(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return bool(step["use_regex"])
    return step.get("type") == "Split" and step["pattern"].get("Regex") in _PATTERNS


def _around(
    tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool
) -> tuple[list[int], list[int]] | None:
    """The special tokens that go before a text and behind it; None where that is not clear."""
    if not add_special_tokens:
        return [], []
    (plain,) = _encoded(tokenizer, ["a"], add_special_tokens=False)
    (whole,) = _encoded(tokenizer, ["a"], add_special_tokens=True)
    starts = [at for at in range(len(whole)) if whole[at : at + len(plain)] == plain]
    if len(starts) != 1:
        return None
    return whole[: starts[0]], whole[starts[0] + len(plain) :]


def _pieces(text: str) -> Iterator[str]:
    """A text's pieces; texts with the same beginning have the same pieces there."""
    start = 0
    while (found := _CUT.search(text, start + _STEP)) is not None:
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def _encoded(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    with _all_cores():
        found = tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)
    return [list(ids) for ids in found["input_ids"]]


def _pieces_encoded(tokenizer: Any, pieces: Sequence[str]) -> Iterator[list[int]]:
    """Ids alone: of a hundred thousand pieces, masks and offsets take longer than the ids."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # what a call of the tokenizer leaves behind
    backend.no_padding()
    with _all_cores():
        found = backend.encode_batch_fast(pieces, add_special_tokens=False)
    return (each.ids for each in found)


@contextmanager
def _all_cores() -> Iterator[None]:
    """Within, a tokenizer uses threads; RAYON_NUM_THREADS says how many.

    They are switched off elsewhere because of processes that are forked, and none is forked here.
    """
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
