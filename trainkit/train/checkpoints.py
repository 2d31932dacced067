"""Checkpoints of a run: written whole by all ranks together, found again, and thinned out.

The writing itself is transformers' and DeepSpeed's; this module decides where it goes and when it
counts. All ranks write into one staging directory; only after a barrier does rank 0 put the
manifest in and rename. So DeepSpeed's ``latest`` file, which rank 0 writes before the others are
done, can never point at half a checkpoint.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerState

from trainkit.checkpoint.atomic import commit, discard, newest_valid, remove_directory, stage
from trainkit.checkpoint.base_fingerprint import base_on_disk, write_fingerprint
from trainkit.checkpoint.base_fingerprint import check_fingerprint as check_base
from trainkit.checkpoint.companions import carry_record
from trainkit.checkpoint.manifest import Manifest, verify_directory
from trainkit.errors import CheckpointError, ResumeRefusedError

TRAINER_STATE = "trainer_state.json"


def folder_name(step: int) -> str:
    """The directory name of the checkpoint of one step, as transformers calls it."""
    return f"checkpoint-{step}"


@contextmanager
def written_together(
    target: Path, accelerator: Accelerator, metadata: Mapping[str, Any], *, replace: bool = False
) -> Iterator[Path]:
    """Let all ranks write one directory that appears whole or not at all.

    Args:
        target: where it appears.
        accelerator: knows the ranks.
        metadata: plain JSON values for the manifest.
        replace: swap out an existing target; without it an existing target is an error.

    Yields:
        The directory to write into. It has the target's name, and exists once somebody makes it.

    Raises:
        CheckpointError: a rank failed to write, or the disk is full. Nothing is left behind and
            what was there before is as it was.
    """
    place: list[str | None] = [None]
    if accelerator.is_main_process:
        place[0] = str(stage(target, replace=replace))
    staging = Path(str(broadcast_object_list(place)[0]))
    inner = staging / target.name
    failure: Exception | None = None
    try:
        yield inner
    except Exception as error:
        failure = error
    problems = _gather_problems(failure, accelerator)
    if not problems and accelerator.is_main_process:
        try:
            _lift(inner)
            commit(staging, target, metadata=metadata, replace=replace)
        except (OSError, CheckpointError) as error:
            failure = error
    problems = problems or _gather_problems(failure, accelerator)
    if problems:
        if accelerator.is_main_process:
            discard(staging)
        raise CheckpointError(
            f"{target.name} could not be written: {problems[0]}",
            where=str(target),
            fix="mend that (is the disk full?) and continue with --resume; earlier checkpoints "
            "are whole",
        ) from failure


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes ``checkpoint-N`` directories into a run directory.

    Attributes:
        root: the run directory.
        fingerprint: what a resumed run must agree with, stored in each manifest.
    """

    root: Path
    fingerprint: Mapping[str, Any]

    @contextmanager
    def saving(self, step: int, accelerator: Accelerator, state: TrainerState) -> Iterator[Path]:
        """Yield the directory in which transformers is to make ``checkpoint-N``."""
        target = self.root / folder_name(step)
        if target.exists() and accelerator.is_main_process:
            remove_directory(target)  # written by an attempt that is being redone
        metadata = {"step": step, "run": dict(self.fingerprint)}
        with written_together(target, accelerator, metadata) as inner:
            yield inner.parent
            if state.best_model_checkpoint == str(inner):
                # transformers noted where it wrote; the state must name where it will be.
                state.best_model_checkpoint = str(target)
                if accelerator.is_main_process:
                    state.save_to_json(str(inner / TRAINER_STATE))

    def rotate(self, limit: int | None, state: TrainerState, accelerator: Accelerator) -> None:
        """Delete the oldest checkpoints beyond ``limit``; the best one always stays."""
        if limit is None or limit <= 0 or not accelerator.is_main_process:
            return
        found = sorted(self.root.glob("checkpoint-*"), key=_step_of)
        best = state.best_model_checkpoint
        spare = [path for path in found[:-1] if str(path) != best]
        for path in spare[: max(len(found) - limit, 0)]:
            remove_directory(path)


def remember_origin(directory: Path, base: Path) -> None:
    """Write down where saved weights come from, in checkpoints as in ``final/``.

    An adapter gets the fingerprint of its base beside it, and a model what a conversion knew about
    the model that it was made from.
    """
    if not write_fingerprint(directory):
        carry_record(base, directory)


def _lift(inner: Path) -> None:
    """Move the files of ``staging/checkpoint-N`` up into ``staging``, which becomes the target."""
    for path in list(inner.iterdir()):
        path.rename(inner.parent / path.name)
    inner.rmdir()


def _gather_problems(failure: BaseException | None, accelerator: Accelerator) -> list[str]:
    mine = [] if failure is None else [f"{type(failure).__name__}: {failure}"]
    if accelerator.num_processes == 1:
        return mine
    return [problem for problem in gather_object([mine]) for problem in problem]


def _step_of(path: Path) -> int:
    suffix = path.name.rpartition("-")[2]
    return int(suffix) if suffix.isdigit() else -1


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint to continue from.

    Attributes:
        run: the run directory that holds it.
        checkpoint: the checkpoint directory.
        step: its optimizer step.
        fingerprint: what the run was started with, from the manifest.
        skipped: newer checkpoints that were damaged, with the reason.
    """

    run: Path
    checkpoint: Path
    step: int
    fingerprint: Mapping[str, Any]
    skipped: tuple[tuple[Path, str], ...] = ()


def find_resume_point(
    request: str, *, output_dir: Path | None, runs: Path, name: str
) -> ResumePoint | None:
    """Turn ``--resume auto|PATH`` into a verified checkpoint.

    Args:
        request: ``auto``, a run directory, or a checkpoint directory.
        output_dir: with ``auto``, the run directory to continue.
        runs: where run directories are made; ``auto`` without ``output_dir`` takes the newest run
            there that is called ``name-*`` and has a checkpoint.
        name: the run's name.

    Returns:
        None when ``auto`` finds a run without any checkpoint, or no run: start from the beginning.

    Raises:
        CheckpointError: the path holds no whole checkpoint.
    """
    if request == "auto":
        candidates = [output_dir] if output_dir else sorted(runs.glob(f"{name}-*"), reverse=True)
        for run in candidates:
            point = _newest_in(run) if run is not None and run.is_dir() else None
            if point is not None:
                return point
        return None
    path = Path(request)
    if (path / TRAINER_STATE).is_file():
        manifest = verify_directory(path)
        return _resume_point(path, manifest)
    point = _newest_in(path) if path.is_dir() else None
    if point is None:
        raise CheckpointError(
            "there is no whole checkpoint here to resume from",
            where=str(path),
            fix="give a run directory or one of its checkpoint-N directories",
        )
    return point


def _newest_in(run: Path) -> ResumePoint | None:
    newest = newest_valid(run)
    if newest.path is None or newest.manifest is None:
        if newest.skipped:
            path, reason = newest.skipped[0]
            raise CheckpointError(
                f"every checkpoint is damaged; the newest: {reason}",
                where=str(path),
                fix="start a new run, or put the damaged files back",
            )
        return None
    return _resume_point(newest.path, newest.manifest, newest.skipped)


def _resume_point(
    path: Path, manifest: Manifest, skipped: tuple[tuple[Path, str], ...] = ()
) -> ResumePoint:
    step = int(manifest.metadata.get("step", _step_of(path)))
    return ResumePoint(path.parent, path, step, manifest.metadata.get("run", {}), skipped)


def check_fingerprint(point: ResumePoint, fingerprint: Mapping[str, Any]) -> None:
    """Refuse to continue a run on other data, another model or another batch.

    Raises:
        ResumeRefusedError: naming each value that changed.
        CheckpointError: an adapter's base has other weights than those it was trained over so far.
    """
    saved = point.fingerprint
    changed = [
        f"{key} was {saved.get(key)!r} and is {value!r}"
        for key, value in fingerprint.items()
        if saved.get(key) != value
    ]
    if changed:
        raise ResumeRefusedError(
            "the run was started with other settings: " + "; ".join(changed),
            where=str(point.checkpoint),
            fix="give the run's own recipe and data, or start a new run without --resume",
        )
    _check_base(point.checkpoint, str(fingerprint.get("model")))


def _check_base(checkpoint: Path, base: str) -> None:
    """Compare the weights under an adapter, where they lie on this disk."""
    try:
        check_base(checkpoint, base_on_disk(base))
    except CheckpointError as error:
        fix = "put the base's weights back, or start a new run without --resume"
        raise CheckpointError(error.what, where=error.where, fix=fix) from None
    except OSError:
        return  # a hub name without a local copy: loading the model will say so
