"""Messages, docstrings and comments use the words that a newcomer reads at once."""

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]

INSTEAD = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bdoors?\b": "what it is: a method, a command",
    r"\b(is|are) no numbers?\b": "is NaN, is infinite, is not a number",
    r"(?<!there )\b(is|are) no (adapter|model|run|checkpoint|date|size|file|format)s?\b": "not a",
    r"\bbeside\b": "next to; besides",
    r"\banew\b": "again",
    r"\b(whence|thence|hither|lest|thereof|whereof|nought|naught|wherein)\b": "current English",
    r"\brows? of tokens\b": "sequence; tokenised row",
    r"\bwhat is asked\b": "what it is: the prompt, the command, the option",
    r"\bfor want of\b": "because there is no",
    r"\btold in a (line|sentence)\b": "called with; printed as",
    r"\b(in the place of|but for (the|those|hidden|what|its))\b": "instead of; except",
    r"\bwhole or not at all\b": "complete or not at all",
    r"\b(stands?|stood) (there|in|beside|behind)\b": "is",
}
"""Words that are refused, and what to write."""

IDENTIFIERS = r"\b(\w*Asked|asked|told|\w+Place|source_store|num_shares|was_told)\b"
"""Names that said what English does not: a prompt, a shard, a rank, a path."""

PATHS = sorted((ROOT / "trainkit").rglob("*.py"))
TEXTS = [
    *PATHS,
    *(ROOT / "trainkit" / "configs").glob("*.yaml"),
    *(ROOT / "docs").rglob("*.md"),
    *ROOT.glob("*.md"),
]


def prose(path):
    """The strings and comments of a module, or all of a text, as (line, text)."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return list(enumerate(text.splitlines(), 1))
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", None)}
    return [
        (token.start[0] + offset, line)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in kinds
        for offset, line in enumerate(token.string.splitlines())
    ]


def refused(lines):
    return [
        f"{number}: {found[0]!r}; write: {better}"
        for number, line in lines
        for pattern, better in INSTEAD.items()
        if (found := re.search(pattern, line, re.IGNORECASE))
    ]


def test_words_are_current_english():
    found = {str(path.relative_to(ROOT)): refused(prose(path)) for path in TEXTS}
    assert not {path: said for path, said in found.items() if said}


def test_names_say_what_they_hold():
    for path in PATHS:
        reader = io.StringIO(path.read_text(encoding="utf-8")).readline
        names = {t.string for t in tokenize.generate_tokens(reader) if t.type == tokenize.NAME}
        assert not [name for name in names if re.fullmatch(IDENTIFIERS, name)], path
