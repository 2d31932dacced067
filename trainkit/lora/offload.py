"""Checkpointed activations in host memory, copied while the GPU computes.

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
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from trainkit.errors import PatchError

MIN_BYTES = 1 << 20
"""Smaller tensors stay: copying them frees nothing worth a copy."""

MIN_WIDTH = 2048
"""Narrower models compute too briefly for the copies to hide: a layer's time goes with the square
of its width, the copies' with the width."""


def offload_where_it_pays(
    model: nn.Module, config: PretrainedConfig, setting: bool | Literal["auto"]
) -> Callable[[], None] | None:
    """Offload the checkpoints of a model that is trained on a GPU, as a recipe asks for it.

    Args:
        model: with gradient checkpointing enabled.
        config: the model's.
        setting: ``auto`` leaves models alone that are narrower than `MIN_WIDTH`, and those
            without a layer that transformers checkpoints.

    Returns:
        A function that puts the layers back as they were; None where nothing is offloaded.

    Raises:
        PatchError: asked for, but no layer is checkpointed.
    """
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    wide = config.get_text_config().hidden_size >= MIN_WIDTH
    if setting == "auto":
        setting = wide and bool(_checkpointed_layers(model))
    if not on_gpu or not setting:
        return None
    return offload_checkpoints(model)


def offload_checkpoints(model: nn.Module, *, min_bytes: int = MIN_BYTES) -> Callable[[], None]:
    """Move the inputs of checkpointed layers to the host, except the last layer's.

    Call it after gradient checkpointing has been enabled (Trainer enables it when training starts).
    The last layer's input is needed back at once, so it stays.

    Args:
        model: a model with checkpointed layers.
        min_bytes: tensors smaller than this stay.

    Returns:
        A function that puts the layers back as they were.

    Raises:
        PatchError: no layer is checkpointed.
    """
    layers = _checkpointed_layers(model)
    if not layers:
        raise PatchError(
            "no layer of the model is checkpointed, so there is nothing to offload",
            fix="enable gradient checkpointing first",
        )
    travel = _Travel(min_bytes)
    originals = [layer._gradient_checkpointing_func for layer in layers]
    for layer, original in zip(layers[:-1], originals, strict=False):
        layer._gradient_checkpointing_func = functools.partial(travel.around, original)

    def undo() -> None:
        for layer, original in zip(layers, originals, strict=True):
            layer._gradient_checkpointing_func = original

    return undo


def _checkpointed_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    ]


class _Away:
    """A tensor on the host, and on the device again once it has been asked for."""

    def __init__(self, host: Tensor, device: torch.device, before: _Away | None) -> None:
        self.host = host
        self.device = device
        self.back: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
        # The one that went before is the next to be needed: the backward pass runs in reverse.
        self.before = None if before is None else weakref.ref(before)


class _Travel:
    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
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
        if not self.travels(tensor):
            return tensor
        away = _Away(
            self.to_host(tensor.detach()),
            tensor.device,
            None if self.latest is None else self.latest(),
        )
        self.latest = weakref.ref(away)
        return away

    def fetch(self, packed: Tensor | _Away) -> Tensor:
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

    def to_host(self, tensor: Tensor) -> Tensor:
        side = self.stream(tensor.device)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)  # its memory must not be reused before the copy has read it
        return host

    def start(self, away: _Away) -> None:
        """Begin the way back."""
        side = self.stream(away.device)
        with torch.cuda.stream(side):
            away.back = away.host.to(away.device, non_blocking=True)
            away.arrived = side.record_event()
