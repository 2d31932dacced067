"""What is measured while a model trains, besides its loss; training goes on as if nothing had been.

Random numbers, dropout and the modes of all modules are as before, so a curve with these
measurements is the curve without them, bit for bit.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_utils import speed_metrics

from trainkit.errors import TrainkitError
from trainkit.evaluation_mode import evaluation_mode
from trainkit.objectives.objective import Ahead, EvaluatedBatch, take_counts
from trainkit.train.data import sample_loader
from trainkit.train.hooks import Hook, LoopState

if TYPE_CHECKING:
    from trainkit.train.faults.watch import Watch


@dataclass(frozen=True)
class Measurement:
    """A set of figures that is taken every so many steps.

    Attributes:
        take: the figures by name, without ``eval_``; the same on every rank, which all call it.
    """

    every: int
    take: Callable[[LoopState], Mapping[str, float]]


class Evaluations(Hook):
    """The mean loss on the held-out samples, and other figures, when they are due.

    Attributes:
        makes_up: a continued run begins with an evaluation that the stopped one has missed.
    """

    is_alone = makes_up = False

    def __init__(self, measurements: Sequence[Measurement] = ()) -> None:
        self.measurements = tuple(measurements)
        self._taken: dict[Measurement, int] = {}

    def on_step_end(self, loop: LoopState) -> None:
        if self.measurements:
            self.is_alone = not loop.control.should_evaluate
            if self._due(loop.state.global_step):
                loop.control.should_evaluate = True

    def on_epoch_end(self, loop: LoopState) -> None:
        """An evaluation that the end of an epoch brings is one of the loss."""
        self.is_alone = False

    def _due(self, step: int) -> list[Measurement]:
        due = [row for row in self.measurements if step and step % row.every == 0]
        return [row for row in due if self._taken.get(row) != step]

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Measure where the recipe, or a stopped run, says so."""
        if checkpoint is None and loop.args.eval_on_start:
            self.measure(loop)
        is_missed = checkpoint is not None and self.makes_up
        if is_missed and self._decide(loop, self.measure(loop)):
            loop.state.best_model_checkpoint = str(checkpoint)

    def due(self, loop: LoopState) -> None:
        if loop.control.should_evaluate:
            is_best = self._decide(loop, self.measure(loop))
            if loop.args.save_strategy == "best":
                loop.control.should_save = is_best

    def measure(self, loop: LoopState) -> dict[str, float]:
        """All that is due at this step, in one row; every rank calls it."""
        loop.guard.flush()
        started, step = time.perf_counter(), loop.state.global_step
        row: dict[str, float] = {}
        for each in self._due(step):
            self._taken[each] = step
            with undisturbed(loop.model), marking(loop.run.watch, loop.model):
                row |= {f"eval_{name}": value for name, value in each.take(loop).items()}
        if row:
            row["eval_seconds"] = time.perf_counter() - started
        if not self.measurements or not (self.is_alone or loop.eval_data is None):
            row = self._loss(loop, row)
        if row:
            loop.log(row)
        loop.event("on_evaluate", row)
        return row

    def batches(self, loop: LoopState) -> tuple[Iterable[dict[str, Any]], int]:
        """Every evaluation sample once, dealt out over the ranks; and how many there are."""
        if loop.eval_data is None:
            raise TrainkitError(
                "there is nothing to evaluate on", where="data.eval", fix="name a file there"
            )
        size = loop.args.eval_batch_size
        batches = sample_loader(loop.eval_data, loop.args, loop.layout, size)
        return batches, len(loop.eval_data.samples)

    @torch.no_grad()
    def _loss(self, loop: LoopState, figures: dict[str, float]) -> dict[str, float]:
        """The mean per item (for SFT, per trained token) over all batches and ranks.

        transformers averages the means of batches instead, which weighs a short answer in a small
        batch more than a long one, and changes with the batch size. No logits are kept.
        """
        args, layout, loss = loop.args, loop.layout, loop.loss
        batches, num_samples = self.batches(loop)
        started = time.time()
        # Losses, their items, trained tokens.
        totals = torch.zeros(3, dtype=torch.float64, device=args.device)
        if loop.run.data.objective.looks_ahead:
            given = [dict(batch) for batch in batches]
            for batch in given:
                take_counts(batch, loss.num_items)
            look_ahead(loop, given)
        with evaluation_mode(loop.wrapped):
            for batch in batches:
                counts = take_counts(batch, loss.num_items)
                with loop.sharing():  # ranks without the head have no answer
                    found: EvaluatedBatch | None = loop.engine.evaluate(
                        loop.prepare(batch), partial(loss.evaluate, num_items=counts.num_items)
                    )
                if found is not None:
                    totals[0] += found.loss_sum.double() * layout.counts_losses
                totals[1] += counts.num_items * layout.counts_rows
                totals[2] += counts.num_trained_tokens * layout.counts_rows
        own = loss.eval_metrics
        if own is not None:
            mine = own.take(totals.device).flatten()
            totals = torch.cat((totals, mine * layout.counts_losses))
        totals = loop.ranks.reduce(totals, reduction="sum")
        loss_sum, num_items, num_tokens, *sums = totals.tolist()
        row = {
            "eval_loss": loss_sum / max(num_items, 1),
            "eval_num_trained_tokens": int(num_tokens),
        }
        if own is not None:
            row |= own.rows(sums, "eval_")
        num_steps = math.ceil(num_samples / (args.eval_batch_size * args.world_size))
        return row | figures | speed_metrics("eval", started, num_samples, num_steps)

    def _decide(self, loop: LoopState, row: Mapping[str, float]) -> bool:
        """What an evaluation is followed by; returns whether this is the best model so far.

        One that does not measure the figure, or finds no number, changes nothing.
        """
        args, state = loop.args, loop.state
        figure = judged_figure(args, row)
        if figure is None:
            return False
        if loop.follows_metric:
            loop.scheduler.step(figure)
        if args.metric_for_best_model is None or not math.isfinite(figure):
            return False
        best = state.best_metric
        sign = 1 if args.greater_is_better else -1
        if best is not None and sign * figure <= sign * best:
            return False
        state.best_metric = figure
        if args.save_strategy != "no":
            state.best_global_step = state.global_step
        return True


def judged_figure(args: TrainingArguments, metrics: Mapping[str, float]) -> float | None:
    """The figure that the best model is judged by; None where it was not measured."""
    name = str(args.metric_for_best_model or "loss").removeprefix("eval_")
    return metrics.get(f"eval_{name}")


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Within, the model is in evaluation mode; afterwards all is as before.

    Also the random states of Python, numpy, torch and every GPU.
    """
    before = random_state()
    try:
        with evaluation_mode(model), torch.no_grad():
            yield
    finally:
        set_random_state(before)


def random_state(*, of_all: bool = True) -> dict[str, Any]:
    """Of Python, numpy, torch, and the GPU of this process or all GPUs of the host."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        of_gpus = torch.cuda.get_rng_state_all if of_all else torch.cuda.get_rng_state
        state["cuda"] = of_gpus()
    return state


def set_random_state(state: Mapping[str, Any], *, of_all: bool = True) -> None:
    """Draw from here on as where `random_state` was called."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        (torch.cuda.set_rng_state_all if of_all else torch.cuda.set_rng_state)(state["cuda"])


@contextmanager
def marking(watch: "Watch | None", model: Any) -> Iterator[None]:
    """Within, every forward pass is a sign of life: thousands of questions are no hang."""
    head = model.get_output_embeddings()
    if watch is None or head is None:
        yield
        return
    with head.register_forward_pre_hook(lambda *_: watch.mark("evaluating")):
        yield


def look_ahead(loop: LoopState, batches: Iterable[dict[str, Any]]) -> None:
    """Have the loss know what it must of all these batches, and those of the other ranks."""
    loss = cast(Ahead, loop.loss)
    with evaluation_mode(loop.wrapped), loop.sharing():
        each = [loop.engine.evaluate(loop.prepare(batch), loss.ahead) for batch in batches]
    loss.seen = loop.total(torch.stack(each).sum(0), counted=loop.layout.counts_losses)


class LookAhead(Hook):
    """Before each step, what its loss must know of the whole of it."""

    def before_step(
        self, loop: LoopState, micro: Sequence[dict[str, Any]], items: Any, seconds: float
    ) -> None:
        """The micro-batches are there, and nothing of them is computed yet."""
        counts = getattr(loop.loss, "counts_ahead", False)
        if loop.run.data.objective.looks_ahead or (counts and len(micro) > 1):
            look_ahead(loop, micro)
        elif counts:  # a single micro-batch is counted as it goes by
            cast(Ahead, loop.loss).seen = None


class Displacement(Hook):
    """Warns once where both answers of pairs have become less likely than they were before."""

    def __init__(self) -> None:
        self._changes: list[tuple[float, float]] = []
        self._is_said = False

    def on_log(self, loop: LoopState, row: dict[str, Any]) -> None:
        """Look at the last rows together: one has few pairs."""
        keys = [f"logps/{side}_change" for side in ("chosen", "rejected")]
        if self._is_said or not all(key in row for key in keys):
            return
        self._changes = [*self._changes[1 - _ROWS :], (row[keys[0]], row[keys[1]])]
        better, worse = (sum(each) / len(each) for each in zip(*self._changes, strict=True))
        if len(self._changes) == _ROWS and better < -_FALLEN and worse < 0:
            self._is_said = True
            loop.run.console.warn(
                f"both answers become less likely: over the last {_ROWS} logged rows the better "
                f"ones by {-better:.3f} nats a token, the worse ones by {-worse:.3f}; a lower "
                "training.learning_rate or a larger preference.beta holds the model closer to "
                "what it was"
            )


_ROWS, _FALLEN = 10, 0.02
"""So many rows, and how far down the better answers may be."""


class StopEarly(Hook):
    """Ends training when the figure that the best model is judged by gets no better.

    What it has seen is kept in the run's state, so that every checkpoint has it.
    """

    def __init__(self, patience: int, min_delta: float) -> None:
        self._patience = patience
        self._min_delta = min_delta
        self._best: float | None = None
        self._num_worse = 0

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Take up what a continued run has seen."""
        if kept := loop.state.stateful_callbacks.get(_EARLY):
            self._best, self._num_worse = kept["best"], kept["num_worse"]
        self._end(loop)  # killed behind the checkpoint of its last step, nothing is left to train

    def on_evaluate(self, loop: LoopState, row: dict[str, float]) -> None:
        args, state = loop.args, loop.state
        if not self._see(args, row):
            return
        state.stateful_callbacks[_EARLY] = {"best": self._best, "num_worse": self._num_worse}
        self._end(loop)

    def _end(self, loop: LoopState) -> None:
        args, state = loop.args, loop.state
        if self._num_worse >= self._patience:
            loop.control.should_training_stop = loop.control.should_log = True
            name = str(args.metric_for_best_model or "loss").removeprefix("eval_")
            found = "a number" if self._best is None else f"better than {self._best:.4g}"
            loop.run.console.note(
                f"stopped at step {state.global_step}: {name} was not {found} in "
                f"{self._num_worse} evaluation{'' if self._num_worse == 1 else 's'}"
            )

    def _see(self, args: TrainingArguments, metrics: Mapping[str, float]) -> bool:
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
"""Its place in the run's state."""
