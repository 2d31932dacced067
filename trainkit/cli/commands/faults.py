"""``trainkit diagnose`` and ``verify-resume``: why numbers went bad; kill and resume, proved."""

from pathlib import Path
from typing import Annotated

import typer

from trainkit.cli.options import JsonObject, RecipeChoice, expanded, note, run_directories, tell


@expanded
def verify_resume(
    recipe: RecipeChoice,
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
    as_json: JsonObject = False,
) -> None:
    """Train a few steps unbroken, and the same killed and resumed; compare every byte.

    Exits with 1 where anything differs. Its two runs are deleted in the end.
    """
    from trainkit.parallel.launch import count_local_gpus
    from trainkit.recipe import check_files, load_recipe
    from trainkit.train.rehearse import rehearse

    config, words = recipe.required()
    check_files(load_recipe(config, words))
    verdict = rehearse(
        config,
        words,
        num_ranks=num_ranks or max(count_local_gpus(), 1),
        kills=kills,
        seed=seed,
        parent=parent,
        say=(lambda text: None) if as_json else note,
    )
    end = "ends with the same bytes" if verdict.is_same else "does NOT end with the same bytes"
    num_kills = sum(start.what.startswith("killed") for start in verdict.starts)
    tell(
        verdict.to_dict(),
        as_json,
        *(
            f"{'same' if same else 'DIFFERENT':<10}{what}"
            for what, same in verdict.compared.items()
        ),
        *(f"  {line}" for line in verdict.differences),
        f"killed {num_kills} times and resumed, the run {end}",
    )
    if not verdict.is_same:
        raise typer.Exit(1)


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run directory.", autocompletion=run_directories)],
    step: Annotated[
        int | None, typer.Option(help="Of the steps whose batch was kept; the last by default.")
    ] = None,
    as_json: JsonObject = False,
) -> None:
    """Replay the batch of a bad step, change one thing at a time, and name the culprit.

    Exits with 1 where the batch is not bad any more.
    """
    from trainkit.parallel.launch import quieten_imports

    quieten_imports()
    from trainkit.run import RunDirectory
    from trainkit.run.files import jsonable
    from trainkit.train.diagnose import diagnose as find
    from trainkit.train.quiet import quieten_libraries

    quieten_libraries()
    found = find(RunDirectory.open(run), step, (lambda text: None) if as_json else note)
    culprit = f"{found.culprit}: {found.name}" if found.culprit else "none found"
    tell(
        jsonable(found.to_dict()),
        as_json,
        f"step {found.step}  {found.says}",
        f"weights of {found.weights}",
        f"culprit  {culprit}",
        f"because  {found.because}",
        f"fix      {found.fix}",
    )
    if found.culprit is None:
        raise typer.Exit(1)
