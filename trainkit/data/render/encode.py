"""Text with spans of characters in, token ids with ranges of tokens out.

The whole text is tokenised once, so ids are those of the plain rendering; spans of characters are
mapped to tokens through the tokenizer's offsets.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from trainkit.data.render.ascii_bpe import AsciiBpe, find_ascii_bpe
from trainkit.errors import DataError


@dataclass(frozen=True)
class Encoded:
    """One tokenised text.

    Attributes:
        input_ids: (S,) int32.
        ranges: for each span its first token and one past its last. A token that reaches over a
            border is in, as with the generation tags of transformers: else a word would be lost.
        num_straddling: tokens that reach over a span's border.
    """

    input_ids: np.ndarray
    ranges: tuple[tuple[int, int], ...]
    num_straddling: int


class Encoder:
    """Tokenises in batches through the Rust backend.

    Args:
        tokenizer: a fast one.

    Raises:
        DataError: the tokenizer has no offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        _require_fast(tokenizer)
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        # Tokens such as Phi-3's <|end|> take the blanks around them along.
        self._greedy = {
            index: token.content
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.rstrip or token.lstrip
        }

    @functools.cached_property
    def _ascii(self) -> AsciiBpe | None:
        """The fast way; proving it takes a second, which cached data never needs."""
        return find_ascii_bpe(self._backend)

    def encode(
        self,
        texts: Sequence[str],
        spans: Sequence[Sequence[tuple[int, int]]],
        *,
        add_special_tokens: bool = False,
    ) -> list[Encoded]:
        """Tokenise texts and find the tokens inside the spans.

        Args:
            texts: each tokenised whole.
            spans: for each text its character ranges, in order, not overlapping.
            add_special_tokens: for text that no template has rendered.
        """
        results: list[Encoded | None] = [None] * len(texts)
        if self._ascii is not None and not add_special_tokens:
            for place, (text, ranges) in enumerate(zip(texts, spans, strict=True)):
                results[place] = _by_words(self._ascii, text, ranges)
        rest = [place for place, result in enumerate(results) if result is None]
        encodings = self._backend.encode_batch(
            [texts[place] for place in rest], add_special_tokens=add_special_tokens
        )
        for place, encoding in zip(rest, encodings, strict=True):
            results[place] = self._ranges(encoding, texts[place], spans[place])
        return [result for result in results if result is not None]

    def _ranges(self, encoding: Encoding, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
        ids = np.array(encoding.ids, dtype=np.int32)
        ranges: list[tuple[int, int]] = []
        straddling = 0
        for start, end in spans:
            first, straddles = _token_from(encoding, start, len(text), len(ids))
            if straddles and self._core(encoding, first, text)[1] <= start:
                first, straddles = first + 1, False
            last, reaches = _token_from(encoding, end, len(text), len(ids))
            if reaches:
                core = self._core(encoding, last, text)
                reaches = core[0] < end < core[1]
                last += core[0] < end
            straddling += straddles + reaches
            ranges.append((first, max(first, last)))
        return Encoded(ids, tuple(ranges), straddling)

    def _core(self, encoding: Encoding, token: int, text: str) -> tuple[int, int]:
        """The characters of a token, without blanks it takes along."""
        covered = encoding.token_to_chars(token)
        assert covered is not None
        content = self._greedy.get(encoding.ids[token])
        if content is None:
            return covered
        start = text.find(content, *covered)
        return (start, start + len(content)) if start >= 0 else covered


def _by_words(ascii_bpe: AsciiBpe, text: str, spans: Sequence[tuple[int, int]]) -> Encoded | None:
    """The fast way; None where a span begins or ends inside a word."""
    words = ascii_bpe.encode(text)
    ranges: list[tuple[int, int]] = []
    for start, end in spans:
        found = words.tokens(start, end)
        if found is None:
            return None
        ranges.append(found)
    return Encoded(words.input_ids, tuple(ranges), 0)


def _require_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without offsets: masks are found in text and mapped by them.

    Raises:
        DataError: the tokenizer has no Rust backend.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} is a slow tokenizer: it cannot say which characters a "
            "token covers, so masks cannot be proved",
            where=str(tokenizer.name_or_path),
            fix="install tokenizers' conversion (pip install sentencepiece protobuf) or use a "
            "model with a tokenizer.json",
        )


def _token_from(encoding: Encoding, place: int, length: int, num_ids: int) -> tuple[int, bool]:
    """The first token at or behind a character, and whether it begins before that character.

    Offsets may leave blanks out (``Ġword`` may be said to start at the ``w``), so a blank without a
    token of its own belongs to the next one.
    """
    while place < length:
        token = encoding.char_to_token(place)
        if token is not None:
            covered = encoding.token_to_chars(token)
            return token, covered is not None and covered[0] < place
        place += 1
    return num_ids, False
