"""What the shell offers after TAB: keys of a recipe, shipped recipes, runs."""

from collections.abc import Iterator
from pathlib import Path

_DEFAULT_PARENT = Path("train_model")


def recipe_keys(incomplete: str) -> Iterator[tuple[str, str]]:
    """Keys as overrides are written, ``training.learning_rate=``, each with its help."""
    from trainkit.recipe import key_references

    for entry in key_references():
        if entry.key.startswith(incomplete) and "[]" not in entry.key:
            yield f"{entry.key}=", entry.help


def key_words(incomplete: str) -> Iterator[tuple[str, str]]:
    """Keys as they are named, ``training.learning_rate``."""
    for key, text in recipe_keys(incomplete):
        yield key.removesuffix("="), text


def shipped(incomplete: str) -> Iterator[tuple[str, str]]:
    """The recipes that come with trainkit."""
    from trainkit.recipe.write import describe_recipe, shipped_recipes

    for name, path in shipped_recipes().items():
        if name.startswith(incomplete):
            yield name, describe_recipe(path)


def run_directories(incomplete: str) -> Iterator[str]:
    """Runs in ``train_model`` by the start of their name, or by that of their path."""
    parent = Path(incomplete).parent if "/" in incomplete else _DEFAULT_PARENT
    start = Path(incomplete).name if not incomplete.endswith("/") else ""
    if not parent.is_dir():
        return
    for status in sorted(parent.glob("*/status.json")):
        if status.parent.name.startswith(start):
            yield str(status.parent)
