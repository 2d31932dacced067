"""Checkpointed activations in host memory, copied while the GPU computes.

Gradient checkpointing keeps one input per layer on the GPU. Here each is copied to pinned host
memory on a separate stream as soon as its layer has started, and copied back one layer ahead of
the backward pass. At 8192 tokens of width 3584 that is 59 MB a layer each way, about a millisecond
of a link that is otherwise idle, against several of computing.

Works with reentrant and non-reentrant checkpointing: both keep a layer's inputs as saved tensors.
On a CPU nothing travels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PretrainedConfig

MIN_BYTES = 1 << 20
"""Smaller tensors stay: copying them frees nothing worth a copy."""

MIN_WIDTH = 2048
"""Narrower models compute too briefly for the copies to hide: a layer's time goes with the square
of its width, the copies' with the width."""


def pays(model: nn.Module, config: PretrainedConfig, setting: bool | Literal["auto"]) -> bool:
    """Whether the inputs of recomputed layers go to the host, as a recipe asks for it.

    Args:
        model: on a CPU nothing travels.
        config: the model's.
        setting: ``auto`` leaves models alone that are narrower than `MIN_WIDTH`.
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

    Args:
        min_bytes: tensors smaller than this stay; `MIN_BYTES` where nothing is said.
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
        """Whether a tensor is worth the way."""
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
        """Begin the way back."""
        side = self.stream(away.device)
        with torch.cuda.stream(side):
            back = torch.empty(away.shape, dtype=away.host[0].dtype, device=away.device)
            for there, here in zip(pieces_of(back), away.host, strict=True):
                there.copy_(here, non_blocking=True)
            away.back = back
            away.arrived = side.record_event()
