"""From a file of another tool to a recipe that loads, and a line for each of its keys."""

import contextlib
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import RecipeError
from trainkit.recipe.check.foreign import FOREIGN, REFUSED, REMOVED
from trainkit.recipe.check.problems import InvalidRecipe
from trainkit.recipe.fields.table import FIXED
from trainkit.recipe.load import load_recipe
from trainkit.recipe.show.reference import default_of
from trainkit.recipe.translate import axolotl, llamafactory, trl, unsloth
from trainkit.recipe.translate.draft import Draft, Line, Row, as_training_field, to
from trainkit.recipe.translate.rows import COMMON
from trainkit.recipe.translate.theirs import Theirs, read_theirs
from trainkit.recipe.write import recipe_text

NEEDED = ("model.name_or_path", "data.train")


@dataclass(frozen=True)
class Tool:
    """Another tool.

    Attributes:
        name: as it is typed.
        signs: keys that tell its files from others'.
        rows: what to do with a key.
        defaults: of ours: what it does where nobody says so.
        changed: of ours: where trainkit's own default stays, and what the tool does instead.
        first: the key that others depend on.
        assumed: keys of its own that it takes as given.
        has_adapters: whether its keys ask for adapters.
        refuse: why its keys are no supervised fine-tuning, or None.
    """

    name: str
    signs: Sequence[str]
    rows: Mapping[str, Row]
    defaults: Mapping[str, Any]
    changed: Mapping[str, str]
    first: str
    assumed: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    has_adapters: Callable[[Mapping[str, Any]], Any]
    refuse: Callable[[Mapping[str, Any]], str | None]


TOOLS: Mapping[str, Tool] = {
    name: Tool(
        name,
        rows.SIGNS,
        rows.ROWS,
        rows.DEFAULTS,
        rows.CHANGED,
        first,
        rows.assumed,
        has_adapters,
        rows.refuse,
    )
    for name, rows, first, has_adapters in (
        ("axolotl", axolotl, "adapter", lambda theirs: theirs.get("adapter") in ("lora", "qlora")),
        (
            "llamafactory",
            llamafactory,
            "finetuning_type",
            lambda theirs: theirs.get("finetuning_type") in ("lora", "oft"),
        ),
        ("trl", trl, "use_peft", lambda theirs: theirs.get("use_peft") or "LoraConfig" in theirs),
        (
            "unsloth",
            unsloth,
            "r",
            lambda theirs: not theirs.get("full_finetuning") and theirs.get("r"),
        ),
    )
}


@dataclass(frozen=True)
class Translation:
    """A recipe, and how it came about.

    Attributes:
        tool: whose file it was.
        text: the recipe.
        lines: a line for each key of theirs that has a value, and each default that was added.
    """

    tool: str
    text: str
    lines: tuple[Line, ...]


def translate(path: Path, tool: str | None = None) -> Translation:
    """Turn another tool's file into a recipe.

    Args:
        path: YAML, JSON, a command line in a file, or a Python script, which is read and not run.
        tool: whose it is; None looks at its keys.

    Raises:
        RecipeError: it cannot be read, nobody's keys are in it, or it is no fine-tuning.
    """
    theirs = read_theirs(path)
    known = TOOLS[tool] if tool else _tool_of(theirs)
    if reason := known.refuse(theirs.values):
        raise RecipeError(
            f"this recipe has no counterpart: {reason}",
            where=str(path),
            fix="trainkit does supervised fine-tuning and pretraining",
        )
    values = {**known.assumed(theirs.values), **theirs.values}
    draft = Draft(known.name, path.absolute().parent, values)
    for key in sorted(values, key=lambda name: name != known.first):
        value = values[key]
        if value is None or value == "" or value == {} or _is_call(key):
            continue
        num_lines = len(draft.lines)
        if key not in draft.seen:
            _row_of(key, known)(draft, key, value)
        if len(draft.lines) == num_lines and not draft.has_line(key):
            draft.same(key)
    for key, expression in theirs.unclear.items():
        target = _target(key, known)
        where = f"; set {target}" if target else ""
        draft.leave(f"{key}: {expression}", f"only the script knows its value{where}")
    _complete(draft, known)
    text = _valid_text(draft, path)
    return Translation(known.name, text, tuple(draft.lines))


def _tool_of(theirs: Theirs) -> Tool:
    counts = {name: sum(s in theirs.values for s in tool.signs) for name, tool in TOOLS.items()}
    if "FastLanguageModel" in theirs.values:
        return TOOLS["unsloth"]
    best = max(counts.values())
    found = [name for name, count in counts.items() if count == best]
    if best == 0 or len(found) > 1:
        raise RecipeError(
            "it is not clear which tool this file belongs to",
            where=str(theirs.path),
            fix=f"say it with --tool: {', '.join(TOOLS)}",
        )
    return TOOLS[found[0]]


def _is_call(key: str) -> bool:
    return key in ("from_pretrained", "get_peft_model", "load_dataset") or key[0].isupper()


def _row_of(key: str, tool: Tool) -> Row:
    row = tool.rows.get(key) or COMMON.get(key)
    if row is not None:
        return row
    foreign = FOREIGN.get(key)
    if foreign is not None and foreign.target and not foreign.note:
        return to(foreign.target)
    reason = None if foreign is None else foreign.note
    for table in (REFUSED, REMOVED):
        reason = reason or table.get(key)
    if key in FIXED:
        reason = FIXED[key][1]
    known = as_training_field(key)
    if reason is None and known is not None:
        return known

    def left(draft: Draft, name: str, value: Any) -> None:
        why = reason or "trainkit has no such setting"
        draft.leave(name, why.replace("{value}", str(value)))

    return left


def _target(key: str, tool: Tool) -> str | None:
    """Our key for one of theirs whose value nobody knows."""
    draft = Draft(tool.name, Path(), {key: 1})
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        _row_of(key, tool)(draft, key, 1)
    return next(iter(draft.values), None)


def _complete(draft: Draft, tool: Tool) -> None:
    """Defaults of theirs that differ from ours, and what every recipe needs."""
    if not tool.has_adapters(draft.theirs):
        for key in [key for key in draft.values if key.startswith("lora.")]:
            draft.drop(key, "adapters are off, so it does nothing")
    if "model.name_or_path" not in draft.values:
        draft.add("model.name_or_path", "MODEL", "fill in: a hub name or a directory")
    if "data.train" not in draft.values:
        draft.add("data.train", ["data/train.jsonl"], "fill in: your conversations")
    for key, value in tool.defaults.items():
        name = key.rpartition(".")[2]
        if name in draft.theirs and draft.theirs[name] is None:
            draft.leave(name, f"trainkit's default is {key}: {default_of(key)}")
        else:
            draft.add(key, value, f"{tool.name}'s default")
    for key, note in tool.changed.items():
        draft.change(key, default_of(key), note)
    for key, value in draft.values.items():
        if isinstance(value, str) and key not in NEEDED and _is_number(default_of(key)):
            draft.values[key] = _number(value)
    draft.add("kernels", True, "trainkit's kernels, each checked against plain torch")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _valid_text(draft: Draft, path: Path) -> str:
    """The recipe's text, without the values that trainkit refuses; each of them has a line."""
    header = [f"From {path.name}, a recipe of {draft.tool}'s; `trainkit new --from` made it."]
    while True:
        text, places = recipe_text(draft.values, draft.origins, header)
        problem = _first_problem(text)
        if problem is None:
            return text
        line, why = problem
        key = places.get(line) or _named_in(why, draft.values)
        if key is None or key in NEEDED:
            raise RecipeError(
                f"what this recipe comes to is refused: {why}",
                where=str(path),
                fix="change it there, or write a recipe with `trainkit new`",
            )
        draft.drop(key, why)


def _number(value: Any) -> Any:
    """The number that a text is, such as 2e-4 in quotes; or the text."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def _named_in(why: str, values: Mapping[str, Any]) -> str | None:
    """The first of our keys that a refusal names: what is refused with others has no line."""
    found = re.findall(r"[a-z]\w*(?:\.\w+)+", why)
    return next((key for key in found if key in values and key not in NEEDED), None)


def _first_problem(text: str) -> tuple[int, str] | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            load_recipe(file)
        except InvalidRecipe as error:
            what, where = error.problems[0].what, error.problems[0].where
        except RecipeError as error:
            what, where = error.what, error.where
        else:
            return None
    found = re.search(r":(\d+)$", where or "")
    return (int(found[1]) if found else 0), what.replace(str(file), "the recipe")
