"""``trainkit config`` and ``estimate``: what a recipe means, and what it takes."""

import json
import shutil
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli.options import (
    JsonObject,
    RecipeChoice,
    echo,
    expanded,
    json_lines,
    key_words,
    note,
    recipe_keys,
    tell,
)

app = typer.Typer()


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SECTION.KEY=VALUE",
            help="Values that win over the recipe's.",
            autocompletion=recipe_keys,
        ),
    ] = None,
    as_json: Annotated[bool, json_lines("key, value, origin")] = False,
    diff_defaults: Annotated[
        bool, typer.Option("--diff-defaults", help="Leave out values that nobody chose.")
    ] = False,
) -> None:
    """Print every value of a recipe and where it comes from.

    As YAML, which is a recipe itself.
    """
    from trainkit.parallel.launch import this_machine
    from trainkit.recipe import dump_resolved, load_recipe, shown

    loaded, machine = load_recipe(file, overrides or ()), this_machine()
    if as_json:
        for value, said in shown(loaded.values(machine, only_given=diff_defaults)):
            tell({"key": value.key, "value": said, "origin": value.origin}, as_json)
    else:
        echo(dump_resolved(loaded, machine, only_given=diff_defaults), nl=False)


@app.command()
def schema(as_json: Annotated[bool, typer.Option("--json", help="On one line.")] = False) -> None:
    """Print the recipe's JSON schema, for editors and programs."""
    from trainkit.recipe import recipe_json_schema

    indent = None if as_json else 1
    echo(json.dumps(recipe_json_schema(), indent=indent, ensure_ascii=False))


@app.command()
def keys(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORD]...",
            help="Only keys, values and effects with one of these words; other tools' names, too.",
            autocompletion=key_words,
        ),
    ] = None,
    as_json: Annotated[bool, json_lines("key, type, default, help")] = False,
) -> None:
    """List the keys that a recipe can have, with type, default and effect.

    Exits with 1 where a word is part of no key and no other tool's name for one.
    """
    from trainkit.recipe import find_keys, yaml_text

    entries, notes, unknown = find_keys(words or ())
    width = shutil.get_terminal_size().columns - 4
    for entry in entries:
        row = {
            "key": entry.key,
            "type": entry.type,
            "default": entry.default,
            "required": entry.is_required,
            "help": entry.help,
        }
        default = "required" if entry.is_required else f"default {yaml_text(entry.default)}"
        about = [f"    {line}" for line in textwrap.wrap(entry.help, width)]
        tell(row, as_json, f"{entry.key}: {entry.type}; {default}", *about)
    for line in unknown:
        note(line)
    for line in notes:
        echo(line, err=as_json)
    if unknown:
        raise typer.Exit(1)


@expanded
def estimate(
    choice: RecipeChoice,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help="h200, h100, a100-80g, l40s, 4090, ...; by default this machine's, or else h100.",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="How many; by default this machine's.")
    ] = None,
    as_json: JsonObject = False,
) -> None:
    """Say how much memory a recipe takes of each GPU, of whom, and how long it runs.

    Needs no GPU and no weights; of a model on the hub only its config.json is fetched.
    """
    from trainkit.cli.quick_imports import import_quickly, leave_others_out

    leave_others_out()
    from trainkit.estimate.estimate import estimate as estimate_plan
    from trainkit.estimate.estimate import lines
    from trainkit.estimate.gpus import gpu_of, this_gpu
    from trainkit.estimate.recipe import notes_of, plan_of, replanning, tokens_of
    from trainkit.parallel.launch import count_local_gpus
    from trainkit.recipe import load_recipe

    loaded = load_recipe(*choice.required())
    recipe = loaded.recipe
    if recipe.lora is not None:
        import_quickly()
    chosen = gpu_of(gpu) if gpu else this_gpu() or gpu_of("h100")
    number = gpus or max(count_local_gpus(), 1)
    plan = plan_of(recipe, number)
    found = estimate_plan(
        plan,
        chosen,
        tokens=tokens_of(recipe, plan),
        notes=notes_of(recipe, plan),
        replan=replanning(loaded, number),
    )
    tell(found.to_dict(), as_json, *lines(found))
