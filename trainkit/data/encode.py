"""Text with spans of characters in, token ids with ranges of tokens out.

The whole text is tokenised once, so ids are those of the plain rendering; spans of characters are
mapped to tokens through the tokenizer's offsets, or by a fast way through byte-level BPE.

A byte-level BPE tokenizer cuts text into words by a pattern and encodes each word on its own.
Language repeats its words, so cutting with :mod:`re` and looking words up is over three times as
fast as the general path of ``tokenizers``, which carries normalisation and alignments along.
Words that are not ASCII go that general way. Which pattern a tokenizer uses is not looked up but
proved: a pattern is taken when it gives the backend's ids on several hundred strings made to tell
patterns apart. A tokenizer without a proof is left alone.
"""

import functools
import os
import random
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase

from trainkit.errors import DataError

# The patterns below are those of the model families, with Unicode's classes written out for ASCII.
_GPT2 = (
    r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+"
    r"|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
)
_GPT2_SINGLE_DIGITS = (
    r"[0-9]|'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[^\t-\r A-Za-z0-9]+"
    r"|[\t-\r ]+(?=[0-9]|\Z)|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
)
_MODERN = (
    r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{digits}"
    r"| ?[^\t-\r A-Za-z0-9]+[\r\n]*|[\t-\r ]*[\r\n]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
)
PATTERNS = (
    _GPT2,
    _GPT2_SINGLE_DIGITS,
    _MODERN.replace("{digits}", ""),
    _MODERN.replace("{digits}", "{1,3}"),
    _MODERN.replace("{digits}", "+"),
)

SINGLE_BLANK = re.compile(r" (?<=\S )(?=\S)")
"""One blank between others: all of the patterns cut before it, whatever else is there."""

SINGLE_BREAK = re.compile(r"(?<=[A-Za-z0-9])(?=\n\S)|(?<=\n)(?<!\s\n)(?=\S)")
"""So they do behind one line break between others, and before it behind a letter or digit."""

ANY_BREAK = re.compile(r"(?<=[A-Za-z0-9])(?=\n\S)|(?<=\n)(?=\S)")
"""The same for patterns that keep several line breaks together."""

MAX_CACHED_CHUNK = 24
"""Longer chunks that are not ASCII hardly come again."""

MAX_WORDS = 1_000_000
"""The memory of words is emptied beyond this; about 150 MB."""

PROVED_FROM = 1_000_000
"""Characters: the proof takes as long as to encode so many the plain way."""

NUM_TRIALS = 400
MAX_OWN_TRIALS = 2000

ONE_WORD = re.compile(r" ?[A-Za-z]+")
"""What every pattern keeps together; most tokens are of this kind."""


class Words:
    """An encoded text, piece by piece; only where a place in a piece is asked for, word by word.

    Attributes:
        input_ids: (S,) int32.
    """

    def __init__(self) -> None:
        self.input_ids = np.empty(0, dtype=np.int32)
        self._ids: list[tuple[int, ...]] = []
        self._words: list[str] = []
        # Of each piece the first character, token and word.
        self._pieces: list[tuple[int, int, int]] = []
        self._length = self._size = 0

    def add(self, length: int, words: Sequence[str], ids: Sequence[tuple[int, ...]]) -> None:
        """Append a piece of text with its words, and the tokens of each."""
        self._pieces.append((self._length, self._size, len(self._words)))
        self._words += words
        self._ids += ids
        self._length += length
        self._size += sum(map(len, ids))

    def finish(self) -> "Words":
        self._pieces.append((self._length, self._size, len(self._words)))
        flat = chain.from_iterable(self._ids)
        self.input_ids = np.fromiter(flat, dtype=np.int32, count=self._size)
        return self

    def tokens(self, start: int, end: int) -> tuple[int, int] | None:
        """The tokens of characters ``start`` to ``end``; None where one is inside a word."""
        first, last = self._token(start), self._token(end)
        return None if first is None or last is None else (first, last)

    def _token(self, place: int) -> int | None:
        """The token that begins at a character; None inside a word."""
        number = bisect_left(self._pieces, (place,))
        character, token, word = self._pieces[min(number, len(self._pieces) - 1)]
        if character == place:
            return token
        character, token, word = self._pieces[number - 1]
        while character < place:
            character += len(self._words[word])
            token += len(self._ids[word])
            word += 1
        return token if character == place else None


class AsciiBpe:
    """Encodes text for one tokenizer, ASCII fast."""

    def __init__(self, backend: Tokenizer, pattern: str) -> None:
        added = {
            token.content: index for index, token in backend.get_added_tokens_decoder().items()
        }
        ordered = sorted(added, key=lambda text: (-len(text), text))
        self._control = re.compile(f"({'|'.join(map(re.escape, ordered)) or '(?!)'})")
        self._control_ids = {text: (index,) for text, index in added.items()}
        self._words = re.compile(pattern)
        self._breaks = ANY_BREAK if self._words.findall("\n\nx") == ["\n\n", "x"] else SINGLE_BREAK
        self._backend = backend
        self._model = backend.model
        self._known: dict[str, tuple[int, ...]] = {}
        self._known_chunks: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> Words:
        encoded = Words()
        for place, piece in enumerate(self._control.split(text)):
            if place % 2:
                encoded.add(len(piece), (piece,), (self._control_ids[piece],))
            elif piece.isascii():
                self._add_ascii(encoded, piece)
            else:
                self._add_chunks(encoded, piece)
        return encoded.finish()

    def _add_chunks(self, encoded: Words, piece: str) -> None:
        """Append a piece that is not ASCII: the words of it that are go the fast way."""
        chunks = SINGLE_BLANK.split(piece)
        chunks[1:] = [f" {chunk}" for chunk in chunks[1:]]
        done = 0
        for number in [n for n, chunk in enumerate(chunks) if not chunk.isascii()]:
            self._add_ascii(encoded, "".join(chunks[done:number]))
            for part in self._breaks.split(chunks[number]):
                if part.isascii():
                    self._add_ascii(encoded, part)
                else:
                    encoded.add(len(part), (part,), (self._of_chunk(part),))
            done = number + 1
        self._add_ascii(encoded, "".join(chunks[done:]))

    def _add_ascii(self, encoded: Words, text: str) -> None:
        words, known = self._words.findall(text), self._known
        try:
            ids = [known[word] for word in words]
        except KeyError:
            if len(known) > MAX_WORDS:
                known.clear()
            for word in words:
                if word not in known:
                    tokens = self._model.tokenize(word.translate(BYTE_CHARACTERS))
                    known[word] = tuple(token.id for token in tokens)
            ids = [known[word] for word in words]
        encoded.add(len(text), words, ids)

    def _of_chunk(self, chunk: str) -> tuple[int, ...]:
        known = self._known_chunks
        ids = known.get(chunk)
        if ids is None:
            ids = tuple(self._backend.encode(chunk, add_special_tokens=False).ids)
            if len(chunk) <= MAX_CACHED_CHUNK:
                if len(known) > MAX_WORDS:
                    known.clear()
                known[chunk] = ids
        return ids


_SHOWN = range(33, 127)
BYTE_CHARACTERS = {byte: chr(byte) for byte in _SHOWN} | {
    byte: chr(256 + place) for place, byte in enumerate(b for b in range(128) if b not in _SHOWN)
}
"""The character by which byte-level tokenizers write each ASCII byte."""


def find_ascii_bpe(backend: Tokenizer) -> AsciiBpe | None:
    """The fast way for a tokenizer, if one of the patterns is proved for it."""
    if not isinstance(backend.model, BPE) or backend.model.dropout:
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    trials = [*_trials([token.content for token in added]), *_own_trials(backend)]
    truth = [encoding.ids for encoding in backend.encode_batch(trials, add_special_tokens=False)]
    for pattern in PATTERNS:
        candidate = AsciiBpe(backend, pattern)
        if all(
            candidate.encode(text).input_ids.tolist() == ids
            for text, ids in zip(trials, truth, strict=True)
        ):
            return candidate
    return None


def _own_trials(backend: Tokenizer) -> list[str]:
    """The tokenizer's own tokens that the patterns cut differently.

    A wrong pattern gives other ids only where a token reaches over a border that the right one has,
    so a tokenizer with few such tokens would pass on strings that are not made of them.
    """
    patterns = [re.compile(pattern) for pattern in PATTERNS]
    back = {ord(name): chr(byte) for byte, name in BYTE_CHARACTERS.items()}
    found = []
    for token in sorted(backend.get_vocab(with_added_tokens=False)):
        text = token.translate(back)
        if not text.isascii() or len(text) < 2 or ONE_WORD.fullmatch(text):
            continue
        if len({tuple(pattern.findall(text)) for pattern in patterns}) > 1:
            found.append(text)
    return random.Random(0).sample(found, min(len(found), MAX_OWN_TRIALS))


def _trials(control: Sequence[str]) -> list[str]:
    """Strings that tell the patterns apart: every ASCII character, and what is at borders."""
    draw = random.Random(0)
    pieces = [chr(byte) for byte in range(128)]
    pieces += ["'s", "'T", "'re", "'LL", "'d", "word", "Two", "12", "3456", "  ", "\n\n", " \n "]
    pieces += ["é", "三", "😀", "’", "\u00a0", "\u3000", "\u2028", "\x85", "e\u0301", " é"]
    pieces += ["é x", " 三.", " \u00a0a"]
    pieces += ["\r\n", "\t ", "...", "!?\n", " (", "a1b", "I'm", "x" * 20, " 7", "   9", "_", "''s"]
    # Some tokenizers have thousands of reserved tokens; a few show how all are treated.
    pieces += [text for text in draw.sample(list(control), min(8, len(control))) if text.isascii()]
    trials = [*pieces, "", "The quick brown fox, aged 42, isn't lazy.\n\nIs it?  No!"]
    trials += ["".join(draw.choices(pieces, k=draw.randrange(2, 12))) for _ in range(NUM_TRIALS)]
    return trials


@dataclass(frozen=True)
class Encoded:
    """One tokenised text.

    Attributes:
        ranges: for each span its first token and one past its last. A token that reaches over a
            border is in, as with the generation tags of transformers: else a word would be lost.
        num_straddling: tokens that reach over a span's border.
    """

    input_ids: np.ndarray
    ranges: tuple[tuple[int, int], ...]
    num_straddling: int
    images: tuple[tuple[int, int], ...] = ()


class Encoder:
    """Tokenises in batches through the Rust backend."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} is a slow tokenizer: it cannot say which characters a "
                "token covers, so masks cannot be proved",
                where=str(tokenizer.name_or_path),
                fix="install tokenizers' conversion (pip install sentencepiece protobuf) or use a "
                "model with a tokenizer.json",
            )
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._num_characters = 0  # encoded so far
        # Tokens such as Phi-3's <|end|> take the blanks around them along.
        self._greedy = {
            index: token.content
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.rstrip or token.lstrip
        }

    @functools.cached_property
    def _ascii(self) -> AsciiBpe | None:
        """The fast way; proving it takes a second, which cached and small data never need."""
        return find_ascii_bpe(self._backend)

    def encode(
        self,
        texts: Sequence[str],
        spans: Sequence[Sequence[tuple[int, int]]],
        *,
        add_special_tokens: bool = False,
    ) -> list[Encoded]:
        """Tokenise texts and find the tokens inside the spans.

        Spans are in order and do not overlap; special tokens are for text that no template has
        rendered.
        """
        results: list[Encoded | None] = [None] * len(texts)
        self._num_characters += sum(map(len, texts))
        is_long = self._num_characters >= PROVED_FROM and not add_special_tokens
        if is_long and self._ascii is not None:
            for place, (text, wanted) in enumerate(zip(texts, spans, strict=True)):
                words = self._ascii.encode(text)
                found = [words.tokens(start, end) for start, end in wanted]
                ranges = tuple(each for each in found if each is not None)
                if len(ranges) == len(found):  # else a span begins or ends inside a word
                    results[place] = Encoded(words.input_ids, ranges, 0)
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


@contextmanager
def threads_of_tokenizers(on: bool) -> Iterator[None]:
    """Within, tokenizers use threads, or none; RAYON_NUM_THREADS says how many."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true" if on else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


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
