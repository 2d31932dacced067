"""``trainkit verify-resume``: kill and resume, proved on this machine with this recipe."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli.arguments import Overrides
from trainkit.cli.output import echo


def verify_resume(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The recipe (YAML).")
    ] = None,
    overrides: Overrides = None,
    num_ranks: Annotated[
        int | None,
        typer.Option("--num-ranks", min=1, help="Processes; by default one for each GPU."),
    ] = None,
    kills: Annotated[
        int, typer.Option(min=1, help="How often it is killed; every second time inside a save.")
    ] = 2,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the moments.")] = 0,
    parent: Annotated[
        Path,
        typer.Option("--work-dir", help="Where its runs are while it lasts; on the disk to try."),
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a few steps unbroken, and the same killed and resumed; compare every byte.

    Exits with 1 where anything differs. Its two runs are deleted in the end.
    """
    from trainkit.cli.arguments import recipe_and_overrides
    from trainkit.errors import RecipeError
    from trainkit.parallel.launch.processes import count_local_gpus
    from trainkit.recipe import check_files, load_recipe
    from trainkit.train.rehearsal.rehearse import rehearse

    config, words = recipe_and_overrides(config, overrides)
    if config is None:
        raise RecipeError("no recipe is given", where="--config", fix="--config FILE")
    check_files(load_recipe(config, words))
    verdict = rehearse(
        config,
        words,
        num_ranks=num_ranks or max(count_local_gpus(), 1),
        kills=kills,
        seed=seed,
        parent=parent,
        say=(lambda text: None) if as_json else lambda text: echo(text, err=True),
    )
    if as_json:
        echo(json.dumps(verdict.to_dict()))
    else:
        for what, is_same in verdict.compared.items():
            echo(f"{'same' if is_same else 'DIFFERENT':<10}{what}")
        for line in verdict.differences:
            echo(f"  {line}")
        end = "ends with the same bytes" if verdict.is_same else "does NOT end with the same bytes"
        num_kills = sum(start.what.startswith("killed") for start in verdict.starts)
        echo(f"killed {num_kills} times and resumed, the run {end}")
    if not verdict.is_same:
        raise typer.Exit(1)
