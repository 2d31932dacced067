"""Puts what a recipe recomputes into the model when training begins; measures for a budget."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.models.recompute import Recomputed, Way, checkpointed_layers, every, pays
from trainkit.options.parallel import RecomputeOptions
from trainkit.recipe import Recipe
from trainkit.run.files import read_json, write_json_atomic
from trainkit.train.faults.shortage import num_tokens
from trainkit.train.hooks import Hook, LoopState

# Which layers to recompute, and to offload, so that the peak keeps to a budget. Arithmetic only.
#
# A layer that keeps its activations adds at most what it keeps to the peak. So from any measured
# step one can go on: keep as many more layers as the rest of the budget holds. Three steps make
# that exact, since the last one is measured where it matters; a few more follow where they
# differ. Where gradients decide the peak, at the end of the backward pass, most activations are
# gone by then: what counts for them is the peak around the loss, and a layer's own backward pass.
#
# Recomputed are the first layers: their backward pass comes last, when the activations of the
# layers that kept theirs are gone.

GIB = 2**30
AIM = 0.985
"""Of the budget, that is used: the allocator rounds, and rows are not all the same."""

STEPS, MOST_STEPS = 3, 12
"""Measured before the choice; more where the activations were not yet what decides the peak."""

RECORD = "recompute.json"
"""Of a run directory: what was measured, and what was chosen."""

HELD = 3
"""Layers whose offloaded inputs are on the GPU at a time."""


@dataclass(frozen=True)
class Choice:
    """What the layers do."""

    layers: int
    recomputed: int
    offloaded: int = 0

    @property
    def ways(self) -> tuple[Way, ...]:
        ways: list[Way] = ["offload"] * self.offloaded
        ways += ["full"] * (self.recomputed - self.offloaded)
        ways += ["keep"] * (self.layers - self.recomputed)
        return tuple(ways)

    def __str__(self) -> str:
        if not self.recomputed:
            return "no layer is recomputed"
        text = f"{self.recomputed} of {self.layers} layers are recomputed"
        return f"{text}, {self.offloaded} of them offloaded" if self.offloaded else text


@dataclass(frozen=True)
class Measured:
    """A step of the rank that needed the most. Bytes.

    Attributes:
        peak: until the optimizer's step.
        loss_peak: until the backward pass came to the last layer: when the most layers hold theirs.
        after: allocated when it had ended; the first step makes the optimizer's states.
        whole: a layer that keeps everything adds; 0 where no layer did.
        slim: a recomputed layer's input.
        largest: by what factor the run's largest batch has more tokens than the step's.
    """

    choice: Choice
    peak: int
    loss_peak: int
    step_peak: int
    base: int
    after: int
    whole: int
    slim: int
    largest: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        gib = {name: round(getattr(self, name) / GIB, 5) for name in ("step_peak", "base")}
        return {
            "recomputed": self.choice.recomputed,
            "offloaded": self.choice.offloaded,
            "peak_gib": gib["step_peak"],
            "before_gib": gib["base"],
            "layer_keeps_mib": round(self.whole / 2**20, 3),
            "layer_input_mib": round(self.slim / 2**20, 3),
            "largest_batch": round(self.largest, 4),
        }


def next_choice(budget: int, measured: Sequence[Measured], *, offload: bool = True) -> Choice:
    latest, choice = measured[-1], measured[-1].choice
    whole = max(each.whole for each in measured)
    slim = max(each.slim for each in measured)
    grown = max(latest.after - latest.base, 0)
    a_layer = (whole - slim) * latest.largest
    # Activations grow with the tokens; what was there before the step does not.
    peak, at_loss = (
        latest.base + grown + (size - latest.base) * latest.largest
        for size in (latest.peak, latest.loss_peak)
    )
    if whole and peak <= budget * AIM:
        peak = min(peak, at_loss + whole * latest.largest)
    spare = budget * AIM - peak
    an_input = slim * latest.largest
    recomputed, offloaded = choice.recomputed, choice.offloaded
    if a_layer > 0:
        more = int(spare // a_layer)  # below 0 where the peak is over the budget
        # What was too much once is not tried again.
        over = [each.choice.recomputed + 1 for each in measured if each.peak > budget * AIM]
        least = min(max(over, default=0), choice.layers)
        recomputed = min(max(recomputed - more, least), choice.layers)
        spare -= (choice.recomputed - recomputed) * a_layer
    if offload and recomputed == choice.layers and an_input > 0 and choice.layers > HELD:
        more = -int(spare // an_input)
        offloaded = min(max(offloaded + more, 0), choice.layers - HELD)
    return Choice(choice.layers, recomputed, offloaded if recomputed == choice.layers else 0)


def worst(each_rank: Sequence[Measured]) -> Measured:
    """One step of all ranks: the largest figure of each kind, so that all choose the same."""
    values = {
        name: max(getattr(rank, name) for rank in each_rank)
        for name in ("peak", "loss_peak", "step_peak", "base", "after", "whole", "slim", "largest")
    }
    return Measured(each_rank[0].choice, **values)


# Memory as a step goes: what is allocated, and the most that was. On a CPU it is counted.


class GpuMemory:
    """The allocator's own figures, in bytes."""

    start = staticmethod(torch.cuda.reset_peak_memory_stats)
    now = staticmethod(torch.cuda.memory_allocated)
    peak = staticmethod(torch.cuda.max_memory_allocated)

    def stop(self) -> None:
        """Nothing to undo."""


class CountedMemory(TorchDispatchMode):
    """Every tensor of a CPU that is there or that this thread makes, until it is gone."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._now = self._peak = 0
        for each in gc.get_objects():
            # Tensors without numbers say "cpu", too; their memory is nowhere.
            if issubclass(type(each), Tensor) and each.untyped_storage().device.type == "cpu":
                self._count(each)
        self._is_on = False

    def start(self) -> None:
        if not self._is_on:
            self.__enter__()
            self._is_on = True
        self._peak = self._now

    def now(self) -> int:
        return self._now

    def peak(self) -> int:
        return self._peak

    def stop(self) -> None:
        if self._is_on:
            self.__exit__(None, None, None)
            self._is_on = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self._count(each)
        return result

    def _count(self, tensor: Tensor) -> None:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._now += self._sizes[key]
        self._peak = max(self._peak, self._now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)


ALL = RecomputeOptions(every=1)


def recompute_hooks(recipe: Recipe, *, is_on: bool) -> list[Hook]:
    """What a recipe says of activations, by the new keys or the older ones."""
    options = RecomputeOptions.of(recipe.recompute)
    if options is not None and options.budget_gib is not None:
        return [KeepToBudget(options)]
    offload: bool | Literal["auto"] = False
    if recipe.lora is not None:
        offload = recipe.lora.offload_activations
    if options is not None and options.selective:
        offload = False
    elif options is not None and options.offload != "auto":
        offload = options.offload
    return [RecomputeLayers(options or ALL, offload)] if is_on else []


class RecomputeLayers(Hook):
    """Has layers recompute, and offload, for as long as the training lasts.

    Not earlier: the loop enables checkpointing itself, when it begins.
    """

    _layers: Recomputed | None = None

    def __init__(self, options: RecomputeOptions, offload: bool | Literal["auto"]) -> None:
        self._options, self._offload = options, offload

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
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
        if self._layers is not None:
            self._layers.undo()


class KeepToBudget(Hook):
    """Measures steps, chooses the layers that recompute, and says what it chose."""

    def __init__(self, options: RecomputeOptions) -> None:
        self._options, self._budget_gib = options, options.budget_gib or 0.0
        self._budget = int(self._budget_gib * GIB)
        self._layers: Recomputed | None = None
        self._memory: GpuMemory | CountedMemory | None = None
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
        record = read_json(loop.run.root / RECORD)  # of an earlier start
        known = record if isinstance(record, dict) else {}
        conditions = {**self._conditions, "layers": count}
        if all(known.get(key) == value for key, value in conditions.items()):
            self._apply(Choice(count, known["recomputed"], known["offloaded"]))
            self._is_chosen = True
            loop.run.console.note(f"recompute: {self._choice}, as chosen before")
            return
        # All but the last one, which shows what a layer keeps.
        self._apply(Choice(count, max(count - 1, 1)))
        self._memory = GpuMemory() if loop.args.device.type == "cuda" else CountedMemory()
        for index, layer in enumerate(self._layers.layers):
            self._handles += [
                layer.register_forward_pre_hook(self._entering(index), prepend=True),
                layer.register_forward_hook(self._leaving(index)),
            ]

    def _entering(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self._memory is not None and not _is_backward():
                self._before[index] = self._memory.now()

        return hook

    def _leaving(self, index: int) -> Callable[..., None]:
        def at_loss(_: torch.Tensor) -> None:
            if self._memory is not None:
                self._loss_peak = max(self._loss_peak, self._memory.peak())

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._memory is None or _is_backward() or index not in self._before:
                return
            added = self._memory.now() - self._before.pop(index)
            self._adds[index] = max(added, self._adds.get(index, 0))
            hidden = output[0] if isinstance(output, tuple) else output
            is_last = self._layers is not None and module is self._layers.layers[-1]
            if is_last and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(at_loss)  # when the gradient of its output has come

        return hook

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
        if not self._is_chosen and self._memory is not None:
            self._tokens = max(self._tokens, num_tokens(loop.latest_batch))
            self._peak = self._memory.peak()

    def on_step_end(self, loop: LoopState) -> None:
        """Choose for the next step; all ranks choose the same."""
        if self._is_chosen or self._memory is None or self._choice is None:
            return
        memory, choice = self._memory, self._choice
        kept, full = (
            [self._adds.get(i, 0) for i, each in enumerate(choice.ways) if each == way]
            for way in ("keep", "full")
        )
        mine = Measured(
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
        self._measured.append(worst(gather_object([mine])))
        offload = loop.args.device.type == "cuda" and self._options.offload is not False
        chosen = next_choice(self._budget, self._measured, offload=offload)
        number = len(self._measured)
        is_settled = number >= STEPS and chosen == self._choice
        self._apply(chosen)
        if is_settled or number >= MOST_STEPS:
            self._settle(loop)

    def _settle(self, loop: LoopState) -> None:
        assert self._choice is not None
        self.close()
        self._is_chosen = True
        console, latest = loop.run.console, self._measured[-1]
        if loop.run.process.is_main:
            steps = [each.to_dict() for each in self._measured]
            found = {**self._conditions, **asdict(self._choice), "measured": steps}
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
        if self._memory is not None:
            self._memory.stop()
            self._memory = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def on_train_end(self, loop: LoopState) -> None:
        if self._measured and not self._is_chosen:
            self._settle(loop)  # the run was shorter than the search
        self.close()
        if self._layers is not None:
            self._layers.undo()


def _is_backward() -> bool:
    """Whether a backward pass runs: a layer is then computed for the second time."""
    return bool(torch._C._current_graph_task_id() != -1)


def _gib(size: float) -> str:
    return f"{size:.1f} GiB" if size >= 0.95 else f"{size * 1024:.1f} MiB"
