"""The composition root: everything is wired together here.

``run_sft`` is the whole journey in order. What can fail cheaply comes first (recipe, tokenizer,
data), then the model, its kernels and adapters, then training, then what is left behind.
"""

import contextlib
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainingArguments, set_seed

from trainkit.estimate.estimate import Estimate
from trainkit.lora.report import merge_warning
from trainkit.models.attention.proof import AttentionProofError
from trainkit.models.checks.self_check import SelfCheckError
from trainkit.parallel import Layout, ProcessRank
from trainkit.parallel.agreement import decided_by_main, refuse_disagreement
from trainkit.parallel.launch.hosts import Hosts
from trainkit.parallel.launch.processes import count_local_gpus, launch_command
from trainkit.recipe import (
    LoadedRecipe,
    Recipe,
    SftOptions,
)
from trainkit.run import (
    Console,
    RunDirectory,
    start_rank_log,
    stop_rank_log,
)
from trainkit.run.lock import locked
from trainkit.run.report.redraw import reported_at_an_early_end
from trainkit.run.stages import Stages
from trainkit.train.dry_run import describe_dry_run, run_one_step
from trainkit.train.faults.signals import hold_back, not_in_between, record_if_stuck
from trainkit.train.faults.smaller_batch import BatchFinder
from trainkit.train.log.quiet import quieten_libraries
from trainkit.train.memory import expect
from trainkit.train.model import BuiltModel, build_model
from trainkit.train.prepare import Invocation, Prepared, prepare
from trainkit.train.results.finish import AfterTraining
from trainkit.train.resume.back import go_back
from trainkit.train.resume.begin import (
    find_resumption,
    open_run_directory,
    refuse_other_hosts,
    review_built,
)
from trainkit.train.resume.record import Resumption, write_record, write_start
from trainkit.train.resume.settings import settings_of
from trainkit.train.sections import (
    fp8_setup,
    machine,
    number_policy,
    optimizer_plan,
    recompute_wanted,
)
from trainkit.train.session import Session
from trainkit.train.surroundings import refuse_contradicting_start

logger = logging.getLogger(__name__)

FP8 = "fp8"
"""Where a checkpoint's record keeps the products that run in fp8."""


def run_sft(loaded: LoadedRecipe, options: SftOptions) -> Path | None:
    """Train as the recipe says.

    Args:
        loaded: the recipe with the origin of every value.
        options: what the command line says about this start.

    Returns:
        The run directory; None after a dry run, and on every rank but the first.

    Raises:
        TrainkitError: anything the user can act on; the run directory, if there is one already,
            says so in ``status.json``.
        StoppedError: a signal stopped the run; where it had begun to train, it has saved.
    """
    refuse_contradicting_start()
    _relaunch_on_all_gpus(options)
    quieten_libraries()
    process = ProcessRank.from_environment()
    console = Console(dist_rank=process.dist_rank, rows=options.rows)
    stages = Stages(options.began)
    stages.end("imports")
    start = Invocation(loaded, options, process, console, stages)
    with contextlib.ExitStack() as scratch:
        scratch.callback(console.stop)
        temporary = Path(scratch.enter_context(tempfile.TemporaryDirectory()))
        prepared = prepare(start, temporary / "dropped.jsonl")
        stages.end("data")
        refuse_other_hosts(start, prepared)
        expected = expect(start, prepared)
        resumption = find_resumption(start, prepared)
        if options.dry_run:
            _dry_run(start, prepared, resumption.fingerprint, temporary, expected)
            return None
        with not_in_between():  # from the first moment there is somebody to say how the run ended
            run = _open_run(start, resumption, scratch)
        if process.is_main and resumption.point is None:
            write_record(run, loaded, prepared.data, prepared.tokenizer, options, machine(process))
            if run.dropped.exists():
                console.note(f"each dropped row has its line in {run.dropped}")
        prepared.args.output_dir = str(run.root)
        stages.end("record")
        session = _session(start, prepared, run, resumption, expected)
        while (bad := session.train(resumption.point)) is not None:
            overrides = session.batch.after(bad)
            del session
            start, prepared, resumption = go_back(start, prepared, run, bad, overrides)
            session = _session(start, prepared, run, resumption, expected)
    return run.root if process.is_main else None


def _open_run(
    start: Invocation, resumption: Resumption, scratch: contextlib.ExitStack
) -> RunDirectory:
    """Make or open the run directory, lock it, and keep its status and logs until the end."""
    process = start.process
    known = start.options.resume if resumption.point is None else resumption.point.run
    if known is not None:
        _lock(RunDirectory(known), process, scratch)
    run = open_run_directory(start, resumption)
    if known is None:
        _lock(run, process, scratch)
    if process.is_main:
        scratch.enter_context(reported_at_an_early_end(run))  # when its status is written
        scratch.enter_context(run.recording_status())
        record_if_stuck(lambda reason: run.write_status("interrupted", reason=reason))
    log = start_rank_log(run.rank_log(process.dist_rank), process.dist_rank)
    scratch.callback(stop_rank_log, log)
    return run


def _lock(run: RunDirectory, process: ProcessRank, scratch: contextlib.ExitStack) -> None:
    """Keep other starts of this run out; one rank does, and all hear of it."""
    decided_by_main(process, lambda: scratch.enter_context(locked(run)))


def _session(
    start: Invocation,
    prepared: Prepared,
    run: RunDirectory,
    resumption: Resumption,
    expected: Estimate | None,
) -> Session:
    """Build the model and everything that training needs around it."""
    recipe, process = start.recipe, start.process
    point = resumption.point
    built = _build(recipe, prepared, None if point is None else point.fingerprint.get(FP8))
    start.stages.end("model")
    refuse_disagreement(process, {"kernels": built.runs})
    resumption = review_built(start, resumption, built.runs)
    try:
        record = built.check_kernels(prepared.data.train.one_batch())
    except (AttentionProofError, SelfCheckError) as error:
        if process.is_main:
            run.write_json(run.kernels, {error.part: error.rows})
        raise
    if process.is_main:
        run.write_json(run.kernels, record)
        start.console.note(built.describe())
        if built.adapters is not None and (warning := merge_warning(built.adapters)):
            start.console.warn(warning)
    for row in record.get("self_check", ()):
        if row["status"] == "skipped" and row["op"] == "replica":
            start.console.warn(f"the kernels were not checked op by op: {row['detail']}")
    start.stages.end("kernels")
    return Session(
        run=run,
        console=start.console,
        args=prepared.args,
        layout=prepared.layout,
        tokenizer=prepared.tokenizer,
        data=prepared.data,
        built=built,
        fingerprint=_with_choice(resumption.fingerprint, built),
        settings=settings_of(start.loaded),
        begin=lambda args: write_start(
            run, start.loaded, start.options, machine(process), resumption, args, built.attention
        ),
        review=resumption.review,
        begins_again=resumption.point is None and start.options.resume is not None,
        recompute=recompute_wanted(recipe),
        max_length=recipe.data.max_length,
        is_packed=recipe.data.packing,
        optimizer_plan=optimizer_plan(recipe),
        is_main=process.is_main,
        numbers=number_policy(recipe, run),
        step_timeout=recipe.faults.step_timeout,
        expected=expected,
        stages=start.stages,
        batch=_batch_finder(recipe, prepared.args, prepared.layout, run, expected),
        after=AfterTraining(
            base_model=recipe.model.name_or_path,
            questions=prepared.questions,
        ),
    )


def _batch_finder(
    recipe: Recipe,
    args: TrainingArguments,
    layout: Layout,
    run: RunDirectory,
    expected: Estimate | None,
) -> BatchFinder:
    """What finds the micro-batch; the estimate knows what the optimizer and gradients will take."""

    def agree(size: int) -> int:
        return int(min(gather_object([size]))) if layout.process.world_size > 1 else size

    owners = {} if expected is None else expected.peak.by_owner
    return BatchFinder(
        is_on=bool(recipe.training.get("auto_find_batch_size")),
        args=args,
        keeps_global=recipe.global_batch_size is not None
        and "gradient_accumulation_steps" not in recipe.training,
        layout=layout,
        run=run,
        to_come_gib=owners.get("optimizer", 0.0) + owners.get("gradients", 0.0) / 2,
        agree=agree,
    )


def _with_choice(fingerprint: Mapping[str, Any], built: BuiltModel) -> Mapping[str, Any]:
    """The fingerprint with the products that run in fp8: a continued run takes them from there."""
    choice = built.fp8_choice
    return fingerprint if choice is None else {**fingerprint, FP8: choice.to_dict()}


def _build(
    recipe: Recipe, prepared: Prepared, chosen_before: Mapping[str, Any] | None
) -> BuiltModel:
    """Load the model with its adapters and kernels."""
    args = prepared.args
    set_seed(args.seed)
    keywords: Mapping[str, Any] = args.gradient_checkpointing_kwargs or {}
    return build_model(
        prepared.source,
        attention=recipe.model.attn_implementation,
        packing=recipe.data.packing,
        lora=recipe.lora,
        quantize=recipe.lora.quantize if recipe.lora else None,
        kernels=recipe.kernels,
        reentrant=bool(args.gradient_checkpointing) and bool(keywords.get("use_reentrant")),
        device=prepared.layout.engine.loading_device(args.device),
        fp8=fp8_setup(recipe, prepared.data, prepared.layout, args, chosen_before),
        loading_whole=prepared.layout.engine.loading_whole,
        load_part=prepared.layout.engine.load_part,
        reads_parts=prepared.layout.engine.reads_parts(args.device),
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


def _dry_run(
    start: Invocation,
    prepared: Prepared,
    fingerprint: Mapping[str, Any],
    scratch: Path,
    expected: Estimate | None,
) -> None:
    """Train one step in a directory that is thrown away, and report what it cost."""
    run = RunDirectory.create_at(scratch / "run")
    prepared.args.output_dir = str(run.root)
    session = _session(start, prepared, run, Resumption(fingerprint), expected)
    verdict = run_one_step(session)
    figures = describe_dry_run(verdict, prepared.data, prepared.args, prepared.layout.data_size)
    start.console.finish(figures, title="dry run: ready to train")
