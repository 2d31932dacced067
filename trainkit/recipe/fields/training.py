"""The rules of the ``training`` section: the names and types of the installed TrainingArguments."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.options.optimizers import (
    SERVED,
    Optimizer,
    nearest_of,
    optimizer_row,
    parts_of,
    served_as,
)
from trainkit.options.words import ask, nearest, nearest_choice
from trainkit.recipe.check.foreign import REFUSED
from trainkit.recipe.fields.table import ACTS, FIXED, Acts
from trainkit.recipe.fields.training_fields import TrainingField, training_fields
from trainkit.recipe.read.document import read_scalar

TRAINING_DEFAULTS: Mapping[str, Any] = {
    # A curve with a point for every step; a point costs one host sync.
    "logging_steps": 1,
    # No account is asked for; tensorboard and wandb are opt-in.
    "report_to": "none",
    # Each checkpoint of a 7B model with its optimizer takes about 107 GB.
    "save_total_limit": 2,
    # The console shows the progress; transformers' notes go to the logs of the ranks.
    "log_level": "warning",
    "log_level_replica": "warning",
}
"""Where trainkit's defaults for ``training`` differ from TrainingArguments' own."""


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
    """Hold a ``training`` section against the installed TrainingArguments and the table."""
    fields = training_fields().fields
    problems = []
    for name, value in training.items():
        if name not in fields or name in REFUSED:
            what = f"training has no key {name}"
            problems.append(TrainingProblem(name, what, is_unknown=True))
        elif name in FIXED:
            problems += _changed(name, value)
        elif name not in ACTS:
            what = f"training.{name} is new in transformers {training_fields().version}"
            fix = "remove it: this version of trainkit does not know what it would do"
            problems.append(TrainingProblem(name, what, fix))
        else:
            problems += _wrong_value(fields[name], ACTS[name], value)
    return problems or _disagreeing(training)


def complete_training(training: Mapping[str, Any]) -> dict[str, Any]:
    """A ``training`` section with trainkit's own defaults and fixed values in it."""
    fields = training_fields().fields
    fixed = {
        name: value
        for name, (value, _) in FIXED.items()
        if name in fields and value != fields[name].default
    }
    return {**TRAINING_DEFAULTS, **fixed, **training}


def _changed(name: str, value: Any) -> list[TrainingProblem]:
    only, reason = FIXED[name]
    if value == only and type(value) is type(only):
        return []
    what = f"training.{name} cannot be changed: {reason}"
    return [TrainingProblem(name, what, "remove it")]


def _wrong_value(field: TrainingField, row: Acts, value: Any) -> list[TrainingProblem]:
    """What is wrong with a value by itself."""
    words = _unknown_words(field.name, row, value)
    if words or not field.accepts(value):
        return words or [_wrong_type(field, value)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        rule = row.broken_rule(value)
        what = f"training.{field.name}: {value} must be {rule}"
        return [] if rule is None else [TrainingProblem(field.name, what)]
    return _unknown_keys(field.name, row, value)


def _wrong_type(field: TrainingField, value: Any) -> TrainingProblem:
    fix = None
    if isinstance(value, str):
        number = read_scalar(value)
        fix = ask(nearest_choice(value, field.choices))
        if fix is None and number is not value and field.accepts(number):
            fix = f"write {value} without quotes"
    elif isinstance(value, float) and value.is_integer() and field.accepts(int(value)):
        fix = f"write {int(value)}"
    return TrainingProblem(
        field.name, f"training.{field.name}: {value!r} must be {field.rule}", fix
    )


def _unknown_words(name: str, row: Acts, value: Any) -> list[TrainingProblem]:
    """Words inside a value that transformers would only refuse, or pass over, in training."""
    known: tuple[str, ...] = row.choices
    if name == "report_to" and training_fields().trackers:
        known = (*training_fields().trackers, "all", "none")
    words = _words(name, value) if known else []
    problems = []
    for word in words:
        what = f"training.{name}: {word!r} must be one of {', '.join(known)}"
        if word in (row.without or {}):
            verb = "is not served" if name == "optim" else "does nothing"
            what = f"training.{name}: {word} {verb} here"
            problems.append(TrainingProblem(name, what, (row.without or {})[word]))
        elif word not in known:
            elsewhere = _known_elsewhere(word) if name == "optim" else None
            fix = elsewhere or ask(nearest_choice(word, known))
            problems.append(TrainingProblem(name, what, fix))
    return problems


def _known_elsewhere(optim: str) -> str | None:
    found = served_as(optim, SERVED)
    if found is not None:
        return f"write {found}, which is the same"
    near = nearest_of(optim)
    return near and f"it is not served; the nearest is {near}"


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return value.split() if name == "debug" else [value]
    return [word for word in value if isinstance(word, str)] if isinstance(value, list) else []


def _unknown_keys(name: str, row: Acts, value: Any) -> list[TrainingProblem]:
    """Keys of a mapping that nothing would read."""
    if name == "optim_args" and isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        return [
            TrainingProblem(name, f"training.{name}: {part!r} must be name=value")
            for part in parts
            if part.count("=") != 1
        ]
    if not row.keys or value is None:
        return []
    if not isinstance(value, dict):
        return [TrainingProblem(name, f"training.{name}: {value!r} must be a mapping")]
    problems = []
    for key, item in value.items():
        dotted = f"training.{name}.{key}"
        if key not in row.keys:
            what = f"training.{name}: {key!r} must be one of {', '.join(row.keys)}"
            if name == "accelerator_config":
                what = f"{dotted} does nothing here: trainkit deals out the rows itself"
            problems.append(TrainingProblem(name, what, ask(nearest(str(key), row.keys))))
        elif name == "accelerator_config" and set(item or {}) - {"sync_each_batch"}:
            what = f"{dotted} may hold sync_each_batch only: the rest is accelerate's own"
            problems.append(TrainingProblem(name, what))
    return problems


def _disagreeing(training: Mapping[str, Any]) -> list[TrainingProblem]:
    """Fields that contradict each other, or that act only with another one."""
    problems = []
    if training.get("bf16") and training.get("fp16"):
        problems.append(("fp16", "training.bf16 and training.fp16 are both on", "keep one"))
    optim = str(training.get("optim") or training_fields().fields["optim"].default)
    row = optimizer_row(optim)
    schedule = str(training.get("lr_scheduler_type"))
    unmet = {
        "warmup_steps": schedule in ("constant", "reduce_lr_on_plateau", "greedy"),
        "lr_scheduler_kwargs": schedule in ("constant", "constant_with_warmup"),
        "optim_target_modules": row.per_rank_bytes is None,
        "liger_kernel_config": not training.get("use_liger_kernel"),
        "dataloader_prefetch_factor": not training.get("dataloader_num_workers"),
    }
    for name, is_unmet in unmet.items():
        if is_unmet and training.get(name):
            what = f"training.{name} does nothing without {ACTS[name].needs}"
            problems.append((name, what, "remove it, or set the other one"))
    problems += _unread_by(row, training)
    return [TrainingProblem(*problem) for problem in problems]


def _unread_by(row: Optimizer, training: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What of the fields of optimizers the one at hand does not obey, or cannot."""
    for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if name in training and name not in row.reads:
            yield name, f"training.{name} does nothing with {row.name}", "remove it"
    given = training.get("optim_args") or ""
    parts = parts_of(given)
    known = {argument.name: argument for argument in row.arguments}
    for number, (word, value) in enumerate(parts):
        dotted = f"training.optim_args: {word}"
        if word not in known:
            others = f"it takes {', '.join(known)}" if known else "it takes none: remove it"
            if word == "bf16_stochastic_round":
                others = "write model.master_weights: false, which rounds every rank alike"
            yield "optim_args", f"{dotted} does nothing with {row.name}", others
            continue
        rule, same = known[word].broken_rule(value), known[word].like
        if rule is not None:
            yield "optim_args", f"{dotted}={value}: {word} {rule}", "change it, or remove it"
        if word in (each for each, _ in parts[:number]):
            yield "optim_args", f"{dotted} is said twice", "keep one"
        if same in training:
            yield "optim_args", f"{dotted} and training.{same} say the same", "keep one"
    if row.name == "sgd":
        yield from _without_momentum(row.read(given))


def _without_momentum(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Settings of torch's SGD that need a momentum, or are refused with one."""
    fix = "set momentum=0.9 in it, or remove it"
    if values.get("nesterov") and values.get("dampening"):
        yield "optim_args", "training.optim_args: nesterov takes no dampening", "keep one"
    for name in ("nesterov", "dampening"):
        if values.get(name) and not values.get("momentum"):
            yield "optim_args", f"training.optim_args: {name} does nothing without momentum", fix
