"""``trainkit sft``: a recipe in, a run directory out."""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from trainkit.cli.options import RecipeChoice, expanded, note, run_directories, tell
from trainkit.terminal import lasting

if TYPE_CHECKING:
    from trainkit.recipe import LoadedRecipe, SftOptions


Shard = Annotated[
    str | None,
    typer.Option(
        metavar="[PRESET|PATH]",
        help="Shard with DeepSpeed: zero1, zero2 (when nothing is named), zero3, "
        "zero3_offload, or a JSON file.",
    ),
]
OutputDir = Annotated[
    Path | None,
    typer.Option(
        "--output-dir",
        "-o",
        help="The run directory to make; by default a new one under train_model/.",
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="[auto|PATH]",
        help="Continue from a run's last checkpoint: PATH, or the latest run of this name "
        "(when nothing is named).",
        autocompletion=run_directories,
    ),
]
AllowChanged = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[KEY]",
        help="Continue although KEY (data, num_ranks, versions, training.seed, ...) is not "
        "what it was; all when nothing is named.",
    ),
]


@dataclass(frozen=True)
class RecipeOrRun(RecipeChoice):
    """A recipe, which a resumed run has of its own."""

    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="The recipe (YAML); by default a resumed run's own."),
    ] = None


@expanded
def sft(
    context: typer.Context,
    recipe: RecipeOrRun,
    deepspeed: Shard = None,
    replace_kernel: Annotated[
        bool | None,
        typer.Option(
            "--replace-kernel/--no-replace-kernel", help="Use trainkit's kernels, or none."
        ),
    ] = None,
    pretrain: Annotated[
        bool, typer.Option("--pretrain", help="Train every token, not only answers.")
    ] = False,
    output_dir: OutputDir = None,
    resume: Resume = None,
    allow_changed: AllowChanged = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Train one real step on the longest batch in a temporary directory."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Train although the estimate says that the GPU is too small."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print each row of the log, the summary and the run as JSON."),
    ] = False,
) -> None:
    """Train a model as a recipe says. The last line printed is the run directory."""
    from trainkit.recipe import SftOptions, check_files
    from trainkit.run import RunDirectory
    from trainkit.run.starts import now, process_began
    from trainkit.train.resume.given import read_command

    command = tuple(context.obj or sys.argv[1:])
    # Called from Python, a command is younger than its process.
    began = process_began() if command == tuple(sys.argv[1:]) else now()
    config, overrides = recipe.given()
    options = {
        "--deepspeed": deepspeed,
        "--replace-kernel": replace_kernel,
        "--pretrain": pretrain or None,
        "--output-dir": output_dir,
    }
    given = read_command(config, overrides, options, resume=resume, output_dir=output_dir)
    if given.is_done and not dry_run:
        if os.environ.get("RANK", "0") == "0":
            note("the run is done; nothing of it was touched")
            tell({"run": str(given.resume)}, as_json, str(given.resume))
        return
    check_files(given.loaded)
    chosen_dir = given.loaded.recipe.training.get("output_dir")
    # Before torch is loaded; only the rank that will make the directory can say.
    is_maker = os.environ.get("RANK", "0") == "0" and given.resume is None and not dry_run
    if chosen_dir is not None and is_maker:
        RunDirectory.check_free(chosen_dir)
    _train(
        given.loaded,
        SftOptions(
            resume=given.resume,
            allow_changed=tuple(allow_changed or ()),
            overrides=given.overrides,
            dry_run=dry_run,
            output_dir=None if chosen_dir is None else Path(chosen_dir),
            command=command,
            force=force,
            began=began,
        ),
        as_json=as_json,
    )


def _train(loaded: "LoadedRecipe", options: "SftOptions", *, as_json: bool) -> None:
    from trainkit.cli.quick_imports import import_quickly, without_collection
    from trainkit.parallel.launch import quieten_imports
    from trainkit.train.faults.signals import watching_signals
    from trainkit.train.resume.given import refuse_unlike_hosts

    ours, people = lasting(sys.stdout), lasting(sys.stderr)
    if as_json:
        options = replace(options, rows=functools.partial(_write_row, ours))
    # Standard output is for the result: what libraries print goes to people, too.
    with watching_signals(), contextlib.redirect_stderr(people), contextlib.redirect_stdout(people):
        if loaded.recipe.training.get("use_cpu"):
            # Before torch looks for any: what asks whether there is a GPU would choose for one.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        quieten_imports()
        with without_collection():
            refuse_unlike_hosts(loaded, options.resume)
            import_quickly()
            from trainkit.train.build import run_sft
            from trainkit.train.quiet import trackers_ended

        with trackers_ended():
            directory = run_sft(loaded, options)
    if directory is not None:
        with contextlib.redirect_stdout(ours):
            tell({"run": str(directory)}, as_json, str(directory))


def _write_row(stream: TextIO, row: Mapping[str, object]) -> None:
    from trainkit.run.files import jsonable

    stream.write(json.dumps(jsonable(dict(row)), ensure_ascii=False) + "\n")
    stream.flush()
