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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from accelerate.utils import broadcast_object_list
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from trainkit.checkpoint.ownership import refuse_foreign
from trainkit.data.messages import Conversation
from trainkit.errors import TrainkitError
from trainkit.models.self_check import SelfCheckError
from trainkit.recipe import (
    LoadedRecipe,
    Recipe,
    SftOptions,
    dump_resolved,
    read_chat_template,
)
from trainkit.run import (
    Console,
    RunDirectory,
    capture_environment,
    command_script,
    start_rank_log,
    stop_rank_log,
)
from trainkit.train.checkpoints import ResumePoint, check_fingerprint, find_resume_point
from trainkit.train.data import RunData, prepare_run_data, read_conversations
from trainkit.train.dry_run import describe_dry_run, run_one_step
from trainkit.train.finish import AfterTraining
from trainkit.train.launch import (
    ProcessPlace,
    count_local_gpus,
    torchrun_command,
)
from trainkit.train.loading import ModelSource, check_exists, load_tokenizer
from trainkit.train.model import BuiltModel, build_model
from trainkit.train.quiet import quieten_libraries, tokenisation_progress
from trainkit.train.sections import (
    RUNS,
    adapter_fingerprint,
    data_options,
    data_sources,
    feeding,
    lora_options,
    model_source,
    trainer_arguments,
)
from trainkit.train.session import Session

logger = logging.getLogger(__name__)

Decision = TypeVar("Decision")


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
        KeyboardInterrupt: the run was stopped and has saved.
    """
    _relaunch_on_all_gpus(options)
    quieten_libraries()
    place = ProcessPlace.from_environment()
    console = Console(dist_rank=place.dist_rank)
    with contextlib.ExitStack() as scratch:
        scratch.callback(console.stop)
        temporary = Path(scratch.enter_context(tempfile.TemporaryDirectory()))
        prepared = _prepare(loaded, place, console, temporary / "dropped.jsonl", options.dry_run)
        if options.dry_run:
            _dry_run(loaded, prepared, place, console, temporary)
            return None
        fingerprint = _fingerprint(loaded.recipe, prepared, place)
        point = _resume_point(loaded, options, place, fingerprint, console)
        run = _run_directory(loaded, options, place, point)
        log = start_rank_log(run.rank_log(place.dist_rank), place.dist_rank)
        scratch.callback(stop_rank_log, log)
        with _recording(run, place):
            if place.is_main and point is None:
                _write_record(run, loaded, prepared.data)
                if run.dropped.exists():
                    console.note(f"each dropped row has its line in {run.dropped}")
            prepared.args.output_dir = str(run.root)
            _session(loaded, prepared, run, place, console, fingerprint).train(point)
    return run.root if place.is_main else None


@dataclass(frozen=True)
class _Prepared:
    """What is known before a run directory exists."""

    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    data: RunData
    held_out: list[Conversation]
    args: TrainingArguments


def _prepare(
    loaded: LoadedRecipe, place: ProcessPlace, console: Console, ledger: Path, dry_run: bool
) -> _Prepared:
    """Tokenizer, data, arguments: in this order, since the last one starts the process group."""
    recipe = loaded.recipe
    source = model_source(recipe)
    check_exists(source)
    tokenizer = load_tokenizer(source)
    # Set on the tokenizer, so that the held-out answers and final/ have it as well.
    tokenizer.chat_template = read_chat_template(recipe.data.chat_template) or (
        tokenizer.chat_template
    )
    with tokenisation_progress(console) as progress:
        data = prepare_run_data(
            data_sources(recipe, recipe.data.train),
            data_sources(recipe, recipe.data.eval),
            tokenizer,
            data_options(recipe, cache_dir=str(ledger.parent) if dry_run else None),
            feeding(recipe, place.world_size),
            ledger=ledger,
            progress=progress,
        )
    for note in (data.headline, *data.notes):
        console.note(note)
    for warning in data.warnings:
        console.warn(warning)
    held_out = _held_out(recipe, ledger, console)
    return _Prepared(source, tokenizer, data, held_out, trainer_arguments(recipe, place))


def _held_out(recipe: Recipe, ledger: Path, console: Console) -> list[Conversation]:
    """The conversations to be answered after training; read now, since bad rows are found now."""
    asked = recipe.generation_eval
    if asked is None:
        return []
    conversations, num_dropped = read_conversations(data_sources(recipe, asked.data), ledger)
    if num_dropped:
        console.warn(f"{num_dropped} held-out rows are no conversations and are not asked")
    return conversations[: asked.max_samples]


def _session(
    loaded: LoadedRecipe,
    prepared: _Prepared,
    run: RunDirectory,
    place: ProcessPlace,
    console: Console,
    fingerprint: Mapping[str, Any],
) -> Session:
    """Build the model and everything that training needs around it."""
    recipe = loaded.recipe
    built = _build(recipe, prepared)
    try:
        record = built.check_kernels(prepared.data.train.one_batch())
    except SelfCheckError as error:
        if place.is_main:
            run.write_json(run.kernels, {"self_check": error.rows})
        raise
    if place.is_main:
        run.write_json(run.kernels, record)
        console.note(built.describe())
    asked = recipe.generation_eval
    return Session(
        run=run,
        console=console,
        args=prepared.args,
        tokenizer=prepared.tokenizer,
        data=prepared.data,
        built=built,
        fingerprint=fingerprint,
        max_length=recipe.data.max_length,
        is_packed=recipe.data.packing,
        lora_plus_ratio=recipe.lora.lora_plus_ratio if recipe.lora else None,
        is_main=place.is_main,
        after=AfterTraining(
            base_model=recipe.model.name_or_path,
            held_out=prepared.held_out,
            max_new_tokens=asked.max_new_tokens if asked else 0,
            batch_size=asked.batch_size if asked else 0,
            options=data_options(recipe, cache_dir=None),
        ),
    )


def _build(recipe: Recipe, prepared: _Prepared) -> BuiltModel:
    """Load the model with its adapters and kernels."""
    args = prepared.args
    set_seed(args.seed)
    keywords: Mapping[str, Any] = args.gradient_checkpointing_kwargs or {}
    return build_model(
        prepared.source,
        attention=recipe.model.attn_implementation,
        packing=recipe.data.packing,
        lora=lora_options(recipe),
        quantize=recipe.lora.quantize if recipe.lora else None,
        kernels=recipe.kernels,
        reentrant=bool(args.gradient_checkpointing) and bool(keywords.get("use_reentrant")),
        device=None if is_deepspeed_zero3_enabled() else args.device,
    )


def _relaunch_on_all_gpus(options: SftOptions) -> None:
    """Start once for each GPU of this host when nobody has; Trainer would split batches instead."""
    if "RANK" in os.environ:
        return
    num_gpus = count_local_gpus()
    if num_gpus < 2:
        return
    command = torchrun_command(options.command, num_gpus)
    logger.warning("one process for each of %d GPUs: %s", num_gpus, shlex.join(command))
    sys.stdout.flush()
    os.execv(command[0], command)


def _resume_point(
    loaded: LoadedRecipe,
    options: SftOptions,
    place: ProcessPlace,
    fingerprint: Mapping[str, Any],
    console: Console,
) -> ResumePoint | None:
    """Find and verify the checkpoint to continue from; hashing it is one rank's work.

    Raises:
        CheckpointError: there is none, or it belongs to another run.
    """
    resume = options.resume
    if resume is None:
        return None
    point = _decided_by_main(
        place,
        lambda: find_resume_point(
            resume, output_dir=options.output_dir, runs=RUNS, name=loaded.name
        ),
    )
    if point is None:
        return None
    check_fingerprint(point, fingerprint)
    # Optimizer states and ZeRO shards are pickles: only the user's own may be loaded.
    refuse_foreign(point.checkpoint)
    for path, reason in point.skipped:
        console.warn(f"{path.name} is damaged and was passed over: {reason}")
    console.note(f"continuing from {point.checkpoint}")
    return point


def _run_directory(
    loaded: LoadedRecipe, options: SftOptions, place: ProcessPlace, point: ResumePoint | None
) -> RunDirectory:
    """Make the run directory on rank 0, or open the one to continue; all ranks learn of it."""
    if point is not None:
        return RunDirectory.open(point.run)
    wanted = options.output_dir
    return _decided_by_main(
        place,
        lambda: (
            RunDirectory.create_at(wanted) if wanted else RunDirectory.create(RUNS, loaded.name)
        ),
    )


def _decided_by_main(place: ProcessPlace, decide: Callable[[], Decision]) -> Decision:
    """Let rank 0 decide for all; what it cannot do is an error on every rank, not a hang."""
    told: list[Any] = [None]
    if place.is_main:
        try:
            told[0] = decide()
        except TrainkitError as error:
            told[0] = error
    if place.world_size > 1:
        broadcast_object_list(told)
    if isinstance(told[0], TrainkitError):
        raise told[0]
    return cast(Decision, told[0])


@contextlib.contextmanager
def _recording(run: RunDirectory, place: ProcessPlace) -> Iterator[None]:
    """Keep ``status.json`` truthful; one rank writes it."""
    with run.recording_status() if place.is_main else contextlib.nullcontext():
        yield


def _write_record(run: RunDirectory, loaded: LoadedRecipe, data: RunData) -> None:
    """What is known before training: recipe, command, environment, data."""
    run.write_text(run.recipe, loaded.source_text)
    run.write_text(run.resolved, dump_resolved(loaded), private=True)
    run.write_text(run.command, command_script(), private=True)
    run.write_json(run.environment, capture_environment(), private=True)
    run.write_json(run.data, data.summary)
    for target in (run.dropped, run.changed):
        entries = data.ledger.with_name(target.name)
        if entries.exists():
            run.write_text(target, entries.read_text(encoding="utf-8"))


def _fingerprint(recipe: Recipe, prepared: _Prepared, place: ProcessPlace) -> dict[str, Any]:
    """What a continued run must share with the one it continues, or its curve means nothing."""
    args = prepared.args
    micro = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return {
        "data": prepared.data.fingerprint,
        "model": recipe.model.name_or_path,
        "lora": adapter_fingerprint(recipe),
        "rows_per_step": micro * place.world_size,
        "seed": args.seed,
        # ZeRO's shards fit the same number of ranks only.
        "num_ranks": place.world_size if recipe.deepspeed else None,
    }


def _dry_run(
    loaded: LoadedRecipe, prepared: _Prepared, place: ProcessPlace, console: Console, scratch: Path
) -> None:
    """Train one step in a directory that is thrown away, and report what it cost."""
    run = RunDirectory.create_at(scratch / "run")
    prepared.args.output_dir = str(run.root)
    fingerprint = _fingerprint(loaded.recipe, prepared, place)
    verdict = run_one_step(_session(loaded, prepared, run, place, console, fingerprint))
    figures = describe_dry_run(verdict, prepared.data, prepared.args)
    console.finish(figures, title="dry run: ready to train")
