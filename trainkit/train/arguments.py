"""transformers' TrainingArguments from a recipe's ``training`` section and the layout."""

import copy
import logging
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from trainkit.errors import RecipeError
from trainkit.options.optimizers import DEFAULT, OURS
from trainkit.parallel import Layout
from trainkit.parallel.launch import meet_anew
from trainkit.recipe import Derived, derive

logger = logging.getLogger(__name__)


def training_arguments(
    training: Mapping[str, Any],
    *,
    output_dir: Path,
    model_dtype: str,
    layout: Layout,
    has_adapters: bool,
    has_eval: bool,
    gradient_accumulation_steps: int,
    measured_every: int | None = None,
    stops_early: bool = False,
    is_streaming: bool = False,
    recompute: bool | None = None,
) -> TrainingArguments:
    """Build the arguments; starts the process group when there are several ranks.

    Args:
        training: the recipe's ``training`` section.
        output_dir: the run directory.
        model_dtype: ``bfloat16``, ``float16``, ``float32`` or ``auto``.
        layout: how the run is spread over processes.
        has_adapters: LoRA: fp32 adapters on half-precision weights compute under autocast.
        has_eval: evaluation data is given, so evaluate each epoch by default.
        gradient_accumulation_steps: micro-batches per optimizer step.
        measured_every: see :func:`trainkit.recipe.derived.derive`.
        stops_early: likewise.
        is_streaming: the training rows are streamed.
        recompute: whether ``recompute`` has layers recomputed; None where it says nothing.

    Raises:
        RecipeError: transformers refuses the combination.
    """
    on_cpu = not torch.cuda.is_available()
    meet_anew(layout.process)
    layout.engine.prepare(layout.process, on_cpu=on_cpu)
    if on_cpu:
        _refuse_float16(training, model_dtype, has_adapters=has_adapters)
    derived = derive(
        training,
        model_dtype=model_dtype,
        reads_precision=layout.strategy.reads_precision,
        has_adapters=has_adapters,
        has_eval=has_eval,
        measured_every=measured_every,
        stops_early=stops_early,
        is_streaming=is_streaming,
        on_cpu=on_cpu,
        recompute=recompute,
    )
    values: dict[str, Any] = {**training, **{name: one.value for name, one in derived.items()}}
    values = copy.deepcopy(values)  # transformers writes into some, and these are the recipe's
    values["output_dir"] = str(output_dir)
    values.pop("auto_find_batch_size", None)  # trainkit's own; transformers' loses the steps so far
    values["gradient_accumulation_steps"] = gradient_accumulation_steps
    values |= layout.engine.training_arguments(num_micro_batches=gradient_accumulation_steps)
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


def _refuse_float16(training: Mapping[str, Any], model_dtype: str, *, has_adapters: bool) -> None:
    """On a CPU."""
    if training.get("fp16"):
        raise RecipeError(
            "fp16 needs a GPU: on a CPU transformers would train without it and not say so",
            where="training.fp16",
            fix="leave it out here; bf16 works on a CPU",
        )
    if model_dtype == "float16" and not has_adapters:
        raise RecipeError(
            "float16 weights need a loss scaler, which trains on GPUs only: without one small "
            "gradients silently become 0",
            where="model.dtype",
            fix="model.dtype: bfloat16 (or float32)",
        )


def settled_values(arguments: TrainingArguments, shown: Mapping[str, Any]) -> dict[str, Derived]:
    """What the arguments say otherwise than a recipe does: worked out only when the run was built.

    Args:
        arguments: as the run has them.
        shown: field to value, as the recipe and what follows from it say.
    """
    found = {}
    for name, value in shown.items():
        used = _plain(getattr(arguments, name, value))
        if name not in _NOT_COMPARED and _comparable(name, used) != _comparable(name, value):
            origin = "from the model" if name in _OF_THE_MODEL else "by transformers"
            found[name] = Derived(used, origin)
    return found


# No file knows the first two as values; the last one is ours.
_NOT_COMPARED = frozenset({"output_dir", "accelerator_config", "auto_find_batch_size"})
_OF_THE_MODEL = frozenset({"ddp_find_unused_parameters"})


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _comparable(name: str, value: Any) -> Any:
    """One spelling of a value: transformers makes [] of "none" and false of null."""
    if name in ("report_to", "debug") and isinstance(value, str):
        value = [] if value in ("none", "") else value.split()
    if name == "include_num_input_tokens_seen" and isinstance(value, bool):
        value = "all" if value else "no"
    return value or None if isinstance(value, bool | list | dict | None) else value
