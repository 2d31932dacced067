"""``training.auto_find_batch_size``: the micro-batch that fits, the step keeps its rows.

The longest batch there is runs forth and back before the first step; where it does not fit, on any
rank, all take half of it, and twice the accumulation. A step that still runs out of memory makes
one process go back to its last checkpoint with half the rows. Several processes cannot: the others
wait in the middle of the step. They stop together, and the run goes on with half when it is
resumed. What was found is recorded as an override, like one that a user gives.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainkit.errors import TrainkitError
from trainkit.models.loss.loss_head import take_counts as take_correct
from trainkit.parallel import Layout
from trainkit.run import RunDirectory
from trainkit.run.going_on import resume_command
from trainkit.run.starts import Start, append_start, read_starts
from trainkit.train.faults.shortage import MemoryShortageError, is_shortage

_SIZE, _ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"


def smaller(rows: int) -> int | None:
    """The largest part of a micro-batch that is at most half of it; None of one row."""
    return next((size for size in range(rows // 2, 0, -1) if rows % size == 0), None)


@dataclass(frozen=True)
class BatchFinder:
    """Finds the micro-batch of a run.

    Attributes:
        is_on: as the recipe says.
        args: of the run: micro-batch and accumulation.
        keeps_global: ``global_batch_size`` makes up the accumulation by itself.
        layout: how the run is spread over processes.
        run: where what was found is recorded.
        to_come_gib: of memory that the first step will take, and that is not there yet.
        agree: the smallest of all ranks' numbers.
    """

    is_on: bool
    args: TrainingArguments
    keeps_global: bool
    layout: Layout
    run: RunDirectory
    to_come_gib: float
    agree: Callable[[int], int]

    def overrides(self, size: int) -> tuple[str, ...]:
        """The settings of a micro-batch, as a user would give them."""
        found = (f"training.{_SIZE}={size}",)
        if self.keeps_global:
            return found
        rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return (*found, f"training.{_ACCUMULATION}={rows // size}")

    def smaller(self, error: MemoryShortageError) -> int | None:
        """What to go on with after a step without memory; None where nothing smaller is left."""
        if error.fits:
            return error.fits
        is_training = bool(error.rows) and self.is_on
        return smaller(self.args.per_device_train_batch_size) if is_training else None

    def after(self, error: TrainkitError) -> tuple[str, ...]:
        """The settings to go on with; none after bad numbers."""
        size = self.smaller(error) if isinstance(error, MemoryShortageError) else None
        return () if size is None else self.overrides(size)

    def goes_back(self, error: MemoryShortageError) -> bool:
        """Whether the run goes on in this process."""
        return error.is_agreed or (
            self.layout.process.world_size == 1 and self.smaller(error) is not None
        )

    def for_resuming(self, error: MemoryShortageError) -> MemoryShortageError:
        """Where the ranks must stop: record the smaller micro-batch, and say how to go on."""
        size = self.smaller(error)
        if size is None:
            return error
        overrides = self.overrides(size)
        starts = read_starts(self.run)
        if not starts or starts[-1].overrides != overrides:  # another rank may have
            append_start(self.run, Start(overrides=overrides))
        found = MemoryShortageError(
            error.what,
            where=error.where,
            fix=f"{resume_command(self.run.root)}: it goes on with {size} rows at a time "
            f"instead of {self.args.per_device_train_batch_size} "
            f"(training.auto_find_batch_size); or {error.fix}",
        )
        found.rows = error.rows
        return found

    @property
    def can_try(self) -> bool:
        """Whether a rank can run a batch by itself: no other rank has a part of the weights."""
        layout, kwargs = self.layout, self.args.gradient_checkpointing_kwargs or {}
        is_whole = layout.engine.holds_whole_model
        is_alone = layout.data_size == layout.process.world_size
        return self.is_on and is_whole and is_alone and not kwargs.get("use_reentrant")

    def largest_that_fits(self, trainer: Any) -> int:
        """Run the longest rows forth and back, fewer and fewer of them, until they fit."""
        size: int | None = self.args.per_device_train_batch_size
        while size is not None and not self._fits(trainer, size):
            size = smaller(size)
        if size is None:
            raise MemoryShortageError(
                "not even one row of the longest fits into memory",
                where=f"training.{_SIZE}",
                fix="lower data.max_length, set recompute: full, or lora: {quantize: nf4}",
            )
        return size

    def _fits(self, trainer: Any, size: int) -> bool:
        try:
            self._run(trainer, size)
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            error.__traceback__ = None  # which keeps the activations alive
            fits = False
        else:
            fits = True
        take_correct(trainer.model)  # what the head has counted of it is no part of the run
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return fits

    def _run(self, trainer: Any, size: int) -> None:
        device = self.args.device
        on_gpu = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(on_gpu):
            to_come = torch.empty(
                int(self.to_come_gib * 2**30) if on_gpu else 0, dtype=torch.uint8, device=device
            )
            trained = [each for each in trainer.model.parameters() if each.requires_grad]
            loss = trainer.loss_of(trainer.train_data.longest_batch(size))
            # Not `backward`: an engine would hear of it, and share the gradients.
            torch.autograd.grad(loss, trained, allow_unused=True)
            del to_come


class TryLongestBatch(TrainerCallback):
    """Before the first step: does the longest batch fit on every rank?"""

    def __init__(self, finder: BatchFinder, trainer: Any) -> None:
        self._finder, self._trainer = finder, trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Try.

        Raises:
            MemoryShortageError: it does not, and a smaller one does; the same on all ranks.
        """
        was_training = self._trainer.model.training
        self._trainer.model.train()
        try:
            mine = self._finder.largest_that_fits(self._trainer)
        except MemoryShortageError:
            self._finder.agree(0)
            raise
        finally:
            self._trainer.model.train(was_training)
        size = self._finder.agree(mine)
        if size < args.per_device_train_batch_size:
            error = MemoryShortageError(
                f"a micro-batch of {args.per_device_train_batch_size} of the longest rows does "
                f"not fit into memory; {size} rows do"
                if size
                else "on another rank not even one row of the longest fits into memory",
                where=f"training.{_SIZE}",
            )
            error.rows, error.fits, error.is_agreed = mine, size, bool(size)
            raise error
