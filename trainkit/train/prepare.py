"""What a run has before it has a directory or a model: tokenizer, data, arguments.

What can fail cheaply fails here. With ``build.py`` the only reader of recipe fields.
"""

import copy
import functools
import importlib.util
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from trainkit.data.options import BUFFER
from trainkit.errors import RecipeError, TrainkitError
from trainkit.models.proof.replica import replica_of
from trainkit.models.tokenizer import check_exists, load_config, load_tokenizer, new_tokens
from trainkit.objectives import objective_of
from trainkit.options.optimizers import DEFAULT, OURS, optimizer_row
from trainkit.options.parallel import RecomputeOptions
from trainkit.parallel import Layout, Machine, ProcessRank, strategy_for
from trainkit.parallel.launch import meet_anew
from trainkit.parallel.matrix import COMPILES
from trainkit.recipe import Derived, Recipe, default_of, read_chat_template, resolve_accumulation
from trainkit.recipe.derived import derive_values
from trainkit.recipe.schema import accumulates_in_backward, late_warmup
from trainkit.recipe.training import FIELDS
from trainkit.terminal import visible
from trainkit.train.data import RunData, prepare_run_data
from trainkit.train.fit import context_warning, refuse_unfit_model
from trainkit.train.hooks import own_callbacks
from trainkit.train.images import data_options, vision_of
from trainkit.train.quiet import tokenisation_progress
from trainkit.train.resume.given import RUNS
from trainkit.train.run import Run

logger = logging.getLogger(__name__)

KEY = "training.optim"


def refuse_unfit_optimizer(optim: str | None, *, on_gpu: bool) -> None:
    """Refuse an optimizer whose package or device is missing."""
    row = optimizer_row(optim)
    if row.package is not None and importlib.util.find_spec(row.package.module) is None:
        raise RecipeError(
            f"{row.name} needs the package {row.package.module}, which is not installed",
            where=KEY,
            fix=f'pip install "{row.package.pip}"',
        )
    if row.needs_gpu and not on_gpu:
        raise RecipeError(
            f"{row.name} runs on a GPU alone, and this run has none",
            where=KEY,
            fix="set training.optim: adamw_torch_fused",
        )


def prepare(run: Run, ledger: Path) -> None:
    """Tokenizer, data, arguments: in this order, since the last one starts the process group."""
    recipe, console = run.recipe, run.console
    training = recipe.training
    run.layout = layout = layout_of(recipe, run.process)
    check_exists(recipe.model)
    run.config = config = load_config(recipe.model)
    refuse_unfit_model(
        config,
        packing=recipe.data.packing,
        kernels=recipe.kernels,
        lora=recipe.lora,
        fp8=recipe.model.fp8,
        projected=training.get("optim_target_modules"),
        recompute=RecomputeOptions.of(recipe.recompute),
    )
    _refuse_unfit_device(recipe, layout)
    own_callbacks(recipe.callbacks)
    trusted = recipe.model.trust_remote_code
    own = run.process.local_rank if torch.cuda.is_available() else -1
    with torch.cuda.device(own):
        layout.engine.refuse_model(config, functools.partial(replica_of, trust_remote_code=trusted))
    for idle in run.loaded.idle(run.machine):
        console.note(visible(idle))
    warning = context_warning(config, recipe.data.max_length)
    if warning is not None:
        console.warn(warning)
    run.tokenizer = load_tokenizer(recipe.model, config)
    if recipe.model.adds_tokens:
        from trainkit.models.vocabulary import describe_new_tokens

        rows = getattr(config.get_text_config(), "vocab_size", None)
        console.note(visible(describe_new_tokens(new_tokens(recipe.model), rows)))
    # Set on the tokenizer, so that the held-out answers and final/ have it as well.
    template = read_chat_template(recipe.data.chat_template) or run.tokenizer.chat_template
    run.tokenizer.chat_template = template
    if recipe.distill is not None:
        from trainkit.train.teacher import refuse_unfit_teacher

        if (warning := refuse_unfit_teacher(recipe, run.tokenizer)) is not None:
            console.warn(warning)
    run.data = data = _read_data(run, ledger)
    _refuse_no_batch(recipe, data, layout)
    _refuse_images(recipe, data)
    for note in (data.headline, *data.notes):
        console.note(visible(note))
    for warning in (*data.warnings, *_noise_warning(recipe, data)):
        console.warn(visible(warning))
    if recipe.generation_eval is not None or recipe.eval_tasks is not None:
        from trainkit.train.generation_eval import load_questions

        load_questions(run, ledger)
    run.args = trainer_arguments(recipe, layout)
    _refuse_late_warmup(data, run.args, layout)


def _read_data(run: Run, ledger: Path) -> RunData:
    recipe, data, training = run.recipe, run.recipe.data, run.recipe.training
    workers = max(int(training.get("dataloader_num_workers", 0)), 1)
    cache_dir = str(ledger.parent) if run.options.dry_run else None
    run.data_options = data_options(recipe, cache_dir=cache_dir, config=run.config)
    objective = objective_of(recipe.objective, recipe.distill)
    if objective.takes_images:
        run.vision = vision_of(recipe.model, run.tokenizer, data.images, run.config)
    return prepare_run_data(
        data.with_format(data.train),
        data.with_format(data.eval_sources),
        run.tokenizer,
        run.data_options,
        ledger=ledger,
        progress=tokenisation_progress(run.console),
        objective=objective,
        packing=data.packing,
        shuffle=training.get("train_sampling_strategy") != "sequential",
        per_source_loss=data.per_source_loss,
        stream_buffer=BUFFER if data.streaming is True else int(data.streaming),
        num_shards=run.layout.data_size * workers,
        row_parts=recipe.parallel.sequence,
        held_out=data.eval_part,
        vision=run.vision,
        shares_prompts=recipe.preference is not None and recipe.preference.share_prompts,
    )


def _refuse_unfit_device(recipe: Recipe, layout: Layout) -> None:
    on_gpu = torch.cuda.is_available() and not recipe.training.get("use_cpu")
    device = torch.device("cuda" if on_gpu else "cpu")
    refuse_unfit_optimizer(recipe.training.get("optim"), on_gpu=on_gpu)
    if recipe.optim_in_backward:
        steps = resolve_accumulation(recipe, layout.data_size)
        for key, what, fix in accumulates_in_backward(steps):
            raise RecipeError(what, where=key, fix=fix)
    if recipe.model.fp8:
        from trainkit.models.fp8.decide import refuse_unfit

        refuse_unfit(device)
    if recipe.lora is not None and recipe.lora.quantize is not None:
        from trainkit.lora.quant import refuse_unfit_device

        refuse_unfit_device(recipe.lora.quantize, device)


def _refuse_no_batch(recipe: Recipe, data: RunData, layout: Layout) -> None:
    """Stop where rows that fill no batch would all be left out."""
    if not recipe.training.get("dataloader_drop_last") or data.train.stream is not None:
        return
    name = "per_device_train_batch_size"
    rows, micro = len(data.train.samples), recipe.training.get(name, default_of(f"training.{name}"))
    if rows >= micro * layout.data_size:
        return
    kind = "packed rows" if recipe.data.packing else "rows"
    fewer = rows // layout.data_size
    raise RecipeError(
        f"training.dataloader_drop_last: true leaves out what does not fill a batch, and the data "
        f"has {rows} {kind} for one of {micro} x {layout.data_size} ranks = "
        f"{micro * layout.data_size}: nothing would be trained",
        where="training.dataloader_drop_last",
        fix="remove it" + (f", or set training.{name}={fewer} or less" if fewer else ""),
    )


def _refuse_images(recipe: Recipe, data: RunData) -> None:
    """What rows with images have not been trained with, and parts that only they would train."""
    if not data.num_images:
        has_adapters = recipe.lora is not None and recipe.lora.vision
        if has_adapters or recipe.model.train != ["text"]:
            parts = ", ".join(recipe.model.train)
            key, value = ("lora.vision", "true") if has_adapters else ("model.train", parts)
            raise RecipeError(
                f"{key}: {value}: what sees images trains on images, and no row has any",
                where=key,
                fix="remove it, or give rows with images",
            )
        return
    shared = {key: getattr(recipe.parallel, key) for key in ("sequence", "tensor", "pipeline")}
    compiles = next((key for key in COMPILES if recipe.training.get(key)), None)
    untried = {
        **{f"parallel.{key}": size > 1 and size for key, size in shared.items()},
        f"training.{compiles}": compiles,
    }
    for key, value in untried.items():
        if value:
            raise RecipeError(
                f"{key}: {value} has not been held against a plain run on rows with images",
                where=key,
                fix=f"remove {key}, or the {data.num_images} images",
            )


def _refuse_late_warmup(data: RunData, args: TrainingArguments, layout: Layout) -> None:
    """Where the data say how many steps there are; max_steps is held in the recipe."""
    if args.max_steps > 0:
        return
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * layout.data_size
    last = math.ceil(math.ceil(len(data.train.samples) / rows) * args.num_train_epochs)
    for key, rule, fix in late_warmup(args.warmup_steps, last):
        raise RecipeError(rule, where=key, fix=fix)


def _noise_warning(recipe: Recipe, data: RunData) -> list[str]:
    """NEFTune's noise is as weak as a row is long, and a packed row is longer than its samples."""
    alpha, totals = recipe.training.get("neftune_noise_alpha"), data.summary["train"].get("totals")
    if not alpha or not recipe.data.packing or not totals or not totals["samples"]:
        return []
    sample = totals["tokens"] / totals["samples"]
    factor = math.sqrt(min(recipe.data.max_length, totals["tokens"]) / sample)
    if factor < 1.5:  # less than what choosing alpha leaves open
        return []
    return [
        f"training.neftune_noise_alpha: the noise is alpha / sqrt(tokens of a row * hidden size), "
        f"and packed rows hold many samples of about {sample:.0f} tokens: each gets 1/{factor:.1f} "
        f"of the noise that it would get in a row of its own; {alpha * factor:.3g} gives as much"
    ]


# -- what several sections of a recipe decide together -------------------------------------------


def layout_of(recipe: Recipe, process: ProcessRank) -> Layout:
    """How the run is spread over processes; what its engine's own file says is checked."""
    layout = Layout.of(strategy_for(recipe.parallel.shard), process, recipe.parallel)
    sizes = ("per_device_train_batch_size", "max_grad_norm")
    given = {name: recipe.training.get(name, default_of(f"training.{name}")) for name in sizes}
    given["gradient_accumulation_steps"] = resolve_accumulation(recipe, layout.data_size)
    # Whether an engine that reads it computes in half precision; None: the model's files say.
    dtypes, said = {"bf16": "bfloat16", "fp16": "float16"}, recipe.model.dtype
    is_given = recipe.training.keys() & dtypes.keys()
    for name, dtype in dtypes.items():
        of_model = None if said == "auto" else said == dtype
        given[name] = bool(recipe.training.get(name)) if is_given else of_model
    layout.engine.refuse_contradictions(given, world_size=layout.data_size)
    return layout


def trainer_arguments(recipe: Recipe, layout: Layout) -> TrainingArguments:
    """Transformers' TrainingArguments; with several ranks the process group exists after this."""
    on_cpu = not torch.cuda.is_available()
    if on_cpu and recipe.training.get("fp16"):
        raise RecipeError(
            "fp16 needs a GPU: on a CPU transformers would train without it and not say so",
            where="training.fp16",
            fix="leave it out here; bf16 works on a CPU",
        )
    if on_cpu and recipe.model.dtype == "float16" and recipe.lora is None:
        raise RecipeError(
            "float16 weights need a loss scaler, which trains on GPUs only: without one small "
            "gradients silently become 0",
            where="model.dtype",
            fix="model.dtype: bfloat16 (or float32)",
        )
    values = dict(recipe.training)
    for key, derived in derive_values(recipe, Machine(layout.process.world_size, on_cpu)).items():
        section, _, name = key.partition(".")
        values |= {name: derived.value} if section == "training" else {}
    values["gradient_accumulation_steps"] = resolve_accumulation(recipe, layout.data_size)
    # The directory is replaced when the run's is known to all ranks.
    return training_arguments(values, layout, output_dir=RUNS)


def training_arguments(
    training: Mapping[str, Any], layout: Layout, *, output_dir: Path
) -> TrainingArguments:
    """Build the arguments; starts the process group when there are several ranks."""
    on_cpu = not torch.cuda.is_available()
    meet_anew(layout.process)
    layout.engine.prepare(layout.process, on_cpu=on_cpu)
    values: dict[str, Any] = copy.deepcopy(dict(training))  # transformers writes into some
    numbers = {k: v for k, v in values.items() if type(v) is int and FIELDS[k].type == "float"}
    values |= {name: float(value) for name, value in numbers.items()}  # torch's betas are no ints
    values["output_dir"] = str(output_dir)
    values.pop("auto_find_batch_size", None)  # trainkit's own; transformers' loses the steps so far
    steps = int(values["gradient_accumulation_steps"])
    values |= layout.engine.training_arguments(num_micro_batches=steps)
    optim = values.get("optim")
    if optim in OURS:  # transformers knows no such name, and asks nothing of it
        values["optim"] = DEFAULT
    try:
        arguments = TrainingArguments(**values)
    except (ValueError, TypeError) as error:
        raise RecipeError(
            f"transformers refuses these settings: {error}",
            where="training",
            fix="change the key that the message names",
        ) from error
    if optim in OURS:
        arguments.optim = str(optim)
    # Asking for the device starts the process group, which an engine must know before it shards a
    # model while it is loaded.
    logger.info("training on %s, %s", arguments.device, arguments.parallel_mode)
    layout.engine.start(on_cpu=on_cpu)
    return arguments


def settled_values(arguments: TrainingArguments, shown: Mapping[str, Any]) -> dict[str, Derived]:
    """What the arguments say otherwise than a recipe does: known once the run was built."""

    def plain(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.value
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    def comparable(name: str, value: Any) -> Any:
        """One spelling of a value: transformers makes [] of "none" and false of null."""
        if name in ("report_to", "debug") and isinstance(value, str):
            value = [] if value in ("none", "") else value.split()
        if name == "include_num_input_tokens_seen" and isinstance(value, bool):
            value = "all" if value else "no"
        return value or None if isinstance(value, bool | list | dict | None) else value

    found = {}
    for name, value in shown.items():
        used = plain(getattr(arguments, name, value))
        if name not in _NOT_COMPARED and comparable(name, used) != comparable(name, value):
            is_of_model = name == "ddp_find_unused_parameters"
            found[name] = Derived(used, "from the model" if is_of_model else "by transformers")
    return found


# No file knows the first two as values; the last one is ours.
_NOT_COMPARED = frozenset({"output_dir", "accelerator_config", "auto_find_batch_size"})


# What a library refuses as it is set up, said as a fault of the recipe; contradicting starts.


# A missing package, a name or number out of place, a hub out of reach.
_REFUSALS = (ArithmeticError, AttributeError, ImportError, LookupError, OSError)


@contextmanager
def settings_refused_by(what: str, where: str) -> Iterator[None]:
    """Turn the errors of a library that is being set up into one about the recipe."""
    try:
        yield
    except TrainkitError:
        raise
    except (*_REFUSALS, RuntimeError, TypeError, ValueError) as error:
        said = f"{type(error).__name__} {error}".lower()
        if isinstance(error, RuntimeError) and ("memory" in said or "cuda" in said):
            raise  # the machine's, not the recipe's
        said = " ".join(str(error).split()) or type(error).__name__
        raise RecipeError(
            f"{what} cannot be made of these settings: {said}",
            where=where,
            fix="change or remove what the message names",
        ) from error


# Environment variables that would train otherwise than the recipe says.

_INSTEAD: Mapping[str, str] = {
    "ACCELERATE_DYNAMO_": "training.torch_compile and its keys",
    "ACCELERATE_MIXED_PRECISION": "training.bf16 or training.fp16",
    "ACCELERATE_GRADIENT_": "training.gradient_accumulation_steps and training.max_grad_norm",
    "ACCELERATE_USE_FSDP": "parallel.shard: fsdp2",
    "FSDP_": "parallel.shard: fsdp2",
    "ACCELERATE_USE_DEEPSPEED": "deepspeed: zero2 or another preset or file",
    "ACCELERATE_DEEPSPEED_": "deepspeed: zero2 or another preset or file",
    "ACCELERATE_FP8_": "model.fp8",
    "ACCELERATE_USE_CPU": "training.use_cpu",
    "ACCELERATE_TORCH_DEVICE": "training.use_cpu, or CUDA_VISIBLE_DEVICES",
    "ACCELERATE_USE_": "the keys of parallel",
    "PARALLELISM_CONFIG_": "the keys of parallel",
}
"""By how the name begins: the keys of a recipe that say the same."""

_OFF = frozenset({"", "no", "none", "false", "0", "default"})


@functools.cache
def refuse_contradicting_start() -> None:
    """Hold the environment as the process's first run finds it.

    The libraries of that run then set some of these variables, for which no later one is refused.
    """
    refuse_contradicting_variables(os.environ)


def refuse_contradicting_variables(environ: Mapping[str, str]) -> None:
    """Refuse what accelerate reads of its environment: a recipe says all that a run does."""
    for name, value in sorted(environ.items()):
        instead = next((keys for prefix, keys in _INSTEAD.items() if name.startswith(prefix)), None)
        if instead is not None and value.strip().lower() not in _OFF:
            raise RecipeError(
                f"the environment sets {name}={value}, which would train otherwise than the recipe "
                "says",
                where=name,
                fix=f"unset {name}, and say it in the recipe: {instead}",
            )
