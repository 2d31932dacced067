"""Rules across the sections of a recipe: what is measured, and what an optimizer cannot be with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.options.model import LoraOptions, ModelOptions
from trainkit.options.optimizers import optimizer_row
from trainkit.options.section import ask, nearest
from trainkit.options.training import EarlyStopping, GenerationOptions, TaskOptions
from trainkit.recipe.training import FIELDS

LOSS = "loss"


@dataclass(frozen=True)
class Measured:
    """The sections that measure.

    Attributes:
        has_eval: there is evaluation data, so there is a loss.
        generation: answers to held-out conversations.
        tasks: benchmarks.
    """

    has_eval: bool
    generation: GenerationOptions | None
    tasks: TaskOptions | None

    def every(self, figure: str) -> int | None:
        """The steps between two measurements of a figure; None for a loss and for the unknown."""
        generation, tasks = self.generation, self.tasks
        if generation is not None and figure in generation.figures():
            return generation.every
        if tasks is not None and tasks.may_measure(figure):
            return tasks.every
        return None

    def known(self) -> list[str]:
        """Every name that is known before the tasks are loaded."""
        names = [LOSS] if self.has_eval else []
        if self.generation is not None and self.generation.every is not None:
            names += self.generation.figures()
        return names + (self.tasks.figures() if self.tasks is not None else [])

    def keys(self) -> tuple[str, ...]:
        """The sections that measure while the run trains."""
        answers = self.generation is not None and self.generation.every is not None
        found = {"generation_eval.every": answers, "eval_tasks": self.tasks is not None}
        return tuple(key for key, is_on in found.items() if is_on)


def metric_of(training: Mapping[str, Any]) -> str:
    """What the best model, and an early end, are judged by; without ``eval_``."""
    return str(training.get("metric_for_best_model") or LOSS).removeprefix("eval_")


def is_loss(metric: str) -> bool:
    """Whether a figure is a loss, of all data or of one source: lower is better."""
    return metric.removeprefix("eval_").partition("/")[0].endswith(LOSS)


def problems(
    training: Mapping[str, Any], measured: Measured, early: EarlyStopping | None
) -> Iterator[tuple[str, str, str]]:
    """What depends on a figure that is not measured: (key, what, fix)."""
    metric, key = metric_of(training), "training.metric_for_best_model"
    every = measured.every(metric)
    generation = measured.generation
    if every is None and generation is not None and metric in generation.figures():
        yield (
            key,
            f"{metric} is measured after training only",
            "set generation_eval.every to a number of steps",
        )
    elif every is None and metric != LOSS and not metric.startswith(f"{LOSS}/"):
        known = measured.known()
        fixes = [ask(nearest(metric, known)), f"measured are {', '.join(known)}" if known else None]
        fixes.append("write loss, or loss/SOURCE with data.per_source_loss: true")
        fix = "; ".join(each for each in fixes if each)
        yield key, f"{key}: {metric!r} is not measured in training", fix
    if every is None and not measured.has_eval:
        yield from _without_data(training, early)
    if every is not None:
        yield from _other_steps(training, metric, every)
    yield from _unsaved_best(training, every)


def _without_data(
    training: Mapping[str, Any], early: EarlyStopping | None
) -> Iterator[tuple[str, str, str]]:
    for name in ("eval_strategy", "load_best_model_at_end"):
        if training.get(name, "no") not in ("no", False):
            yield (
                f"training.{name}",
                f"training.{name} needs evaluation data, and data.eval is empty",
                f"give files in data.eval, or remove {name}",
            )
    if early is not None:
        yield (
            "early_stopping",
            "early_stopping waits for a loss that is not measured: data.eval is empty",
            "give files in data.eval, or name a measured figure in training.metric_for_best_model",
        )


def _other_steps(
    training: Mapping[str, Any], metric: str, every: int
) -> Iterator[tuple[str, str, str]]:
    """Evaluations at other steps than those at which the figure is measured."""
    strategy, steps = training.get("eval_strategy"), training.get("eval_steps")
    if strategy not in (None, "steps") or (steps is not None and steps != every):
        name = "eval_strategy" if strategy not in (None, "steps") else "eval_steps"
        yield (
            f"training.{name}",
            f"{metric} is measured every {every} steps, and decides which model is the best",
            f"remove {name}, or write eval_strategy: steps and eval_steps: {every}",
        )


def _unsaved_best(training: Mapping[str, Any], every: int | None) -> Iterator[tuple[str, str, str]]:
    """An evaluation without a checkpoint may be the best: there is no model of it to load."""
    evaluated, saved = training.get("eval_steps") or every, training.get("save_steps")
    strategy = training.get("eval_strategy") or ("epoch" if evaluated is None else "steps")
    both = (strategy, training.get("save_strategy", "steps"))
    if not training.get("load_best_model_at_end") or both != ("steps", "steps") or saved is None:
        return  # by epochs both come at once, and of two strategies transformers has its own word
    evaluated = evaluated or training.get("logging_steps", FIELDS["logging_steps"].default)
    if evaluated != saved:
        yield (
            "training.save_steps",
            f"a model is evaluated every {evaluated} steps and saved every {saved}: of the best "
            "one there may be no checkpoint for load_best_model_at_end",
            f"remove save_steps, write save_steps: {evaluated}, or write save_strategy: best",
        )


# -- Optimizers ------------------------------------------------------------------------------------


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
