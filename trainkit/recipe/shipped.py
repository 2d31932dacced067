"""The recipes that come with trainkit, found in an installed package as in a clone."""

from pathlib import Path

from trainkit.errors import RecipeError
from trainkit.options.words import ask, nearest

_DIRECTORY = Path(__file__).parents[1] / "configs"
_SCHEMA = "recipe.schema.json"


def shipped_recipes() -> dict[str, Path]:
    """Name to file, in alphabetical order."""
    return {path.stem: path for path in sorted(_DIRECTORY.glob("*.yaml"))}


def schema_uri() -> str:
    """Where an editor finds the recipe's JSON schema, for recipes that are written elsewhere."""
    return (_DIRECTORY / _SCHEMA).resolve().as_uri()


def describe_recipe(path: Path) -> str:
    """The first sentence of the comment at the top of a shipped recipe."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


def shipped_text(name: str) -> str:
    """A shipped recipe's text, with the schema where an editor finds it from anywhere.

    Raises:
        RecipeError: there is no such recipe.
    """
    recipes = shipped_recipes()
    if name not in recipes:
        hint = ask(nearest(name, recipes))
        raise RecipeError(
            f"there is no shipped recipe {name!r}",
            fix=f"{hint or ''} The recipes are {', '.join(recipes)}".strip(),
        )
    text = recipes[name].read_text(encoding="utf-8")
    return text.replace(f"$schema={_SCHEMA}", f"$schema={schema_uri()}", 1)


def write_text(text: str, target: Path) -> None:
    """Write a new recipe.

    Raises:
        RecipeError: the file exists, or cannot be written.
    """
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(
            "this file exists and is not overwritten",
            where=str(target),
            fix="name another one with --output",
        ) from None
    except OSError as error:
        raise RecipeError(f"cannot be written: {error.strerror}", where=str(target)) from error
