"""What the pages share: where they run, how an answer is checked, how a kernel is timed."""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

INTERPRETING = bool(triton.knobs.runtime.interpret)
ON_GPU = torch.cuda.is_available() and not INTERPRETING
DEVICE = "cuda" if ON_GPU else "cpu"

if not (ON_GPU or INTERPRETING):
    raise SystemExit("There is no GPU here: put TRITON_INTERPRET=1 before the command.")


def size(*, gpu: int, cpu: int) -> int:
    """A size that keeps a GPU busy, or one the interpreter finishes soon."""
    return gpu if ON_GPU else cpu


def check(what: str, actual: Tensor, truth: Tensor, tolerance: float) -> None:
    """Hold a result against fp64: the largest error, as a share of the largest true value."""
    truth = truth.double()
    error = (actual.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-30)
    print(f"{what}: error {error:.1e} (at most {tolerance:.1e})")
    assert error <= tolerance, what  # a NaN fails, too


def clock(case: str, num_bytes: int, ways: dict[str, Callable[[], object]]) -> None:
    """On a GPU: the median time of each way, and the share of a copy's speed it reaches.

    Args:
        case: what is done.
        num_bytes: what a perfect kernel reads and writes.
        ways: named functions that do it.
    """
    if not ON_GPU:
        return
    print("| case | provider | us | of copy |")
    for name, work in ways.items():
        microseconds = _microseconds(work)
        share = num_bytes / microseconds / 1e3 / _copy_gb_per_second()
        print(f"| {case} | {name} | {microseconds:.1f} | {share:.0%} |")
        _keep(case, name, microseconds=microseconds, share_of_copy=share)


def clock_host(case: str, ways: dict[str, Callable[[], object]], calls: int = 1000) -> None:
    """On a GPU: what a call costs the host, which runs ahead of the device."""
    if not ON_GPU:
        return
    print("| case | provider | us |")
    for name, work in ways.items():
        work()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            work()
        microseconds = 1e6 * (time.perf_counter() - started) / calls
        torch.cuda.synchronize()
        print(f"| {case} | {name} | {microseconds:.1f} |")
        _keep(case, name, microseconds=microseconds)


def clock_flops(
    case: str,
    flops: int,
    ways: dict[str, Callable[[], object]],
    facts: dict[str, dict[str, int]],
) -> None:
    """On a GPU: the median time of each way, its TFLOP/s, and what its kernel takes.

    Args:
        case: what is done.
        flops: what it has to compute.
        ways: named functions that do it.
        facts: what `used_by` said of some of them.
    """
    if not ON_GPU:
        return
    print("| case | provider | us | TFLOP/s | registers | spills | shared KiB |")
    for name, work in ways.items():
        microseconds = _microseconds(work)
        values = {"microseconds": microseconds, "tflops": flops / microseconds / 1e6}
        used = facts.get(name, {})
        _keep(case, name, **values, **used)
        cells = [f"{each:.1f}" for each in values.values()] + [
            f"{each:.0f}" for each in used.values()
        ]
        print(f"| {case} | {name} | {' | '.join(cells)} |")


def used_by(compiled: object) -> dict[str, float]:
    """What a compiled kernel takes: registers and spills of a thread, a program's shared memory."""
    if not ON_GPU:
        return {}
    return {
        "registers": compiled.n_regs,
        "spills": compiled.n_spills,
        "shared_kib": compiled.metadata.shared / 1024,
    }


def _keep(case: str, name: str, **values: float) -> None:
    """Append rows to the file that TUTORIAL_ROWS names."""
    from trainkit.bench.cells import Records

    if rows := os.environ.get("TUTORIAL_ROWS"):
        Records("tutorial", Path(rows)).of(case, {"provider": name, **values})


def _microseconds(work: Callable[[], object]) -> float:
    # The cache is flushed between repetitions; the median forgives a disturbed one.
    return 1e3 * triton.testing.do_bench(work, warmup=10, rep=40, return_mode="median")


@functools.cache
def _copy_gb_per_second() -> float:
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    rate = 2 * 2**30 / _microseconds(lambda: target.copy_(source)) / 1e3
    print(f"(a copy reaches {rate:.0f} GB/s)")
    _keep("ceiling", "torch", gb_per_second=rate)
    return rate
