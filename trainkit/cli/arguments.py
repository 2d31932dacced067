"""What the command line may look like before click reads it.

Underscores in option names (``--replace_kernel``), options with an optional value (a bare
``--deepspeed``), overrides written as options (``--training.seed=1``), and the argument that old
launchers add.
"""

from collections.abc import Iterator, Mapping, Sequence

OPTIONAL_VALUES: Mapping[str, Mapping[str, str]] = {
    "sft": {"--deepspeed": "zero2", "--resume": "auto", "--allow-changed": "all"},
}
"""Per command: options that may be given without a value, and what they mean then."""

_LAUNCHER_OPTION = "--local-rank"


def normalize(arguments: Sequence[str]) -> list[str]:
    """Rewrite a command line so that every option is spelled one way and has its value with it.

    What comes after ``--`` stays as it is.
    """
    command = next((word for word in arguments if not word.startswith("-")), "")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = list(_rewritten(arguments[:end], OPTIONAL_VALUES.get(command, {}), command == "sft"))
    return [*words, *arguments[end:]]


def _rewritten(
    arguments: Sequence[str], optional: Mapping[str, str], takes_overrides: bool
) -> Iterator[str]:
    position = 0
    while position < len(arguments):
        word = arguments[position]
        following = arguments[position + 1] if position + 1 < len(arguments) else None
        position += 1
        if not word.startswith("--"):
            yield word
            continue
        name, equals, value = word.partition("=")
        if takes_overrides and "." in name:  # --training.seed=1 and --training.seed 1
            if not equals and following is not None:
                value, position = following, position + 1
            yield f"{name.removeprefix('--')}={value}"
            continue
        name = name.replace("_", "-")
        if takes_overrides and name == _LAUNCHER_OPTION:
            position += not equals and _is_value(following)
        elif name in optional and not equals:
            has_value = _is_value(following)
            yield f"{name}={following if has_value else optional[name]}"
            position += has_value
        else:
            yield f"{name}{equals}{value}"


def _is_value(word: str | None) -> bool:
    """Whether a word after an option belongs to it: no other option, no override, no recipe."""
    if word is None or word.startswith("-"):
        return False
    from trainkit.recipe.document import is_override  # not for help, which needs no recipe

    return not is_override(word) and not word.endswith((".yaml", ".yml"))
