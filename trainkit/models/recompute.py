"""THE TABLE of what a layer may do with its activations, and putting it into a model.

transformers' decoder layers have a switch each and a function to call in place of their forward.
Both are set here, layer by layer, at any time between two steps: gradients do not change.

Checkpointing that keeps a layer's matrix products and its attention.

The layer runs a second time in the backward pass, but what is costly is not computed again: its
result was kept. Norms, gates and rope are cheap, and their results need not be kept.

Seen are the operations of torch's dispatcher. A Triton kernel is none, so its result is computed
again, as it should be; a product inside an autograd function of ours is one, and is kept.

torch's own selective checkpointing refuses a kept tensor that is added to in place, as the products
of adapters are, and keeps a layer's last product, which nobody needs. Hence these two modes.

Checkpointed activations in host memory, copied while the GPU computes.

Gradient checkpointing keeps one input per layer on the GPU. Here each is copied to pinned host
memory on a separate stream as soon as its layer has started, and copied back one layer ahead of
the backward pass. At 8192 tokens of width 3584 that is 59 MB a layer each way, about a millisecond
of a link that is otherwise idle, against several of computing.

Works with reentrant and non-reentrant checkpointing: both keep a layer's inputs as saved tensors.
On a CPU nothing travels.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from trainkit.errors import PatchError

Way = Literal["keep", "selective", "full", "offload"]
_Checkpoint = Callable[..., Any]


WAYS: Mapping[Way, Callable[[_Checkpoint, Travel], _Checkpoint] | None] = {
    "keep": None,
    "selective": lambda plain, travel: SelectiveCheckpoint(),
    "full": lambda plain, travel: plain,
    "offload": lambda plain, travel: functools.partial(travel.around, plain),
}
"""Way to what runs the layer: its input kept (``full``), products and attention too
(``selective``), its input on the host (``offload``), everything kept (``keep``)."""


class Recomputed:
    """The layers of a model that can recompute."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = checkpointed_layers(model)
        if not self.layers:
            raise PatchError(
                "no layer of the model is checkpointed, so there is nothing to recompute",
                where="recompute",
                fix="write recompute: none, or full for a model that checkpoints in its own way",
            )
        self._plain = [layer._gradient_checkpointing_func for layer in self.layers]
        self.ways: tuple[Way, ...] = self._as_it_was

    @property
    def _as_it_was(self) -> tuple[Way, ...]:
        return every(len(self.layers), 1, "full")

    def apply(self, ways: Sequence[Way]) -> None:
        """Have every layer do as it is told, from the next forward pass on."""
        travel = Travel()
        for layer, plain, way in zip(self.layers, self._plain, ways, strict=True):
            make = WAYS[way]
            layer.gradient_checkpointing = make is not None
            layer._gradient_checkpointing_func = plain if make is None else make(plain, travel)
        self.ways = tuple(ways)

    def undo(self) -> None:
        """Every layer is recomputed, as transformers has it."""
        self.apply(self._as_it_was)


def checkpointed_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers whose switch is on, in the order of the model."""
    return [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]


def every(count: int, k: int, way: Way) -> tuple[Way, ...]:
    """``way`` for layers 0, k, 2k, ... of ``count``, the others are kept.

    The last one is never sent to the host: its input is needed back at once.
    """
    ways: list[Way] = [way if index % k == 0 else "keep" for index in range(count)]
    if ways[-1] == "offload":
        ways[-1] = "full"
    return tuple(ways)


KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "torch_attn::_varlen_attn",
    }
)
"""Whose results are kept. Not ``bmm``: in eager attention it makes S x S scores. Not products in
fp8: our kernels add to them in place, which the dispatcher does not see."""


CHEAP = 8
"""A product over an eighth of the numbers that it gives for a row, as an adapter's, is computed
again, unless a larger one is added to it in place."""


class SelectiveCheckpoint:
    """The checkpoint function of one layer."""

    def __init__(self) -> None:
        self.needed: int | None = None
        """How many results the backward pass has asked for; None before the first one."""

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer and keep its input and `KEPT`; the same numbers as without."""
        return checkpoint(run, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[_Keep, _Again]:
        keep = _Keep(self.needed)
        return keep, _Again(keep.results, self._asked_for)

    def _asked_for(self, number: int) -> None:
        self.needed = max(self.needed or 0, number)


class _Keep(TorchDispatchMode):
    """Keeps results in the order in which they come."""

    supports_higher_order_operators = True

    def __init__(self, needed: int | None) -> None:
        super().__init__()
        self.results: dict[int, Any] = {}
        self._needed = needed
        self._number = 0
        self._cheap: int | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __exit__(self, *error: Any) -> None:
        self._drop_cheap()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_kept(func):
            self._drop_cheap()
            if self._needed is None or self._number < self._needed:
                self.results[self._number] = _detached(result)
                self._cheap = self._number if is_cheap(func, args) else None
            self._number += 1
        elif self._cheap is not None and _writes_to_first(func):
            kept = self.results[self._cheap]
            written = [storage._cdata for storage in _storages(args[0])]
            if any(storage._cdata in written for storage in _storages(kept)):
                self._cheap = None  # with what was added it is worth keeping
        return result

    def _drop_cheap(self) -> None:
        if self._cheap is not None:
            del self.results[self._cheap]
            self._cheap = None


class _Again(TorchDispatchMode):
    """Gives out what was kept, each once, and computes the rest."""

    supports_higher_order_operators = True

    def __init__(self, results: dict[int, Any], asked_for: Callable[[int], None]) -> None:
        super().__init__()
        self._results, self._asked_for = results, asked_for
        self._number = self._taken = 0
        # Weak references, so that what is let go is let go, and its address not taken for it again.
        self._given: dict[int, StorageWeakRef] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> _Again:
        self._number = self._taken = 0  # a second backward pass comes by again
        self._given.clear()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._asked_for(self._taken)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_kept(func):
            number, self._number = self._number, self._number + 1
            if number in self._results:
                self._taken = self._number
                result = self._results.pop(number)
                for storage in _storages(result):
                    self._given[storage._cdata] = StorageWeakRef(storage)
                return result
        elif _writes_to_first(func) and any(s._cdata in self._given for s in _storages(args[0])):
            return args[0]  # it was kept with this already added
        return func(*args, **(kwargs or {}))


def is_kept(func: Any) -> bool:
    """Whether an operation's result is one of `KEPT`."""
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.name in KEPT and func._overloadname == "default"


def is_cheap(func: Any, args: Sequence[Any]) -> bool:
    """Whether it is a product that is computed again all the same, see `CHEAP`."""
    if func._schema.name not in ("aten::mm", "aten::addmm"):
        return False
    inner, outputs = args[-1].shape
    return bool(inner * CHEAP <= outputs)


def _writes_to_first(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.arguments:
        return False
    alias = schema.arguments[0].alias_info
    return alias is not None and bool(alias.is_write)


def _detached(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return type(result)(map(_detached, result))
    return result.detach() if isinstance(result, Tensor) else result


def _storages(result: Any) -> Iterator[UntypedStorage]:
    for each in result if isinstance(result, tuple | list) else (result,):
        if isinstance(each, Tensor):
            yield each.untyped_storage()


MIN_BYTES = 1 << 20
"""Smaller tensors stay: copying them frees nothing worth a copy."""

MIN_WIDTH = 2048
"""Narrower models compute too briefly for the copies to hide: a layer's time goes with the square
of its width, the copies' with the width."""


def pays(model: nn.Module, config: PretrainedConfig, setting: bool | Literal["auto"]) -> bool:
    """Whether the inputs of recomputed layers go to the host, as a recipe asks for it.

    ``auto`` leaves models alone that are narrower than `MIN_WIDTH`; on a CPU nothing travels.
    """
    if not any(parameter.is_cuda for parameter in model.parameters()):
        return False
    if setting == "auto":
        return bool(config.get_text_config().hidden_size >= MIN_WIDTH)
    return setting


PIECE_BYTES = 32 << 20
"""Pinned memory comes in powers of two: a tensor of 3.5 GiB in one piece would take 4."""


def pieces_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """A tensor's numbers in a row, cut where pinned memory wastes at most one piece."""
    return tensor.reshape(-1).split(PIECE_BYTES // tensor.element_size())


class _Away:
    """A tensor on the host, and on the device again once it has been asked for."""

    def __init__(
        self, host: Sequence[Tensor], shape: torch.Size, device: torch.device, before: _Away | None
    ) -> None:
        self.host, self.shape = host, shape
        self.device = device
        self.back: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
        # The one that went before is the next to be needed: the backward pass runs in reverse.
        self.before = None if before is None else weakref.ref(before)


class Travel:
    """The way of a model's activations to the host and back, layer after layer.

    Tensors smaller than ``min_bytes`` stay.
    """

    def __init__(self, min_bytes: int | None = None) -> None:
        self.min_bytes = MIN_BYTES if min_bytes is None else min_bytes
        self.latest: weakref.ref[_Away] | None = None
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def around(self, checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A layer's checkpoint function with its inputs sent away."""
        with saved_tensors_hooks(self.send, self.fetch):
            return checkpoint(*args, **kwargs)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]

    def travels(self, tensor: Tensor) -> bool:
        large = tensor.numel() * tensor.element_size() >= self.min_bytes
        return tensor.is_cuda and large and not isinstance(tensor, nn.Parameter)

    def send(self, tensor: Tensor) -> Tensor | _Away:
        """Begin the way to the host, where a tensor takes it."""
        if not self.travels(tensor):
            return tensor
        away = _Away(
            self.to_host(tensor.detach()),
            tensor.shape,
            tensor.device,
            None if self.latest is None else self.latest(),
        )
        self.latest = weakref.ref(away)
        return away

    def fetch(self, packed: Tensor | _Away) -> Tensor:
        """The tensor on its device, and the next one on its way there."""
        if isinstance(packed, Tensor):
            return packed
        if packed.back is None:
            self.start(packed)
        back = packed.back
        assert back is not None
        if packed.arrived is not None:
            current = torch.cuda.current_stream(packed.device)
            current.wait_event(packed.arrived)
            back.record_stream(current)
        packed.back = None  # autograd holds it while it is used; a second pass fetches it again
        before = None if packed.before is None else packed.before()
        if before is not None and before.back is None:
            self.start(before)
        return back

    def to_host(self, tensor: Tensor) -> Sequence[Tensor]:
        """A copy on the host, in pieces, written when the stream gets to it."""
        side = self.stream(tensor.device)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        host = []
        with torch.cuda.stream(side):
            for piece in pieces_of(tensor):
                host.append(torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True))
                host[-1].copy_(piece, non_blocking=True)
        tensor.record_stream(side)  # its memory must not be reused before the copy has read it
        return host

    def start(self, away: _Away) -> None:
        side = self.stream(away.device)
        with torch.cuda.stream(side):
            back = torch.empty(away.shape, dtype=away.host[0].dtype, device=away.device)
            for there, here in zip(pieces_of(back), away.host, strict=True):
                there.copy_(here, non_blocking=True)
            away.back = back
            away.arrived = side.record_event()
