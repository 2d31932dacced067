"""Values of ``training`` that follow from others, or from the machine.

They are worked out here only: a run takes its arguments from here, and whatever prints
them (``config show``, ``resolved.yaml``, the report) asks the same function. A continued run asks
again, so a value that nobody wrote is never frozen.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.errors import RecipeError
from trainkit.options.optimizers import optimizer_row
from trainkit.parallel.process import Machine
from trainkit.parallel.strategies import strategy_for
from trainkit.places import cache_of
from trainkit.recipe.schema import Recipe, is_loss
from trainkit.recipe.training import CHECKPOINTING, FIELDS


def resolve_accumulation(recipe: Recipe, data_size: int) -> int:
    """Micro-batches per optimizer step.

    ``global_batch_size`` = ``per_device_train_batch_size`` x data ranks x this number, in rows (a
    packed row holds several samples).

    ``data_size``: processes, one a GPU, unless some of them share a model (``parallel``).
    """
    name = "per_device_train_batch_size"
    micro = recipe.training.get(name, FIELDS[name].default)
    given = recipe.training.get("gradient_accumulation_steps")
    total = recipe.global_batch_size
    if total is None:
        return 1 if given is None else int(given)
    a_pass = micro * data_size
    ranks = "processes" if recipe.parallel.model_ranks == 1 else "data ranks"
    if total % a_pass:
        smaller = total - total % a_pass
        either = " or ".join(str(each) for each in (smaller, smaller + a_pass) if each)
        raise RecipeError(
            f"global_batch_size {total} cannot be made of {data_size} {ranks} x {micro} rows: "
            f"it is not a multiple of {a_pass}",
            where="global_batch_size",
            fix=f"take {either}, or change training.{name}",
        )
    steps = total // a_pass
    if given is not None and given != steps:
        raise RecipeError(
            f"global_batch_size {total} and gradient_accumulation_steps {given} disagree: "
            f"{data_size} {ranks} x {micro} rows x {given} = {a_pass * given}",
            where="global_batch_size",
            fix=f"remove one of them, or set gradient_accumulation_steps to {steps}",
        )
    return steps


@dataclass(frozen=True)
class Derived:
    """A value that nobody wrote.

    Attributes:
        origin: what it follows from: ``from model.dtype``.
        is_of_machine: another machine would use another one, so it is not a part of a recipe.
    """

    value: Any
    origin: str
    is_of_machine: bool = False


def derive_values(recipe: Recipe, machine: Machine) -> dict[str, Derived]:
    """The values of a recipe on a machine that nobody wrote, by dotted key."""
    derived = derive(
        recipe.training,
        model_dtype=recipe.model.dtype,
        reads_precision=strategy_for(recipe.parallel.shard).reads_precision,
        has_adapters=recipe.lora is not None,
        has_eval=bool(recipe.data.eval),
        measured_every=recipe.metric_every,
        stops_early=recipe.early_stopping is not None,
        is_streaming=bool(recipe.data.streaming),
        on_cpu=machine.on_cpu,
        recompute=recipe.recomputes,
    )
    found = {f"training.{key}": value for key, value in derived.items()}
    name = "gradient_accumulation_steps"
    if recipe.global_batch_size is not None and name not in recipe.training:
        # A recipe for more GPUs than this machine has can be shown all the same.
        world_size = max(machine.world_size, recipe.parallel.model_ranks)
        steps = resolve_accumulation(recipe, recipe.parallel.data_ranks(world_size))
        origin = f"from global_batch_size on {world_size} process{'es' if world_size > 1 else ''}"
        found[f"training.{name}"] = Derived(steps, origin, is_of_machine=True)
    for name, value, origin in (
        ("num_workers", os.cpu_count() or 1, "this machine's cores"),
        ("cache_dir", str(cache_of("data")), "this user's cache"),
    ):
        if getattr(recipe.data, name) is None:
            found[f"data.{name}"] = Derived(value, origin, is_of_machine=True)
    return found


def derive(
    training: Mapping[str, Any],
    *,
    model_dtype: str,
    reads_precision: bool,
    has_adapters: bool,
    has_eval: bool,
    measured_every: int | None = None,
    stops_early: bool = False,
    is_streaming: bool = False,
    on_cpu: bool,
    recompute: bool | None = None,
) -> dict[str, Derived]:
    """What follows from a ``training`` section and the settings around it, by name.

    Args:
        training: the section; what it says itself stays, except what the machine cannot do.
        model_dtype: ``bfloat16``, ``float16``, ``float32`` or ``auto``.
        reads_precision: an engine trains that computes in what ``bf16`` and ``fp16`` say.
        has_adapters: LoRA: fp32 adapters on half-precision weights compute under autocast.
        has_eval: evaluation data is given, so it is used unless switched off.
        measured_every: steps between measurements of the figure that the best model is judged by,
            where that is none of the losses.
        stops_early: the run may end when that figure gets no better.
        is_streaming: the training rows are streamed.
        on_cpu: there is no GPU to train on.
        recompute: whether ``recompute`` has layers recomputed; None where it says nothing.
    """
    found: dict[str, Derived] = {}

    def value(name: str) -> Any:
        known = found.get(name)
        default = FIELDS[name].default if name in FIELDS else None
        return training.get(name, default) if known is None else known.value

    if on_cpu:
        no_gpu = "this machine has no GPU"
        found["use_cpu"] = Derived(True, no_gpu, is_of_machine=True)
        found["dataloader_pin_memory"] = Derived(False, no_gpu, is_of_machine=True)
    elif training.get("use_cpu"):
        found["dataloader_pin_memory"] = Derived(False, "from training.use_cpu")
    # Plain full fine-tuning in half precision needs no autocast: the weights are in that dtype and
    # the optimizer keeps fp32 masters. Other engines and fp32 adapters need a setting, and
    # float16 always needs a loss scaler.
    says_nothing = "bf16" not in training and "fp16" not in training
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        is_needed = reads_precision or has_adapters or name == "fp16"
        if says_nothing and is_needed and model_dtype == dtype:
            found[name] = Derived(True, "from model.dtype")
    if measured_every is not None and "eval_strategy" not in training:
        origin = "from training.metric_for_best_model"
        found["eval_strategy"] = Derived("steps", origin)
        if "eval_steps" not in training:
            found["eval_steps"] = Derived(measured_every, origin)
    elif has_eval and "eval_strategy" not in training:
        found["eval_strategy"] = (
            Derived("steps", "from training.eval_steps")
            if training.get("eval_steps")
            else Derived("epoch", "from data.eval")
        )
    found |= _checkpointing(training, recompute)
    projects = optimizer_row(training.get("optim")).per_rank_bytes is not None
    if projects and not training.get("optim_target_modules"):
        found["optim_target_modules"] = Derived("all-linear", "from training.optim")
    if is_streaming and not training.get("ignore_data_skip"):
        # The stream goes on from its own position; there is nothing to pass over.
        found["ignore_data_skip"] = Derived(True, "from data.streaming")
    # What TrainingArguments works out by itself; set here so that it is visible before.
    if value("eval_strategy") == "steps" and not value("eval_steps"):
        found["eval_steps"] = Derived(value("logging_steps"), "from training.logging_steps")
    found |= _best_model(training, value, stops_early)
    for name in ("torch_compile_mode", "torch_compile_backend"):
        if value(name) is not None and not value("torch_compile"):
            found["torch_compile"] = Derived(True, f"from training.{name}")
    if value("torch_compile") and not value("torch_compile_backend"):
        found["torch_compile_backend"] = Derived("inductor", "from training.torch_compile")
    return found


def _best_model(
    training: Mapping[str, Any], value: Callable[[str], Any], stops_early: bool
) -> dict[str, Derived]:
    """When checkpoints are written that may be the best, and by which figure they are judged."""
    found: dict[str, Derived] = {}
    best, origin = value("load_best_model_at_end"), "from training.load_best_model_at_end"
    saved_by = value("save_strategy")
    if best and "save_steps" not in training:  # every evaluation has a checkpoint: it may be best
        if value("eval_strategy") == "epoch" and "save_strategy" not in training:
            found["save_strategy"] = Derived("epoch", origin)
            saved_by = "epoch"
        if value("eval_strategy") == saved_by == "steps":
            found["save_steps"] = Derived(value("eval_steps"), origin)
    metric = value("metric_for_best_model")
    reason = "from training.metric_for_best_model" if metric else origin if best else None
    if reason is None and stops_early:
        reason = "from early_stopping"
    if reason is None and value("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy"):
        reason = "from training.lr_scheduler_type"
    if metric is None and reason is not None:
        metric = "loss"
        found["metric_for_best_model"] = Derived(metric, reason)
    if reason is not None and value("greater_is_better") is None:
        found["greater_is_better"] = Derived(not is_loss(metric), reason)
    return found


def _checkpointing(training: Mapping[str, Any], recompute: bool | None) -> dict[str, Derived]:
    """The two names of activation checkpointing, which mirror each other in transformers >= 5.20.

    Without re-entrance: the re-entrant kind refuses inputs that need no gradient, as under LoRA.
    """
    known = [name for name in CHECKPOINTING[:2] if name in FIELDS]
    if recompute is not None:
        # A comment in resolved.yaml, where recompute stands as well: a recipe says it once.
        values: dict[str, Any] = dict.fromkeys(known, recompute)
        if recompute:
            values |= {f"{name}_kwargs": {"use_reentrant": False} for name in known}
        return {
            name: Derived(value, "from recompute", is_of_machine=True)
            for name, value in values.items()
        }
    given = [name for name in known if training.get(name) is not None]
    if not given:
        return {}
    origin, is_on = f"from training.{given[0]}", training[given[0]]
    options = [training.get(f"{name}_kwargs") for name in known]
    found = {}
    for name, own in zip(known, options, strict=True):
        if name not in given:
            found[name] = Derived(is_on, origin)
        if is_on and own is None:
            chosen = next((other for other in options if other is not None), None)
            found[f"{name}_kwargs"] = Derived(chosen or {"use_reentrant": False}, origin)
    return found
