"""Puts what a recipe recomputes into the model when training begins; measures for a budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from torch import nn

from trainkit.models.recompute.layers import Recomputed, Way, checkpointed_layers, every
from trainkit.models.recompute.offload import pays
from trainkit.options.recompute import RecomputeOptions
from trainkit.recipe import Recipe
from trainkit.run.files import write_json_atomic
from trainkit.train.faults.shortage import num_tokens
from trainkit.train.hooks import Hook, LoopState
from trainkit.train.recompute.budget import (
    GIB,
    MOST_STEPS,
    RECORD,
    STEPS,
    Choice,
    Measured,
    first_choice,
    next_choice,
    read_record,
    record_of,
    worst,
)
from trainkit.train.recompute.peaks import Memory, memory_of

ALL = RecomputeOptions(every=1)


def recompute_hook(recipe: Recipe, *, is_on: bool) -> Hook | None:
    """What a recipe says of activations, by the new keys or the older ones; None where nothing.

    Args:
        recipe: of the run.
        is_on: ``training.gradient_checkpointing``.
    """
    options = RecomputeOptions.of(recipe.recompute)
    if options is not None and options.budget_gib is not None:
        return KeepToBudget(options)
    offload: bool | Literal["auto"] = False
    if recipe.lora is not None:
        offload = recipe.lora.offload_activations
    if options is not None and options.selective:
        offload = False
    elif options is not None and options.offload != "auto":
        offload = options.offload
    return RecomputeLayers(options or ALL, offload) if is_on else None


class RecomputeLayers(Hook):
    """Has layers recompute, and offload, for as long as the training lasts.

    Not earlier: the loop enables checkpointing itself, when it begins.

    Args:
        options: which layers.
        offload: whether inputs of recomputed layers go to the host.
    """

    _layers: Recomputed | None = None

    def __init__(self, options: RecomputeOptions, offload: bool | Literal["auto"]) -> None:
        self._options, self._offload = options, offload

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Begin."""
        options, model = self._options, loop.model
        offload = pays(model, model.config, self._offload)
        is_plain = options.every == 1 and not options.selective
        if is_plain and not (offload and (self._offload is True or checkpointed_layers(model))):
            return  # as transformers has it, for models that checkpoint in their own way, too
        self._layers = Recomputed(model)
        way: Way = "full"
        if options.selective or offload:
            way = "selective" if options.selective else "offload"
        self._layers.apply(every(len(self._layers.layers), options.every or 1, way))

    def on_train_end(self, loop: LoopState) -> None:
        """Put the layers back as they were."""
        if self._layers is not None:
            self._layers.undo()


class KeepToBudget(Hook):
    """Measures steps, chooses the layers that recompute, and says what it chose.

    Args:
        options: with a budget.
    """

    def __init__(self, options: RecomputeOptions) -> None:
        self._options, self._budget_gib = options, options.budget_gib or 0.0
        self._budget = int(self._budget_gib * GIB)
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

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Take up an earlier choice, or begin to measure."""
        lengths = getattr(loop.train_data.samples, "lengths", None)
        longest = loop.run.recipe.data.max_length if lengths is None else int(max(lengths))
        self._largest_batch = longest * loop.args.per_device_train_batch_size
        self._conditions = {
            "budget_gib": self._budget_gib,
            "num_ranks": loop.run.process.world_size,
            "largest_batch": self._largest_batch,
        }
        self._layers = Recomputed(loop.model)
        count = len(self._layers.layers)
        known = read_record(loop.run.root / RECORD) or {}
        conditions = {**self._conditions, "layers": count}
        if all(known.get(key) == value for key, value in conditions.items()):
            self._apply(Choice(count, known["recomputed"], known["offloaded"]))
            self._is_chosen = True
            loop.run.console.note(f"recompute: {self._choice}, as chosen before")
            return
        self._apply(first_choice(count))
        self._memory = memory_of(loop.args.device)
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

    def on_step_begin(self, loop: LoopState) -> None:
        """Measure from here; the first step has made the optimizer's states."""
        if self._is_chosen or self._memory is None:
            return
        self._forget_step()
        self._memory.start()
        self._base = self._memory.now()

    def on_substep_end(self, loop: LoopState) -> None:
        """Note how large the micro-batch was."""
        if not self._is_chosen:
            self._tokens = max(self._tokens, num_tokens(loop.latest_batch))

    def on_pre_optimizer_step(self, loop: LoopState) -> None:
        """The activations' part of the step is over."""
        if not self._is_chosen and self._memory is not None:
            self._tokens = max(self._tokens, num_tokens(loop.latest_batch))
            self._peak = self._memory.peak()

    def on_step_end(self, loop: LoopState) -> None:
        """Choose for the next step; all ranks choose the same."""
        if self._is_chosen or self._memory is None or self._choice is None:
            return
        mine = self._measure(self._memory, self._choice)
        is_alone = loop.run.process.world_size == 1
        self._measured.append(mine if is_alone else worst(gather_object([mine])))
        offload = loop.args.device.type == "cuda" and self._options.offload is not False
        chosen = next_choice(self._budget, self._measured, offload=offload)
        number = len(self._measured)
        is_settled = number >= STEPS and chosen == self._choice
        self._apply(chosen)
        if is_settled or number >= MOST_STEPS:
            self._settle(loop)

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
            largest=max(self._largest_batch / max(self._tokens, 1), 1.0),
        )

    def _settle(self, loop: LoopState) -> None:
        assert self._choice is not None
        self.close()
        self._is_chosen = True
        console, latest = loop.run.console, self._measured[-1]
        if loop.run.process.is_main:
            found = record_of(self._conditions, self._choice, self._measured)
            write_json_atomic(loop.run.root / RECORD, found)
        peak = latest.step_peak / GIB
        text = (
            f"recompute: {self._choice}; {_gib(peak)} measured of a budget of "
            f"{_gib(self._budget_gib)}"
        )
        if latest.step_peak > self._budget:
            console.warn(
                f"{text}: that is what the rest of the step needs (weights, gradients, optimizer, "
                "one layer's activations); a smaller per_device_train_batch_size or "
                "data.max_length, or parallel.shard, takes less"
            )
        else:
            console.note(text)

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

    def on_train_end(self, loop: LoopState) -> None:
        """Put the layers back as they were."""
        if self._measured and not self._is_chosen:
            self._settle(loop)  # the run was shorter than the search
        self.close()
        if self._layers is not None:
            self._layers.undo()


def _goes_back() -> bool:
    """Whether a backward pass runs: a layer is then computed for the second time."""
    return bool(torch._C._current_graph_task_id() != -1)


def _gib(size: float) -> str:
    return f"{size:.1f} GiB" if size >= 0.95 else f"{size * 1024:.1f} MiB"
