"""The rules of the ``training`` section: the names and types of the installed TrainingArguments."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.recipe.document import read_scalar
from trainkit.recipe.foreign import REFUSED
from trainkit.recipe.suggest import ask, nearest
from trainkit.recipe.training_fields import TrainingField, training_fields

TRAINING_DEFAULTS: Mapping[str, Any] = {
    # A curve with a point for every step; a point costs one host sync.
    "logging_steps": 1,
    # No account is asked for; tensorboard and wandb are opt-in.
    "report_to": "none",
    # Each checkpoint of a 7B model with its optimizer takes about 107 GB.
    "save_total_limit": 2,
}
"""Where trainkit's defaults for ``training`` differ from TrainingArguments' own."""

TRAINING_FIXED: Mapping[str, tuple[Any, str]] = {
    "remove_unused_columns": (False, "trainkit hands the model exactly what it takes"),
    "logging_nan_inf_filter": (False, "a loss that is no number must be seen, not filtered out"),
    "disable_tqdm": (True, "trainkit shows the progress itself"),
}
"""Fields of ``training`` that have one value here, and why."""

# What torch.utils.checkpoint takes, but for functions.
_CHECKPOINT_OPTIONS = (
    "use_reentrant",
    "preserve_rng_state",
    "determinism_check",
    "debug",
    "early_stop",
)
_AT_LEAST_ONE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
)
_ABOVE_ZERO = ("num_train_epochs", "logging_steps", "eval_steps", "save_steps", "adam_epsilon")
_NOT_NEGATIVE = (
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "label_smoothing_factor",
    "dataloader_num_workers",
    "seed",
    "data_seed",
)


@dataclass(frozen=True)
class TrainingProblem:
    """A field that is unknown, set elsewhere, or of the wrong type.

    Attributes:
        name: the field.
        what: the rule it breaks, with its value; None where the name itself is unknown.
        fix: what to write instead.
    """

    name: str
    what: str
    fix: str | None = None
    is_unknown: bool = False


def check_training(training: Mapping[str, Any]) -> list[TrainingProblem]:
    """Hold a ``training`` section against the installed TrainingArguments."""
    fields = training_fields().fields
    problems = []
    for name, value in training.items():
        if name not in fields or name in REFUSED:
            what = f"training has no key {name}"
            problems.append(TrainingProblem(name, what, is_unknown=True))
        elif not fields[name].accepts(value):
            problems.append(_wrong_type(fields[name], value))
        elif name in TRAINING_FIXED and value != TRAINING_FIXED[name][0]:
            what = f"training.{name} cannot be changed: {TRAINING_FIXED[name][1]}"
            problems.append(TrainingProblem(name, what, "remove it"))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            problems += _out_of_range(name, value)
        else:
            problems += _unknown_words(name, value)
    if not problems and training.get("bf16") and training.get("fp16"):
        problems.append(
            TrainingProblem("fp16", "training.bf16 and training.fp16 are both on", "keep one")
        )
    return problems


def complete_training(training: Mapping[str, Any]) -> dict[str, Any]:
    """A ``training`` section with trainkit's own defaults and fixed values in it."""
    fixed = {name: value for name, (value, _) in TRAINING_FIXED.items()}
    return {**TRAINING_DEFAULTS, **fixed, **training}


def _wrong_type(field: TrainingField, value: Any) -> TrainingProblem:
    fix = None
    if isinstance(value, str):
        number = read_scalar(value)
        fix = ask(nearest(value, field.choices))
        if fix is None and number is not value and field.accepts(number):
            fix = f"write {value} without quotes"
    elif isinstance(value, float) and value.is_integer() and field.accepts(int(value)):
        fix = f"write {int(value)}"
    return TrainingProblem(
        field.name, f"training.{field.name}: {value!r} must be {field.rule}", fix
    )


def _unknown_words(name: str, value: Any) -> list[TrainingProblem]:
    """Words inside a value that transformers or torch would only refuse when training starts."""
    if name == "report_to" and training_fields().trackers:
        known = training_fields().trackers
        words = [value] if isinstance(value, str) else value or []
        unknown = [word for word in words if word not in (*known, "all", "none")]
    elif name == "gradient_checkpointing_kwargs" and isinstance(value, dict):
        known = _CHECKPOINT_OPTIONS
        unknown = [word for word in value if word not in known]
    elif name == "optim_args" and isinstance(value, str):
        known = ()
        unknown = [part for part in value.split(",") if part.count("=") != 1]
    else:
        return []
    problems = []
    for word in unknown:
        rule = f"must be one of {', '.join(known)}" if known else "must be name=value"
        what = f"training.{name}: {word!r} {rule}"
        problems.append(TrainingProblem(name, what, ask(nearest(str(word), known))))
    return problems


def _out_of_range(name: str, value: float) -> list[TrainingProblem]:
    if name in _AT_LEAST_ONE and value < 1:
        rule = "at least 1"
    elif name in _ABOVE_ZERO and not value > 0:
        rule = "above 0"
    elif name in _NOT_NEGATIVE and not value >= 0:  # nan is not
        rule = "0 or more"
    elif name in (*_ABOVE_ZERO, *_NOT_NEGATIVE) and math.isinf(value):
        rule = "finite"
    else:
        return []
    return [TrainingProblem(name, f"training.{name}: {value} must be {rule}")]
