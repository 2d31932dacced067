"""What the GPU can do at most, measured in the same run: copying and multiplying matrices.

A GPU under load lowers its clocks to stay within its power, so each ceiling is taken after a
second of the same work, as a training step finds the GPU.
"""

import time
from collections.abc import Callable

import torch

from trainkit.bench.clock import timed

_COPY_BYTES = 2**31
_MATRIX_SIZE = 8192


def ceilings(device: torch.device) -> dict[str, float]:
    """``gb_per_second`` of a device copy (bytes read and written), ``tflops`` of a bf16 matmul."""
    return {"gb_per_second": _copy_rate(device), "tflops": _matmul_rate(device)}


def _copy_rate(device: torch.device) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _sustained(lambda: target.copy_(source), device) / 1e6


def _matmul_rate(device: torch.device) -> float:
    shape = (_MATRIX_SIZE, _MATRIX_SIZE)
    left, right = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    milliseconds = _sustained(lambda: torch.mm(left, right, out=product), device)
    return 2 * _MATRIX_SIZE**3 / milliseconds / 1e9


def _sustained(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Milliseconds of ``work`` once the GPU has done it for a second."""
    warm_up(work, seconds=1.0)
    return timed(work, 20, device)[0]


def warm_up(work: Callable[[], object], *, seconds: float) -> None:
    """Repeat ``work`` for a while; on a GPU, until clocks and temperature have settled."""
    on_gpu = torch.cuda.is_available()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        work()
        if on_gpu:
            torch.cuda.synchronize()
