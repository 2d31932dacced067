"""One optimizer step's micro-batches through the stages, forth and back, by a schedule of torch's.

What goes from stage to stage has one size for all micro-batches of a step, as torch's stages want
it: (T, H), the states of as many tokens as the largest micro-batch has, padded. Each stage knows
the batches, and takes and gives what is in them; so a micro-batch is computed as it would be alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from transformers.modeling_layers import GradientCheckpointingLayer

from trainkit.evaluation_mode import changed
from trainkit.parallel.pipeline.chain import RunLoss, Stage
from trainkit.parallel.pipeline.share import Schedule, Share

# Checkpointing by the stage, for schedules that split the backward pass in two.
#
# Layers checkpointed one by one are recomputed for each call of autograd: once for the gradient
# of a stage's input, and once more for each group of its weights. A stage as a whole is
# recomputed once when its backward pass begins, and kept until its weights have their gradients.
# That takes no more memory, for what the weights' part needs has to stay that long either way.


@contextmanager
def layers_kept(stages: Sequence[Stage]) -> Iterator[bool]:
    """Have no layer checkpoint itself; says whether any would have."""
    layers = dict.fromkeys(
        layer
        for stage in stages
        for layer in stage.modules()
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
    )
    with changed((layer, "gradient_checkpointing", False) for layer in layers):
        yield bool(layers)


class TwiceRun:
    """Forward passes that are run without a graph, and again with one; with the same dropout."""

    def __init__(self) -> None:
        self._random: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def first(self, number: int, device: torch.device, run: Callable[[], Any]) -> Any:
        """Run the forward pass of a micro-batch, and keep nothing but its result."""
        on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._random[number] = torch.get_rng_state(), on_gpu
        with torch.no_grad():
            return run()

    def again(self, number: int, device: torch.device, run: Callable[[], Any]) -> Any:
        """Run it once more, for the backward pass; what comes next draws as if it had not been."""
        on_cpu, on_gpu = self._random.pop(number)
        devices = [] if on_gpu is None else [device]
        with torch.random.fork_rng(devices), torch.enable_grad():
            torch.set_rng_state(on_cpu)
            if on_gpu is not None:
                torch.cuda.set_rng_state(on_gpu, device)
            return run()


# The weights' part of a backward pass, put off: ``zbv`` fills with it the time others wait.
#
# torch.distributed.pipelining can split a backward pass itself. It walks over autograd's graph in
# Python for each stage and micro-batch, and then asks for the weights' gradients group by group,
# which takes the host longer than the device computes; before 2.13 the gradients are wrong where
# a function has several outputs. Here the backward pass is an ordinary one, in which linear maps
# keep what their weights' gradients are made of.


class LateWeights:
    """Products that are not formed yet."""

    def __init__(self) -> None:
        self._waiting: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []

    def put(self, weight: nn.Parameter, given: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep what makes a weight's gradient.

        Args:
            weight: (O, I).
            given: (..., I), what the linear map was given.
            gradient: (..., O), of what it returned.
        """
        self._waiting.append((weight, given, gradient))

    def take(self) -> Callable[[], None]:
        """What forms the products that were put here since the last call, and adds them up."""
        waiting, self._waiting = self._waiting, []

        def form() -> None:
            for weight, given, gradient in waiting:
                left, right = gradient.flatten(0, -2).mT, given.flatten(0, -2).to(gradient.dtype)
                if weight.grad is None:
                    weight.grad = (left @ right).to(weight.dtype)
                elif weight.dtype == left.dtype:
                    weight.grad.addmm_(left, right)
                else:
                    weight.grad += left @ right
            waiting.clear()

        return form

    @contextmanager
    def of(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Have linear maps whose weights are trained put their products here."""
        maps = [
            each
            for each in dict.fromkeys(modules)
            if type(each) is nn.Linear and each.weight.requires_grad
        ]
        for each in maps:
            each.__class__, each.__dict__["late_weights"] = _Linear, self
        try:
            yield
        finally:
            for each in maps:
                each.__class__ = nn.Linear
                del each.__dict__["late_weights"]


class _Linear(nn.Linear):
    """What a linear map is meanwhile."""

    late_weights: LateWeights

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Product.apply(given, self.weight, self.bias, self.late_weights)
        return found


class _Product(torch.autograd.Function):
    """``given @ weight.T + bias``, whose weight gets its gradient elsewhere."""

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        weight: nn.Parameter,
        bias: torch.Tensor | None,
        late: LateWeights,
    ) -> torch.Tensor:
        ctx.save_for_backward(given)
        ctx.weight, ctx.late = weight, late
        return nn.functional.linear(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (given,) = ctx.saved_tensors
        ctx.late.put(ctx.weight, given, gradient)
        wants_given, _, wants_bias, _ = ctx.needs_input_grad
        back = (gradient @ ctx.weight.to(gradient.dtype)).to(given.dtype) if wants_given else None
        bias = gradient.flatten(0, -2).sum(0).to(ctx.weight.dtype) if wants_bias else None
        return back, None, bias, None


class Clock:
    """Sums stretches of time on one device.

    On a GPU the stretches lie between events of the stream; reading waits for the last of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._stretches: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def running(self) -> Iterator[None]:
        begin = self._now()
        yield
        self._stretches.append((begin, self._now()))

    def take(self) -> float:
        """Seconds since the last call."""
        stretches, self._stretches = self._stretches, []
        if not self._is_cuda:
            return float(sum(end - begin for begin, end in stretches))
        for _, end in stretches[-1:]:
            end.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in stretches) / 1e3


_TOKENS_STEP = 64
"""The size of what is sent grows by so many tokens, so that it settles soon."""


@dataclass(frozen=True)
class Wire:
    """What the ranks of a pipeline agree on."""

    group: Any
    last: int
    device: torch.device
    hidden_size: int
    dtype: torch.dtype


class _Sent(nn.Module):
    """A stage as torch runs it: padded states and the number of a micro-batch in, the same out."""

    def __init__(self, stage: Stage, wire: Wire) -> None:
        super().__init__()
        self.stage = stage
        self._wire = wire
        self.num_tokens = 0
        self.batches: Sequence[Mapping[str, Any]] = ()
        self.loss: RunLoss | None = None
        self.recomputes = False

    def forward(self, states: torch.Tensor, *, number: torch.Tensor) -> torch.Tensor:
        """(T, H) padded states; the last stage gives a loss, 0-d."""
        batch = self.batches[int(number)]
        shape = batch["input_ids"].shape
        if not self.stage.is_first:
            states = states[: shape.numel()].view(*shape, self._wire.hidden_size)
        assert self.loss is not None
        found: torch.Tensor = self.stage.run(states, batch, self.loss)
        if self.stage.is_last:
            return found
        flat = found.to(self._wire.dtype).flatten(0, 1)
        return nn.functional.pad(flat, (0, 0, 0, self.num_tokens - len(flat)))


class _Timed(PipelineStage):
    """Knows how long it computes; waiting for others is no part of it."""

    clock: Clock
    twice: TwiceRun

    @property
    def _recomputes(self) -> bool:
        # The last stage's backward pass comes next: there is nothing to save.
        return bool(self.submod.recomputes) and not self.is_last

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.running():
            return super().forward_one_chunk(*args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's; where the backward pass will recompute the stage, without a graph."""
        run = partial(super().forward_maybe_with_nosync, *args, **kwargs)
        if not self._recomputes:
            return run()
        return self.twice.first(int(kwargs["number"]), self.device, run)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.clock.running():
            if self._recomputes:
                _, (given, number) = self.fwd_cache[bwd_chunk_id]
                run = partial(super().forward_maybe_with_nosync, given, number=number)
                output = self.twice.again(bwd_chunk_id, self.device, run)
                self.fwd_cache[bwd_chunk_id] = (output,), [given, number]
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.running():
            super().backward_weight_one_chunk(*args, **kwargs)

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Not with itself: torch before 2.13 has a rank with two neighbouring stages try that."""
        found: list[Any] = super()._get_init_p2p_neighbors_ops()
        return [each for each in found if each.group_peer != self.group_rank]


class Steps:
    """Runs steps of a fixed number of micro-batches."""

    def __init__(self, stages: Sequence[Stage], share: Share, row: Schedule, wire: Wire) -> None:
        self._sent = [_Sent(stage, wire) for stage in stages]
        self._share, self._row, self._wire = share, row, wire
        self.busy, self.whole = Clock(wire.device), Clock(wire.device)
        self._late = LateWeights()
        self._gather: Callable[[], object] = lambda: None
        self._schedule: Any = None
        self._made_for = (0, 0)

    def run(
        self, batches: Sequence[Mapping[str, Any]], loss: RunLoss, gather: Callable[[], object]
    ) -> torch.Tensor:
        """Add a step's gradients to those of the parameters.

        ``gather`` takes what gradients there are into fp32, where somebody keeps them so.

        Returns:
            The loss of each micro-batch, (M,) float32, on every rank.
        """
        self._gather = gather
        if not self._row.splits_backward:
            return self._run(batches, loss)
        stages = [sent.stage for sent in self._sent]
        # The head's product would keep the gradients of all logits.
        inner = [each for stage in stages for layer in stage.layers() for each in layer.modules()]
        with layers_kept(stages) as recomputes, self._late.of(inner):
            for sent in self._sent:
                sent.recomputes = recomputes
            return self._run(batches, loss)

    def _run(self, batches: Sequence[Mapping[str, Any]], loss: RunLoss) -> torch.Tensor:
        self._prepare(batches)
        for sent in self._sent:
            sent.batches, sent.loss = batches, loss
            sent.num_tokens = self._made_for[0]
        numbers = torch.arange(len(batches))
        first = (numbers,) if self._share.has_first else ()
        losses: list[torch.Tensor] | None = [] if self._share.has_last else None
        target = numbers if self._share.has_last else None
        with self.whole.running():
            self._schedule.step(
                *first, target=target, losses=losses, return_outputs=False, number=numbers
            )
        for sent in self._sent:
            sent.batches, sent.loss = (), None
        found = torch.zeros(len(batches), device=self._wire.device)
        if losses is not None:
            found = torch.stack([each.detach().float() for each in losses])
        torch.distributed.broadcast(found, src=self._wire.last, group=self._wire.group)
        return found

    def _put_off(self) -> Callable[[], None]:
        """The weights' part of the backward pass that has just been."""
        form = self._late.take()

        def run() -> None:
            form()
            self._gather()  # it adds to gradients past autograd, and so past autograd's hooks

        return run

    def _prepare(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Have a schedule for as many micro-batches, and buffers for the largest of them."""
        largest = max(batch["input_ids"].numel() for batch in batches)
        size, number = self._made_for
        if largest > size or len(batches) != number:
            size = max(-(-largest // _TOKENS_STEP) * _TOKENS_STEP, size)
            self._schedule = self._make(size, len(batches))
            self._made_for = size, len(batches)

    def _make(self, num_tokens: int, num_micro_batches: int) -> Any:
        wire, num_stages = self._wire, self._share.num_stages

        def meta(*shape: int, dtype: torch.dtype, grad: bool = True) -> torch.Tensor:
            return torch.empty(shape, device="meta", dtype=dtype, requires_grad=grad)

        states = meta(num_tokens, wire.hidden_size, dtype=wire.dtype)
        number, loss = meta(1, dtype=torch.long, grad=False), meta(dtype=torch.float32)
        made = []
        for sent in self._sent:
            one = _Timed(
                sent,
                sent.stage.index,
                num_stages,
                wire.device,
                input_args=(number if sent.stage.is_first else states,),
                output_args=(loss if sent.stage.is_last else states,),
                group=wire.group,
                dw_builder=self._put_off if self._row.splits_backward else None,
            )
            one.clock, one.twice = self.busy, TwiceRun()
            made.append(one)
        kind = get_schedule_class(self._row.engine)
        is_multi = issubclass(kind, PipelineScheduleMulti)
        return kind(
            made if is_multi else made[0],
            num_micro_batches,
            loss_fn=lambda found, _: found,
            scale_grads=False,
        )


# A forward pass alone through the stages: evaluation, and the proofs that read logits.
#
# Each rank goes on with its next batch when it has handed on the one before, so batches follow
# one another through the pipeline by themselves.


@torch.no_grad()
def relay(
    stages: Sequence[Stage],
    share: Share,
    ranks: Sequence[int],
    wire: Wire,
    batch: Mapping[str, Any],
    last: RunLoss,
) -> Any:
    """Run this rank's stages on a batch that all ranks of the pipeline have.

    Returns:
        What ``last`` returns on the rank with the head, None on the others.
    """
    shape = (*batch["input_ids"].shape, wire.hidden_size)
    found: Any = None
    states = torch.empty(0)
    me = torch.distributed.get_rank(wire.group)
    for stage in stages:
        before, after = stage.index - 1, stage.index + 1
        if not stage.is_first and share.ranks[before] != me:
            states = torch.empty(shape, dtype=wire.dtype, device=wire.device)
            torch.distributed.recv(states, src=ranks[share.ranks[before]], group=wire.group)
        found = stage.run(states, batch, last)
        if not stage.is_last:
            states = found.to(wire.dtype).contiguous()
            if share.ranks[after] != me:
                torch.distributed.send(states, dst=ranks[share.ranks[after]], group=wire.group)
    return found if share.has_last else None


class Runnable(nn.Module):
    """A cut model that can be called like a whole one, by all ranks together; without gradients."""

    def __init__(self, model: nn.Module, run: Any, share: Share, wire: Wire) -> None:
        super().__init__()
        self.model = model
        self._run, self._share, self._wire = run, share, wire

    def forward(self, **batch: Any) -> Any:
        """The logits (B, S, V), on every rank."""
        batch.pop("use_cache", None)
        logits = self._run(batch, lambda body, given: body(**given, use_cache=False).logits)
        size = torch.zeros(3, dtype=torch.long, device=self._wire.device)
        if self._share.has_last:
            logits = logits.float().contiguous()
            size = torch.tensor(logits.shape, device=self._wire.device)
        torch.distributed.broadcast(size, src=self._wire.last, group=self._wire.group)
        if not self._share.has_last:
            logits = torch.empty(*size.tolist(), device=self._wire.device)
        torch.distributed.broadcast(logits, src=self._wire.last, group=self._wire.group)
        return SimpleNamespace(logits=logits)
