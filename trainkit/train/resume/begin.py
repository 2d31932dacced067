"""Where a start begins: a new run directory, or a checkpoint that fits; and the way back to one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState, TrainingArguments

from trainkit.checkpoint.weights.base_fingerprint import base_files, base_on_disk, file_digest
from trainkit.checkpoint.whole.manifest import refuse_foreign
from trainkit.data.files import resolve_files
from trainkit.errors import CheckpointError, ResumeRefusedError
from trainkit.options import ModelOptions
from trainkit.parallel.agreement import decided_by_each, decided_by_main, refuse_disagreement
from trainkit.run import RunDirectory
from trainkit.run.starts import Start, append_start, begin_again, read_starts
from trainkit.train.checkpoints import BASE, ResumePoint, find_resume_point, folder_name
from trainkit.train.data import EpochPlan, train_loader
from trainkit.train.evaluations import Evaluations
from trainkit.train.faults.numbers import NumberError
from trainkit.train.hooks import Hook, LoopState
from trainkit.train.log import missed_evaluation
from trainkit.train.prepare import trainer_arguments
from trainkit.train.resume.changes import (
    DEEPSPEED,
    EVALUATION,
    IN_USE,
    PARTS,
    TEACHER,
    Review,
    review,
    review_running,
)
from trainkit.train.resume.given import RUNS, settings_of, settings_of_all
from trainkit.train.resume.surroundings import code_digest, gpu_name, versions
from trainkit.train.run import Run

if TYPE_CHECKING:
    from trainkit.train.faults.shortage import MemoryShortageError

FP8 = "fp8"
"""Where a checkpoint's record keeps the products that run in fp8."""


def fingerprint_around(run: Run) -> dict[str, Any]:
    """What surrounds a recipe and decides the curve; a continued run must share it."""
    args, recipe = run.args, run.recipe
    micro = args.per_device_train_batch_size * args.gradient_accumulation_steps
    quantize = recipe.lora.quantize if recipe.lora else None
    packages = run.layout.engine.packages
    if quantize:
        from trainkit.models.linears import packed_kind

        packages = (*packages, *packed_kind(quantize).packages)
    return {
        "data": run.data.fingerprint,
        PARTS: run.data.parts,
        "rows_per_step": micro * run.layout.data_size,
        "num_ranks": run.process.world_size,
        "device": args.device.type,
        "gpu": decided_by_main(run.process, gpu_name) if args.device.type == "cuda" else None,
        "code": code_digest(),
        "versions": versions(packages),
    }


def files_asked(run: Run) -> dict[str, dict[str, str] | None]:
    """The digests of the files of the base, a teacher, DeepSpeed, and of what judges the model.

    A model that trains whole has its weights in every checkpoint, whatever the base's are by then,
    unless the model before training is asked along the way.
    """
    model, distill = run.recipe.model, run.recipe.distill
    is_asked = run.recipe.lora is not None or run.recipe.asks_reference == "second model"
    is_asked = is_asked and model.init != "random"
    found = {BASE: _digests(run, model, is_asked), EVALUATION: _judging(run)}
    settings = run.layout.strategy.config
    if settings is not None and run.process.local_rank == 0:
        found[DEEPSPEED] = {str(settings): file_digest(settings)}
    if distill is not None and distill.teacher is not None:
        place = {"name_or_path": distill.teacher, "revision": distill.teacher_revision}
        found[TEACHER] = _digests(run, model.replace(**place, gguf_file=None), True)
    return found


def _judging(run: Run) -> dict[str, str] | None:
    """Of files: which model is the best, and when training ends, may hang on them."""
    found, answers, tasks = {}, run.recipe.generation_eval, run.recipe.eval_tasks
    files: list[Path] = []
    if run.process.local_rank != 0:
        return None
    if run.recipe.data.eval_sources:
        found = {row["path"]: row["sha256"] for row in run.data.summary["eval"]["files"]}
    if answers is not None:
        files += [file for source in answers.data for file in resolve_files(source.path)]
        own = [metric for metric in answers.metrics if isinstance(metric, str) and ":" in metric]
        files += [Path(metric.rpartition(":")[0]) for metric in own]
    if tasks is not None:
        from trainkit.evals.tasks import SETS

        files += [Path(task) for task in tasks.tasks if Path(task).is_file()]
        sets = [each for each in SETS if any(task.startswith(each) for task in tasks.tasks)]
        places = [Path(tasks.data).expanduser() / each for each in sets] if tasks.data else []
        files += [path for place in places for path in place.rglob("*") if path.is_file()]
    return found | {str(file): file_digest(file.expanduser()) for file in files}


def _digests(run: Run, model: ModelOptions, weights: bool) -> dict[str, str] | None:
    """Of a model's files; None where another process of this host reads them.

    None, too, of what cannot be read: the model will not load then, and that says why.
    """
    if run.process.local_rank != 0:
        return None
    try:
        place = base_on_disk(model.name_or_path, model.revision)
        return base_files(place, weights=weights, gguf_file=model.gguf_file)
    except (CheckpointError, OSError):
        return None


def refuse_other_hosts(run: Run) -> None:
    """Stop where ranks have other settings or data: each host may have read files of its own."""
    if run.process.world_size == 1:
        return
    around = {**fingerprint_around(run), "continues": str(run.options.resume)}
    del around[PARTS]
    refuse_disagreement(run.process, {**settings_of_all(run.loaded), **around})


def find_resumption(run: Run) -> None:
    """Find and verify the checkpoint to continue from; hashing it is one rank's work."""
    run.fingerprint, run.point, run.review = fingerprint_around(run), None, Review()
    console, resume = run.console, run.options.resume
    if resume is None:
        # Read while the model loads: its digests are known by the time they are asked for.
        threading.Thread(target=files_asked, args=(run,), daemon=True).start()
        return
    point = decided_by_main(run.process, lambda: find_resume_point(resume))
    if point is None:
        console.note(
            f"{resume} was stopped before its first checkpoint; it starts again from step 0, in "
            "the same directory"
        )
        return
    decided_by_each(run.process, lambda: refuse_behind_the_end(run, point))
    run.review = decided_by_each(run.process, lambda: _reviewed(run, point))
    run.point = point
    for path, reason in point.skipped:
        console.warn(f"{path.name} is damaged and was passed over: {reason}")
    console.note(f"continuing from {point.checkpoint}")
    for change in run.review.changes:
        console.note(f"from step {point.step} on, {change}")
    for change in run.review.accepted:
        console.warn(f"not as it was, and accepted: {change}")


def refuse_behind_the_end(run: Run, point: ResumePoint) -> None:
    """Refuse a checkpoint that the recipe, say repeated without its overrides, ends before."""
    args, data, last = run.args, run.data.train, run.args.max_steps
    if last <= 0:  # no stream, which has no other end
        loader = train_loader(data, None, args, run.layout)
        last = EpochPlan.of(loader, args, is_equal=data.has_equal_epochs).max_steps
    if point.step > last:
        raise ResumeRefusedError(
            f"the checkpoint is at step {point.step}, and the recipe ends at step {last}",
            where=str(point.checkpoint),
            fix="repeat the run's own command with --resume (command.sh has it), or raise "
            "training.max_steps or training.num_train_epochs",
        )


def _reviewed(run: Run, point: ResumePoint) -> Review:
    """Hold recipe, surroundings and files of this host against the checkpoint."""
    reviewed = review(
        point,
        settings_of(run.loaded),
        {**run.fingerprint, **files_asked(run)},
        run.options.allow_changed,
        _accepted_before(point),
        sharded=run.layout.fits_its_ranks_only,
    )
    refuse_foreign(point.checkpoint)
    return reviewed


def _accepted_before(point: ResumePoint) -> list[Mapping[str, Any]]:
    starts = read_starts(RunDirectory.open(point.run))
    return [row for earlier in starts for row in earlier.accepted]


def review_built(run: Run) -> None:
    """Hold what runs in the built model against the checkpoint: kernels, and the attention.

    Where the recipe leaves them to the machine, another one may choose others, and nobody would
    see it. What runs is in the fingerprint of what the run saves.
    """
    runs, point = run.built.runs, run.point
    run.fingerprint = {**run.fingerprint, IN_USE: dict(runs), **files_asked(run)}
    if run.built.fp8_choice is not None:
        run.fingerprint[FP8] = run.built.fp8_choice.to_dict()
    if point is not None and not any(
        change.key.startswith(_CHOOSING) for change in run.review.changes
    ):
        allowed, before = run.options.allow_changed, _accepted_before(point)
        accepted = decided_by_each(
            run.process, lambda: review_running(point, runs, allowed, before)
        )
        for change in accepted:
            run.console.warn(f"not as it was, and accepted: {change}")
        run.review = replace(run.review, accepted=(*run.review.accepted, *accepted))


_CHOOSING = ("kernels", "lora", "model.attn_implementation", "model.fp8", "data.packing")


def open_run_directory(run: Run) -> RunDirectory:
    """Make the run directory on rank 0, or open the one to continue; all ranks learn of it."""
    if run.point is not None:
        return RunDirectory.open(run.point.run)
    wanted, stopped = run.options.output_dir, run.options.resume
    if stopped is not None:
        return decided_by_main(run.process, lambda: begin_again(stopped))
    return decided_by_main(
        run.process,
        lambda: (
            RunDirectory.create_at(wanted) if wanted else RunDirectory.create(RUNS, run.loaded.name)
        ),
    )


def go_back(run: Run, bad: NumberError | MemoryShortageError, overrides: tuple[str, ...]) -> None:
    """Give the memory of the old model back, find the last checkpoint, and record the step.

    As for a process that starts: nothing of the attempt that met the bad step is used again.
    """
    run.layout.engine.forget()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    run.options = replace(run.options, resume=run.root, overrides=())
    if overrides:
        run.loaded = run.loaded.overridden(overrides)
        run.args = trainer_arguments(run.recipe, run.layout)
        run.args.output_dir = str(run.root)
    find_resumption(run)
    left_out = (bad.step,) if isinstance(bad, NumberError) else ()
    step = run.point.step if run.point else 0

    def record() -> None:
        if run.point is None:
            begin_again(run.root)
        start = Start(step=step, overrides=overrides, passed_over=left_out)
        append_start(run.directory, start)

    decided_by_main(run.process, record)
    what = f", and leaves step {left_out[0]} out" if left_out else f" with {' '.join(overrides)}"
    run.console.warn(f"{bad.what}; the run goes back to step {step}{what}")


# Taking up a run at a checkpoint: the recipe's values win over the saved ones, and no row is
# lost.
#
# transformers restores the optimizer's groups and the schedule as they were saved, so an override
# of a learning rate or a weight decay would do nothing. And it forgets an evaluation that was due
# when the process ended.

_OPTIONS = ("weight_decay", "betas", "eps", "momentum")


class TakeUp(Hook):
    """Makes the recipe's values win over those that the checkpoint brought."""

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Everything is restored by now, and no step is taken yet."""
        assert checkpoint is not None
        args, state = loop.args, loop.state
        for group, wanted in zip(loop.optimizer.param_groups, loop.group_options, strict=True):
            group.update({name: wanted[name] for name in _OPTIONS if name in wanted})
        self._set_rates(loop)
        self._find_best(loop, checkpoint)
        if state.is_world_process_zero:  # a kill may have come between a commit and the thinning
            best = state.best_model_checkpoint
            spared = {checkpoint, None if best is None else Path(best)}
            loop.checkpoints.thin_out(args.save_total_limit, spared)
        evaluations, missed = loop.hook(Evaluations), missed_evaluation(checkpoint)
        evaluations.makes_up = missed is not None or _misses_evaluation(args, state)
        if missed == "figures" and evaluations.measurements:
            evaluations.is_alone = True

    def _find_best(self, loop: LoopState, checkpoint: Path) -> None:
        """The best checkpoint is next to this one, whatever the state says: it is a file too.

        transformers keeps its whole path, which may be the run's former name or anyone's.
        """
        state = loop.state
        state.best_model_checkpoint = None
        if type(state.best_global_step) is not int or not state.best_global_step:
            return
        best = checkpoint.parent / folder_name(state.best_global_step)
        if best.is_dir() and not best.is_symlink():
            state.best_model_checkpoint = str(best)
        elif loop.args.load_best_model_at_end:
            loop.run.console.note(
                f"{best.name}, the best so far, is gone: unless a better one comes, final/ will be "
                "the model of the last step"
            )

    def _set_rates(self, loop: LoopState) -> None:
        """The schedule of the recipe goes on at this step, with its rates, warm-up and arguments.

        Only the shape of a schedule that is a function of the step can be another one.
        """
        groups, scheduler = loop.optimizer.param_groups, loop.scheduler
        before = [group["lr"] for group in groups]
        if isinstance(scheduler, LambdaLR):
            wanted = [options["initial_lr"] for options in loop.group_options]
            scheduler.base_lrs = wanted
            rates = [
                base * shape(scheduler.last_epoch)
                for base, shape in zip(wanted, scheduler.lr_lambdas, strict=True)
            ]
            for group, base in zip(groups, wanted, strict=True):
                group["initial_lr"] = base
        else:
            rates = self._scaled_rates(loop, groups)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates
        changed: dict[str, tuple[float, float]] = {}
        for was, now, given in zip(before, rates, loop.group_options, strict=True):
            own = given.get("initial_lr", given["lr"])  # "lr" may be that of a first warm-up step
            if was != now:
                is_usual = own == loop.args.learning_rate
                others = f" where learning_rate is {own:.4g}"  # of LoRA+, of another part's weights
                changed.setdefault("" if is_usual else others, (was, now))
        for where, (was, now) in sorted(changed.items()):
            loop.run.console.note(
                f"the learning rate goes on at {now:.4g}{where}; it was {was:.4g}"
            )

    def _scaled_rates(self, loop: LoopState, groups: Sequence[Mapping[str, Any]]) -> list[float]:
        """The rates that a schedule with a state of its own has come to, over the recipe's."""
        rate = loop.args.learning_rate
        factor = rate / (loop.run.review.value_before("training.learning_rate") or rate or 1.0)
        ratio = loop.run.review.factor("lora.lora_plus_ratio")
        return [
            group["lr"] * factor * (ratio if options["lr"] != rate else 1.0)
            for group, options in zip(groups, loop.group_options, strict=True)
        ]


def _misses_evaluation(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the process ended, or was stopped, when an evaluation was due at the saved step."""
    if args.eval_strategy == "epoch":
        is_due = bool(state.epoch) and state.epoch % 1 == 0 and args.eval_delay <= state.epoch
    elif args.eval_strategy == "steps" and state.eval_steps:
        is_due = state.global_step % state.eval_steps == 0 and args.eval_delay <= state.global_step
    else:
        is_due = False
    if not is_due or not state.global_step:
        return False
    rows = [row for row in state.log_history if row.get("step") == state.global_step]
    return not any(key.startswith("eval_") for row in rows for key in row)
