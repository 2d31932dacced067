"""What a strategy of spreading a run over processes does, and how plain DDP does it.

A strategy owns its step: it places the model, takes it forward and backward, updates it, saves and
loads it. Whoever holds one never asks which. Another one is a subclass that does some of it
otherwise, and a row of ``strategies.py``.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate.utils import convert_to_fp32
from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.checkpoint.weights.contents import saved_by_torch, taking_up
from trainkit.parallel.parameters import all_ranks
from trainkit.parallel.part_files import (
    WITHOUT,
    by_name,
    refuse_other,
    refuse_unfit_state,
    without_state,
)
from trainkit.parallel.process import ProcessRank

# A copy of a state that training cannot change any more, so that it can be written meanwhile.

_Copies = dict[Any, tuple[torch.Tensor, torch.Tensor]]
"""A place in memory to the tensor there and its copy. The tensor is held: what a composed one is
made of may be made for the asking, and once let go of, its place is another's."""


@torch.no_grad()
def snapshot(value: Any) -> Any:
    """Copy every tensor of a nested state to the host; other values are copied shallowly.

    Tensors that are one stay one. Copies from a GPU go into pinned memory, all of them at once, and
    are complete when this returns.
    """
    copies: _Copies = {}
    found = _copy(value, copies)
    if any(device != "cpu" for *_, device in copies):
        torch.cuda.synchronize()
    return found


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested state that `snapshot` copies: each once."""
    found: dict[Any, torch.Tensor] = {}

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if is_composed(value):
                inner = value.__tensor_flatten__()[0]  # type: ignore[attr-defined]
                walk([getattr(value, name) for name in inner])
            else:
                found[value.data_ptr(), value.shape] = value
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif type(value) in (list, tuple):
            for each in value:
                walk(each)

    walk(value)
    return list(found.values())


def pin_ahead(tensors: Iterable[torch.Tensor]) -> threading.Thread | None:
    """Have the pinned memory made that `snapshot` will copy these into, while the caller goes on.

    The driver takes most of a second for a GiB. What torch has once made it keeps, and hands out
    again for whatever has a like size.

    Returns:
        What does it; None where there is nothing to do.
    """
    on_gpu = [each for each in tensors if each.device.type == "cuda"]
    if not on_gpu:
        return None
    device, sizes = on_gpu[0].device, [each.numel() * each.element_size() for each in on_gpu]

    def make() -> None:
        torch.cuda.set_device(device)  # a thread begins with the first GPU
        with suppress(RuntimeError):  # without so much memory the save itself will say so
            held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            del held

    thread = threading.Thread(target=make, name="pin", daemon=True)
    thread.start()
    return thread


def is_composed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of others and has no memory of its own, as torchao's states are."""
    return hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "to_local")


def _copy(value: Any, copies: _Copies) -> Any:
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value, copies)
    if isinstance(value, dict):
        items = {key: _copy(item, copies) for key, item in value.items()}
        if type(value) is dict:
            return items
        other = copy.copy(value)  # an ordered dictionary, with what hangs on it
        other.update(items)
        return other
    if type(value) in (list, tuple):
        return type(value)(_copy(item, copies) for item in value)
    return copy.copy(value)


def _copy_tensor(tensor: torch.Tensor, copies: _Copies) -> torch.Tensor:
    if is_composed(tensor):
        names, meta = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: _copy_tensor(getattr(tensor, name), copies) for name in names}
        make = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
        whole: torch.Tensor = make(inner, meta, tensor.shape, tensor.stride())
        return whole
    place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type)
    if place in copies and tensor.numel():
        return copies[place][1]
    if tensor.device.type == "cuda":
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies[place] = tensor, host.copy_(tensor, non_blocking=True)
    else:
        copies[place] = tensor, tensor.clone()
    return copies[place][1]


def on_device(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """Numbers of the host as float64 on the device; nothing waits until they are there."""
    host = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class Fetched:
    """A tensor on its way to the host, while the device goes on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ready: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host = host.copy_(tensor, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def tolist(self) -> list[float]:
        """Its numbers; waits for what the device had in its queue when the copy was asked for."""
        if self._ready is not None:
            self._ready.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


class Ranks:
    """All that the parts of a run ask of the others."""

    def __init__(self, args: Any) -> None:
        self.device: torch.device = args.device
        self.num_processes: int = args.world_size
        self.process_index: int = args.process_index
        self.is_main_process = self.process_index == 0

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        """The sum, or the mean, over the ranks; all of them get it."""
        total = tensor.clone()
        if self.num_processes > 1:
            torch.distributed.all_reduce(total)
        return total / self.num_processes if reduction == "mean" else total


OPTIMIZER, SCALER = "optimizer.pt", "scaler.pt"
HALF_DTYPES = (torch.bfloat16, torch.float16)
_BITSANDBYTES = "bitsandbytes"

Batch = dict[str, Any]
"""What the model and the loss take of a micro-batch, on the device."""

LoadPart = Callable[[type, Any, Callable[[type], tuple[Any, Any]]], tuple[Any, Any]]


class Saving(Protocol):
    """Where a strategy's files of a checkpoint, or of a model, go: at once or in the background."""

    directory: Path

    def copied(self, state: Any) -> Any:
        """A state that training cannot change while it is written."""

    def defer(self, path: Path | None, job: Callable[[], object]) -> None:
        """Have ``job`` write, perhaps later; ``path`` is its only file, or None."""

    def attempt(self, job: Callable[[], object]) -> None:
        """Write a small file now."""


@dataclass(frozen=True)
class Training:
    """What a strategy trains."""

    model: Any
    optimizer: Any
    args: Any
    ranks: Ranks
    num_steps: int
    averages: bool = False


@runtime_checkable
class GradientHolder(Protocol):
    """An optimizer that has the gradients, or knows their norm, in place of the parameters."""

    def begin_micro_batch(self, model: Any, *, accumulates: bool) -> None:
        """Before each micro-batch; the wrapper's ``no_sync`` is entered already."""

    def gather_gradients(self) -> Any:
        """All gradients are there; returns what has them as ``parameters()``."""

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """Clip; the norm before, or None where the gradients wait to be clipped."""


def autocast_of(args: Any) -> Callable[[], AbstractContextManager[Any]]:
    """What forward passes compute under, as ``training.bf16`` and ``fp16`` say."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    return nullcontext if dtype is None else partial(torch.autocast, args.device.type, dtype=dtype)


class Engine:
    """One process, or one of several that each have the model, its gradients and its states.

    Every other strategy is a subclass that answers what differs.

    Attributes:
        keeps_masters: it keeps fp32 copies of half-precision weights, so the optimizer must not.
        shards_optimizer: each rank holds a part of the optimizer's state.
        reshards: another number of ranks can take up those parts.
        packages: whose versions decide the curve.
        load_part: loads what this rank holds of a model: (class, configuration, ``from_pretrained``
            of a class, with its report); None where each rank loads all of it.
    """

    keeps_masters = False
    holds_whole_model = True
    shards_optimizer = False
    reshards = False
    packages: tuple[str, ...] = ()
    load_part: LoadPart | None = None

    model: Any
    wrapped: Any
    _optimizer: Any
    _holder: GradientHolder | None = None
    scaler: torch.amp.GradScaler | None = None

    # -- before there is a model ------------------------------------------------------------------

    def refuse_contradictions(self, training: Mapping[str, Any], *, world_size: int) -> None:
        """Refuse settings of the engine's own file that the recipe gives otherwise."""

    def prepare(self, process: ProcessRank, *, on_cpu: bool) -> None:
        """Before TrainingArguments exist."""

    def training_arguments(self, *, num_micro_batches: int) -> dict[str, Any]:
        """What TrainingArguments are given besides the recipe's."""
        del num_micro_batches
        return {}

    def start(self, *, on_cpu: bool) -> None:
        """Once the process group exists, before the model is loaded."""

    def refuse_model(self, config: Any, replica_of: Callable[[Any], Any]) -> None:
        """Refuse a model that cannot be spread so, from its configuration or a small replica."""

    # -- the model, before it trains --------------------------------------------------------------

    def reads_parts(self, device: torch.device) -> Callable[[nn.Module], bool] | None:
        """Says of a model on the meta device whether each rank reads its part of it in `place`.

        None of an engine whose models are loaded before they are spread.
        """
        del device
        return None

    def loading_device(self, device: torch.device) -> torch.device | None:
        """Where weights go as they are loaded; None leaves it to the engine."""
        return device

    def gathering(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within, a model that no engine has wrapped yet can run, its weights sharded or not."""
        del model
        return nullcontext()

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Spread the model over the ranks, in place; before the optimizer is made."""

    def receive(self, model: nn.Module, args: Any) -> None:
        """Onto the device, but what has no memory yet or is there already."""
        self.model, self.wrapped, self.args = model, model, args
        is_there = getattr(model, "quantization_method", None) == _BITSANDBYTES
        if not is_there and not any(each.is_meta for each in model.parameters()):
            model.to(args.device)

    def set_up(self, training: Training) -> nn.Module:
        """All is made; returns the model as it is called in training."""
        self._hold(training)
        self._cast()
        if self.ranks.num_processes > 1 and not training.averages:
            args = self.args
            options = {
                "find_unused_parameters": args.ddp_find_unused_parameters,
                "bucket_cap_mb": args.ddp_bucket_cap_mb,
                "broadcast_buffers": args.ddp_broadcast_buffers,
                "static_graph": args.ddp_static_graph,
            }
            given = {name: value for name, value in options.items() if value is not None}
            devices = [args.device] if args.device.type == "cuda" else None
            self.wrapped = DistributedDataParallel(self.model, device_ids=devices, **given)
        return self._compiled()

    def forget(self) -> None:
        """Let go of the model that was trained: another one will be."""
        self.model = self.wrapped = self._optimizer = self._holder = self.scaler = None
        self._trained = self._adapter = None

    def _hold(self, training: Training) -> None:
        self.model = self.wrapped = training.model
        self._optimizer, self.args, self.ranks = training.optimizer, training.args, training.ranks
        self._holder = (
            training.optimizer if isinstance(training.optimizer, GradientHolder) else None
        )
        self.scaler = torch.amp.GradScaler(self.args.device.type) if self.args.fp16 else None

    def _cast(self) -> None:
        """Autocast around the forward pass alone, and what it returns in fp32.

        Label smoothing takes logits, and has them in fp32. It is the model's own forward, since
        answers during training and the proofs before the first step call that, too.
        """
        autocast, forward = autocast_of(self.args), self.model.forward
        if autocast is nullcontext:
            return

        @functools.wraps(forward)
        def cast(*given: Any, **named: Any) -> Any:
            with autocast():
                outputs = forward(*given, **named)
            return convert_to_fp32(outputs)

        self.model.forward = cast

    def _compiled(self) -> Any:
        args = self.args
        if args.torch_compile:
            self.wrapped = torch.compile(
                self.wrapped, backend=args.torch_compile_backend, mode=args.torch_compile_mode
            )
        return self.wrapped

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    # -- steps ------------------------------------------------------------------------------------

    def forward_backward(
        self,
        batches: Iterable[Batch],
        count: int,
        loss: Callable[[Any, Batch], torch.Tensor],
        watch: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """All micro-batches of a step.

        Returns:
            The losses, 0-d each, on every rank.
        """
        accumulates = self.args.gradient_accumulation_steps > 1
        losses = []
        for number, batch in enumerate(batches, 1):
            is_last = number == count
            with nullcontext() if is_last else self._apart():
                if self._holder is not None:
                    self._holder.begin_micro_batch(self.wrapped, accumulates=accumulates)
                found = loss(self.wrapped, batch)
                factor = watch(found.detach())
                found = found if factor is None else found * factor
                self._backward(found, is_last=is_last)
            losses.append(found.detach())
        return losses

    def _apart(self) -> AbstractContextManager[Any]:
        """Within, ranks do not add their gradients up yet."""
        of_accelerate = self.args.accelerator_config.gradient_accumulation_kwargs or {}
        if of_accelerate.get("sync_each_batch"):
            return nullcontext()
        found: AbstractContextManager[Any] = getattr(self.wrapped, "no_sync", nullcontext)()
        return found

    def _backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        del is_last
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(
        self,
        max_norm: float,
        judge: Callable[[torch.Tensor | float | None, Any], None],
        before: Callable[[], None],
    ) -> tuple[torch.Tensor | float | None, bool]:
        """Clip, hear the verdict on the numbers, step.

        Args:
            max_norm: infinite where nothing is clipped.
            judge: is told the norm, and whose step is to be held back if it is bad: None where that
                is done here.
            before: is called when the step is about to be taken.

        Returns:
            The norm before clipping, and whether the schedule goes on.
        """
        norm = None if self._holder is None else self._holder.clip(max_norm)
        if norm is None:
            norm = self._clipped(max_norm)
        judge(norm, self._optimizer if self.scaler is None else None)
        before()
        if self.scaler is None:
            self._optimizer.step()
            return norm, True
        scale = self.scaler.get_scale()
        self.scaler.step(self._optimizer)
        self.scaler.update()
        # torch's fused optimizers hold back on the device, and the schedule goes on by the plan.
        is_fused = getattr(self._optimizer, "_step_supports_amp_scaling", False)
        return norm, is_fused or self.scaler.get_scale() >= scale

    def _clipped(self, max_norm: float) -> torch.Tensor:
        holder = None if self._holder is None else self._holder.gather_gradients()
        if self.scaler is not None:
            self.scaler.unscale_(self._optimizer)
        parameters = self._trains() if holder is None else holder.parameters()
        return all_ranks(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

    def clear(self) -> None:
        """Let go of the step's gradients."""
        for each in self._trains():
            each.grad = None
        if self._holder is not None and self.scaler is not None:
            self._optimizer.zero_grad()  # of a step that the scaler has skipped they are there yet

    def evaluate(self, batch: Batch, measure: Callable[[Any, Batch], Any]) -> Any:
        """What ``measure`` says of a batch; None on a rank that has no part in the answer."""
        return measure(self.wrapped, batch)

    def figures(self) -> Mapping[str, float]:
        """For the log, since the last call; every rank calls it."""
        return {}

    def runnable(self, model: nn.Module) -> nn.Module:
        """The model as something that gives logits when all ranks call it together."""
        return model

    # -- files ------------------------------------------------------------------------------------

    def save_weights(self, save: Saving, write: Callable[[Mapping[str, Any]], None]) -> None:
        """Write the model as ``from_pretrained`` reads it; every rank calls it."""
        if self.args.should_save:
            save.defer(None, partial(write, save.copied(self._saved_weights())))

    _trained: list[nn.Parameter] | None = None
    _adapter: tuple[tuple[int, ...], dict[str, Any]] | None = None

    def _trains(self) -> list[nn.Parameter]:
        """What is trained; to go through a thousand modules each step takes milliseconds."""
        if self._trained is None:
            self._trained = [each for each in self.model.parameters() if each.requires_grad]
        return self._trained

    def _saved_weights(self) -> dict[str, Any]:
        """What ``save_pretrained`` writes of the model's state; of a frozen base, nothing."""
        if not isinstance(self.model, PeftModel):
            return dict(self.model.state_dict())
        places = tuple(each.data_ptr() for each in self._trains())
        if self._adapter is None or self._adapter[0] != places:
            weights: dict[str, Any] = self.model.state_dict()
            kept = get_peft_model_state_dict(self.model, state_dict=weights)
            held = {tensor.data_ptr() for tensor in kept.values()}
            self._adapter = (
                places,
                {
                    name: tensor
                    for name, tensor in weights.items()
                    if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in held
                },
            )
        return dict(self._adapter[1])

    def save_state(self, save: Saving) -> None:
        """Write what continues the run exactly, besides the weights; every rank calls it."""
        if not self.args.should_save:
            return
        path = save.directory / OPTIMIZER
        state = save.copied(self._optimizer.state_dict())
        state[WITHOUT] = without_state(self.model, self._optimizer)
        save.defer(path, partial(torch.save, state, path))
        if self.scaler is not None:
            state = self.scaler.state_dict()
            save.attempt(partial(torch.save, state, save.directory / SCALER))

    def copied_by_a_save(self) -> list[torch.Tensor]:
        """The tensors that this rank copies for a checkpoint, as often as it copies them."""
        if not self.args.should_save:
            return []
        return [*tensors_of(self._saved_weights()), *tensors_of(self._optimizer.state_dict())]

    def load_state(self, folder: Path, step: int) -> None:
        """Behind `set_up`: what `save_state` wrote at a step."""
        # Of one process through the host, whose memory is the larger one.
        is_alone = self.ranks.num_processes == 1 or self.args.device.type == "cpu"
        path = folder / OPTIMIZER
        saved = saved_by_torch(path, "cpu" if is_alone else self.args.device)
        with taking_up(path):
            named = by_name(self.model, self._optimizer, saved, path)
            refuse_unfit_state(self.model, self._optimizer, named, path, step)
            saved.pop(WITHOUT, None)
            self._optimizer.load_state_dict(saved)
        if self.scaler is not None:
            path = folder / SCALER
            state = saved_by_torch(path)
            with taking_up(path):
                refuse_other(path, state, self.scaler.state_dict())
                self.scaler.load_state_dict(state)

    def load_best(self, folder: Path, read: Callable[[], None]) -> None:
        """The weights of another checkpoint of the run; ``read`` reads them from whole files."""
        read()

    def load_weights(self, model: nn.Module, read: Callable[[], None]) -> None:
        """Before `place`: take up a checkpoint's weights, which ``read`` reads from whole files."""
        read()

    def saved_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """What a parameter is saved in."""
        del name
        return parameter.dtype

    def saved_bytes(self, name: str, parameter: nn.Parameter) -> int:
        """Of each number of a parameter in a checkpoint, the optimizer's state left out."""
        return self.saved_dtype(name, parameter).itemsize

    def whole_model(self, model: nn.Module, reload: Callable[[], nn.Module]) -> nn.Module:
        """A model that each rank can run by itself, after training."""
        del reload
        return model
