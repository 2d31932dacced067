"""The data files of this folder: each tool's settings, the kinds of training, the prompts."""

import functools
from pathlib import Path
from typing import Any

import yaml

TOOLS = ("axolotl", "llamafactory", "llamafactory_v1", "swift", "unsloth", "trl")


@functools.cache
def table(name: str) -> dict[str, Any]:
    """A data file of this folder."""
    text = (Path(__file__).parent / f"{name}.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@functools.cache
def tool_table(name: str) -> dict[str, Any]:
    """A tool's settings: its own rows over those of the tools that it is built on."""
    own = table(f"tools/{name}")
    for base in own.get("based_on", ()):
        under = tool_table(base)
        for part in ("keys", "defaults", "expected", "row_formats"):
            own[part] = {**under.get(part, {}), **own.get(part, {})}
        for part in ("idle", "refused"):
            both = [*under[part].items(), *own[part].items()]
            own[part] = {why: [] for why, _ in both}
            for why, keys in both:
                own[part][why] += keys
        own = {**under, **own}
    return own


def known_keys(name: str) -> set[str]:
    """Every key that a tool's table speaks of."""
    rows = tool_table(name)
    listed = [key for part in ("idle", "refused") for keys in rows[part].values() for key in keys]
    return {*rows["keys"], *rows.get("training", ()), *rows.get("expected", ()), *listed}
