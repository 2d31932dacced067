"""Kernels compiled on threads before a run launches them.

A machine that has compiled nothing yet would do so launch by launch, a third of a second to two
each. The estimate calls the same kernels beforehand, on tensors without numbers: what it would have
launched is compiled while the weights are read.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MOST_THREADS = 8
"""Half of a compilation holds Python's lock: more threads would only wait."""


@dataclass
class Noted:
    """Launches that were not made, each once.

    Attributes:
        device: the index of the GPU that they are for; None notes nothing.
    """

    device: int | None
    launches: dict[object, tuple[Any, tuple[Any, ...], Mapping[str, Any]]] = field(
        default_factory=dict
    )


_noted: Noted | None = None
_compiling: dict[int, list[Future[None]]] = {}
_first = threading.Lock()


def device() -> int | None:
    """The GPU that launches are noted for; None where they are not."""
    return None if _noted is None else _noted.device


@contextlib.contextmanager
def noting(device: int | None) -> Iterator[Noted]:
    """Within, launches that fake tensors stand for are noted, as they would be on this GPU."""
    global _noted
    before, _noted = _noted, Noted(device)
    try:
        yield _noted
    finally:
        _noted = before


def note(jitted: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Keep a launch: dtypes stand for pointers, which are taken to be aligned."""
    if _noted is None or _noted.device is None:
        return
    given = tuple(each.dtype if isinstance(each, Tensor) else each for each in arguments)
    code = map(_decides, jitted.params, given)  # what is left over is in the options
    _noted.launches.setdefault((id(jitted), *code, *options.items()), (jitted, given, options))


def _decides(parameter: Any, argument: Any) -> object:
    """What of an argument the machine code depends on."""
    if hasattr(argument, "block_shape"):
        return argument.base.dtype, *argument.block_shape
    if parameter.is_constexpr or not isinstance(argument, int | float):
        return argument
    return type(argument), argument == 1, argument % 16 == 0


def compile_noted(noted: Noted, world_size: int) -> None:
    """Begin to compile what was noted of a run of so many processes, on threads of its own."""
    if not noted.launches:
        return
    ranks = min(world_size, torch.cuda.device_count())
    threads = min((os.cpu_count() or 1) // ranks, MOST_THREADS)
    pool = ThreadPoolExecutor(max(threads, 1), thread_name_prefix="compile")
    for jitted, arguments, options in noted.launches.values():
        future = pool.submit(_compile, noted.device, jitted, arguments, options)
        _compiling.setdefault(id(jitted), []).append(future)
    pool.shutdown(wait=False)


def _compile(
    device: int | None, jitted: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    import triton

    with torch.cuda.device(device):
        with _first:  # which compiles what all kernels need
            triton.runtime.driver.active.get_current_target()
        # What runs it on the host is compiled when it is asked for.
        _ = jitted.warmup(*arguments, grid=(1,), **options).run


def wait_for(jitted: Any) -> None:
    """Wait until a kernel is compiled as was noted; what fails now is said at its launch."""
    for future in _compiling.pop(id(jitted), ()):
        future.exception()


def wait_for_all() -> None:
    """Wait until no thread compiles: a process that is forked meanwhile could take a lock along."""
    for futures in _compiling.values():
        wait(futures)
    _compiling.clear()
