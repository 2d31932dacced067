"""What an optimizer cannot be combined with in one process: keys, reasons and ways out."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainkit.options.lora import LoraOptions
from trainkit.options.model import ModelOptions
from trainkit.options.optimizers import optimizer_row

Broken = tuple[str, str, str]
"""The key, the rule that is broken, and what to write instead."""


@dataclass(frozen=True)
class Trained:
    """What of a recipe decides about its optimizer: the sections, and ``optim_in_backward``."""

    model: ModelOptions
    lora: LoraOptions | None
    training: dict[str, Any]
    optim_in_backward: bool


def broken_optimizer_rules(recipe: Trained) -> Iterator[Broken]:
    """Every rule about the optimizer that a recipe breaks."""
    yield from _rates(recipe)
    if recipe.optim_in_backward:
        yield from _in_backward(recipe)
    if not recipe.model.master_weights:
        yield from _without_masters(recipe)
    if recipe.training.get("optim") == "flat_adamw" and _is_fp16(recipe):
        yield (
            "training.optim",
            "flat_adamw has no loss scaler, which float16 needs",
            "set model.dtype: bfloat16, or training.optim: adamw_torch_fused",
        )


def _rates(recipe: Trained) -> Iterator[Broken]:
    """Steps of rates above 1 are larger than the weights; the sign of an exponent was lost."""
    training = recipe.training
    rate, plus = training.get("learning_rate", 5e-5), recipe.lora and recipe.lora.lora_plus_ratio
    if optimizer_row(training.get("optim")).name != "sgd":  # its steps are as small as gradients
        for key, value in (
            ("training.learning_rate", rate),
            ("lora.lora_plus_ratio", rate * (plus or 0)),
        ):
            if value > 1:
                yield (
                    key,
                    f"a learning rate of {value:g} moves each weight by more than its own size a "
                    "step; it is at most 1",
                    "1.0e-5 is usual for all weights, 1.0e-4 for adapters; only training.optim: "
                    "sgd takes larger ones",
                )
    warmup, last = training.get("warmup_steps") or 0, training.get("max_steps") or -1
    if last > 0 and warmup > last:
        yield late_warmup(warmup, last)


def late_warmup(warmup: float, last: int) -> Broken:
    """The rule that a warm-up ends before the run does."""
    return (
        "training.warmup_steps",
        f"the learning rate would rise for {warmup:g} steps, and the run has {last}",
        "write a share of all steps, as 0.03, or fewer steps; for a rate that rises to the end "
        f"write {last}",
    )


def accumulates_in_backward(accumulation: int) -> Broken | None:
    """The rule that a step in the backward pass is a step of one micro-batch."""
    if accumulation <= 1:
        return None
    return (
        "optim_in_backward",
        f"a step has {accumulation} micro-batches, and with optim_in_backward the weights would "
        "change after each of them",
        "set training.gradient_accumulation_steps: 1 (and no larger global_batch_size), or remove "
        "optim_in_backward",
    )


def _in_backward(recipe: Trained) -> Iterator[Broken]:
    key, training = "optim_in_backward", recipe.training
    row = optimizer_row(training.get("optim"))
    if not row.steps_alone:
        yield (
            key,
            f"{row.name} steps all parameters together, or by their place among all",
            "set training.optim: adamw_torch_fused or adamw_8bit, or remove optim_in_backward",
        )
    max_norm = training.get("max_grad_norm", 1.0)
    if max_norm > 0:
        yield (
            "training.max_grad_norm",
            f"max_grad_norm: {max_norm} (transformers' default is 1.0) clips by the norm of all "
            "gradients, and with optim_in_backward the first are gone before the last are there",
            "set training.max_grad_norm: 0 (grad_norm is logged all the same), or remove "
            "optim_in_backward",
        )
    accumulation = accumulates_in_backward(int(training.get("gradient_accumulation_steps", 1)))
    if accumulation is not None:
        yield accumulation
    if _is_fp16(recipe):
        yield (
            key,
            "a loss scaler looks at all gradients before a step, and float16 needs one",
            "set model.dtype: bfloat16, or remove optim_in_backward",
        )
    if recipe.model.fp8:
        yield (
            key,
            "model.fp8 keeps codes of the weights from the forward to the backward pass",
            "remove one of the two",
        )
    if _is_reentrant(training):
        yield (
            key,
            "re-entrant checkpointing may hand over a gradient in parts, each of which would be "
            "taken for the whole",
            "remove use_reentrant (false is the default), or optim_in_backward",
        )


def _without_masters(recipe: Trained) -> Iterator[Broken]:
    key, lora = "model.master_weights", recipe.lora
    if lora is not None and lora.adapter_dtype == "float32":
        yield (
            key,
            "it does nothing here: the adapters are all that is trained, and they are fp32",
            "remove it, or set lora.adapter_dtype: model",
        )
    elif recipe.model.dtype == "float32":
        yield key, "it does nothing with fp32 weights", "remove it, or set model.dtype: bfloat16"
    elif _is_fp16(recipe):
        yield (
            key,
            "float16 gradients need a loss scaler, and that needs fp32 masters",
            "set model.dtype: bfloat16",
        )


def _is_fp16(recipe: Trained) -> bool:
    return recipe.model.dtype == "float16" or bool(recipe.training.get("fp16"))


def _is_reentrant(training: dict[str, Any]) -> bool:
    options = (
        training.get(f"{name}_kwargs") or {}
        for name in ("gradient_checkpointing", "activation_checkpointing")
    )
    return any(each.get("use_reentrant") for each in options)
