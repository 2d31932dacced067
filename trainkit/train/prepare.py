"""What a run has before it has a directory or a model: tokenizer, data, arguments.

What can fail cheaply fails here.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments

from trainkit.data.read.messages import Conversation
from trainkit.errors import RecipeError
from trainkit.lora.quant import refuse_unfit_device
from trainkit.models.files import context_warning
from trainkit.models.fp8.decide import refuse_unfit
from trainkit.models.loading import check_exists, load_config, load_tokenizer, new_tokens
from trainkit.models.vocabulary import describe_new_tokens
from trainkit.objectives import OBJECTIVES
from trainkit.options import ModelOptions
from trainkit.parallel import Layout, ProcessRank
from trainkit.recipe import (
    LoadedRecipe,
    Recipe,
    SftOptions,
    default_of,
    read_chat_template,
    resolve_accumulation,
)
from trainkit.recipe.check.optimizer import late_warmup
from trainkit.recipe.measured import metric_of
from trainkit.run import (
    Console,
)
from trainkit.run.stages import Stages
from trainkit.terminal import visible
from trainkit.train.data.run_data import RunData, prepare_run_data, read_conversations
from trainkit.train.fit import refuse_unfit_model
from trainkit.train.log.quiet import tokenisation_progress
from trainkit.train.optimizer.refuse import refuse_micro_batches, refuse_unfit_optimizer
from trainkit.train.results.questions import Questions, load_questions
from trainkit.train.sections import (
    data_options,
    feeding,
    layout_of,
    trainer_arguments,
)


@dataclass(frozen=True)
class Invocation:
    """One ``trainkit sft`` as this process sees it.

    Attributes:
        loaded: the recipe with the origin of every value.
        options: what the command line says about this start.
        process: which of the run's processes this is.
        console: speaks on rank 0.
        stages: times the way to the first step.
    """

    loaded: LoadedRecipe
    options: SftOptions
    process: ProcessRank
    console: Console
    stages: Stages = field(default_factory=Stages)

    @property
    def recipe(self) -> Recipe:
        """The values."""
        return self.loaded.recipe


@dataclass(frozen=True)
class Prepared:
    """What is known before a run directory exists."""

    source: ModelOptions
    tokenizer: PreTrainedTokenizerBase
    data: RunData
    questions: Questions
    layout: Layout
    args: TrainingArguments


def prepare(start: Invocation, ledger: Path) -> Prepared:
    """Tokenizer, data, arguments: in this order, since the last one starts the process group.

    Args:
        start: what was typed, and where it runs.
        ledger: the file for rows that are dropped, cut or repaired.

    Raises:
        TrainkitError: the model, the data or the settings cannot be trained as they are.
    """
    recipe, console = start.recipe, start.console
    layout = layout_of(recipe, start.process)
    source = recipe.model
    check_exists(source)
    config = load_config(source)
    refuse_unfit_model(
        config,
        packing=recipe.data.packing,
        kernels=recipe.kernels,
        lora=recipe.lora,
        fp8=source.fp8,
        projected=recipe.training.get("optim_target_modules"),
    )
    on_gpu = torch.cuda.is_available() and not recipe.training.get("use_cpu")
    device = torch.device("cuda" if on_gpu else "cpu")
    refuse_unfit_optimizer(recipe.training.get("optim"), on_gpu=on_gpu)
    if recipe.optim_in_backward:
        refuse_micro_batches(resolve_accumulation(recipe, layout.data_size))
    if recipe.model.fp8:
        refuse_unfit(device)
    if recipe.lora is not None and recipe.lora.quantize is not None:
        refuse_unfit_device(recipe.lora.quantize, device)
    layout.engine.refuse_model(config)
    warning = context_warning(config, recipe.data.max_length)
    if warning is not None:
        console.warn(warning)
    tokenizer = load_tokenizer(source)
    if source.adds_tokens:
        rows = getattr(config.get_text_config(), "vocab_size", None)
        console.note(visible(describe_new_tokens(new_tokens(source), rows)))
    # Set on the tokenizer, so that the held-out answers and final/ have it as well.
    tokenizer.chat_template = read_chat_template(recipe.data.chat_template) or (
        tokenizer.chat_template
    )
    with tokenisation_progress(console) as progress:
        data = prepare_run_data(
            recipe.data.with_format(recipe.data.train),
            recipe.data.with_format(recipe.data.eval_sources),
            tokenizer,
            data_options(recipe, cache_dir=str(ledger.parent) if start.options.dry_run else None),
            feeding(recipe, layout.data_size),
            ledger=ledger,
            progress=progress,
            objective=OBJECTIVES[recipe.objective],
            held_out=recipe.data.eval_part,
        )
    _refuse_no_batch(recipe, data, layout)
    for note in (data.headline, *data.notes):
        console.note(visible(note))
    for warning in (*data.warnings, *_noise_warning(recipe, data)):
        console.warn(visible(warning))
    held_out = _held_out(recipe, ledger, console)
    questions = load_questions(
        held_out=held_out,
        generation=recipe.generation_eval,
        tasks=recipe.eval_tasks,
        early=recipe.early_stopping,
        options=data_options(recipe, cache_dir=None),
        layout=layout,
        metric=metric_of(recipe.training),
    )
    args = trainer_arguments(recipe, layout)
    _refuse_late_warmup(data, args, layout)
    return Prepared(source, tokenizer, data, questions, layout, args)


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


def _refuse_late_warmup(data: RunData, args: TrainingArguments, layout: Layout) -> None:
    """Where the data say how many steps there are; max_steps is held in the recipe."""
    if args.max_steps > 0:
        return
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * layout.data_size
    last = math.ceil(math.ceil(len(data.train.samples) / rows) * args.num_train_epochs)
    if args.warmup_steps > last:
        key, rule, fix = late_warmup(args.warmup_steps, last)
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


def _held_out(recipe: Recipe, ledger: Path, console: Console) -> list[Conversation]:
    """The conversations to be answered after training; read now, since bad rows are found now."""
    held_out_eval = recipe.generation_eval
    if held_out_eval is None:
        return []
    sources = recipe.data.with_format(held_out_eval.data)
    conversations, num_dropped = read_conversations(sources, ledger)
    if num_dropped:
        console.warn(f"{num_dropped} held-out rows are not conversations and were skipped")
    return conversations[: held_out_eval.max_samples]
