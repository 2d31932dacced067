"""What a GPU does in a step: the clock, the peak of memory, the ceilings, the kernels.

A GPU under load lowers its clocks to stay within its power, so one ceiling is not enough:
``tflops`` is what a cool GPU reaches in a short burst and bounds everything that follows, the
sustained one is taken after a second of matrix products and is lower than mixed work can reach.

Kernels are told apart by their names: those of torch 2.11 with cuBLAS 13, cuDNN 9 and Liger 0.8.
What no word below matches counts as other.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

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


def peak_gib(device: torch.device) -> float | None:
    """The most memory that tensors took since the clock was started; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None


def sm_clock_mhz(step: Callable[[], torch.Tensor], device: torch.device) -> float | None:
    """The GPU's clock while it works on a step; None on a CPU or without NVIDIA's library."""
    if device.type != "cuda":
        return None
    step()
    try:
        return float(torch.cuda.clock_rate())
    except (ModuleNotFoundError, RuntimeError):
        return None
    finally:
        torch.cuda.synchronize()


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


_ATTENTION = {
    "cudnn": "cuDNN",
    "flash_fwd": "flash",
    "flash_bwd": "flash",
    "fmha_cutlass": "memory-efficient",
}
"""A word of the kernel's name, and the attention it belongs to."""

_KINDS = {
    "attention": (*_ATTENTION, "fmha"),
    "loss": ("cross_entropy", "SoftMax", "softmax", "nll_loss"),
    "matmul": ("nvjet", "gemm", "splitK", "gemv"),
    "rope": ("rope",),
    "norm_and_gate": ("_forward", "_backward", "rms_norm", "swiglu", "silu", "_sum_partials"),
    "elementwise": ("at::native", "Memcpy", "Memset", "triton_"),
}
"""In the order in which they are tried. ``_forward`` and ``_backward`` are trainkit's norms and
gates."""


def kernel_times(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of every GPU kernel in one run of a step, by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        step()
        torch.cuda.synchronize()
    return {
        event.key: event.self_device_time_total / 1e3
        for event in recorded.key_averages()
        if event.self_device_time_total > 0
    }


def attention_kernel(times: Mapping[str, float]) -> str:
    """Whose attention kernels ran; "math" when no fused one did."""
    found = {owner for name in times for word, owner in _ATTENTION.items() if word in name}
    return ", ".join(sorted(found)) or "math"


def by_kind(times: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds by what the kernels do: ``matmul_ms``, ``attention_ms`` and so on."""
    sums = dict.fromkeys((*_KINDS, "other"), 0.0)
    for name, milliseconds in times.items():
        kinds = (kind for kind, words in _KINDS.items() if any(word in name for word in words))
        sums[next(kinds, "other")] += milliseconds
    return {f"{kind}_ms": total for kind, total in sums.items()}
