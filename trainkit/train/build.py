"""The composition root: everything is wired together here.

``run_sft`` is the whole journey in order. What can fail cheaply comes first (recipe, tokenizer,
data), then the model, its kernels and adapters, then training, then what is left behind.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import shlex
import shutil
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils import broadcast_object_list
from transformers import set_seed

from trainkit.auto_class import without_adapters
from trainkit.data.template import leave_memory_alone
from trainkit.errors import CheckpointError, ProofError, StoppedError
from trainkit.kernels import ahead
from trainkit.models.vision import describe_parts
from trainkit.objectives.objective import accepts_num_items
from trainkit.options import Fp8Options
from trainkit.parallel import ProcessRank
from trainkit.parallel.agreement import decided_by_main, refuse_disagreement
from trainkit.parallel.launch import Hosts, count_local_gpus, launch_command
from trainkit.parallel.parameters import made_whole
from trainkit.recipe import LoadedRecipe, SftOptions
from trainkit.run import Console, RunDirectory, start_rank_log, stop_rank_log
from trainkit.run.directory import locked
from trainkit.run.metrics import read_metrics
from trainkit.run.report import reported_at_an_early_end
from trainkit.run.starts import Stages, passed_over
from trainkit.run.status import resume_command
from trainkit.train import log
from trainkit.train.callbacks import (
    EmbeddingNoise,
    KeepFp8Codes,
    KeepToThePlan,
    LeakTest,
    MarkProgress,
    RowTest,
    RunRecorder,
    SeeImages,
    SharedPrompts,
    StopOnRequest,
)
from trainkit.train.checkpoints import CheckpointWriter, written_together
from trainkit.train.evaluations import Displacement, Evaluations, LookAhead, StopEarly
from trainkit.train.faults.numbers import WEIGHTS, NumberError, NumberPolicy, folder_of
from trainkit.train.faults.signals import (
    StopRequest,
    hold_back,
    not_in_between,
    record_if_stuck,
    saving_on_signals,
)
from trainkit.train.faults.watch import Watch
from trainkit.train.finish import finish
from trainkit.train.hooks import KEPT_ROWS, Hook
from trainkit.train.log import Rows
from trainkit.train.loop import Loop
from trainkit.train.model import BuiltModel, build_model
from trainkit.train.prepare import prepare, refuse_contradicting_start, settings_refused_by
from trainkit.train.quiet import quieten_libraries
from trainkit.train.resume.begin import (
    FP8,
    TakeUp,
    find_resumption,
    go_back,
    open_run_directory,
    refuse_other_hosts,
    review_built,
)
from trainkit.train.resume.given import settings_of
from trainkit.train.resume.record import write_record
from trainkit.train.run import Run
from trainkit.train.saves import Numbers, Saves, checkpoint_bytes, refuse_small_disk, save_model

if TYPE_CHECKING:
    from trainkit.train.dry_run import OneStep
    from trainkit.train.faults.shortage import MemoryShortageError

logger = logging.getLogger(__name__)


def run_sft(loaded: LoadedRecipe, options: SftOptions) -> Path | None:
    """Train as the recipe says.

    Returns:
        The run directory; None after a dry run, and on every rank but the first.
    """
    refuse_contradicting_start()
    _relaunch_on_all_gpus(options)
    quieten_libraries()
    process = ProcessRank.from_environment()
    console = Console(dist_rank=process.dist_rank, rows=options.rows)
    run = Run(loaded, options, process, console, Stages(options.began))
    run.stages.end("imports")
    with contextlib.ExitStack() as scratch:
        scratch.callback(console.stop)
        temporary = Path(scratch.enter_context(tempfile.TemporaryDirectory()))
        prepare(run, temporary / "dropped.jsonl")
        run.stages.end("data")
        refuse_other_hosts(run)
        if not run.recipe.training.get("use_cpu") and (gpu := log.this_gpu()) is not None:
            from trainkit.train.memory import expect

            run.expected = expect(run, gpu)
        find_resumption(run)
        if options.dry_run:
            run.directory = RunDirectory.create_at(temporary / "run")
            run.args.output_dir = str(run.root)
            run.point = None
            _dry_run(run)
            return None
        with not_in_between():  # from the first moment there is somebody to say how the run ended
            _open(run, scratch)
        if process.is_main and run.point is None:
            write_record(run)
            if run.directory.dropped.exists():
                console.note(f"each dropped row has its line in {run.directory.dropped}")
        run.args.output_dir = str(run.root)
        run.stages.end("record")
        while (bad := _attempt(run)) is not None:
            del run.built, run.checkpoints  # which hold the model
            go_back(run, bad, bad.overrides)
    return run.root if process.is_main else None


def _open(run: Run, scratch: contextlib.ExitStack) -> None:
    """Make or open the run directory, lock it, and keep its status and logs until the end."""

    def lock(directory: RunDirectory) -> None:
        """Keep other starts of this run out; one rank does, and all hear of it."""
        decided_by_main(run.process, lambda: scratch.enter_context(locked(directory)))

    known = run.options.resume if run.point is None else run.point.run
    if known is not None:
        lock(RunDirectory(known))
    run.directory = directory = open_run_directory(run)
    if known is None:
        lock(directory)
    if run.process.is_main:
        scratch.enter_context(reported_at_an_early_end(directory))  # when its status is written
        scratch.enter_context(directory.recording_status())
        record_if_stuck(lambda reason: directory.write_status("interrupted", reason=reason))
    dist_rank, say = run.process.dist_rank, run.console.warn if run.process.is_main else None
    log = start_rank_log(directory.rank_log(dist_rank), dist_rank, say)
    scratch.callback(stop_rank_log, log)


def _attempt(run: Run) -> NumberError | MemoryShortageError | None:
    """Build the model, train, from the beginning or from a checkpoint, and write what is left.

    Returns:
        None when the run is done; else what is bad in a step that it must go back behind.
    """
    _build(run)
    is_main, point = run.process.is_main, run.point
    with settings_refused_by("the loop", "training"):
        loop = Loop(run, hooks_of(run))
    if is_main and run.args.report_to:
        from trainkit.train.trackers import go_on_with

        for note in go_on_with(run.directory, run.args, goes_on=point is not None):
            run.console.note(note)
    if torch.cuda.is_available():  # loading and checking the model is another matter
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    decided_by_main(run.process, lambda: refuse_small_disk(loop, run.root))
    # Asked once: it goes through every tensor, and stays so.
    run.checkpoints.needed = functools.cache(lambda: checkpoint_bytes(loop))
    run.watch = _watch(run)
    with run.watch.watching():
        started = time.perf_counter()
        bad = _trained(loop)
        seconds = time.perf_counter() - started
        if is_main:
            loop.hook(RunRecorder).finish()
        if bad is not None:
            return bad
        run.watch.timeout = None
        if is_main:
            rows, kept = loop.state.log_history, run.directory
            # Of a long run the state has the last rows only.
            whole = rows if len(rows) <= KEPT_ROWS else read_metrics(kept.metrics)
            kept.write_json(kept.log_history, whole)
        if run.stop.has_saved:
            run.console.stop()
            run.console.note(f"continue with: {resume_command(run.root)}")
            raise StoppedError(run.stop.agreed, run.stop.why)
        finish(loop, seconds)
    return None


def _trained(loop: Loop) -> NumberError | MemoryShortageError | None:
    """Train; a step that the run goes back behind is returned, and any other error raised."""
    run = loop.run
    leave_memory_alone()
    with saving_on_signals(run.stop, run.console.note):
        try:
            loop.train(None if run.point is None else run.point.checkpoint)
        except NumberError as error:
            if run.numbers.goes_back and not run.stop.is_wanted:
                return error.with_traceback(None)  # which would keep the model alive
            if run.process.is_main:
                loop.hook(RunRecorder).finish()
            _keep_weights(loop, error)
            raise
        except Exception as error:
            from trainkit.train.faults.shortage import shortage_of

            return shortage_of(loop, error)
    return None


def _keep_weights(loop: Loop, error: NumberError) -> None:
    """Write down the weights that met a bad step, for `trainkit diagnose`; all ranks are here.

    What cannot be written must not hide what happened.
    """
    target = folder_of(loop.run.root, error.step) / WEIGHTS
    try:
        with written_together(target, loop.ranks, {"step": error.step}, replace=True) as inner:
            save_model(loop, inner)
    except CheckpointError as problem:
        loop.run.console.warn(f"the weights of the step could not be kept: {problem.what}")


def _build(run: Run) -> None:
    """The model, held against the plain one, and what is new with each attempt."""
    recipe, args, layout, console = run.recipe, run.args, run.layout, run.console
    set_seed(args.seed)
    run.built = built = _built(run)
    asks = recipe.objective == "distill" or recipe.asks_reference == "second model"
    if run.teacher is None and asks:
        from trainkit.train.teacher import second_model

        with made_whole():
            second = second_model(recipe, args.device)
        if second is not None:
            run.teacher = second.model
            name, size = second.model.config.name_or_path, second.num_parameters / 1e6
            console.note(f"asked at each step: {name}, {size:.1f} M parameters")
    run.stages.end("model")
    refuse_disagreement(run.process, {"kernels": built.runs})
    review_built(run)
    try:
        record = built.check_kernels(next(run.data.train.first_samples()))
    except ProofError as error:
        if run.process.is_main:
            run.directory.write_json(run.directory.kernels, {error.part: error.rows})
        raise
    parts = {}
    if run.data.num_images:
        parts = describe_parts(built.model, recipe.model.lr_ratios, args.learning_rate)
        record["parts"] = parts
    if run.process.is_main:
        run.directory.write_json(run.directory.kernels, record)
        console.note(built.describe())
        if parts:
            each = "{} {parameters:,} weights at {learning_rate:.3g}"
            console.note("trained: " + ", ".join(each.format(x, **parts[x]) for x in parts))
        if built.adapters is not None and parts.keys() - {"text"}:
            console.warn(
                "adapters see images: most servers ignore those of tower and projector (vLLM does "
                "without --enable-tower-connector-lora); what trainkit merge writes has them"
            )
        if built.adapters is not None:
            from trainkit.lora.report import merge_warning

            if warning := merge_warning(built.adapters):
                console.warn(warning)
    for row in record.get("self_check", ()):
        if row["status"] == "skipped" and row["op"] == "replica":
            console.warn(f"the kernels were not checked op by op: {row['detail']}")
    ahead.wait_for_all()
    run.stages.end("kernels")
    config, faults = built.model.config, recipe.faults
    run.stop = stop = StopRequest()
    run.numbers = NumberPolicy(
        on_bad=faults.on_bad_numbers,
        max_skips=faults.max_skips,
        max_rollbacks=faults.max_rollbacks,
        spike=faults.spike,
        window=faults.spike_window,
        passed_over=passed_over(run.directory),
    )
    run.checkpoints = CheckpointWriter(
        run.root,
        run.fingerprint,
        settings_of(run.loaded),
        committed=lambda path: console.note(f"saved {path}"),
        failed=stop.fail,
    )
    if args.ddp_find_unused_parameters is None:
        # Only a tower next to the text model has weights that no text reaches; looking for such
        # weights costs a walk of the graph every step.
        args.ddp_find_unused_parameters = config.get_text_config() is not config
    if layout.rows is not None:
        from trainkit.models.row_test import refuse_unsplittable

        base = without_adapters(built.model)
        takes = accepts_num_items(built.model)
        name = built.attention.name
        refuse_unsplittable(base, layout.rows, attention=name, takes_num_items=takes)


def _built(run: Run) -> BuiltModel:
    recipe, args, engine = run.recipe, run.args, run.layout.engine
    keywords = args.gradient_checkpointing_kwargs or {}
    fp8, is_fp8_base = None, recipe.lora is not None and recipe.lora.quantize == FP8
    # A base in fp8 without a choice of its own gets the default budget.
    options = Fp8Options.of(recipe.model.fp8 or is_fp8_base)
    if options is not None:
        from trainkit.models.fp8.decide import Fp8Setup

        fp8 = Fp8Setup(
            options,
            run.data.train.first_samples(),
            args.per_device_train_batch_size * recipe.data.max_length,
            None if run.point is None else run.point.fingerprint.get(FP8),
            lambda value: broadcast_object_list([value])[0],
            engine.gathering,
        )
    return build_model(
        recipe.model,
        config=run.config,
        packing=recipe.data.packing,
        lora=recipe.lora,
        kernels=recipe.kernels,
        device=args.device,
        engine=engine,
        reentrant=bool(args.gradient_checkpointing) and bool(keywords.get("use_reentrant")),
        fp8=fp8,
        scalar_head=run.data.objective.scalar_head,
        sees_images=run.data.num_images > 0,
    )


def hooks_of(run: Run, dry: OneStep | None = None) -> list[Hook]:
    """All that happens around the steps, in the order in which it is asked."""
    recipe, args, early = run.recipe, run.args, run.recipe.early_stopping
    hooks: list[Hook] = []
    # First: proofs and evaluations take losses.
    if recipe.asks_reference == "ahead" and dry is None:
        from trainkit.train.reference import References

        hooks.append(References())
    if recipe.objective == "distill":
        from trainkit.train.teacher import hooks_of

        hooks += hooks_of(recipe.distill, has_teacher=run.teacher is not None)
    if early is not None:
        hooks.append(StopEarly(early.patience, early.min_delta))
    if args.gradient_checkpointing or recipe.recompute is not None:
        from trainkit.train.recompute import recompute_hooks

        hooks += recompute_hooks(recipe, is_on=bool(args.gradient_checkpointing))
    hooks += [KeepFp8Codes()] if run.built.fp8 is not None else []
    hooks += [RowTest()] if run.layout.rows is not None else []
    hooks += [LeakTest()] if recipe.data.packing else []
    if recipe.preference is not None and recipe.preference.share_prompts:
        hooks.append(SharedPrompts())
    adapted = run.built.adapters["adapted"] if run.built.adapters is not None else ()
    if any(row["what"] == "parameter" for row in adapted):
        from trainkit.train.experts import ExpertsTrain

        hooks.append(ExpertsTrain())
    hooks += [SeeImages()] if run.data.num_images else []
    if dry is None:
        hooks += [KeepToThePlan(), TakeUp()] if run.point is not None else []
        if run.process.is_main:
            hooks.append(RunRecorder(run))
            if args.report_to:
                from trainkit.train.trackers import RememberTrackers

                hooks.append(RememberTrackers())
        if run.expected is not None:
            from trainkit.train.memory import MemoryRecord

            hooks.append(MemoryRecord())
        if recipe.training.get("auto_find_batch_size"):
            from trainkit.train.faults.shortage import try_hooks

            hooks += try_hooks(run)  # after the record of this start
        hooks.append(MarkProgress())
    hooks += [Displacement()] if recipe.asks_reference and run.process.is_main else []
    hooks += [LookAhead()]
    hooks += [EmbeddingNoise()] if args.neftune_noise_alpha is not None else []
    measured = []
    if recipe.generation_eval is not None or recipe.eval_tasks is not None:
        from trainkit.train.generation_eval import measurements

        measured = measurements(run)
    saves, evaluations = Saves(), Evaluations(measured)
    if args.push_to_hub and run.process.is_main:
        from trainkit.train.hub import Hub

        saves.hub = Hub(args, is_dry=run.options.dry_run)
    if dry is not None:
        from trainkit.train.dry_run import LongestEvaluation

        evaluations = LongestEvaluation(measured)
    hooks += [Numbers(), Rows(), evaluations, StopOnRequest(), saves]
    return hooks if dry is None else [*hooks, dry]


def _watch(run: Run) -> Watch:
    """The ranks' watch over one another; all of them make it together."""
    folder, process, launch = run.directory.logs / "ranks", run.process, [""]
    if process.is_main:
        shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed
        launch[0] = uuid.uuid4().hex
    broadcast_object_list(launch)
    return Watch(
        folder,
        dist_rank=process.dist_rank,
        world_size=process.world_size,
        launch=launch[0],
        step_timeout=run.recipe.faults.step_timeout,
        record=lambda reason: run.directory.write_status("failed", reason=reason),
    )


def _relaunch_on_all_gpus(options: SftOptions) -> None:
    """Start once for each GPU of this host when nobody has: one process trains on one."""
    if "RANK" in os.environ:
        return
    num_gpus = count_local_gpus()
    if num_gpus < 2:
        return
    command = launch_command(options.command, Hosts.from_environment(), num_gpus)
    logger.warning("one process for each of %d GPUs: %s", num_gpus, shlex.join(command))
    sys.stdout.flush()
    hold_back()
    os.execv(command[0], command)


def _dry_run(run: Run) -> None:
    """Train one step in a directory that is thrown away, and report what it cost."""
    from trainkit.train.dry_run import OneStep, describe

    _build(run)
    step = OneStep()
    with settings_refused_by("the loop", "training"):
        loop = Loop(run, hooks_of(run, step))
    if run.args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        loop.train()
    except (RuntimeError, MemoryError) as error:
        from trainkit.train.faults.shortage import is_shortage, out_of_memory

        if not is_shortage(error):
            raise
        raise out_of_memory(loop, error) from error
    run.console.finish(describe(run, step), title="dry run: ready to train")
