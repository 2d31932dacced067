"""``trainkit estimate``: what a recipe takes, before anything is downloaded or started."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli.arguments import Overrides
from trainkit.cli.output import echo

DEFAULT_GPU = "h100"
"""Where this machine has none."""


def estimate(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The recipe, a YAML file.")
    ] = None,
    overrides: Overrides = None,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how much memory a recipe takes of each GPU, of whom, and how long it runs.

    Needs no GPU and no weights; of a model on the hub only its config.json is fetched.
    """
    from trainkit.cli.arguments import recipe_and_overrides
    from trainkit.errors import RecipeError
    from trainkit.estimate.estimate import estimate as estimate_plan
    from trainkit.estimate.estimate import lines
    from trainkit.estimate.gpus import gpu_of, this_gpu
    from trainkit.estimate.recipe import notes_of, plan_of, replanning, tokens_of
    from trainkit.parallel.launch.processes import count_local_gpus
    from trainkit.recipe import load_recipe

    config, overrides = recipe_and_overrides(config, overrides)
    if config is None:
        raise RecipeError("no recipe was given", where="--config", fix="name a YAML file")
    loaded = load_recipe(config, overrides)
    recipe = loaded.recipe
    chosen = gpu_of(gpu) if gpu else this_gpu() or gpu_of(DEFAULT_GPU)
    number = gpus or max(count_local_gpus(), 1)
    plan = plan_of(recipe, number)
    found = estimate_plan(
        plan,
        chosen,
        tokens=tokens_of(recipe, plan),
        notes=notes_of(recipe, plan.shape),
        replan=replanning(loaded, number),
    )
    if as_json:
        echo(json.dumps(found.to_dict()))
        return
    for line in lines(found):
        echo(line)
