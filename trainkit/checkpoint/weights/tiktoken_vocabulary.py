"""Rebuilds a tiktoken vocabulary as a ``tokenizer.json``, so that no remote code is needed.

A tiktoken file is a list of byte strings with ranks. Encoding splits the text by a pattern, takes
a piece whole if it is in the list, and else merges the adjacent pair whose union has the lowest
rank. The same is said to the tokenizers library with one merge for every way to cut a token into
two tokens, in the order of ranks, and ``ignore_merges`` for the whole pieces.
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.errors import CheckpointError

# Of GLM-4's tokenizer; the same as that of cl100k_base.
GLM4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PREFIX = ("[gMASK]", "<sop>")  # what GLM-4's tokenizer puts before every text


def read_ranks(path: Path) -> dict[bytes, int]:
    """The tokens of a tiktoken file.

    Raises:
        CheckpointError: it is not such a file (ChatGLM3 and older have SentencePiece models).
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        raise CheckpointError(
            "it is not a tiktoken vocabulary", where=str(path), fix="add a tokenizer.json"
        ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError("its ranks have holes or repeat", where=str(path))
    return ranks


def build_tokenizer_json(path: Path, settings: Mapping[str, Any]) -> str:
    """The text of ``tokenizer.json``.

    Args:
        path: the tiktoken file.
        settings: tokenizer_config.json, whose ``added_tokens_decoder`` lists the special tokens.

    Raises:
        CheckpointError: the special tokens are not listed, or do not follow the vocabulary.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks = read_ranks(path)
    letters = _byte_letters()
    words = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {words[token]: rank for token, rank in ranks.items()}
    merges = [(words[left], words[right]) for left, right in _merges(ranks)]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GLM4_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    for number, added in _added_tokens(path, settings):
        core.add_tokens([AddedToken(**added)])
        if core.token_to_id(added["content"]) != number:
            raise CheckpointError(
                f"special token {added['content']!r} has id {number}, but the vocabulary ends at "
                f"{core.get_vocab_size() - 2}",
                where=str(path.parent),
            )
    _add_prefix(core)
    return str(core.to_str(pretty=True))


def _added_tokens(path: Path, settings: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    listed = settings.get("added_tokens_decoder")
    try:
        rows = [
            (int(number), {flag: row[flag] for flag in flags if flag in row})
            for number, row in dict(listed or {}).items()
        ]
        if not rows or not all(isinstance(row["content"], str) for _, row in rows):
            raise ValueError
    except (TypeError, ValueError, KeyError):
        raise CheckpointError(
            "tokenizer_config.json does not list the special tokens (added_tokens_decoder)",
            where=str(path.parent),
            fix="add a tokenizer.json",
        ) from None
    return sorted(rows, key=lambda row: row[0])


def _add_prefix(core: Any) -> None:
    from tokenizers import processors

    ids = [(token, core.token_to_id(token)) for token in _PREFIX]
    if all(number is not None for _, number in ids):
        prefix = " ".join(f"{token}:0" for token in _PREFIX)
        core.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{prefix} $A:0", pair=f"{prefix} $A:0 $B:1", special_tokens=ids
                ),
            ]
        )


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every cut of every token into two tokens, by rank of the token, then of the parts."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
    return merges


def _byte_letters() -> dict[int, str]:
    """The printable stand-in of each byte that byte-level tokenizers use (from GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in letters)
    return letters | {byte: chr(256 + index) for index, byte in enumerate(others)}
