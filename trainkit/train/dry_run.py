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
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from trainkit.train.data import Batches
from trainkit.train.evaluations import Evaluations
from trainkit.train.finish import generation_config
from trainkit.train.hooks import Hook, LoopState
from trainkit.train.run import Run
from trainkit.train.saves import checkpoint_bytes, optimizer_bytes

LARGEST_CHECKPOINT = 2**30
"""Bytes of weights and optimizer states up to which a checkpoint is written to see that it can."""


class _LongestFirst:
    """The run's loader, whose first micro-batch is the longest there is."""

    def __init__(self, loader: Batches, longest: dict[str, Any]) -> None:
        self._loader, self._longest = loader, longest

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[dict[str, Any]]:
        return itertools.chain([dict(self._longest)], self._loader.epoch(epoch, skip))


class LongestEvaluation(Evaluations):
    """An evaluation of the longest batch alone."""

    def batches(self, loop: LoopState) -> tuple[list[dict[str, Any]], int]:
        _, num_samples = super().batches(loop)
        assert loop.eval_data is not None
        return [dict(loop.eval_data.longest_batch(loop.args.eval_batch_size))], num_samples


class OneStep(Hook):
    """Times one step on the longest batch, looks at what it holds in memory, and ends the training.

    Attributes:
        eval_loss: of the longest evaluation batch; None without evaluation data.
        seconds: the step took, kernels compiled on the way.
        optimizer_gib: the optimizer's states and fp32 masters, on one process.
        has_saved: whether one was written, and thrown away.
    """

    num_micro_batches = 0
    loss = float("nan")
    eval_loss: float | None = None
    seconds = optimizer_gib = checkpoint_gib = _started = 0.0
    has_saved = False

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        self.longest = loop.train_data.longest_batch(loop.args.train_batch_size)
        loop.loader = _LongestFirst(loop.loader, self.longest)

    def before_step(self, loop: LoopState, micro: Any, counts: Any, seconds: float) -> None:
        self.num_micro_batches = len(micro)

    def on_step_begin(self, loop: LoopState) -> None:
        _wait_for(loop.args.device)
        self._started = time.perf_counter()

    def on_step_end(self, loop: LoopState) -> None:
        """Stop it; then log, evaluate and save once, as the run would some time."""
        _wait_for(loop.args.device)
        self.seconds = time.perf_counter() - self._started
        self.optimizer_gib = optimizer_bytes(loop) / 2**30
        num_bytes, control = checkpoint_bytes(loop), loop.control
        self.checkpoint_gib = num_bytes / 2**30
        control.should_log = True
        control.should_evaluate = loop.eval_data is not None
        # One process decides for all: they write together.
        decided = broadcast_object_list([num_bytes <= LARGEST_CHECKPOINT])
        control.should_save = loop.args.save_strategy != "no" and bool(decided[0])
        control.should_training_stop = True

    def on_epoch_end(self, loop: LoopState) -> None:
        control = loop.control
        control.should_log = control.should_evaluate = control.should_save = False

    def on_log(self, loop: LoopState, row: dict[str, Any]) -> None:
        self.loss = row.get("loss", self.loss)
        self.eval_loss = row.get("eval_loss", self.eval_loss)

    def on_save(self, loop: LoopState) -> None:
        self.has_saved = True


def describe(run: Run, step: OneStep) -> dict[str, object]:
    args, device_is_gpu = run.args, run.args.device.type == "cuda"
    # Settings for generating that contradict each other are refused when final/ is written.
    settings = generation_config(run.built.model, run.tokenizer, run.data.stop_token_ids)
    settings.save_pretrained(run.root)
    rows = len(run.data.train.samples)
    micro = args.per_device_train_batch_size * run.layout.data_size
    per_step = micro * args.gradient_accumulation_steps
    steps = -(-rows // per_step)
    total = args.max_steps if args.max_steps > 0 else math.ceil(steps * args.num_train_epochs)
    num_tokens, num_trained = (step.longest[f"num_{each}tokens"] for each in ("", "trained_"))
    figures: dict[str, object] = {
        "longest batch": f"{num_tokens} tokens, {num_trained} trained",
        "loss": f"{step.loss:.4f}",
    }
    if step.eval_loss is not None:
        figures["eval loss"] = f"{step.eval_loss:.4f} of its longest batch"
    plural = "es" if step.num_micro_batches > 1 else ""
    figures["one step"] = f"{step.seconds:.2f} s, {step.num_micro_batches} micro-batch{plural}"
    if device_is_gpu:
        figures["peak"] = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    figures["optimizer"] = f"{_size(step.optimizer_gib)} of states"
    size = _size(step.checkpoint_gib)
    if step.has_saved:
        figures["checkpoint"] = f"{size}, written and thrown away"
    elif args.save_strategy == "no":
        figures["checkpoint"] = "none is asked for"
    else:
        figures["checkpoint"] = f"about {size}; not written here"
    streamed = run.data.train.stream is not None
    figures["rows"] = "streamed" if streamed else f"{rows}, {per_step} a step"
    figures["steps"] = f"{total}" if streamed else f"{total} ({steps} an epoch)"
    return figures


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{gib * 2**10:.1f} MiB"


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
