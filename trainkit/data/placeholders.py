"""Words of other tools that stand for what is not text: ``<image>``, and where they are text."""

import re
from collections.abc import Collection

_MEDIUM = "(?:image|img|video|vid|audio|vision|sound|speech|media)"
_PLACEHOLDER = re.compile(
    rf"<(?:image|img|video|audio|sound|speech|IMAGE|IMG|VIDEO|AUDIO)>|<(?i:"
    rf"\|(?:\w+_)?{_MEDIUM}(?:pad|_\w+)?\||(?:(?:start|end)_of_|fake_token_around_|global-){_MEDIUM}|"
    rf"(?:{_MEDIUM}|im)_?(?:pad|patch|col|row|atom|context|(?:soft_)?token|placeholder))>"
    r"|\[(?:IMG(?:_BREAK|_END)?|BEGIN_AUDIO)\]"
)
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


def placeholder_in(text: str, known: Collection[str] = ()) -> str | None:
    """The first one that no backticks quote and no tag closes; an ``<img>`` has none to close."""
    if not _PLACEHOLDER.search(text):
        return None
    for found in _PLACEHOLDER.finditer(CODE.sub("", text)):
        closed = f"{found[0][0]}/{found[0][1:]}"
        if found[0] not in known and (closed not in text or found[0] == "<img>"):
            return found[0]
    return None


def outside_code(word: str, text: str, by: str) -> tuple[str, int]:
    """A text with something else for a placeholder, but not inside code; how many there were."""
    wanted = f"<{word}>"
    if wanted not in text or f"</{word}>" in text:
        return text, 0
    pieces, last, count = [], 0, 0
    for code in [*CODE.finditer(text), None]:
        end = len(text) if code is None else code.start()
        piece = text[last:end]
        count += piece.count(wanted)
        pieces.append(piece.replace(wanted, by))
        if code is not None:
            pieces.append(code[0])
            last = code.end()
    return "".join(pieces), count
