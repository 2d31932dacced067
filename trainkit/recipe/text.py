"""A recipe as text: resolved, with where each value is from; or with a comment behind each."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from trainkit.parallel.process import Machine
from trainkit.recipe.derived import Derived
from trainkit.recipe.load import LoadedRecipe, ResolvedValue, schema_uri
from trainkit.recipe.schema import Recipe
from trainkit.redact import redact


def shown_value(value: ResolvedValue) -> Any:
    """The value, or ``<redacted>`` where its key says that it is a secret."""
    key = value.key.rpartition(".")[2]
    return redact({key: value.value})[key]


class _OneLine(yaml.SafeDumper):
    """Texts of several lines in double quotes, which hold their ends as ``\\n``."""


_OneLine.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if "\n" in text else None
    ),
)


def yaml_text(value: Any) -> str:
    """A value on one line, as YAML that reads the same under 1.1 and 1.2."""
    text = yaml.dump(
        value, None, _OneLine, default_flow_style=True, sort_keys=False, allow_unicode=True,
        width=2**31,
    )  # fmt: skip
    return text.removesuffix("...\n").strip()


def dump_resolved(
    loaded: LoadedRecipe,
    machine: Machine | None = None,
    *,
    only_given: bool = False,
    settled: Mapping[str, Derived] | None = None,
) -> str:
    """Write every value of a run and where it came from.

    The text is itself a recipe: it loads again to the same values. What only this machine decides
    is in comments, so that another one decides for itself.

    Args:
        loaded: the recipe.
        machine: where the run is; None leaves out what only a machine can decide.
        only_given: leave out what nobody chose.
        settled: dotted key to a value that was only known when the model was built.
    """
    lines = [f"# Values and where they come from; made from {loaded.path.name}."]
    open_section = ""
    for value in loaded.values(machine, only_given=only_given, settled=settled):
        section, _, key = value.key.rpartition(".")
        if section and section != open_section:
            lines.append(f"{section}:")
        open_section = section
        indent = "  " if section else ""
        mark = "# " if value.is_of_machine else ""
        lines.append(f"{indent}{mark}{key}: {yaml_text(shown_value(value))}  # {value.origin}")
    return "\n".join(lines) + "\n"


# -- Recipes that are made or changed --------------------------------------------------------------


_COMMENT_COLUMN = 52
_SHORT_COLUMN = 38  # of the shipped recipes


def recipe_text(
    values: Mapping[str, Any], comments: Mapping[str, str], header: Sequence[str]
) -> tuple[str, dict[int, str]]:
    """Write values as a commented recipe.

    Args:
        values: by dotted key, a section and a key deep.
        comments: what to write behind a key.
        header: comment lines for the top.

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

    Args:
        text: a recipe whose sections are written out, a key a line.
        values: by dotted key; one that the recipe does not have is added to its section, None
            takes it out.
        comments: other ones, by dotted key.
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
        elif begin == end and section:
            lines += ["", f"{section}:", _line(f"  {name}", yaml_text(values[key]), comment)]
        else:
            new = _line(f"{indent}{name}", yaml_text(values[key]), comment, _SHORT_COLUMN)
            at = _last_used(lines, begin, end)
            apart = [""] if not section and at and lines[at - 1][:1] == " " else []
            lines[at:at] = [*apart, new]
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
