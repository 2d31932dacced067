"""How many micro-batches each epoch has, where sources shown in part make epochs unequal.

transformers takes the first epoch's number for all; a longer epoch would leave rows untrained, and
a shorter one would end amid an optimizer step, whose gradients would leak into the next.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import Trainer, TrainingArguments

from trainkit.errors import DataError

_MAX_EMPTY = 1000
"""Epochs without a row before we stop looking for the next one that has some."""


class SizedByEpoch(Protocol):
    """A loader whose length is that of the chosen epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""

    def __len__(self) -> int: ...


@dataclass
class EpochPlan:
    """The epochs of a run, counted as far as anybody asks.

    Attributes:
        count: micro-batches of an epoch, on every rank.
        accumulation: micro-batches per optimizer step.
    """

    count: Callable[[int], int]
    accumulation: int
    _counted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, loader: SizedByEpoch, accumulation: int) -> "EpochPlan":
        """Ask the loader, and leave it at its first epoch."""

        def count(epoch: int) -> int:
            loader.set_epoch(epoch)
            size = len(loader)
            loader.set_epoch(0)
            return size

        return cls(count, accumulation)

    def num_batches(self, epoch: int) -> int:
        """Micro-batches of an epoch."""
        while len(self._counted) <= epoch:
            self._counted.append(self.count(len(self._counted)))
        return self._counted[epoch]

    def num_steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch; the last one may have fewer micro-batches."""
        return -(-self.num_batches(epoch) // self.accumulation)

    def steps_in(self, num_epochs: float) -> int:
        """Optimizer steps of so many epochs; of a part of one, rounded up as transformers does."""
        whole = int(num_epochs)
        steps = sum(self.num_steps(epoch) for epoch in range(whole))
        rest = num_epochs - whole
        return steps + (math.ceil(rest * self.num_steps(whole)) if rest else 0)

    def place_of(self, step: int) -> tuple[int, int]:
        """The epoch that the step after ``step`` belongs to, and steps of it that are done."""
        epoch = num_empty = 0
        while step >= self.num_steps(epoch):
            num_empty = 0 if self.num_steps(epoch) else num_empty + 1
            if num_empty > _MAX_EMPTY:
                raise DataError(
                    f"{_MAX_EMPTY} epochs in a row have no row to train on",
                    where="data.train",
                    fix="raise the sources' epochs or weight",
                )
            step -= self.num_steps(epoch)
            epoch += 1
        return epoch, step


class CountedEpochs(Trainer):
    """A Trainer whose epochs may differ in length; set ``_has_equal_epochs`` where they do not."""

    _has_equal_epochs = True
    _plan: EpochPlan | None = None

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Transformers' counts; with the steps of every epoch counted where they differ."""
        values = super().set_initial_training_values(args, dataloader)
        if self._has_equal_epochs:
            return values
        self._plan = EpochPlan.of(dataloader, args.gradient_accumulation_steps)
        max_steps, num_epochs = args.max_steps, values[0]
        if max_steps > 0:
            num_epochs = self._plan.place_of(max_steps - 1)[0] + 1
        else:
            max_steps = self._plan.steps_in(args.num_train_epochs)
        return (num_epochs, *values[1:-1], max_steps)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Where to go on: the epoch, and how many of its micro-batches are done."""
        state = super()._init_training_state(*args, **kwargs)
        if self._plan is None or self.state.global_step == 0:
            return state
        epoch, steps = self._plan.place_of(self.state.global_step)
        is_skipping = not self.args.ignore_data_skip
        return epoch, steps * self.args.gradient_accumulation_steps if is_skipping else 0

    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        """One pass over the loader, with its own number of micro-batches.

        None where an evaluation that was made up for has ended the run: transformers asks behind
        the first step only.
        """
        if self.control.should_training_stop:
            return
        if self._plan is not None:
            kwargs["steps_in_epoch"] = self._plan.num_batches(epoch)
            kwargs["num_update_steps_per_epoch"] = self._plan.num_steps(epoch)
            if not kwargs["steps_in_epoch"]:
                return  # no row of any source is due; transformers would end the run
        super()._run_epoch(epoch=epoch, **kwargs)
