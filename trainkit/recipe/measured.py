"""What a run measures while it trains, by name, and what may depend on it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.options.evaluation import EarlyStopping, GenerationOptions, TaskOptions
from trainkit.options.words import ask, nearest
from trainkit.recipe.fields.training import TRAINING_DEFAULTS

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
    evaluated = evaluated or training.get("logging_steps", TRAINING_DEFAULTS["logging_steps"])
    if evaluated != saved:
        yield (
            "training.save_steps",
            f"a model is evaluated every {evaluated} steps and saved every {saved}: of the best "
            "one there may be no checkpoint for load_best_model_at_end",
            f"remove save_steps, write save_steps: {evaluated}, or write save_strategy: best",
        )
