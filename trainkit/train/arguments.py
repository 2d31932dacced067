"""transformers' TrainingArguments from a recipe's ``training`` section, and DeepSpeed's file."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from trainkit.errors import RecipeError

logger = logging.getLogger(__name__)


def deepspeed_config(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed configuration; the recipe's own checks have seen that it is one."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    # DeepSpeed 0.19 clips at 1.0 where nothing is said; the recipe's max_grad_norm must decide.
    content.setdefault("gradient_clipping", "auto")
    return content


def training_arguments(
    training: Mapping[str, Any],
    *,
    output_dir: Path,
    model_dtype: str,
    deepspeed: Mapping[str, Any] | None,
    has_adapters: bool,
    has_eval: bool,
    gradient_accumulation_steps: int,
) -> TrainingArguments:
    """Build the arguments; starts the process group when there are several ranks.

    Args:
        training: the recipe's ``training`` section.
        output_dir: the run directory.
        model_dtype: ``bfloat16``, ``float16``, ``float32`` or ``auto``.
        deepspeed: a DeepSpeed configuration, or None.
        has_adapters: LoRA: fp32 adapters on half-precision weights compute under autocast.
        has_eval: evaluation data is given, so evaluate each epoch unless told otherwise.
        gradient_accumulation_steps: micro-batches per optimizer step.

    Raises:
        RecipeError: transformers refuses the combination.
    """
    on_cpu = not torch.cuda.is_available()
    if on_cpu and training.get("fp16"):
        raise RecipeError(
            "fp16 needs a GPU: on a CPU transformers would train without it and not say so",
            where="training.fp16",
            fix="leave it out here; bf16 works on a CPU",
        )
    values: dict[str, Any] = dict(training)
    values["output_dir"] = str(output_dir)
    values["gradient_accumulation_steps"] = gradient_accumulation_steps
    values.setdefault("log_level", "warning")
    values.setdefault("log_level_replica", "warning")
    if on_cpu:
        values["use_cpu"] = True
        values["dataloader_pin_memory"] = False
    if deepspeed is not None:
        values["deepspeed"] = dict(deepspeed)
    # Plain full fine-tuning in half precision needs no autocast: the weights are in that dtype and
    # the optimizer keeps fp32 masters. DeepSpeed's engine and fp32 adapters need to be told.
    if "bf16" not in values and "fp16" not in values and (deepspeed is not None or has_adapters):
        values["bf16"] = model_dtype == "bfloat16"
        values["fp16"] = model_dtype == "float16"
    if has_eval:
        values.setdefault("eval_strategy", "epoch")
    for name in ("gradient_checkpointing", "activation_checkpointing"):  # the old and the new name
        if values.get(name):
            values.setdefault(f"{name}_kwargs", {"use_reentrant": False})
    try:
        arguments = TrainingArguments(**values)
    except (ValueError, TypeError) as error:
        raise RecipeError(
            f"transformers refuses these settings: {error}",
            where="training",
            fix="change the key that the message names",
        ) from error
    # Asking for the device starts the process group. DeepSpeed must know it, too, before ZeRO-3
    # shards a model while loading; on a CPU accelerate does not tell it.
    logger.info("training on %s, %s", arguments.device, arguments.parallel_mode)
    if deepspeed is not None:
        from deepspeed import comm

        comm.init_distributed("gloo" if on_cpu else "nccl", verbose=False)
    return arguments
