"""From another tool's file to a recipe: what it is, the tool's defaults, then every setting."""

import difflib
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import RecipeError
from trainkit.recipe.keys import InvalidRecipe
from trainkit.recipe.load import load_recipe
from trainkit.recipe.training import FIELDS
from trainkit.recipe.translate.draft import (
    OFF,
    TOOLS,
    Draft,
    Line,
    Theirs,
    all_fit,
    known_keys,
    other_kind,
    table,
    tool_table,
)
from trainkit.recipe.translate.read import read_theirs
from trainkit.recipe.translate.rules import Rules
from trainkit.recipe.write import recipe_text

NEEDED = ("model.name_or_path", "data.train")


@dataclass(frozen=True)
class Translation:
    """A recipe, and how it came about.

    Attributes:
        tool: whose file it was.
        lines: what became of each setting; what is lost comes first.
    """

    tool: str
    text: str
    lines: tuple[Line, ...]


def translate(path: Path, tool: str | None = None, *, lossy: bool = False) -> Translation:
    """Turn another tool's file into a recipe.

    Args:
        path: YAML, JSON, a command line in a file, a Python script or a notebook; none is run.
        tool: whose it is; None finds out.
        lossy: leave out what changes the result and is not here, instead of refusing.
    """
    theirs = read_theirs(path)
    name = tool or theirs.tool or _tool_of(theirs)
    rows, known = tool_table(name), known_keys(name) | {*FIELDS}
    flat, nullable = dict(_flat(theirs.values, rows)), rows.get("nullable", ())
    given = {key: value for key, value in flat.items() if value is not None}
    given |= {key: "null" for key in nullable if key in flat and key not in given}
    for key in [key for key in given if key not in known and key.removeprefix("no_") in known]:
        given[key.removeprefix("no_")] = not given.pop(key)  # as Hugging Face's parser has it
    seen = {**rows["defaults"], **given, "program": theirs.program}
    _refuse_kind(theirs, rows, seen)
    variant = next((to for condition, to in rows.get("is", ()) if all_fit(seen, condition)), "")
    rows = tool_table(name, variant)
    keys: dict[str, tuple[str, ...]] = {}
    for key, word in rows["keys"].items():
        keys[word] = (*keys.get(word, ()), key)
    draft = Draft(rows["tool"], path.absolute().parent, given, {**rows["defaults"], **given}, keys)
    draft.launcher = {**theirs.launcher, "program": theirs.program}
    for what, why in theirs.lost:
        draft.lose(what, why)
    for key, expression in theirs.unclear.items():
        if key in rows["idle"]:
            draft.leave(f"{key}: {expression}", "it changes nothing that is learnt")
        else:
            draft.lose(f"{key}: {expression}", "only running it would tell its value")
    _classify(draft, rows)
    Rules(draft, rows).run(table("rules")["all"])
    draft.ours.setdefault("kernels", True)
    draft.origins.setdefault("kernels", "trainkit's kernels, each checked against plain torch")
    for what, why in theirs.noted:
        draft.leave(what, why)
    for key in (key for key in given if key not in draft.said):
        draft.leave(key, "it needs nothing here")
    text = _valid_text(draft, path)
    lost = _lost(draft)
    if lost and not lossy:
        fix = "change it there, or leave it out here with --lossy"
        raise RecipeError(lost, where=str(path), fix=fix)
    lines = sorted(draft.lines, key=lambda line: line.kind != "lost")
    return Translation(rows["tool"], text, tuple(lines))


def _lost(draft: Draft) -> str:
    """All that changes the result and is not here, as a sentence."""
    lost = dict.fromkeys(f"{e.theirs} ({e.note})" for e in draft.lines if e.kind == "lost")
    return f"trainkit would not train the same: {'; '.join(lost)}" if lost else ""


def _flat(values: Mapping[str, Any], rows: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key in rows.get("sections", ()) and isinstance(value, dict):
            yield from ((f"{key}.{name}", each) for name, each in value.items())
        else:
            yield key, value


def _tool_of(theirs: Theirs) -> str:
    """Whose file it is: by its program, or by keys that one tool alone has."""
    for name in TOOLS:
        program = tool_table(name).get("programs")
        if theirs.program and program and re.search(program, theirs.program):
            return name
    given = theirs.values.keys()
    fitting = [name for name in TOOLS if given & set(tool_table(name)["signs"])]
    others = {n: set[str]().union(*(known_keys(o) for o in fitting if o != n)) for n in fitting}
    sure = [name for name in fitting if given & (known_keys(name) - others[name])]
    sure = sure if len(fitting) > 1 else fitting
    if len(sure) == 1 and not theirs.program.endswith(".py"):
        return sure[0]
    if theirs.program:
        raise RecipeError(
            f"{theirs.program} is no program that is known here",
            where=str(theirs.path),
            fix=f"if it takes the options of one of them, say so with --tool: {', '.join(TOOLS)}",
        )
    both = f": it could be {' or '.join(sure)}" if sure else ""
    raise RecipeError(
        f"it is not clear which tool this file belongs to{both}",
        where=str(theirs.path),
        fix=f"say it with --tool: {', '.join(TOOLS)}",
    )


def _refuse_kind(theirs: Theirs, rows: Mapping[str, Any], seen: Mapping[str, Any]) -> None:
    for condition, kind in rows["kinds"]:
        if all_fit(seen, condition):
            sign = ", ".join(f"{key}: {str(seen.get(key))[:80]}" for key in condition)
            raise other_kind(kind, sign, theirs.path)


def _classify(draft: Draft, rows: Mapping[str, Any]) -> None:
    """Keys that are translated alone; the steps read the rest."""
    idle, refused = rows["idle"], rows["refused"]
    for key, value in draft.theirs.items():
        word = rows["keys"].get(key)
        if key not in draft.given and any(each in draft.given for each in draft.keys.get(word, ())):
            continue  # a default by another name
        if key in rows.get("expected", {}):
            if value in rows["expected"][key]:
                draft.leave(key, "it is so here, too")
            else:
                draft.lose(key, "trainkit has no such setting")
        elif word is not None and "." in word:
            draft.take(word, {word: _number(value)})
        elif word is not None:
            continue
        elif (
            key not in idle
            and key in FIELDS
            and not FIELDS[key].fixed
            and (key in rows["training"] or "*" in rows["training"])
        ):
            draft.take(key, {f"training.{key}": _number(value)})
        elif key in idle:
            if key in draft.given:
                draft.leave(key, idle[key])
        elif key not in draft.given:
            continue
        elif key not in refused:
            near = difflib.get_close_matches(key, [*rows["keys"], *idle, *refused], 1, 0.85)
            meant = f"; {near[0]} is one" if near else ""
            why = f"{draft.tool} {rows['version']} has no such setting that is known here{meant}"
            draft.lose(key, why)
        elif value in OFF:
            draft.said.add(key)
        else:
            draft.lose(key, refused[key])


def _number(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"-?\d[\d_]*(\.\d*)?([eE][-+]?\d+)?", value.strip()):
        return float(value) if re.search(r"[.eE]", value) else int(value)
    return value


def _valid_text(draft: Draft, path: Path) -> str:
    """The recipe's text; each value that trainkit refuses is lost, with a line."""
    header = [f"From {path.name}, a recipe of {draft.tool}'s; `trainkit new --from` made it."]
    while True:
        text, places = recipe_text(draft.ours, draft.origins, header)
        problem = _first_problem(text)
        if problem is None:
            return text
        line, why = problem
        named = re.findall(r"[a-z]\w*(?:\.\w+)+", why)
        key = places.get(line) or next((n for n in named if n in draft.ours), None)
        if key is None or key in NEEDED:
            raise RecipeError(
                _lost(draft) or f"what this recipe comes to is refused: {why}",
                where=str(path),
                fix="change it there, or write a recipe with `trainkit new --model`",
            )
        draft.drop(key, why)


def _first_problem(text: str) -> tuple[int, str] | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            load_recipe(file)
            return None
        except RecipeError as error:
            first = error.problems[0] if isinstance(error, InvalidRecipe) else error
    found = re.search(r":(\d+)$", first.where or "")
    return (int(found[1]) if found else 0), first.what.replace(str(file), "the recipe")
