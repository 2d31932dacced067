"""A training step on fake tensors, recorded: what is alive when, and which products there are.

A tracker sees every operation of torch's dispatcher. Storage counts from the operation that makes
it until nobody holds it any more, as on a GPU. Weights count elsewhere (`build`); a weight's
gradient counts until it is whole, and is given away then.

Phases of a step: "forward", "loss" (from the last layer's output to its gradient), the backward
pass of each layer from the last to the first, and "end" (what lies before the first layer).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers.modeling_layers import GradientCheckpointingLayer

from trainkit.auto_class import FAILURES, without_adapters
from trainkit.errors import ModelError, TrainkitError
from trainkit.estimate import build
from trainkit.estimate.job import Job
from trainkit.kernels.launch import shapes_only
from trainkit.models.loss import CausalLM, LossHead
from trainkit.models.recompute import is_cheap, is_kept
from trainkit.models.swap import subclass_of
from trainkit.models.vision import attend_in_tower, blank_images, features_of, parts_of, sees_ahead
from trainkit.objectives.distill import DistillLoss
from trainkit.objectives.objective import LossSetup
from trainkit.options.vision import VISION

_T = TypeVar("_T")


@dataclass
class Phase:
    """One part of a step.

    Attributes:
        most: of numbers whose gradient is whole, to the most bytes alive then.
    """

    begin: float = 0.0
    end: float = 0.0
    most: dict[int, float] = field(default_factory=dict)
    matrix: float = 0.0
    attention: float = 0.0
    fp8: float = 0.0
    operations: int = 0


class Tracker(TorchDispatchMode):
    """Counts what is alive."""

    def __init__(self, known: Sequence[Tensor], in_kernels: list[float]) -> None:
        super().__init__()
        self.live = 0.0
        self.gradients = 0
        self.phases: dict[str, Phase] = {}
        self.now = Phase()
        self.assumed: set[str] = set()
        self.has_real_places = False
        self._all: set[int] = set()
        self.products: list[float] = []
        self._in_kernels = in_kernels
        self._storages: dict[int, Any] = {}
        for tensor in known:  # held: a layer may replace its bias, and another get the address
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage
        self.begin("forward")

    def begin(self, name: str) -> None:
        if self.phases:
            self.now.end = self.live
        self.now = self.phases.setdefault(name, Phase(self.live))
        self.now.most.setdefault(self.gradients, self.live)

    def takes(self, temporary: float) -> None:
        """Bytes that an operation has inside for a moment."""
        most = self.now.most
        most[self.gradients] = max(most.get(self.gradients, 0.0), self.live + temporary)

    def gives_away(self, parameter: Tensor) -> None:
        """A weight's gradient is whole."""
        self.gradients += parameter.numel()
        parameter.grad = None
        self.takes(0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "prim::device" and isinstance(args[0], FakeTensor):
            self.now.operations += 1
            return args[0].fake_device  # most of all calls; through the mode it takes 0.3 ms
        if self.has_real_places and _is_of_places(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if name == "aten::index":
            args = (args[0], [*itertools.chain(*map(self._places, args[1]))])
        if name in _OF_NUMBERS:
            self.assumed.add(name.removeprefix("aten::"))
            return self._guess(name, args[0])
        if name == "aten::add" and _is_the_engines(args):
            return args[0]
        flops = _flops(name, args)
        # Written into what is there: products with a wider result know no CPU's form.
        result = kwargs["out"] if flops and "out" in kwargs else func(*args, **kwargs)
        now = self.now
        now.operations += 1
        if is_kept(func) and not is_cheap(func, args):
            self.products.append(_bytes(result))
        if flops is not None:
            if name == "aten::_scaled_mm":
                now.fp8 += flops
            else:
                now.matrix += flops
        for operations, kept in build.attention_notes:
            now.attention += operations
            self.products.append(kept)
        build.attention_notes.clear()
        if self._in_kernels:
            now.matrix += sum(self._in_kernels)
            self._in_kernels.clear()
        if name == "aten::all":
            self._all.add(result.untyped_storage()._cdata)
        made = False
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                made |= self._add(each)
        if made:
            self.takes(0.0)
        return result

    def _places(self, index: Tensor | None) -> Sequence[Tensor | None]:
        """What an index picks; of a mask all places, or they could not be counted."""
        if not isinstance(index, FakeTensor) or index.dtype != torch.bool:
            return (index,)
        return self._guess("aten::nonzero", index).unbind(1)

    def _guess(self, name: str, tensor: Tensor) -> Any:
        """One for a number, and yes only where all of something is asked for.

        Of places that are not zero: all, and of a slice (an expert's tokens) the slice's share.
        """
        if name == "aten::nonzero":
            numbers = tensor.numel()
            whole = tensor.untyped_storage().nbytes() // tensor.element_size()
            found = max(numbers * numbers // max(whole, 1), 1) if numbers else 0
            return tensor.new_zeros((found, tensor.dim()), dtype=torch.int64)
        if name == "aten::equal":
            return True
        if tensor.dtype == torch.bool:
            return tensor.untyped_storage()._cdata in self._all
        return 1.0 if tensor.is_floating_point() else 1

    def _add(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return False
        size = -(-storage.nbytes() // 512) * 512  # as the allocator rounds

        def gone(_: Any) -> None:  # another may get its address
            self._storages.pop(key, None)
            self._all.discard(key)
            self.live -= size

        self._storages[key] = weakref.ref(storage, gone)
        self.live += size
        return True


def _is_of_places(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation makes integers of nothing but such: towers ask where images are."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if tensors:
        return not any(isinstance(each, FakeTensor) for each in tensors)
    with unset_fake_temporarily():
        made = func(*args, **{**kwargs, "device": "meta"})
    return isinstance(made, Tensor) and not made.is_floating_point()


def _is_the_engines(args: Sequence[Any]) -> bool:
    """Whether autograd's engine adds two gradients, which it does into the first one."""
    if len(args) < 2 or not (isinstance(args[0], Tensor) and isinstance(args[1], Tensor)):
        return False
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.endswith(("_compile.py", "eval_frame.py")):
        frame = frame.f_back
    engine = frame.f_code.co_name == "_engine_run_backward"
    return engine and args[0].shape == args[1].shape


def _flops(name: str, args: Sequence[Any]) -> float | None:
    if name in ("aten::mm", "aten::_scaled_mm"):
        a, b = args[0], args[1]
    elif name in ("aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_"):
        a, b = args[1], args[2]
    elif name == "aten::bmm":
        a, b = args[0], args[1]
    elif name == "aten::_grouped_mm":
        a, b = args[0], args[1]
        return 2.0 * a.shape[-2] * a.shape[-1] * b.shape[-1]
    elif name == "bitsandbytes::gemm_4bit":
        return 2.0 * args[0].numel() * args[2][0]
    else:
        return None
    return 2.0 * a.numel() * b.shape[-1]


_OF_NUMBERS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero")
"""What a host asks of numbers, and waits for."""


def _bytes(result: Any) -> float:
    tensors = (each for each in tree_leaves(result) if isinstance(each, Tensor))
    return float(sum(each.numel() * each.element_size() for each in tensors))


# -- A whole step ---------------------------------------------------------------------------------

Frontier = tuple[tuple[int, float], ...]
"""Of numbers whose gradient is whole, and the most bytes alive meanwhile."""


@dataclass(frozen=True)
class Layer:
    """A decoder layer's part of a step, over all tokens of a micro-batch.

    Attributes:
        weights: bytes of them, packed or not, and of codes that are kept between steps.
        kept: bytes from its forward to its backward pass.
        output: of them, its result, which is what a recomputed layer keeps: the next one's input.
        selectively: what it keeps where products and attention are kept.
        matrix: floating-point operations forward and backward; of all products.
        operations: that the host launches, forward and backward.
    """

    weights: float
    trained: int
    trained_tensors: int
    kept: float
    output: float
    selectively: float
    forward: float
    moving: Frontier
    matrix: tuple[float, float]
    fp8: tuple[float, float]
    attention: tuple[float, float]
    operations: int


@dataclass(frozen=True)
class Recording:
    """A step.

    Attributes:
        before: bytes alive before the first layer: embedded tokens, tables of angles, masks.
        loss: from the last layer's output to its gradient, over what layers keep.
        after: of that, what stays until the layers have gone back.
        end: behind the first layer's backward pass.
        weights: bytes outside of layers, of the embedding and of the rest.
        trained_head: numbers of the output layer and what else lies outside of layers.
        trained_tower: numbers of tower and projector.
        matrix: operations of products outside of layers.
        assumed: what a real step learns from numbers, and was assumed.
        plain: why no kernel was counted, where some were asked for.
    """

    kinds: tuple[Layer, ...]
    before: float
    loss: Frontier
    after: float
    end: Frontier
    embeddings: float
    head: float
    tower: float
    trained_embeddings: int
    trained_head: int
    trained_tower: int
    trained_tensors: int
    matrix: float
    fp8: float
    assumed: frozenset[str]
    plain: str | None


def _nbytes(tensors: Any) -> float:
    seen: dict[int, int] = {}
    for each in tensors:
        storage = each.untyped_storage()
        seen[storage._cdata] = storage.nbytes()
    return float(sum(seen.values()))


@functools.lru_cache(maxsize=512)
def record(job: Job, batch_size: int, length: int) -> Recording:
    """A step of a job's short model on fake tokens.

    With kernels, and where these fail on a model of the kind, without.
    """
    found, failed = _tried(job, functools.partial(_step, batch_size=batch_size, length=length))
    if failed is None:
        return found
    why = f"a step with them fails without numbers: {build.first_line(failed)}"
    return replace(found, plain=why)


def _tried(job: Job, step: Callable[..., _T]) -> tuple[_T, BaseException | None]:
    """A step of a job's short model; and why it is one without kernels, where it is."""
    failed: BaseException | None = None
    for each in (job, replace(job, ops=frozenset())) if job.ops else (job,):
        masked = job.masked or (job.has_images and sees_ahead(build.config_of(job.config)))
        for attention in build.ATTENTIONS[masked:]:
            try:
                short = build.built(each, attention)
                try:
                    with short.fake, shapes_only() as in_kernels:
                        return step(short, each, in_kernels), None if each is job else failed
                finally:
                    short.model.zero_grad(set_to_none=True)
            except TrainkitError:  # of adapters, say: as a run would say it
                raise
            except FAILURES as error:
                failed = failed or error
    assert failed is not None
    raise ModelError(
        f"no estimate: a step without numbers fails: {build.first_line(failed)}",
        where="model.name_or_path",
        fix="`trainkit sft --dry-run` measures one real step",
    ) from failed


class _AutocastOfGpu(TorchFunctionMode):
    """What autocast computes in fp32 on a GPU, and on a CPU in the dtype that comes."""

    _WIDE = frozenset(
        {
            *("layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss"),
            *("softplus", "pow", "rsqrt", "exp", "log", "log1p", "reciprocal", "norm"),
            *("sum", "prod", "cumsum", "cumprod"),
        }
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self._WIDE and torch.is_autocast_enabled("cpu"):
            args = [_wide(each) for each in args]
            kwargs = {name: _wide(each) for name, each in kwargs.items()}
        return func(*args, **kwargs)


def _wide(each: Any) -> Any:
    is_narrow = isinstance(each, Tensor) and each.dtype in (torch.bfloat16, torch.float16)
    return each.float() if is_narrow else each


class _Watch:
    """Marks the phases of a step with hooks."""

    def __init__(
        self, layers: Sequence[nn.Module], tracker: Tracker, hooks: contextlib.ExitStack
    ) -> None:
        self.before: dict[int, float] = {}
        self.after: dict[int, float] = {}
        self.outputs: dict[int, float] = {}
        self.products: dict[int, list[float]] = {}
        self._tracker, self._number = tracker, len(layers)
        for index, layer in enumerate(layers):
            into, out = (functools.partial(each, index) for each in (self._enter, self._leave))
            hooks.enter_context(layer.register_forward_pre_hook(into, with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(out))

    def _enter(self, index: int, module: Any, args: Any, kwargs: Any) -> None:
        tracker = self._tracker
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not index and isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: tracker.begin("end"))
        self.before.setdefault(index, tracker.live)
        tracker.begin(f"forward {index}")
        tracker.products = []

    def _leave(self, index: int, module: Any, args: Any, result: Any) -> None:
        tracker = self._tracker
        hidden = result[0] if isinstance(result, tuple | list) else result
        self.after[index] = tracker.live
        self.outputs[index] = _bytes(hidden)
        self.products[index] = tracker.products
        tracker.products = []
        # Of a layer that is not the last one, until the next one begins.
        tracker.begin("loss")
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: tracker.begin(f"layer {index}"))


def _step(
    short: build.Built, job: Job, in_kernels: list[float], *, batch_size: int, length: int
) -> Recording:
    model, layers = short.model, short.layers
    teacher = None if job.distill is None else _teacher(job)
    not_here = [] if teacher is None else [*teacher.parameters(), *teacher.buffers()]
    tracker = Tracker([*short.known, *not_here], in_kernels)
    ids = torch.zeros(batch_size, length, dtype=torch.long)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if job.masked:
        batch["attention_mask"] = torch.ones_like(ids)
    build.attention_notes.clear()
    with contextlib.ExitStack() as hooks, tracker:
        if job.has_images and sees_ahead(model.config):  # in place of what a model makes of ids
            row = (batch_size, 1, length, length)
            kinds = ("full_attention", "sliding_attention")
            batch["attention_mask"] = {kind: ids.new_ones(row, dtype=torch.bool) for kind in kinds}
        watch = _Watch(layers, tracker, hooks)
        if job.sees:  # embedded tokens and images have a gradient
            embed = model.get_input_embeddings()
            hooks.enter_context(embed.register_forward_hook(lambda *args: args[2].requires_grad_()))
        _give_away(model, tracker, hooks)
        with as_computed(job):
            loss = (
                model(**batch).loss if teacher is None else _distilled(model, teacher, batch, job)
            )
        loss.backward()
        tracker.begin("done")
        del loss
    return _recording(short, tracker, watch)


def _teacher(job: Job) -> Any:
    """An output layer whose hidden states come from nowhere: all else is not counted here."""
    assert job.distill is not None
    _, vocab, width = job.distill
    dtype = "float32" if job.base == "float32" else "bfloat16"
    sizes = {"num_hidden_layers": 0, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = Qwen2Config(hidden_size=width, intermediate_size=8, vocab_size=vocab, **sizes)
    with torch.device("cpu"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    if "linear_cross_entropy" in job.ops:
        model.lm_head.__class__ = subclass_of(nn.Linear, LossHead)
        model.__class__ = subclass_of(type(model), CausalLM)
    return model.requires_grad_(False).eval()


def _distilled(model: Any, teacher: Any, batch: dict[str, Any], job: Job) -> Tensor:
    """A distillation's own loss."""
    assert job.distill is not None
    setup = LossSetup(model, takes_num_items=False, distill=job.distill[0], teacher=teacher)
    trained = {"num_trained_tokens": batch["labels"].numel()}
    return DistillLoss(setup).evaluate(model, batch | trained, 1).loss_sum


def _give_away(model: nn.Module, tracker: Tracker, hooks: contextlib.ExitStack) -> None:
    for each in model.parameters():
        if each.requires_grad:
            hooks.enter_context(each.register_post_accumulate_grad_hook(tracker.gives_away))


@contextlib.contextmanager
def as_computed(job: Job) -> Iterator[None]:
    """A forward pass in the dtypes of a GPU's autocast, where a run has it."""
    is_cast = job.adapters is not None or job.upcast
    autocast: Any = torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast)
    with autocast, _AutocastOfGpu(), build.quiet():
        yield


@dataclass(frozen=True)
class Seen:
    """What sees images, on those of a micro-batch.

    Attributes:
        kept: bytes that stay while the text model computes: pixels, features, and what is needed
            to go back through what trains.
        forward: the most bytes on the way there.
        moving: in its backward pass, all that it keeps included.
        trained: numbers.
        matrix: operations of products.
    """

    kept: float
    forward: float
    moving: Frontier
    trained: int
    matrix: float


def record_images(job: Job, num_tokens: int, *, recompute: bool) -> Seen:
    """Images of so many tokens, through tower and projector of a job's model and back."""
    # What is done to the text model alone is left out: it would be recorded again for each.
    job = replace(
        job,
        base="float32" if job.base == "float32" else "bfloat16",
        in_fp8=frozenset(),
        fp8_head=False,
        chunk_tokens=None,
        tile_tokens=None,
        keeps_gradient=True,
        masked=False,
        tensor=1,
    )
    seen = functools.partial(_seen, job, recompute)
    family = VISION[build.config_of(job.config).model_type]
    fewer, more = _LINE
    if family.processor != "patches" or num_tokens <= more:
        return seen(num_tokens)
    # Its towers go from window to window, and what they take is a line.
    low, high, times = seen(fewer), seen(more), (num_tokens - fewer) / (more - fewer)

    def at(one: float, other: float) -> float:
        return one + (other - one) * times

    pairs = zip(low.moving, high.moving, strict=True)
    return Seen(
        kept=at(low.kept, high.kept),
        forward=at(low.forward, high.forward),
        moving=tuple((done, at(one, other)) for (_, one), (done, other) in pairs),
        trained=high.trained,
        matrix=at(low.matrix, high.matrix),
    )


@functools.lru_cache(maxsize=64)
def _seen(job: Job, recompute: bool, num_tokens: int) -> Seen:
    look = functools.partial(_look, num_tokens=num_tokens, recompute=recompute)
    return _tried(job, look)[0]


_LINE = (16, 64)
"""Tokens of the images that a line goes through."""


def _look(
    short: build.Built, job: Job, in_kernels: list[float], *, num_tokens: int, recompute: bool
) -> Seen:
    config, parts = short.model.config, parts_of(short.model)
    trained = [p for part in ("projector", "vision") for p in parts[part] if p.requires_grad]
    base = without_adapters(short.model).base_model
    tower = base.get_submodule(VISION[config.model_type].tower)
    attend_in_tower(tower, by_bounds=False)  # bounds have no numbers here
    tracker = Tracker(short.known, in_kernels)
    tracker.has_real_places = True
    with contextlib.ExitStack() as hooks, torch.set_grad_enabled(bool(trained)), tracker:
        if recompute and trained:
            hooks.enter_context(_recomputing(tower))
        _give_away(short.model, tracker, hooks)
        with as_computed(job):
            seen = base.get_image_features(**blank_images(config, num_tokens), return_dict=True)
        kept = tracker.live
        tracker.begin("backward")
        if trained:
            features = features_of(seen)
            torch.autograd.backward(features, [torch.zeros_like(each) for each in features])
        tracker.begin("done")
    forward, backward = tracker.phases["forward"], tracker.phases["backward"]
    return Seen(
        kept=kept,
        forward=max(forward.most.values()),
        moving=_frontier(backward, 0.0),
        trained=sum(each.numel() for each in trained),
        matrix=forward.matrix + backward.matrix,
    )


@contextlib.contextmanager
def _recomputing(tower: nn.Module) -> Iterator[None]:
    """Within, the layers of a tower are computed again in the backward pass."""
    again = functools.partial(checkpoint, use_reentrant=False)
    layers = [m for m in tower.modules() if isinstance(m, GradientCheckpointingLayer)]
    for each in layers:
        each.gradient_checkpointing, each._gradient_checkpointing_func = True, again
    try:
        yield
    finally:
        for each in layers:
            each.gradient_checkpointing = False


def _frontier(phase: Phase | None, base: float) -> Frontier:
    if phase is None:
        return ((0, 0.0),)
    start = min(phase.most)
    return tuple((done - start, most - base) for done, most in phase.most.items())


def _recording(short: build.Built, tracker: Tracker, watch: _Watch) -> Recording:
    model, layers, phases = short.model, short.layers, tracker.phases
    shape = build.shape_of(short.config, "")
    # Some models leave layers out: those for images, say.
    ran = sorted(watch.after)
    before = watch.before[ran[0]] if ran else 0.0
    end = watch.after[ran[-1]] if ran else 0.0
    last = phases.get(f"layer {ran[-1]}") if ran else None
    after = max(last.begin - end, 0.0) if last else 0.0
    kinds: dict[int, Layer] = {}
    for index, layer in enumerate(layers):
        forward = phases.get(f"forward {index}", Phase(most={0: 0.0}))
        backward = phases.get(f"layer {index}")
        started = watch.before.get(index, 0.0)
        stopped = watch.after.get(index, started)
        own = [each for each in layer.parameters() if each.requires_grad]
        kept = stopped - started
        products = watch.products.get(index, [])[:-1]  # nobody asks for the last one's
        output = watch.outputs.get(index, 0.0)
        kinds[shape.order[index]] = Layer(
            weights=_nbytes([*layer.parameters(), *_packed_states(layer)]),
            trained=sum(each.numel() for each in own),
            trained_tensors=len(own),
            kept=kept,
            output=output,
            selectively=min(output + sum(products), kept),
            forward=max(max(forward.most.values()) - started, 0.0),
            moving=_frontier(backward, stopped + after),
            matrix=(forward.matrix + forward.fp8, _of(backward, "matrix") + _of(backward, "fp8")),
            fp8=(forward.fp8, _of(backward, "fp8")),
            attention=(forward.attention, _of(backward, "attention")),
            operations=int(forward.operations + _of(backward, "operations")),
        )
    inside = {id(each) for layer in layers for each in layer.parameters()}
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    tower = {id(each) for each in build.outside_text(base).values()}
    embeddings = {id(p): p for p in base.get_input_embeddings().parameters()}
    rest = [p for p in model.parameters() if id(p) not in inside | tower | embeddings.keys()]
    seeing = [p for p in model.parameters() if id(p) in tower]
    others = [phases[name] for name in phases if not name.startswith(("forward ", "layer "))]
    return Recording(
        kinds=tuple(kinds[kind] for kind in sorted(kinds)),
        before=before,
        loss=_frontier(phases.get("loss", phases["forward"]), end),
        after=after,
        end=_frontier(phases.get("end"), 0.0),
        embeddings=_nbytes(embeddings.values()),
        head=_nbytes(rest),
        tower=_nbytes(seeing),
        trained_embeddings=sum(p.numel() for p in embeddings.values() if p.requires_grad),
        trained_head=sum(p.numel() for p in rest if p.requires_grad),
        trained_tower=sum(p.numel() for p in seeing if p.requires_grad),
        trained_tensors=sum(p.requires_grad for p in [*embeddings.values(), *rest, *seeing]),
        matrix=sum(each.matrix + each.fp8 for each in others),
        fp8=sum(each.fp8 for each in others),
        assumed=frozenset(tracker.assumed),
        plain=short.plain,
    )


def _of(phase: Phase | None, what: str) -> float:
    return 0.0 if phase is None else float(getattr(phase, what))


def _packed_states(layer: nn.Module) -> list[Tensor]:
    """What packed weights have besides their codes."""
    names = ("of_state_absmax", "of_state_absmax2", "scale_bits")
    return [b for name, b in layer.named_buffers() if name.rpartition(".")[2] in names]
