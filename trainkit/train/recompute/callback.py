"""Puts what a recipe recomputes into the model when training begins; measures for a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from torch import nn
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from trainkit.models.recompute.layers import Recomputed, Way, checkpointed_layers, every
from trainkit.models.recompute.offload import pays
from trainkit.options.recompute import RecomputeOptions
from trainkit.run.files import write_json_atomic
from trainkit.train.recompute.budget import (
    GIB,
    MOST_STEPS,
    STEPS,
    Choice,
    Measured,
    first_choice,
    next_choice,
    record_of,
    worst,
)
from trainkit.train.recompute.peaks import Memory, memory_of

ALL = RecomputeOptions(every=1)


@dataclass(frozen=True)
class Wanted:
    """What a recipe says of activations.

    Attributes:
        options: None is ``training.gradient_checkpointing`` alone.
        offload: whether inputs of recomputed layers go to the host.
    """

    options: RecomputeOptions | None
    offload: bool | Literal["auto"]


class RecomputeLayers(TrainerCallback):
    """Has layers recompute, and offload, for as long as the training lasts.

    Not earlier: the loop enables checkpointing itself, when it begins.

    Args:
        model: what is trained.
        wanted: by the recipe.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, wanted: Wanted) -> None:
        self._model, self._options, self._offload = model, wanted.options or ALL, wanted.offload
        self._layers: Recomputed | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begin, where activations are checkpointed."""
        if not args.gradient_checkpointing:
            return
        options = self._options
        offload = pays(self._model, self._model.config, self._offload)
        is_plain = options.every == 1 and not options.selective
        if is_plain and not (offload and (self._offload is True or self._can_set())):
            return  # as transformers has it, for models that checkpoint in their own way, too
        self._layers = Recomputed(self._model)
        way: Way = "full"
        if options.selective or offload:
            way = "selective" if options.selective else "offload"
        self._layers.apply(every(len(self._layers.layers), options.every or 1, way))

    def _can_set(self) -> bool:
        return bool(checkpointed_layers(self._model))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Put the layers back as they were."""
        if self._layers is not None:
            self._layers.undo()


@dataclass(frozen=True)
class BudgetSetup:
    """What a budget needs of a run.

    Attributes:
        budget_gib: the peak of each GPU.
        offload: whether inputs may go to the host.
        largest_batch: tokens of the largest micro-batch there is.
        this_batch: tokens of the micro-batch that was computed last.
        num_ranks: that choose together.
        say: one line for the user.
        warn: one that matters.
        record: where rank 0 writes what was chosen; None on the others.
        known: the record of an earlier start. Under the same conditions nothing is measured.
    """

    budget_gib: float
    offload: bool
    largest_batch: int
    this_batch: Callable[[], int]
    num_ranks: int
    say: Callable[[str], None]
    warn: Callable[[str], None]
    record: Path | None
    known: Mapping[str, Any] | None = None

    @property
    def conditions(self) -> dict[str, Any]:
        """What a choice holds for."""
        return {
            "budget_gib": self.budget_gib,
            "num_ranks": self.num_ranks,
            "largest_batch": self.largest_batch,
        }

    def of_worst_rank(self, mine: Measured) -> Measured:
        """One step of all ranks, which must all call it."""
        if self.num_ranks == 1:
            return mine
        return worst(gather_object([mine]))


class KeepToBudget(TrainerCallback):
    """Measures steps, chooses the layers that recompute, and says what it chose.

    Args:
        model: what is trained.
        setup: of the run.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, setup: BudgetSetup) -> None:
        self._model, self._setup = model, setup
        self._budget = int(setup.budget_gib * GIB)
        self._layers: Recomputed | None = None
        self._memory: Memory | None = None
        self._handles: list[Any] = []
        self._measured: list[Measured] = []
        self._choice: Choice | None = None
        self._is_chosen = False
        self._forget_step()

    def _forget_step(self) -> None:
        self._base = self._peak = self._loss_peak = self._tokens = 0
        self._adds: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Take up an earlier choice, or begin to measure."""
        self._layers = Recomputed(self._model)
        count = len(self._layers.layers)
        known, conditions = self._setup.known or {}, {**self._setup.conditions, "layers": count}
        if all(known.get(name) == value for name, value in conditions.items()):
            self._apply(Choice(count, known["recomputed"], known["offloaded"]))
            self._is_chosen = True
            self._setup.say(f"recompute: {self._choice}, as chosen before")
            return
        self._apply(first_choice(count))
        self._memory = memory_of(args.device)
        for index, layer in enumerate(self._layers.layers):
            self._handles += [
                layer.register_forward_pre_hook(self._entering(index), prepend=True),
                layer.register_forward_hook(self._leaving(index)),
            ]

    def _entering(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self._memory is not None and not _goes_back():
                self._before[index] = self._memory.now()

        return hook

    def _leaving(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._memory is not None and not _goes_back() and index in self._before:
                added = self._memory.now() - self._before.pop(index)
                self._adds[index] = max(added, self._adds.get(index, 0))
                if module is self._last_layer:
                    self._note_at_loss(output)

        return hook

    @property
    def _last_layer(self) -> nn.Module | None:
        return None if self._layers is None else self._layers.layers[-1]

    def _note_at_loss(self, output: Any) -> None:
        """Read the peak when the gradient of the last layer's output has come."""
        hidden = output[0] if isinstance(output, tuple) else output

        def arrived(_: torch.Tensor) -> None:
            if self._memory is not None:
                self._loss_peak = max(self._loss_peak, self._memory.peak())

        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(arrived)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Measure from here; the first step has made the optimizer's states."""
        if self._is_chosen or self._memory is None:
            return
        self._forget_step()
        self._memory.start()
        self._base = self._memory.now()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note how large the micro-batch was."""
        if not self._is_chosen:
            self._tokens = max(self._tokens, self._setup.this_batch())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The activations' part of the step is over."""
        if not self._is_chosen and self._memory is not None:
            self._tokens = max(self._tokens, self._setup.this_batch())
            self._peak = self._memory.peak()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Choose for the next step; all ranks choose the same."""
        if self._is_chosen or self._memory is None or self._choice is None:
            return
        mine = self._measure(self._memory, self._choice)
        self._measured.append(self._setup.of_worst_rank(mine))
        chosen = next_choice(self._budget, self._measured, offload=self._setup.offload)
        number = len(self._measured)
        is_settled = number >= STEPS and chosen == self._choice
        self._apply(chosen)
        if is_settled or number >= MOST_STEPS:
            self._settle()

    def _measure(self, memory: Memory, choice: Choice) -> Measured:
        kept = [self._adds.get(i, 0) for i, way in enumerate(choice.ways) if way == "keep"]
        full = [self._adds.get(i, 0) for i, way in enumerate(choice.ways) if way == "full"]
        return Measured(
            choice,
            peak=self._peak or memory.peak(),
            loss_peak=self._loss_peak or memory.peak(),
            step_peak=memory.peak(),
            base=self._base,
            after=memory.now(),
            whole=max(kept, default=0),
            slim=max(full, default=0),
            largest=max(self._setup.largest_batch / max(self._tokens, 1), 1.0),
        )

    def _settle(self) -> None:
        assert self._choice is not None
        self.close()
        self._is_chosen = True
        setup, latest = self._setup, self._measured[-1]
        if setup.record is not None:
            found = record_of(setup.conditions, self._choice, self._measured)
            write_json_atomic(setup.record, found)
        peak = latest.step_peak / GIB
        text = (
            f"recompute: {self._choice}; {_gib(peak)} measured of a budget of "
            f"{_gib(setup.budget_gib)}"
        )
        if latest.step_peak > self._budget:
            setup.warn(
                f"{text}: that is what the rest of the step needs (weights, gradients, optimizer, "
                "one layer's activations); a smaller per_device_train_batch_size or "
                "data.max_length, or parallel.shard, takes less"
            )
        else:
            setup.say(text)

    def _apply(self, choice: Choice) -> None:
        assert self._layers is not None
        if choice != self._choice:
            self._layers.apply(choice.ways)
        self._choice = choice

    def close(self) -> None:
        """Measure no longer."""
        if self._memory is not None:
            self._memory.stop()
            self._memory = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Put the layers back as they were."""
        if self._measured and not self._is_chosen:
            self._settle()  # the run was shorter than the search
        self.close()
        if self._layers is not None:
            self._layers.undo()


def _goes_back() -> bool:
    """Whether a backward pass runs: a layer is then computed for the second time."""
    return bool(torch._C._current_graph_task_id() != -1)


def _gib(size: float) -> str:
    return f"{size:.1f} GiB" if size >= 0.95 else f"{size * 1024:.1f} MiB"
