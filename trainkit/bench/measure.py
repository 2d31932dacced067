"""What a GPU does in a step: the clock, the peak of memory, the ceilings.

A GPU under load lowers its clocks to stay within its power, so one ceiling is not enough:
``tflops`` is what a cool GPU reaches in a short burst and bounds everything that follows, the
sustained one is taken after a second of matrix products and is lower than mixed work can reach.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

_COPY_BYTES = 2**31
_MATRIX_SIZE = 8192


def timed(
    step: Callable[[], torch.Tensor], steps: int, device: torch.device
) -> tuple[float, torch.Tensor]:
    """The median milliseconds of a step, and what the last one returned.

    On a GPU events mark the steps on the stream, so the host may run ahead as it does in training;
    the peak of memory starts afresh.
    """
    if device.type != "cuda":
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            result = step()
            times.append(1e3 * (time.perf_counter() - start))
        return sorted(times)[len(times) // 2], result
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        result = step()
        mark.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
    return sorted(times)[len(times) // 2], result


def warm_up(work: Callable[[], object], *, seconds: float) -> None:
    """Repeat ``work`` for a while; on a GPU, until clocks and temperature have settled."""
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Training:
    """A model and its training step, to be timed."""

    model: nn.Module
    step: Callable[[], torch.Tensor]
    device: torch.device
    steps: int
    warm_up_seconds: float = 0.0

    def milliseconds(self) -> float:
        """The median of a step's."""
        for _ in range(2):
            self.step()
        warm_up(self.step, seconds=self.warm_up_seconds)
        return timed(self.step, self.steps, self.device)[0]


def peak_gib(device: torch.device) -> float | None:
    """The most memory that tensors took since the clock was started; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None


def ceilings(device: torch.device) -> dict[str, float]:
    """What the GPU can do at most; called before anything has warmed it.

    Returns:
        ``tflops`` of a bf16 matmul in a burst, ``tflops_sustained`` of it after a second,
        ``gb_per_second`` of a device copy, bytes read and written.
    """

    def after(seconds: float, work: Callable[[], torch.Tensor]) -> float:
        warm_up(work, seconds=seconds)
        return timed(work, 20, device)[0]

    shape = (_MATRIX_SIZE, _MATRIX_SIZE)
    left, right = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    burst, sustained = (
        2 * _MATRIX_SIZE**3 / after(seconds, lambda: torch.mm(left, right, out=product)) / 1e9
        for seconds in (0.02, 1.0)
    )
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    copy = 2 * _COPY_BYTES / after(1.0, lambda: target.copy_(source)) / 1e6
    return {"tflops": burst, "tflops_sustained": sustained, "gb_per_second": copy}
