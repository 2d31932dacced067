"""Checkpointing by the stage, for schedules that split the backward pass in two.

Layers checkpointed one by one are recomputed for each call of autograd: once for the gradient of a
stage's input, and once more for each group of its weights. A stage as a whole is recomputed once
when its backward pass begins, and kept until its weights have their gradients. That takes no more
memory, for what the weights' part needs has to stay that long either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from trainkit.parallel.pipeline.stage import Stage


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
