"""Tokens that a recipe adds to a model's vocabulary: a list, or a file with one a line."""

from collections.abc import Sequence
from pathlib import Path

from trainkit.errors import RecipeError
from trainkit.places import regular

MAX_TOKENS = 100_000
"""More is another tokenizer, which is trained, not added."""


def read_tokens(choice: str | Sequence[str], key: str) -> tuple[str, ...]:
    """The tokens themselves.

    Args:
        choice: the tokens, or the path of a text file with one a line; blank lines do not count.
        key: of the recipe, for messages.

    Raises:
        RecipeError: the file cannot be read, or a token is blank or given twice.
    """
    if not isinstance(choice, str):
        return _checked(choice, key, [key] * len(choice))
    path = Path(choice).expanduser()
    try:
        lines = regular(path, RecipeError).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{key}: {path.absolute()} cannot be read: {error}",
            where=key,
            fix="give a list of tokens, or a UTF-8 text file with one token a line",
        ) from error
    kept = {number: line.rstrip("\r") for number, line in enumerate(lines, 1) if line.strip()}
    return _checked(list(kept.values()), key, [f"{path}:{number}" for number in kept])


def _checked(tokens: Sequence[str], key: str, places: Sequence[str]) -> tuple[str, ...]:
    first: dict[str, str] = {}
    for token, place in zip(tokens, places, strict=True):
        if not token.strip() or "\0" in token:
            raise RecipeError(f"{key}: {token!r} is no token", where=place, fix="remove it")
        if token in first:
            raise RecipeError(
                f"{key}: {token!r} is given twice", where=place, fix="remove one of the two"
            )
        first[token] = place
    if not 0 < len(first) <= MAX_TOKENS:
        raise RecipeError(
            f"{key}: 1 to {MAX_TOKENS:,} tokens can be added, and these are {len(first):,}",
            where=key,
            fix="remove the key, or train a tokenizer of your own",
        )
    return tuple(first)
