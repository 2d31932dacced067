"""What is measured while a model trains, besides its loss; training goes on as if nothing had been.

Random numbers, dropout and the modes of all modules are as before, so a curve with these
measurements is the curve without them, bit for bit.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainkit.evaluation_mode import evaluation_mode


@dataclass(frozen=True)
class Measurement:
    """A set of figures that is taken every so many steps.

    Attributes:
        every: steps.
        take: the figures by name, without ``eval_``; the same on every rank, which all call it.
    """

    every: int
    take: Callable[["MeasuredTraining"], Mapping[str, float]]


class Measurements(TrainerCallback):
    """Has the Trainer evaluate at the steps at which something is to be measured."""

    def __init__(self, rows: Sequence[Measurement]) -> None:
        self.rows = tuple(rows)
        self.is_alone = False
        self._taken: dict[Measurement, int] = {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Ask for an evaluation; where nobody else does, without the loss."""
        self.is_alone = not control.should_evaluate
        if self._due(state.global_step):
            control.should_evaluate = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """An evaluation that the end of an epoch brings is one of the loss."""
        self.is_alone = False

    def take(self, trainer: "MeasuredTraining") -> dict[str, float]:
        """What is due at this step and was not measured yet."""
        step = trainer.state.global_step
        figures: dict[str, float] = {}
        for row in self._due(step):
            self._taken[row] = step
            with undisturbed(trainer.model), _marking(trainer):
                figures.update(row.take(trainer))
        return figures

    def _due(self, step: int) -> list[Measurement]:
        due = [row for row in self.rows if step and step % row.every == 0]
        return [row for row in due if self._taken.get(row) != step]


class MeasuredTraining(Trainer):
    """The Trainer's evaluation with figures besides the loss, or without a loss."""

    measurements: Measurements | None = None
    control: TrainerControl

    def __init__(self, *, args: TrainingArguments, eval_dataset: Any = None, **given: Any) -> None:
        rows = evaluation_rows(eval_dataset, args)
        super().__init__(args=args, eval_dataset=rows, **given)

    _figures: Mapping[str, float] = {}

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """All that is due at this step, in one row."""
        rows = self.measurements
        started = time.perf_counter()
        found = {} if rows is None else rows.take(self)
        figures = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        if figures:
            figures[f"{metric_key_prefix}_seconds"] = time.perf_counter() - started
        is_alone = rows is not None and (rows.is_alone or not self.eval_dataset)
        if not is_alone:
            self._figures = figures
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if figures:
            self.log(figures)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, figures
        )
        return figures

    def take_figures(self) -> Mapping[str, float]:
        """What was measured for the row that the loss is in."""
        figures, self._figures = self._figures, {}
        return figures

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """An evaluation that does not measure the figure, or finds no number, changes nothing."""
        figure = judged_figure(self.args, metrics)
        if figure is None and self.measurements is not None:
            return False
        if figure is not None and not math.isfinite(figure):
            return False
        return bool(super()._determine_best_metric(metrics, trial))


def evaluation_rows(samples: Any, args: TrainingArguments) -> Any:
    """What transformers takes for evaluation data: it refuses to evaluate without any."""
    if samples is not None:
        return samples
    return [] if args.eval_strategy != "no" else None


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Within, the model is in evaluation mode; afterwards all is as before.

    Also the random states of Python, numpy, torch and every GPU.
    """
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        with evaluation_mode(model), torch.no_grad():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)


@contextmanager
def _marking(trainer: Any) -> Iterator[None]:
    """Within, every forward pass is a sign of life: thousands of questions are no hang."""
    watch, head = getattr(trainer, "watch", None), trainer.model.get_output_embeddings()
    if watch is None or head is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda *_: watch.mark("evaluating"))
    try:
        yield
    finally:
        handle.remove()


def judged_figure(args: TrainingArguments, metrics: Mapping[str, float]) -> float | None:
    """The figure that the best model is judged by; None where it was not measured."""
    name = str(args.metric_for_best_model or "loss").removeprefix("eval_")
    return metrics.get(f"eval_{name}")


class StopEarly(TrainerCallback):
    """Ends training when the figure that the best model is judged by gets no better.

    What it has seen is kept in the Trainer's state, so that every checkpoint has it.

    Args:
        patience: evaluations in a row that may bring nothing.
        min_delta: what less is no improvement.
        say: called with the reason.
    """

    def __init__(self, patience: int, min_delta: float, say: Callable[[str], None]) -> None:
        self._patience = patience
        self._min_delta = min_delta
        self._say = say
        self._best: float | None = None
        self._num_worse = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Take up what a continued run has seen."""
        kept = state.stateful_callbacks.get(_EARLY)
        if kept is None:  # a checkpoint of trainkit before it kept this: its log has the rows
            self._best, self._num_worse = None, 0
            for row in state.log_history:
                self._see(args, row)
        else:
            self._best, self._num_worse = kept["best"], kept["num_worse"]

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **_: Any,
    ) -> None:
        """End the run where patience is over."""
        if not self._see(args, metrics or {}):
            return
        state.stateful_callbacks[_EARLY] = {"best": self._best, "num_worse": self._num_worse}
        if self._num_worse >= self._patience:
            control.should_training_stop = control.should_log = True
            name = str(args.metric_for_best_model or "loss").removeprefix("eval_")
            found = "a number" if self._best is None else f"better than {self._best:.4g}"
            self._say(
                f"stopped at step {state.global_step}: {name} was not {found} in "
                f"{self._num_worse} evaluation{'' if self._num_worse == 1 else 's'}"
            )

    def _see(self, args: TrainingArguments, metrics: Mapping[str, float]) -> bool:
        """Whether the figure was measured."""
        value = judged_figure(args, metrics)
        if value is None:
            return False
        sign = 1.0 if args.greater_is_better else -1.0
        is_better = self._best is None or sign * (value - self._best) > self._min_delta
        if is_better and math.isfinite(value):
            self._best, self._num_worse = value, 0
        else:
            self._num_worse += 1
        return True


_EARLY = "early_stopping"
"""Its place in the Trainer's state."""
