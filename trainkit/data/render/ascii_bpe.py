"""A fast way through byte-level BPE for the ASCII part of texts.

A byte-level BPE tokenizer cuts text into words by a pattern and encodes each word on its own.
Language repeats its words, so cutting with :mod:`re` and looking words up is over three times as
fast as the general path of ``tokenizers``, which carries normalisation and alignments along.
Words that are not ASCII go that general way.

Which pattern a tokenizer uses is not looked up but proved: a pattern is taken when it gives the
backend's ids on several hundred strings made to tell patterns apart. A tokenizer without a proof is
left alone.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

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

CHUNK_STARTS = re.compile(r"(?<=\S)(?= \S)|(?<=[A-Za-z0-9])(?=\n\S)|(?<=[A-Za-z0-9]\n)(?=\S)")
"""Where all of the patterns cut, whatever else is there: before one blank between others, and
around one line break behind a letter or digit (a role header ends so)."""

MAX_CACHED_CHUNK = 24
"""Longer chunks that are not ASCII hardly come again."""

MAX_WORDS = 1_000_000
"""The memory of words is emptied beyond this; about 150 MB."""

NUM_TRIALS = 400


@dataclass(frozen=True)
class Words:
    """An encoded text, word by word.

    Attributes:
        input_ids: (S,) int32.
        starts: (W + 1,) the first character of each word, and the text's length.
        firsts: (W + 1,) the first token of each word, and S.
    """

    input_ids: np.ndarray
    starts: np.ndarray
    firsts: np.ndarray

    def tokens(self, start: int, end: int) -> tuple[int, int] | None:
        """The tokens of characters ``start`` to ``end``; None where one is inside a word."""
        places = np.searchsorted(self.starts, (start, end))
        if self.starts[places[0]] != start or self.starts[places[1]] != end:
            return None
        return int(self.firsts[places[0]]), int(self.firsts[places[1]])


class AsciiBpe:
    """Encodes text for one tokenizer, ASCII fast.

    Args:
        backend: with a BPE model.
        pattern: cuts its words.
    """

    def __init__(self, backend: Tokenizer, pattern: str) -> None:
        added = {
            token.content: index for index, token in backend.get_added_tokens_decoder().items()
        }
        ordered = sorted(added, key=lambda text: (-len(text), text))
        self._control = re.compile(f"({'|'.join(map(re.escape, ordered)) or '(?!)'})")
        self._control_ids = {text: (index,) for text, index in added.items()}
        self._words = re.compile(pattern)
        self._backend = backend
        self._model = backend.model
        self._known: dict[str, tuple[int, ...]] = {}
        self._known_chunks: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> Words:
        """Encode a text, control tokens included."""
        words: list[str] = []
        ids: list[tuple[int, ...]] = []
        for place, piece in enumerate(self._control.split(text)):
            if place % 2:
                words.append(piece)
                ids.append(self._control_ids[piece])
            elif piece.isascii():
                found = self._words.findall(piece)
                words += found
                ids += self._look_up(found)
            else:
                found = CHUNK_STARTS.split(piece)
                words += found
                ids += self._look_up_chunks(found)
        sizes = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        counts = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        firsts = np.concatenate(([0], np.cumsum(counts)))
        flat = np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(firsts[-1]))
        return Words(flat, np.concatenate(([0], np.cumsum(sizes))), firsts)

    def _look_up_chunks(self, chunks: list[str]) -> list[tuple[int, ...]]:
        known = self._known_chunks
        if len(known) > MAX_WORDS:
            known.clear()
        found = {chunk: known[chunk] for chunk in chunks if chunk in known}
        strange = []
        for chunk in chunks:
            if chunk in found:
                continue
            if chunk.isascii():
                ids = tuple(chain.from_iterable(self._look_up(self._words.findall(chunk))))
                found[chunk] = known[chunk] = ids
            else:
                strange.append(chunk)
        encoded = self._backend.encode_batch(strange, add_special_tokens=False)
        for chunk, encoding in zip(strange, encoded, strict=True):
            found[chunk] = tuple(encoding.ids)
            if len(chunk) <= MAX_CACHED_CHUNK:
                known[chunk] = found[chunk]
        return [found[chunk] for chunk in chunks]

    def _look_up(self, words: list[str]) -> list[tuple[int, ...]]:
        known = self._known
        try:
            return [known[word] for word in words]
        except KeyError:
            pass
        if len(known) > MAX_WORDS:
            known.clear()
        for word in words:
            if word not in known:
                encoded = self._model.tokenize(word.translate(BYTE_CHARACTERS))
                known[word] = tuple(token.id for token in encoded)
        return [known[word] for word in words]


def _byte_characters() -> dict[int, str]:
    """The character by which byte-level tokenizers write each ASCII byte."""
    table, free = {}, 256
    for byte in range(128):
        if 33 <= byte <= 126:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(free)
            free += 1
    return table


BYTE_CHARACTERS = _byte_characters()


def find_ascii_bpe(backend: Tokenizer) -> AsciiBpe | None:
    """The fast way for a tokenizer, if one of the patterns is proved for it."""
    if not isinstance(backend.model, BPE) or backend.model.dropout:
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    trials = list(_trials([token.content for token in added]))
    truth = [encoding.ids for encoding in backend.encode_batch(trials, add_special_tokens=False)]
    for pattern in PATTERNS:
        candidate = AsciiBpe(backend, pattern)
        if all(
            candidate.encode(text).input_ids.tolist() == ids
            for text, ids in zip(trials, truth, strict=True)
        ):
            return candidate
    return None


def _trials(control: Sequence[str]) -> list[str]:
    """Strings that tell the patterns apart: every ASCII character, and what is at borders."""
    draw = random.Random(0)
    pieces = [chr(byte) for byte in range(128)]
    pieces += ["'s", "'T", "'re", "'LL", "'d", "word", "Two", "12", "3456", "  ", "\n\n", " \n "]
    pieces += [
        "é",
        "三",
        "😀",
        "’",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\x85",
        "e\u0301",
        " é",
        "é x",
        " 三.",
        " \u00a0a",
    ]
    pieces += ["\r\n", "\t ", "...", "!?\n", " (", "a1b", "I'm", "x" * 20, " 7", "   9", "_", "''s"]
    # Some tokenizers have thousands of reserved tokens; a few show how all are treated.
    pieces += [text for text in draw.sample(list(control), min(8, len(control))) if text.isascii()]
    trials = [*pieces, "", "The quick brown fox, aged 42, isn't lazy.\n\nIs it?  No!"]
    trials += ["".join(draw.choices(pieces, k=draw.randrange(2, 12))) for _ in range(NUM_TRIALS)]
    return trials
