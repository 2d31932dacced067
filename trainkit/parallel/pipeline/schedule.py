"""One optimizer step's micro-batches through the stages, forth and back, by a schedule of torch's.

What goes from stage to stage has one size for all micro-batches of a step, as torch's stages want
it: (T, H), the states of as many tokens as the largest micro-batch has, padded. Each stage knows
the batches, and takes and gives what is in them; so a micro-batch is computed as it would be alone.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from transformers.modeling_layers import GradientCheckpointingLayer

from trainkit.parallel.pipeline.share import Schedule, Share

# One stage: a range of layers of a causal language model, run by the model's own forward.

# A model of which this rank holds a part: the rest of it has names and shapes, but no memory.
#
# It is loaded with its own weights only; adapters and kernels are put into the whole of it, so
# that they are numbered and initialised as in one process; then the rest is cut away.


class Elsewhere(nn.Module):
    """Stands where another rank's module was; states pass through."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """The states as they came."""
        return hidden_states


def causal_lm(model: nn.Module) -> Any:
    """The model under adapters, or itself."""
    get_base: Any = getattr(model, "get_base_model", None)
    return model if get_base is None else get_base()


def decoder(model: nn.Module) -> Any:
    """Embeddings, layers and norm."""
    base = causal_lm(model)
    return getattr(base, base.base_model_prefix)


def foreign(model: nn.Module, share: Share, *, ties: bool) -> list[tuple[nn.Module, str]]:
    """The modules that other ranks hold: (parent, name of the child).

    Args:
        model: whole.
        share: of this rank.
        ties: the head is the embeddings' weight: both ends then hold both.
    """
    base, inner = causal_lm(model), decoder(model)
    layers = [
        (inner.layers, str(index))
        for index in range(len(inner.layers))
        if index not in share.layers
    ]
    has_end = share.has_first or share.has_last
    ends = []
    if not (has_end if ties else share.has_first):
        ends.append((inner, "embed_tokens"))
    if not (has_end if ties else share.has_last):
        ends.append((base, "lm_head"))
    if not share.has_last:
        ends.append((inner, "norm"))
    return [*layers, *ends]


def loading_class(model_class: type, share: Share) -> type:
    """A class whose ``from_pretrained`` reads this rank's weights only; see `whole_skeleton`."""

    class Loading(model_class):
        _keys_to_ignore_on_load_unexpected = (r".*",)  # those of other ranks are in the files, too

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            ties = bool(self.config.tie_word_embeddings)
            set_aside = [
                (parent, name, parent._modules[name])
                for parent, name in foreign(self, share, ties=ties)
            ]
            for parent, name, _ in set_aside:
                parent._modules[name] = Elsewhere()
            object.__setattr__(self, "set_aside", set_aside)
            if not (share.has_first or share.has_last):
                self.all_tied_weights_keys: dict[str, str] = {}

    Loading.__name__, Loading.__qualname__ = model_class.__name__, model_class.__qualname__
    Loading.__module__ = model_class.__module__
    return Loading


def whole_skeleton(model: Any, model_class: type) -> Any:
    """Put what was set aside back, without memory; the model is of its own class again."""
    for parent, name, module in model.set_aside:
        module.to("meta")
        parent._modules[name] = module
    del model.set_aside
    model.__class__ = model_class
    if model.config.tie_word_embeddings:
        causal_lm(model).lm_head.weight = decoder(model).embed_tokens.weight
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    return model


def cut_away(model: nn.Module, share: Share) -> None:
    """Leave this rank's modules in a model, which may be whole or a skeleton."""
    base = causal_lm(model)
    for parent, name in foreign(model, share, ties=bool(base.config.tie_word_embeddings)):
        parent._modules[name] = Elsewhere()


_OF_THE_LOSS = ("labels", "num_trained_tokens", "source_ids", "num_items_in_batch")
"""Of a batch: what only the last stage takes."""

RunLoss = Callable[[nn.Module, dict[str, Any]], Any]
"""Takes a model that ends with a head, and a batch; returns the loss."""


class Stage(nn.Module):
    """Token ids or hidden states in, hidden states or what ``run`` returns out.

    The model's own forward builds masks and rotary tables on every stage; layers of other stages
    let the states pass. Parameters and layers are shared with the model.

    Args:
        model: cut to this rank's share, adapters and kernels in it.
        index: of the stage.
        share: of this rank.
        autocast: what the forward pass runs under.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        share: Share,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        base, inner = causal_lm(model), decoder(model)
        layers = share.stages[index]
        self.index = index
        self.is_first, self.is_last = index == 0, index == share.num_stages - 1
        kept = [
            layer if number in layers else Elsewhere() for number, layer in enumerate(inner.layers)
        ]
        changed: dict[str, nn.Module] = {"layers": nn.ModuleList(kept)}
        if not self.is_last:
            changed["norm"] = Elsewhere()
        if not self.is_first:
            changed["embed_tokens"] = Elsewhere()
        body = _twin(inner, changed)
        self.body = _twin(base, {base.base_model_prefix: body}) if self.is_last else body
        self._layers = kept
        self._autocast = autocast

    def layers(self) -> list[nn.Module]:
        """Of the model; those of other stages have an empty module here."""
        return self._layers

    def run(self, states: torch.Tensor, batch: Mapping[str, Any], loss: RunLoss) -> Any:
        """The stage's part of a forward pass.

        The first stage reads ``batch``, the others ``states`` (B, S, H); the last returns what
        ``loss`` gives.
        """
        given = {name: value for name, value in batch.items() if name != "input_ids"}
        if self.is_first:
            given["input_ids"] = batch["input_ids"]
        else:
            given["inputs_embeds"] = states
        with self._autocast():
            if self.is_last:
                return loss(self.body, given)
            given = {name: value for name, value in given.items() if name not in _OF_THE_LOSS}
            return self.body(**given, use_cache=False).last_hidden_state


def _twin(module: nn.Module, changed: Mapping[str, nn.Module]) -> nn.Module:
    """The same module with other children; parameters, buffers and hooks stay shared."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **changed}
    return twin


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
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield bool(layers)
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


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
        """Keep what makes a weight's gradient."""
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
        """Add what happens within."""
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
    """What the ranks of a pipeline agree on.

    Attributes:
        group: its ranks.
        last: global rank of the one with the head.
    """

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
        self,
        batches: Sequence[Mapping[str, Any]],
        loss: RunLoss,
        gather: Callable[[], object],
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
