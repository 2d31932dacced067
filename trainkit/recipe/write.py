"""Recipes that are written: those that come with trainkit, and ones that are made or changed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.errors import RecipeError
from trainkit.options.section import ask, nearest
from trainkit.recipe.load import yaml_text
from trainkit.recipe.schema import Recipe

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
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()


def shipped_text(name: str) -> str:
    """A shipped recipe's text, with the schema where an editor finds it from anywhere."""
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


# -- Recipes that are made or changed --------------------------------------------------------------


_COMMENT_COLUMN = 52
_SHORT_COLUMN = 38  # of the shipped recipes


def recipe_text(
    values: Mapping[str, Any], comments: Mapping[str, str], header: Sequence[str]
) -> tuple[str, dict[int, str]]:
    """Write values as a commented recipe.

    Returns:
        The text, and the key that stands on each 1-based line.
    """
    lines = [f"# {line}" for line in header]
    lines.append(f"# yaml-language-server: $schema={schema_uri()}")
    places: dict[int, str] = {}
    order = {name: n for n, name in enumerate(Recipe.model_fields)}
    groups: dict[str, list[str]] = {}
    for key in values:
        groups.setdefault(key.partition(".")[0], []).append(key)
    for section in sorted(groups, key=lambda name: order.get(name, len(order))):
        lines.append("")
        keys = groups[section]
        if keys == [section]:
            places[len(lines) + 1] = section
            lines.append(_line(section, yaml_text(values[section]), comments.get(section)))
            continue
        lines.append(f"{section}:")
        for key in keys:
            places[len(lines) + 1] = key
            name = key.partition(".")[2]
            lines += _entry(name, values[key], comments.get(key))
    return "\n".join(lines) + "\n", places


def with_values(
    text: str, values: Mapping[str, Any], comments: Mapping[str, str] | None = None
) -> str:
    """A recipe with other values, its comments kept.

    The sections of ``text`` are written out, a key a line. A value whose key the recipe does not
    have is added to its section; None takes a key out.
    """
    lines = text.rstrip("\n").split("\n")
    for key in dict.fromkeys([*values, *(comments or {})]):
        section, _, name = key.rpartition(".")
        begin, end = _section_of(lines, section)
        indent = "  " if section else ""
        found = [n for n in range(begin, end) if lines[n].startswith(f"{indent}{name}:")]
        comment = (comments or {}).get(key)
        if found:
            held, _, old = lines[found[0]].partition(" # ")
            shown = yaml_text(values[key]) if key in values else held.partition(":")[2].strip()
            lines[found[0]] = _line(f"{indent}{name}", shown, comment or old, _SHORT_COLUMN)
            if key in values and values[key] is None:
                del lines[found[0]]
        elif values.get(key) is None:
            continue
        else:
            new = _line(f"{indent}{name}", yaml_text(values[key]), comment, _SHORT_COLUMN)
            at = _last_used(lines, begin, end)
            if section:
                before = ["", f"{section}:"] if begin == end else []
            else:
                before = [""] if at and lines[at - 1][:1] == " " else []
            lines[at:at] = [*before, new]
    return "\n".join(lines) + "\n"


def _section_of(lines: Sequence[str], section: str) -> tuple[int, int]:
    """First line behind a section's name, and the line behind its last; equal where it is not."""
    if not section:
        return 0, len(lines)
    heads = [n for n, line in enumerate(lines) if line.startswith(f"{section}:")]
    if not heads:
        return len(lines), len(lines)
    begin = heads[0] + 1
    later = (n for n in range(begin, len(lines)) if lines[n][:1] not in ("", " ", "#"))
    return begin, next(later, len(lines))


def _last_used(lines: Sequence[str], begin: int, end: int) -> int:
    while end > begin and not lines[end - 1].strip():
        end -= 1
    return end


def _entry(name: str, value: Any, comment: str | None) -> list[str]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        items = [f"    - {yaml_text(each)}" for each in value]
        return [_line(f"  {name}", "", comment), *items]
    return [_line(f"  {name}", yaml_text(value), comment)]


def _line(name: str, shown: str, comment: str | None, column: int = _COMMENT_COLUMN) -> str:
    text = f"{name}: {shown}".rstrip()
    behind = " ".join((comment or "").split())
    return f"{text:<{column}} # {behind}".rstrip() if behind else text
