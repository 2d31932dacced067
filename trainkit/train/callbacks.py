"""What happens around the loop: the record of the run, and a stop that loses nothing."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from trainkit.errors import ResumeRefusedError
from trainkit.models.checks.leak_test import leak_test
from trainkit.models.checks.row_test import row_test
from trainkit.models.fp8.trained import KeptCodes
from trainkit.parallel import ProcessRank
from trainkit.parallel.agreement import decided_by_each
from trainkit.parallel.rows import RowSplit
from trainkit.run.console import Console
from trainkit.run.directory import RunDirectory
from trainkit.run.metrics import MetricsWriter, read_metrics
from trainkit.run.report.redraw import CurveRefresher
from trainkit.run.stages import FILE, Stages
from trainkit.train.checkpoints import TRAINER_STATE, ResumePoint
from trainkit.train.faults.signals import FAILED, StopRequest

FEW_STEPS = 10
"""A run of fewer steps that nobody asked for is most likely a small file under a large batch."""


class RunRecorder(TrainerCallback):
    """Writes metrics, keeps the console and the curves up to date. Rank 0 only.

    The curves are drawn by another process, so that no step waits for matplotlib.

    Args:
        run: where it writes.
        console: speaks.
        resume_step: the last step to keep; 0 redoes everything, None is a new run.
        begin: called once with the run's arguments, when nothing can refuse the run any more.
    """

    def __init__(
        self,
        run: RunDirectory,
        console: Console,
        *,
        resume_step: int | None,
        begin: Callable[[TrainingArguments], None],
    ) -> None:
        self._run = run
        self._console = console
        self._resume_step = resume_step
        self._begin = begin
        self._metrics: MetricsWriter | None = None
        self._evaluated: set[int] = set()
        self._passes: float | None = 0.0 if resume_step is None else None
        self._curves = CurveRefresher(run)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Write down what this start was given, and start the progress display.

        Only now: until here the run may still be refused, and is then as it was.
        """
        self._begin(args)
        self._metrics = self._run.open_metrics(resume_step=self._resume_step)
        rows = read_metrics(self._run.metrics)
        self._evaluated = {
            row["step"] for row in rows if any(key.startswith("eval_") for key in row)
        }
        self._run.heartbeat(state.global_step)
        self._run.write_status("running", step=state.global_step, total_steps=state.max_steps)
        if args.max_steps <= 0 and state.max_steps < FEW_STEPS:  # else it was asked for
            self._console.warn(
                f"all data and epochs make {state.max_steps} optimizer steps, which hardly train a "
                "model: lower global_batch_size, or data.max_length (a packed row of that many "
                "tokens holds several conversations), or raise training.num_train_epochs"
            )
        self._console.start(state.max_steps, first_step=state.global_step, due=_due(args, state))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Move the display and the heartbeat."""
        self._console.step(state.global_step)
        self._run.heartbeat(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Record a row of training or evaluation figures."""
        row = {"step": state.global_step, **(logs or {})}
        is_training = "loss" in row or "num_skipped_steps" in row
        if not is_training and not any(key.startswith("eval_") for key in row):
            return
        # A checkpoint is saved before the epoch's evaluation, which is then done once more.
        is_known = not is_training and state.global_step in self._evaluated
        if not math.isfinite(row.get("eval_loss", 0.0)):
            self._console.warn(
                f"eval_loss is {row['eval_loss']} at step {row['step']}: a row of data.eval "
                "overflows, and nothing can be judged by it, the best checkpoint neither; training "
                "goes on, since its own numbers are finite"
            )
        if self._metrics is not None and not is_known:
            self._metrics.append(row)
        self._console.log(row)
        self._tell_pass(row)
        self._curves.refresh(has_news=not is_training)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A checkpoint is news for the report."""
        self._curves.refresh(has_news=True)

    def _tell_pass(self, row: dict[str, float]) -> None:
        """Say when streamed data begins again: rows come that were trained on before."""
        passes = row.get("num_passes")
        if passes is None:
            return
        if self._passes is not None and math.ceil(passes) > math.ceil(self._passes):
            self._console.note(
                f"by step {row['step']} the stream has begun pass {math.ceil(passes) + 1} over its "
                "files"
            )
        self._passes = passes

    def finish(self) -> None:
        """Close the metrics and wait for the last drawing."""
        if self._metrics is not None:
            self._metrics.close()
        self._curves.close()


def _due(args: TrainingArguments, state: TrainerState) -> dict[str, float]:
    """After how many steps evaluations and checkpoints come again; only what does."""
    an_epoch = state.max_steps / max(state.num_train_epochs, 1)
    kinds = {
        "evaluation": (args.eval_strategy, state.eval_steps),
        "checkpoint": (args.save_strategy, state.save_steps),
    }
    every = {
        name: float(steps) if strategy == "steps" and steps else an_epoch
        for name, (strategy, steps) in kinds.items()
        if strategy in ("steps", "epoch")
    }
    return {name: steps for name, steps in every.items() if steps > 0}


class StopOnRequest(TrainerCallback):
    """Ends a run at the end of a step: one process at once, several when all of them know."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save and stop; an evaluation that is due is made up for when the run goes on.

        The last step is logged in any case: the record then has every step's tokens and seconds.
        """
        if state.global_step >= state.max_steps and args.logging_strategy != "no":
            control.should_log = True
        if args.world_size == 1:
            self._stop.agreed = self._stop.number
        if self._stop.agreed:
            control.should_save = self._stop.has_saved = self._stop.agreed != FAILED
            self._stop.misses_evaluation = control.should_evaluate
            control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Leave out what the end of an epoch would bring: the user is waiting."""
        if self._stop.agreed:
            control.should_evaluate = False
            control.should_save = False


class KeepToThePlan(TrainerCallback):
    """Holds the steps of a continued run against those it was planned for.

    A command repeated without its overrides could else end a run long before its time, or bend the
    learning rate, and nobody would notice.
    """

    def __init__(self, point: ResumePoint, console: Console, process: ProcessRank) -> None:
        self._point = point
        self._console = console
        self._process = process

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Compare.

        Raises:
            ResumeRefusedError: the checkpoint is beyond the last step.
        """
        decided_by_each(self._process, lambda: self._compare(state))

    def _compare(self, state: TrainerState) -> None:
        if state.global_step > state.max_steps:
            raise ResumeRefusedError(
                f"the checkpoint is at step {state.global_step}, and the recipe ends at step "
                f"{state.max_steps}",
                where=str(self._point.checkpoint),
                fix="repeat the run's own command with --resume (command.sh has it), or raise "
                "training.max_steps or training.num_train_epochs",
            )
        saved = TrainerState.load_from_json(str(self._point.checkpoint / TRAINER_STATE))
        if saved.max_steps != state.max_steps:
            self._console.warn(
                f"the run was planned for {saved.max_steps} steps and ends at {state.max_steps} "
                "now; the learning rate follows the new plan from here"
            )


class TimeStart(TrainerCallback):
    """Writes down, once the first step is done, where the time since the command went.

    Args:
        stages: timed until here.
        run: gets ``start.json``.
    """

    def __init__(self, stages: Stages, run: RunDirectory) -> None:
        self._stages = stages
        self._run = run
        self._is_done = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The optimizer is made, and what is proved before the first step is proved."""
        self._stages.end("trainer")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The first step ends."""
        if self._is_done:
            return
        self._is_done = True
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._stages.end("first step")
        self._run.write_json(self._run.root / FILE, self._stages.to_dict())


class LeakTest(TrainerCallback):
    """Proves, before the first step, that the documents of a packed row do not see each other.

    On every rank and through the wrapped model: under ZeRO-3 the weights are there in no other way.
    """

    def __init__(
        self,
        attention: str,
        vocab_size: int,
        runnable: Callable[[nn.Module], nn.Module],
        split: RowSplit | None = None,
    ) -> None:
        self._attention = attention
        self._runnable = runnable
        self._vocab_size = vocab_size
        self._split = split

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Run the test."""
        leak_test(
            self._runnable(kwargs["model"]),
            attention=self._attention,
            vocab_size=self._vocab_size,
            split=self._split,
        )


class RowTest(TrainerCallback):
    """Proves, before the first step, that rows which ranks share are computed as whole ones."""

    def __init__(self, split: RowSplit, vocab_size: int, dtype: torch.dtype) -> None:
        self._split = split
        self._vocab_size = vocab_size
        self._dtype = dtype

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Run the test."""
        flags = {torch.bfloat16: args.bf16, torch.float16: args.fp16, self._dtype: True}
        dtype = max((each for each in flags if flags[each]), key=lambda one: torch.finfo(one).eps)
        row_test(kwargs["model"], self._split, vocab_size=self._vocab_size, dtype=dtype)


class KeepFp8Codes(TrainerCallback):
    """Has weights quantised once between two optimizer steps, and says when they have changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: KeptCodes | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begin, when a checkpoint's weights have been loaded."""
        self._kept = KeptCodes(self._model)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The codes have served; the optimizer may have their memory."""
        self._forget()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The weights are others now."""
        self._forget()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Nobody says any more when weights change."""
        if self._kept is not None:
            self._kept.stop()

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept.weights_changed()
