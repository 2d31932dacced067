"""``--dry-run``: one optimizer step of the real loop, in a temporary directory.

Everything is the run's own: arguments, model, self-check, loaders, optimizer, schedule, logs,
evaluation, checkpoint. Only what would cost time or leave something behind is cut short: the first
micro-batch is the longest there is, training ends after one step, evaluation after the longest
batch, a checkpoint is written where it is small; trackers and the hub hear nothing.
"""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from trainkit.train.data.run_data import RunData
from trainkit.train.faults.disk import checkpoint_bytes, optimizer_bytes
from trainkit.train.faults.shortage import is_shortage, out_of_memory
from trainkit.train.faults.signals import StopRequest
from trainkit.train.loop import Loop
from trainkit.train.results.finish import generation_config
from trainkit.train.results.hub import UntouchedHub
from trainkit.train.session import Session

LARGEST_CHECKPOINT = 2**30
"""Bytes of weights and optimizer states up to which a checkpoint is written to see that it can."""


@dataclass
class DryRunVerdict:
    """What one optimizer step cost.

    Attributes:
        num_tokens: in the longest micro-batch, padding left out.
        num_trained_tokens: labels in it.
        num_micro_batches: of the step, on one process.
        loss: mean over the step's trained tokens.
        eval_loss: of the longest evaluation batch; None without evaluation data.
        seconds: the step took, kernels compiled on the way.
        peak_memory_gib: of the GPU; None on a CPU.
        optimizer_gib: the optimizer's states and fp32 masters, on one process.
        checkpoint_gib: weights and states that a checkpoint holds.
        has_saved: whether one was written, and thrown away.
    """

    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_micro_batches: int = 0
    loss: float = float("nan")
    eval_loss: float | None = None
    seconds: float = 0.0
    peak_memory_gib: float | None = None
    optimizer_gib: float = 0.0
    checkpoint_gib: float = 0.0
    has_saved: bool = False


@dataclass
class _OneBatch:
    """A loader of one batch, for the evaluation."""

    batch: dict[str, Any]
    dataset: Any

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield dict(self.batch)

    def __len__(self) -> int:
        return 1


class OneStep(Loop):
    """The real loop, shown the longest batch first."""

    hub_kind = UntouchedHub
    longest: dict[str, Any] | None = None
    num_micro_batches = 0

    def take(self, batches: Iterator[Any]) -> list[dict[str, Any]]:
        """The longest micro-batch, then those that the run begins with."""
        if self.longest is None:
            self.longest = self.train_data.longest_batch(self.args.train_batch_size)
            batches = itertools.chain([dict(self.longest)], batches)
        micro = super().take(batches)
        self.num_micro_batches = self.num_micro_batches or len(micro)
        return micro

    def eval_batches(self) -> Any:
        """The longest batch alone."""
        loader = super().eval_batches()
        assert self.eval_data is not None
        return _OneBatch(self.eval_data.longest_batch(self.args.eval_batch_size), loader.dataset)


@dataclass
class _OneStep(TrainerCallback):
    """Times one step, looks at what it holds in memory, and ends the training."""

    loop: OneStep
    verdict: DryRunVerdict = field(default_factory=DryRunVerdict)
    _started: float = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start the clock."""
        _wait_for(args.device)
        self._started = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Stop it; then log, evaluate and save once, as the run would some time."""
        _wait_for(args.device)
        found = self.verdict
        found.seconds = time.perf_counter() - self._started
        found.optimizer_gib = optimizer_bytes(self.loop) / 2**30
        num_bytes = checkpoint_bytes(self.loop)
        found.checkpoint_gib = num_bytes / 2**30
        control.should_log = True
        control.should_evaluate = self.loop.eval_data is not None
        # One process decides for all: they write together.
        decided = broadcast_object_list([num_bytes <= LARGEST_CHECKPOINT])
        control.should_save = args.save_strategy != "no" and bool(decided[0])
        control.should_training_stop = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Nothing a second time."""
        control.should_log = control.should_evaluate = control.should_save = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Keep the figures."""
        if logs and "loss" in logs:
            self.verdict.loss = logs["loss"]
        if logs and "eval_loss" in logs:
            self.verdict.eval_loss = logs["eval_loss"]

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A checkpoint could be written."""
        self.verdict.has_saved = True


def run_one_step(session: Session) -> DryRunVerdict:
    """Train one optimizer step as the run would.

    Args:
        session: of the run; its run directory is one to be thrown away.

    Raises:
        RecipeError: the model, the optimizer or the schedule refuses the settings.
        TrainkitError: out of memory (naming the sizes), or a figure is NaN or infinite.
    """
    loop = session.loop(StopRequest(), OneStep)
    assert isinstance(loop, OneStep)
    for tracker in get_reporting_integration_callbacks(session.args.report_to):
        loop.remove_callback(tracker)
    step = _OneStep(loop)
    loop.add_callback(step)
    is_cuda = session.args.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        loop.train()
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        raise out_of_memory(loop, session.expected, error) from error
    verdict = step.verdict
    if is_cuda:
        verdict.peak_memory_gib = torch.cuda.max_memory_allocated() / 2**30
    assert loop.longest is not None
    verdict.num_tokens = int(loop.longest["num_tokens"])
    verdict.num_trained_tokens = int(loop.longest["num_trained_tokens"])
    verdict.num_micro_batches = loop.num_micro_batches
    # Settings for generating that contradict each other are refused when final/ is written.
    settings = generation_config(loop.model, session.tokenizer, session.data.stop_token_ids)
    settings.save_pretrained(session.run.root)
    return verdict


def describe_dry_run(
    verdict: DryRunVerdict, data: RunData, args: TrainingArguments, data_size: int
) -> dict[str, object]:
    """Label to value, for the console."""
    rows = len(data.train.samples)
    micro = args.per_device_train_batch_size * data_size
    per_step = micro * args.gradient_accumulation_steps
    steps = -(-rows // per_step)
    total = args.max_steps if args.max_steps > 0 else math.ceil(steps * args.num_train_epochs)
    figures: dict[str, object] = {
        "longest batch": f"{verdict.num_tokens} tokens, {verdict.num_trained_tokens} trained",
        "loss": f"{verdict.loss:.4f}",
    }
    if verdict.eval_loss is not None:
        figures["eval loss"] = f"{verdict.eval_loss:.4f} of its longest batch"
    plural = "es" if verdict.num_micro_batches > 1 else ""
    figures["one step"] = (
        f"{verdict.seconds:.2f} s, {verdict.num_micro_batches} micro-batch{plural}"
    )
    if verdict.peak_memory_gib is not None:
        figures["peak"] = f"{verdict.peak_memory_gib:.1f} GiB"
    figures["optimizer"] = f"{_size(verdict.optimizer_gib)} of states"
    size = _size(verdict.checkpoint_gib)
    if verdict.has_saved:
        figures["checkpoint"] = f"{size}, written and thrown away"
    elif args.save_strategy == "no":
        figures["checkpoint"] = "none is asked for"
    else:
        figures["checkpoint"] = f"about {size}; not written here"
    streamed = data.train.stream is not None
    figures["rows"] = "streamed" if streamed else f"{rows}, {per_step} a step"
    figures["steps"] = f"{total}" if streamed else f"{total} ({steps} an epoch)"
    return figures


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{gib * 2**10:.1f} MiB"


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
