"""Words of other tools that stand for what is not text: ``<image>``, and where it is mere text."""

import re

PLACEHOLDER = re.compile(r"<(image|video|audio)>")
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


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
