"""The recipe's sections as the packages take them.

With ``build.py`` the only reader of recipe fields; everything below takes plain arguments.
"""

import os
from collections.abc import Sequence

import torch
from transformers import TrainingArguments

from trainkit.data.options import DataOptions, Source
from trainkit.data.serve.streaming import BUFFER
from trainkit.lora.adapter import LoraOptions
from trainkit.models.loading import ModelSource, load_config, stop_token_ids
from trainkit.parallel import Layout, Machine, ProcessRank, strategy_for
from trainkit.recipe import Recipe, SourceSpec, resolve_accumulation
from trainkit.train.arguments import training_arguments
from trainkit.train.data import Feeding
from trainkit.train.resume.given import RUNS


def model_source(recipe: Recipe) -> ModelSource:
    """Where the recipe's model and tokenizer come from."""
    model = recipe.model
    return ModelSource(
        name_or_path=model.name_or_path,
        dtype=model.dtype,
        revision=model.revision,
        gguf_file=model.gguf_file,
        trust_remote_code=model.trust_remote_code,
        random_weights=model.init == "random",
    )


def data_sources(recipe: Recipe, specs: Sequence[SourceSpec]) -> tuple[Source, ...]:
    """A list of the recipe's data section as the data package takes it."""
    return tuple(
        Source(
            path=spec.path,
            name=spec.name or "",
            format=spec.format if spec.format != "auto" else recipe.data.format,
            split=spec.split,
            weight=spec.weight,
            max_samples=spec.max_samples,
            epochs=spec.epochs,
            columns=spec.columns,
            roles=tuple(spec.roles),
        )
        for spec in specs
    )


def data_options(recipe: Recipe, *, cache_dir: str | None) -> DataOptions:
    """The recipe's data section as the data package takes it; ``cache_dir`` wins over its own."""
    data, training = recipe.data, recipe.training
    seed = training.get("data_seed")
    source = model_source(recipe)
    # A GGUF file is slow to read for its configuration, and brings the tokenizer it was made with.
    text = None if "gguf_file" in source.arguments()[1] else load_config(source).get_text_config()
    return DataOptions(
        max_length=data.max_length,
        mask=data.mask,
        truncation=data.truncation,
        thinking=data.thinking,
        system=data.system_policy,
        roles=tuple(data.roles),
        template_kwargs=data.template_kwargs,
        append_eos=data.append_eos,
        stop_token_ids=stop_token_ids(source),
        num_embeddings=getattr(text, "vocab_size", None),
        max_dropped=data.max_dropped,
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
    )


def lora_options(recipe: Recipe) -> LoraOptions | None:
    """The adapters the recipe asks for."""
    lora = recipe.lora
    if lora is None:
        return None
    return LoraOptions(
        r=lora.r,
        alpha=lora.alpha,
        dropout=lora.dropout,
        target_modules=lora.target_modules,
        target_parameters=tuple(lora.target_parameters),
        exclude_modules=lora.exclude_modules,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        modules_to_save=tuple(lora.modules_to_save),
        init_lora_weights=lora.init_lora_weights,
        lora_bias=lora.lora_bias,
        adapter_dtype=lora.adapter_dtype,
        offload_activations=lora.offload_activations,
    )


def layout_of(recipe: Recipe, place: ProcessRank) -> Layout:
    """How the run is spread over processes."""
    return Layout.of(strategy_for(recipe.parallel.shard), place)


def trainer_arguments(recipe: Recipe, layout: Layout) -> TrainingArguments:
    """The Trainer's arguments; with several ranks the process group exists after this."""
    return training_arguments(
        recipe.training,
        output_dir=RUNS,  # replaced when the run directory is known to all ranks
        model_dtype=recipe.model.dtype,
        layout=layout,
        has_adapters=recipe.lora is not None,
        has_eval=bool(recipe.data.eval),
        gradient_accumulation_steps=resolve_accumulation(recipe, layout.data_size),
        is_streaming=bool(recipe.data.streaming),
    )


def machine(place: ProcessRank) -> Machine:
    """What of this machine decides values."""
    return Machine(place.world_size, on_cpu=not torch.cuda.is_available())
