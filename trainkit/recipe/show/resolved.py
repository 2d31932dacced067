"""The resolved recipe as YAML: every value with its origin next to it, secrets left out."""

from collections.abc import Mapping
from typing import Any

import yaml

from trainkit.parallel.process import Machine
from trainkit.recipe.derived import Derived
from trainkit.recipe.load import LoadedRecipe, ResolvedValue
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
