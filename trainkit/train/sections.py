"""What several sections of a recipe decide together; each alone is taken as it is.

With ``build.py`` the only reader of recipe fields.
"""

import contextlib
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainingArguments

from trainkit.data.options import DataOptions
from trainkit.data.serve.streaming import BUFFER
from trainkit.errors import ModelError
from trainkit.models.fp8.decide import Fp8Setup
from trainkit.models.loading import from_pretrained_arguments, load_config, stop_token_ids
from trainkit.options import Fp8Options, RecomputeOptions
from trainkit.parallel import Layout, Machine, ProcessRank, strategy_for
from trainkit.recipe import Recipe, default_of, recompute_of, resolve_accumulation
from trainkit.recipe.measured import metric_of
from trainkit.run import RunDirectory
from trainkit.run.starts import passed_over
from trainkit.train.arguments import training_arguments
from trainkit.train.data.run_data import Feeding, RunData
from trainkit.train.faults.bad_numbers import NumberPolicy
from trainkit.train.optimizer.make import OptimizerPlan
from trainkit.train.recompute.callback import Wanted
from trainkit.train.resume.given import RUNS


def data_options(recipe: Recipe, *, cache_dir: str | None) -> DataOptions:
    """The recipe's data section with what no recipe says; ``cache_dir`` wins over its own."""
    data, training = recipe.data, recipe.training
    seed = training.get("data_seed")
    # A GGUF file is slow to read for its configuration, and brings the tokenizer it was made with.
    is_gguf = "gguf_file" in from_pretrained_arguments(recipe.model)[1]
    text = None
    if not is_gguf:
        # A tokenizer alone is enough to look at data; a run reads the configuration again.
        with contextlib.suppress(ModelError):
            text = load_config(recipe.model).get_text_config()
    return DataOptions(
        **data.sample_options(),
        stop_token_ids=stop_token_ids(recipe.model),
        # Tokens that the recipe adds get rows.
        num_embeddings=None if recipe.model.adds_tokens else getattr(text, "vocab_size", None),
        num_workers=data.num_workers if data.num_workers is not None else os.cpu_count() or 1,
        cache_dir=cache_dir or data.cache_dir,
        seed=int(seed if seed is not None else training.get("seed", 42)),
    )


def feeding(recipe: Recipe, data_size: int) -> Feeding:
    """How the recipe's samples become batches."""
    streaming = recipe.data.streaming
    return Feeding(
        packing=recipe.data.packing,
        shuffle=recipe.training.get("train_sampling_strategy") != "sequential",
        per_source_loss=recipe.data.per_source_loss,
        stream_buffer=BUFFER if streaming is True else int(streaming),
        num_shards=data_size * max(int(recipe.training.get("dataloader_num_workers", 0)), 1),
        row_parts=recipe.parallel.sequence,
    )


def layout_of(recipe: Recipe, process: ProcessRank) -> Layout:
    """How the run is spread over processes; what its engine's own file says is checked."""
    layout = Layout.of(strategy_for(recipe.parallel.shard), process, recipe.parallel)
    sizes = ("per_device_train_batch_size", "max_grad_norm")
    given = {name: recipe.training.get(name, default_of(f"training.{name}")) for name in sizes}
    given["gradient_accumulation_steps"] = resolve_accumulation(recipe, layout.data_size)
    given |= _precision(recipe)
    layout.engine.refuse_contradictions(given, world_size=layout.data_size)
    return layout


def _precision(recipe: Recipe) -> dict[str, bool | None]:
    """Whether an engine that reads it computes in half precision; None: the model's files say."""
    dtypes = {"bf16": "bfloat16", "fp16": "float16"}
    if recipe.training.keys() & dtypes.keys():
        return {name: bool(recipe.training.get(name)) for name in dtypes}
    said = recipe.model.dtype
    return {name: None if said == "auto" else said == dtype for name, dtype in dtypes.items()}


def trainer_arguments(recipe: Recipe, layout: Layout) -> TrainingArguments:
    """Transformers' TrainingArguments; with several ranks the process group exists after this."""
    return training_arguments(
        recipe.training,
        output_dir=RUNS,  # replaced when the run directory is known to all ranks
        model_dtype=recipe.model.dtype,
        layout=layout,
        has_adapters=recipe.lora is not None,
        has_eval=bool(recipe.data.eval),
        measured_every=recipe.measured().every(metric_of(recipe.training)),
        stops_early=recipe.early_stopping is not None,
        gradient_accumulation_steps=resolve_accumulation(recipe, layout.data_size),
        is_streaming=bool(recipe.data.streaming),
        recompute=recompute_of(recipe),
    )


def number_policy(recipe: Recipe, run: RunDirectory) -> NumberPolicy:
    """What the recipe says about bad numbers, and the steps that the run has gone back behind."""
    faults = recipe.faults
    return NumberPolicy(
        on_bad=faults.on_bad_numbers,
        max_skips=faults.max_skips,
        max_rollbacks=faults.max_rollbacks,
        spike=faults.spike,
        window=faults.spike_window,
        passed_over=passed_over(run),
    )


def recompute_wanted(recipe: Recipe) -> Wanted:
    """What is recomputed and what is offloaded, by the new keys or the older ones."""
    options = RecomputeOptions.of(recipe.recompute)
    offload: bool | Literal["auto"] = False
    if recipe.lora is not None:
        offload = recipe.lora.offload_activations
    if options is not None and options.selective:
        offload = False
    elif options is not None and options.offload != "auto":
        offload = options.offload
    return Wanted(options, offload)


def optimizer_plan(recipe: Recipe) -> OptimizerPlan:
    """What the recipe says of the optimizer that transformers does not know."""
    return OptimizerPlan(
        lora_plus_ratio=recipe.lora.lora_plus_ratio if recipe.lora else None,
        in_backward=recipe.optim_in_backward,
        keeps_masters=recipe.model.master_weights,
        loss_chunk_tokens=recipe.model.loss_chunk_tokens,
    )


def machine(process: ProcessRank) -> Machine:
    """What of this machine decides values."""
    return Machine(process.world_size, on_cpu=not torch.cuda.is_available())


def fp8_setup(
    recipe: Recipe,
    data: RunData,
    layout: Layout,
    args: TrainingArguments,
    recorded: Mapping[str, Any] | None,
) -> Fp8Setup | None:
    """How the products that run in fp8 are chosen; None where the recipe has none.

    Args:
        recipe: a base in fp8 without a choice of its own gets the default budget.
        data: what the loss is measured on.
        layout: knows the ranks.
        args: know the size of a micro-batch.
        recorded: what the run has chosen before.
    """
    over_base = recipe.lora is not None and recipe.lora.quantize == "fp8"
    options = Fp8Options.of(recipe.model.fp8 or over_base)
    if options is None:
        return None

    def agree(value: Any) -> Any:
        return broadcast_object_list([value])[0] if layout.process.world_size > 1 else value

    return Fp8Setup(
        options,
        data.train.first_samples(),
        args.per_device_train_batch_size * recipe.data.max_length,
        recorded,
        agree,
        layout.engine.gathering,
    )
