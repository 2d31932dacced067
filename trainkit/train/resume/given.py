"""Which run a command means, and its recipe as given: before torch is imported.

A continued run resolves its recipe again: the copy in the run directory (or the one of
``--config``), the overrides it was given so far, and today's. What nobody wrote is worked out
again.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import RecipeError, ResumeRefusedError, RunDirectoryError
from trainkit.parallel.agreement import refuse_early_disagreement
from trainkit.parallel.process import ProcessRank
from trainkit.places import checkpoints_in, step_of
from trainkit.recipe import LoadedRecipe, load_recipe, option_values, shown, yaml_text
from trainkit.run import RunDirectory
from trainkit.run.directory import is_unfinished
from trainkit.run.starts import read_starts, recorded_overrides, runs_named
from trainkit.run.status import is_restarted, launch_id

RUNS = Path("train_model")
"""Where run directories go unless the command line says otherwise."""

_LENGTHEN = ("training.max_steps", "training.num_train_epochs")


@dataclass(frozen=True)
class Given:
    """What a command asks for.

    Attributes:
        overrides: today's, options of the command line included.
        resume: the run or checkpoint directory to continue; None for a new run.
        is_done: that run has ended, and nothing asks for more of it.
    """

    loaded: LoadedRecipe
    overrides: tuple[str, ...] = ()
    resume: Path | None = None
    is_done: bool = False


def read_command(
    config: Path | None,
    overrides: Sequence[str],
    options: Mapping[str, Any],
    *,
    resume: str | None = None,
    output_dir: Path | None = None,
) -> Given:
    """Find the run that is meant and load its recipe."""
    if resume is None and is_restarted():
        if config is None:
            raise _no_recipe()
        # The same command of a launch once more goes on with the run that this launch has made.
        return _automatic(config, overrides, options, output_dir, launch=launch_id() or "")
    if resume == "auto":
        return _automatic(config, overrides, options, output_dir)
    if resume is None:
        loaded = _load(config, overrides, options)
        return Given(loaded, _as_overrides(overrides, options, loaded))
    path = Path(resume).expanduser().resolve()
    is_checkpoint = not (path / "status.json").exists() and (path.parent / "status.json").exists()
    if not is_checkpoint and is_unfinished(path):
        if config is None:
            raise _stopped_too_early(path / "recipe.yaml")
        loaded = _load(config, overrides, options)
        return Given(loaded, _as_overrides(overrides, options, loaded), resume=path)
    if is_checkpoint and (step_of(path) < 0 or not path.exists()):
        there = ", ".join(each.name for each in checkpoints_in(path.parent)) or "none"
        raise ResumeRefusedError(
            "this is not a checkpoint of the run"
            if path.exists()
            else "there is no such checkpoint",
            where=str(path),
            fix=f"the run has {there}; a retired one is taken up again by renaming it to "
            "checkpoint-N",
        )
    run = RunDirectory.open(path.parent if is_checkpoint else path)
    if is_checkpoint and _went_on_from(run, step_of(path)):
        is_checkpoint = False
    return _continued(run, config, overrides, options, checkpoint=path if is_checkpoint else None)


def _automatic(
    config: Path | None,
    overrides: Sequence[str],
    options: Mapping[str, Any],
    output_dir: Path | None,
    launch: str | None = None,
) -> Given:
    """The run at ``output_dir``, or the newest of this recipe; a new one where there is none."""
    target = output_dir
    loaded = None
    if config is not None:
        loaded = _load(config, overrides, options)
        chosen = output_dir or loaded.recipe.training.get("output_dir")
        target = None if chosen is None else Path(chosen).expanduser()
    elif output_dir is None:
        raise _no_recipe()
    candidates = runs_named(RUNS, loaded.name) if target is None and loaded else [target]
    for path in candidates:
        if path is None or not path.is_dir() or not any(path.iterdir()):
            continue
        if not (path / "status.json").is_file():
            if target is None:
                continue  # killed while it was made: nothing of it is worth finding
            loaded = loaded or _load(config, overrides, options)
            return Given(loaded, _as_overrides(overrides, options, loaded), resume=path)
        run = RunDirectory.open(path)
        if launch is not None and run.status().launch != launch:
            continue
        try:
            return _continued(run, config, overrides, options)
        except ResumeRefusedError:
            if target is not None:
                raise
            break  # ended, and with other values: this one is another run
    loaded = loaded or _load(config, overrides, options)
    return Given(loaded, _as_overrides(overrides, options, loaded))


def _went_on_from(run: RunDirectory, step: int) -> bool:
    """Whether this launch, started again, has been beyond the checkpoint that its command names."""
    if not is_restarted() or run.status().launch != launch_id():
        return False
    starts = read_starts(run)
    return bool(starts) and starts[-1].step >= step


def _continued(
    run: RunDirectory,
    config: Path | None,
    overrides: Sequence[str],
    options: Mapping[str, Any],
    checkpoint: Path | None = None,
) -> Given:
    recorded = recorded_overrides(run)
    if config is None:
        for record in (run.recipe, run.changes):
            if not record.is_file():
                raise _stopped_too_early(record)
        loaded = load_recipe(run.recipe, overrides, options, bases=run.bases, recorded=recorded)
    else:
        loaded = load_recipe(config, overrides, options, recorded=recorded)
    given = _as_overrides(overrides, options, loaded)
    target = run.root if checkpoint is None else checkpoint
    status = run.status()
    if status.state == "done" and run.final.is_dir():
        last = max(map(step_of, checkpoints_in(run.root)), default=-1)
        is_last = checkpoint is None or step_of(checkpoint) == last
        if is_last:
            changed = _changed(run, loaded, recorded)
            if not changed:
                return Given(loaded, given, resume=run.root, is_done=True)
            if not any(key in changed for key in _LENGTHEN):
                raise ResumeRefusedError(
                    f"the run is done (step {status.last_step}); nothing is left for "
                    f"{', '.join(changed)} to act on",
                    where=str(run.root),
                    fix="raise training.max_steps or training.num_train_epochs as well, continue "
                    "an earlier checkpoint of it, or start a new run",
                )
    return Given(loaded, given, resume=target)


def _changed(
    run: RunDirectory, loaded: LoadedRecipe, recorded: Sequence[tuple[str, str]]
) -> list[str]:
    """The keys that are not what the run was given so far."""
    if not run.recipe.is_file():
        return []
    before = load_recipe(run.recipe, bases=run.bases, recorded=recorded)
    then = {value.key: value.value for value in before.values()}
    now = {value.key: value.value for value in loaded.values()}
    ignored = ("name", "training.output_dir", "training.hub_token")
    keys = [key for key in {**then, **now} if key not in ignored]
    return [key for key in keys if then.get(key) != now.get(key)]


def _load(
    config: Path | None, overrides: Sequence[str], options: Mapping[str, Any]
) -> LoadedRecipe:
    if config is None:
        raise _no_recipe()
    return load_recipe(config, overrides, options)


def _stopped_too_early(record: Path) -> RunDirectoryError:
    return RunDirectoryError(
        f"there is no {record.name}: it was deleted, or the run was stopped before it wrote one",
        where=str(record.parent),
        fix="give the recipe once more with --config, and what else was typed",
    )


def _no_recipe() -> RecipeError:
    return RecipeError("no recipe is given", where="--config", fix="--config FILE, or --resume RUN")


def _as_overrides(
    overrides: Sequence[str], options: Mapping[str, Any], loaded: LoadedRecipe
) -> tuple[str, ...]:
    """Everything that the command line sets, as overrides, so that it can be given once more.

    Where the run goes is not part of it: a run may be moved.
    """
    values = option_values(options, loaded.settings.values)
    texts = [*overrides, *(f"{key}={yaml_text(value)}" for key, value in values.values())]
    return tuple(text for text in texts if not text.startswith("training.output_dir="))


# What each host of a run was given, compared before anything slow is loaded: no torch.

_NOT_COMPARED = ("name", "training.output_dir", "training.hub_token", "global_batch_size")
_OF_A_HOST = ("data.cache_dir", "data.num_workers")
_READ_BYTES = 1 << 26
"""Of larger files the size is compared here, and the rows when they have been read."""


def settings_of(loaded: LoadedRecipe) -> dict[str, Any]:
    """Every value of a recipe as JSON, what only the machine decides and secrets left out."""
    values = {
        value.key: said
        for value, said in shown(loaded.values())
        if not value.key.startswith(_NOT_COMPARED)
    }
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def settings_of_all(loaded: LoadedRecipe) -> dict[str, Any]:
    """The values that every host has to share."""
    return {key: value for key, value in settings_of(loaded).items() if key not in _OF_A_HOST}


def refuse_unlike_hosts(loaded: LoadedRecipe, resume: object) -> None:
    """Stop where a host has another recipe, other packages or other files."""
    process = ProcessRank.from_environment()
    if process.world_size == 1:
        return
    from trainkit.train.resume.surroundings import code_digest, versions

    around = {"continues": str(resume), "code": code_digest(), "versions": versions(())}
    refuse_early_disagreement(process, {**settings_of_all(loaded), **around, **_files(loaded)})


def _files(loaded: LoadedRecipe) -> dict[str, str]:
    """The files of data by name, with what tells them from others of that name."""
    data = loaded.recipe.data
    paths: Iterable[Path] = (Path(s.path).expanduser() for s in (*data.train, *data.eval_sources))
    return {str(path): _told_apart(path) for path in paths if path.is_file()}


def _told_apart(path: Path) -> str:
    size = path.stat().st_size
    if size > _READ_BYTES:
        return f"{size} bytes"
    return f"{size} bytes, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
