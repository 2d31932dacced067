"""Checkpoints of a run: written whole by all ranks together, found again, and thinned out.

What is written is the strategies'; this module decides where it goes, and when it counts. All
ranks write into one staging directory; only after a barrier does rank 0 put the manifest in and
rename. So DeepSpeed's ``latest`` file can never point at half a checkpoint.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER_NAME
from safetensors.torch import load_file
from torch.distributed import TCPStore
from transformers import PreTrainedModel, TrainerState

from trainkit.auto_class import is_own_code
from trainkit.checkpoint.weights.base_fingerprint import write_fingerprint
from trainkit.checkpoint.weights.companions import copy_processors, stored_at
from trainkit.checkpoint.weights.contents import ANOTHER, check_contents, refuse_unfit
from trainkit.checkpoint.weights.reader import tensors_in
from trainkit.checkpoint.whole.atomic import (
    commit,
    discard,
    free_space_check,
    newest_valid,
    record_files,
    remove_directory,
    stage,
)
from trainkit.checkpoint.whole.manifest import FileEntry, Manifest, verify_directory
from trainkit.errors import CheckpointError, TrainkitError
from trainkit.models.loading import load_model
from trainkit.options import ModelOptions
from trainkit.parallel.engine import Ranks, snapshot
from trainkit.parallel.part_files import check_parts
from trainkit.places import checkpoints_in, step_of

TRAINER_STATE, SCHEDULER = "trainer_state.json", "scheduler.pt"
BASE = "base"
"""Where a checkpoint's record keeps the digests of the base's files, by name."""


_POLL_SECONDS = 0.05


@dataclass
class Save:
    """What is to be written of one checkpoint, by this rank."""

    directory: Path
    at_once: bool = False
    problem: Exception | None = None
    _jobs: list[tuple[Path | None, Callable[[], object]]] = field(default_factory=list)

    def copied(self, state: Any) -> Any:
        """A state that training cannot change while it is written."""
        return state if self.at_once else snapshot(state)

    def defer(self, path: Path | str | None, job: Callable[[], object]) -> None:
        """Write later, in the background: nothing that ``job`` reads may change meanwhile."""
        if self.at_once:
            self.attempt(job)
        else:
            self._jobs.append((None if path is None else Path(path), job))

    def attempt(self, job: Callable[[], object]) -> None:
        """Write a small file now. An error must not keep this rank from what all do together."""
        try:
            job()
        except Exception as error:
            self.problem = self.problem or error

    def finish(self, *, records: bool) -> list[dict[str, Any]]:
        """Write what was deferred.

        With ``records`` the files are also forced to the disk and hashed.
        """
        for path, job in self._jobs:
            if self.problem is None:
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                self.attempt(job)
        if self.problem is not None:
            raise self.problem
        paths = [path.relative_to(self.directory).as_posix() for path, _ in self._jobs if path]
        return [vars(entry) for entry in record_files(self.directory, paths)] if records else []


class Notes:
    """What threads of different ranks tell one another, without a collective.

    Collectives belong to the training, which goes on meanwhile; and a file could not be written
    where the disk is full.

    The store is rank 0's own: the one that the ranks met at ends with their launcher, and they have
    to save when that was killed.
    """

    def __init__(self, dist_rank: int, world_size: int) -> None:
        self._rank, self._world_size = dist_rank, world_size
        self._own: dict[str, str] = {}
        self._store: Any = None
        if world_size > 1:
            host, port = os.environ["MASTER_ADDR"], [0]
            if dist_rank == 0:
                self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
                port = [self._store.port]
            broadcast_object_list(port)
            if dist_rank != 0:
                self._store = TCPStore(host, port[0], is_master=False)

    def put(self, topic: str, value: Mapping[str, Any]) -> None:
        key, text = f"trainkit/{topic}/{self._rank}", json.dumps(value)
        if self._store is None:
            self._own[key] = text
        else:
            self._store.set(key, text)

    def of(self, topic: str, dist_rank: int) -> dict[str, Any]:
        key = f"trainkit/{topic}/{dist_rank}"
        if self._store is None:
            text = self._own.pop(key)
        else:
            while not self._store.check([key]):
                time.sleep(_POLL_SECONDS)
            text = self._store.get(key)
        note: dict[str, Any] = json.loads(text)
        return note

    def of_all(self, topic: str) -> list[dict[str, Any]]:
        return [self.of(topic, rank) for rank in range(self._world_size)]


# Checkpoints.


def folder_name(step: int) -> str:
    """The directory name of the checkpoint of one step, as transformers calls it."""
    return f"checkpoint-{step}"


@contextmanager
def written_together(
    target: Path, ranks: Ranks, metadata: Mapping[str, Any], *, replace: bool = False
) -> Iterator[Path]:
    """Let all ranks write one directory that appears complete or not at all.

    Yields:
        The directory to write into. It has the target's name, and exists once somebody makes it.
    """
    staging = _staged(target, ranks, replace=replace)
    inner = staging / target.name
    failure: Exception | None = None
    try:
        yield inner
    except Exception as error:
        failure = error
    problems = _gather_problems(failure)
    if not problems and ranks.is_main_process:
        try:
            _lift(inner)
            commit(staging, target, metadata=metadata, replace=replace)
        except (OSError, CheckpointError) as error:
            failure = error
    problems = problems or _gather_problems(failure)
    if problems:
        if ranks.is_main_process:
            discard(staging)
        raise _not_written(target, problems[0]) from failure


@dataclass
class CheckpointWriter:
    """Writes ``checkpoint-N`` directories into a run directory, in the background of training.

    Attributes:
        fingerprint: data, processes and versions, stored in each manifest.
        settings: every value of the recipe as it is used, stored likewise: a continued run says
            what of it has changed.
        committed: called on rank 0 with each checkpoint that is complete.
        failed: called on every rank when one could not be written; `wait` then raises.
        needed: how many bytes the next one takes, over all ranks; less is known to be there.
    """

    root: Path
    fingerprint: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    committed: Callable[[Path], None] = lambda path: None
    failed: Callable[[], None] = lambda: None
    needed: Callable[[], int] = lambda: 0
    _writing: threading.Thread | None = None
    _error: BaseException | None = None
    _notes: Notes | None = None

    def wait(self) -> None:
        """Until the last checkpoint is there."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Wait, and leave out its error: another one is on its way."""
        with contextlib.suppress(Exception):
            self.wait()

    @contextmanager
    def saving(
        self,
        step: int,
        ranks: Ranks,
        state: TrainerState,
        *,
        limit: int | None = None,
        keep: Path | None = None,
    ) -> Iterator[Save]:
        """Collect what makes ``checkpoint-N``; it is written when the body has ended."""
        self.wait()
        target = self.root / folder_name(step)
        if ranks.is_main_process:
            if target.exists():
                remove_directory(target)  # written by an attempt that is being redone
            files = (folder.rglob("*") for folder in checkpoints_in(self.root))
            sizes = [sum(each.stat().st_size for each in one if each.is_file()) for one in files]
            shortage = partial(free_space_check, target, max([self.needed(), *sizes]))
        save = Save(_staged(target, ranks) / target.name)
        save.attempt(partial(save.directory.mkdir, exist_ok=True))
        if ranks.is_main_process:
            save.attempt(shortage)  # all ranks hear of it before a byte of it is written
        try:
            yield save
        except Exception as error:
            save.problem = save.problem or error
        if self._notes is None:
            self._notes = Notes(ranks.process_index, ranks.num_processes)
        notes = self._notes
        spared = {keep, target, Path(state.best_model_checkpoint or target)}

        def write() -> None:
            try:
                self._finish(save, target, notes, ranks.is_main_process, limit, spared)
            except BaseException as error:
                self._error = error

        self._writing = threading.Thread(target=write, name="save", daemon=True)
        self._writing.start()

    def _finish(
        self,
        save: Save,
        target: Path,
        notes: Notes,
        is_main: bool,
        limit: int | None,
        spared: Set[Path | None],
    ) -> None:
        """In the background, on every rank: write, tell the others, and commit."""
        staging = save.directory.parent
        note: dict[str, Any] = {"problem": None, "files": []}
        try:
            note["files"] = save.finish(records=not is_main)
        except Exception as error:
            note["problem"] = _said(error)
        notes.put(f"{staging.name}/written", note)
        if is_main:
            problem = self._commit(staging, target, notes)
            notes.put(f"{staging.name}/committed", {"problem": problem})
        problem = notes.of(f"{staging.name}/committed", 0)["problem"]
        notes.put(f"{staging.name}/heard", {})
        if is_main:
            notes.of_all(f"{staging.name}/heard")  # the notes may end with this process
        if problem is not None:
            self.failed()
            raise _not_written(target, problem)
        if is_main:
            self.thin_out(limit, spared)
            self.committed(target)

    def _commit(self, staging: Path, target: Path, notes: Notes) -> str | None:
        """Let the directory appear if every rank has written its files; else say who has not."""
        everyone = notes.of_all(f"{staging.name}/written")
        for rank, note in enumerate(everyone):
            if note["problem"] is not None:
                discard(staging)
                return note["problem"] if len(everyone) == 1 else f"rank {rank}: {note['problem']}"
        metadata = {
            "step": step_of(target),
            "run": dict(self.fingerprint),
            "settings": dict(self.settings),
        }
        recorded = [FileEntry(**entry) for note in everyone for entry in note["files"]]
        try:
            _lift(staging / target.name)
            commit(staging, target, metadata=metadata, recorded=recorded)
        except (OSError, CheckpointError) as error:
            discard(staging)
            return _said(error)
        return None

    def thin_out(self, limit: int | None, spared: Set[Path | None]) -> None:
        """Delete the oldest checkpoints beyond ``limit``; rank 0 calls it."""
        if limit is None or limit <= 0:
            return
        found = checkpoints_in(self.root)
        spare = [path for path in found if path not in spared]
        for path in spare[: max(len(found) - limit, 0)]:
            remove_directory(path)


def remember_origin(
    directory: Path,
    base: Path,
    files: Mapping[str, str] | None = None,
    of_images: Mapping[str, Any] = {},
) -> None:
    """Write down where saved weights come from, in checkpoints as in ``final/``.

    An adapter gets the fingerprint of its base; it and a model get how the base reads images.
    """
    write_fingerprint(directory, files)
    copy_processors(stored_at(base), directory, of_images)


def _staged(target: Path, ranks: Ranks, *, replace: bool = False) -> Path:
    """Where all ranks write what will be at ``target``."""
    staging = None
    if ranks.is_main_process:
        staging = stage(target, replace=replace, makes_parent=False)
    return Path(str(broadcast_object_list([staging])[0]))


def _said(error: BaseException) -> str:
    """What went wrong, without a place and a way out of its own: those of the checkpoint follow."""
    return error.what if isinstance(error, TrainkitError) else f"{type(error).__name__}: {error}"


def _not_written(target: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{target.name} could not be written: {problem}",
        where=str(target),
        fix="correct that (is the disk full?) and continue with --resume; earlier checkpoints "
        "are whole",
    )


def _lift(inner: Path) -> None:
    """Move the files of ``staging/checkpoint-N`` up into ``staging``, which becomes the target."""
    for path in list(inner.iterdir()):
        path.rename(inner.parent / path.name)
    inner.rmdir()


def _gather_problems(failure: BaseException | None) -> list[str]:
    problems: list[str] = gather_object([] if failure is None else [_said(failure)])
    return problems


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint to continue from.

    Attributes:
        settings: the recipe's values as they were used, from the manifest.
        skipped: newer checkpoints that were damaged, with the reason.
    """

    run: Path
    checkpoint: Path
    step: int
    fingerprint: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[tuple[Path, str], ...] = ()


def find_resume_point(path: Path) -> ResumePoint | None:
    """The checkpoint to continue from, every byte of it verified.

    Of a run directory the newest whole checkpoint is taken.

    Returns:
        None when the run has no checkpoint: it was stopped before the first one.
    """
    if (path / TRAINER_STATE).is_file():
        return _resume_point(path, verify_directory(path))
    newest = newest_valid(path)
    if newest.path is not None and newest.manifest is not None:
        return _resume_point(newest.path, newest.manifest, newest.skipped)
    if newest.skipped:
        damaged, reason = newest.skipped[0]
        raise CheckpointError(
            f"every checkpoint is damaged; the newest: {reason}",
            where=str(damaged),
            fix="start a new run, or put the damaged files back",
        )
    if step_of(path) >= 0 and not (path / "status.json").is_file():
        raise CheckpointError(
            f"there is no {TRAINER_STATE} in this checkpoint",
            where=str(path),
            fix="give the run directory, or another checkpoint of it",
        )
    return None


def _resume_point(
    path: Path, manifest: Manifest, skipped: tuple[tuple[Path, str], ...] = ()
) -> ResumePoint:
    known = manifest.metadata if isinstance(manifest.metadata, dict) else {}
    step, run, settings = known.get("step"), known.get("run", {}), known.get("settings", {})
    is_own = step_of(path) in (-1, step)  # one that was renamed has no step in its name
    if (
        type(step) is not int
        or step < 0
        or not is_own
        or not isinstance(run, dict)
        or not isinstance(settings, dict)
    ):
        raise CheckpointError(
            f"the manifest's metadata is not what a run writes (step: {step!r:.40})",
            where=str(path),
            fix="give another checkpoint of the run, or start a new one",
        )
    check_contents(path, state_file=TRAINER_STATE, step=step)
    check_parts(path)
    return ResumePoint(path.parent, path, step, run, settings, skipped)


def read_weights(model: Any, folder: Path) -> None:
    """Take up the weights of a checkpoint, or of a saved model, from the files of a whole model.

    transformers saves some classes under other names than they run with, experts one by one:
    those are taken as it loads them.
    """
    if isinstance(model, PeftModel):
        file = folder / ADAPTER_NAME
        own, found = get_peft_model_state_dict(model, save_embedding_layers=False), tensors_in(file)
        refuse_unfit(file, found, own)
        _refuse_missing(file, [*(own.keys() - found.keys())])
        set_peft_model_state_dict(model, load_file(file))
        return
    own = model.state_dict()
    names: set[str] = set()
    for part in sorted(folder.glob("model*.safetensors")):
        found = tensors_in(part)
        refuse_unfit(part, found, own)
        names |= found.keys()
        model.load_state_dict(load_file(part), strict=False)
    if names <= own.keys():
        held = {own[name].data_ptr() for name in names}  # one of those that are tied
        trained = [name for name, each in model.named_parameters() if each.requires_grad]
        missing = [name for name in trained if name in own and own[name].data_ptr() not in held]
        _refuse_missing(folder, missing)
    elif isinstance(model, PreTrainedModel):
        _take_renamed(model, folder)


def _refuse_missing(where: Path, names: Sequence[str]) -> None:
    if names:
        raise CheckpointError(f"{names[0]} is not in it", where=str(where), fix=ANOTHER)


def _take_renamed(model: PreTrainedModel, folder: Path) -> None:
    place = ModelOptions(
        name_or_path=str(folder), dtype="auto", trust_remote_code=is_own_code(model)
    )
    saved = load_model(place, attention="eager").state_dict()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(saved[name])
