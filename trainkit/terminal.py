"""Text of users made safe to print: no character of it reaches a terminal as a command."""

import re

UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]"
)
"""Characters that move a terminal's cursor, change its state, or turn text around; tabs and line
feeds are not among them."""


def visible(text: str) -> str:
    """A text whose control characters are written as ``\\u001b``, which JSON reads back."""
    return UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
