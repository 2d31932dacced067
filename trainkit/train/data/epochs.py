"""How many micro-batches each epoch has; sources shown in part make epochs unequal.

Were the first epoch's number that of all, a longer epoch would leave rows untrained, and a shorter
one would end amid an optimizer step, whose gradients would leak into the next.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from transformers import TrainingArguments

from trainkit.errors import DataError

_MAX_EMPTY = 1000
"""Epochs without a row before we stop looking for the next one that has some."""


@runtime_checkable
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
        is_equal: every epoch has as many as the first one.
        max_steps: of the run.
        num_epochs: that they reach into.
    """

    count: Callable[[int], int]
    accumulation: int
    is_equal: bool = False
    max_steps: int = 0
    num_epochs: int = 0
    _counted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, loader: Any, args: TrainingArguments, *, is_equal: bool = False) -> "EpochPlan":
        """Ask the loader, and leave it at its first epoch; a stream is one epoch of all steps."""
        accumulation = args.gradient_accumulation_steps

        def count(epoch: int) -> int:
            if not isinstance(loader, SizedByEpoch):
                return args.max_steps * accumulation
            loader.set_epoch(epoch)
            size = len(loader)
            loader.set_epoch(0)
            return size

        plan = cls(count, accumulation, is_equal)
        plan.max_steps = args.max_steps
        if args.max_steps <= 0:
            plan.max_steps = plan.steps_in(args.num_train_epochs)
        plan.num_epochs = plan.place_of(plan.max_steps - 1)[0] + 1
        return plan

    def num_batches(self, epoch: int) -> int:
        """Micro-batches of an epoch."""
        if self.is_equal:
            epoch = 0
        while len(self._counted) <= epoch:
            self._counted.append(self.count(len(self._counted)))
        return self._counted[epoch]

    def num_steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch; the last one may have fewer micro-batches."""
        return -(-self.num_batches(epoch) // self.accumulation)

    def steps_in(self, num_epochs: float) -> int:
        """Optimizer steps of so many epochs; of a part of one, rounded up as transformers does."""
        if self.is_equal:
            return math.ceil(num_epochs * self.num_steps(0))
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
