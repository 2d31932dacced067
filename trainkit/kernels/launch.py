"""Where an op runs, and how its kernel is launched with little host time.

A Triton launch through ``kernel[grid](...)`` analyses every argument each time, about 15 us of host
time. A small model pays that hundreds of times a step. `launch` asks Triton once per signature and
calls the compiled kernel directly afterwards, as long as the arguments keep the properties Triton
compiled for; otherwise it takes Triton's own road.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainkit.kernels import ahead

try:
    import triton
except ImportError:  # a machine without Triton runs the references
    HAS_TRITON = False
    INTERPRETING = False
else:
    HAS_TRITON = True
    INTERPRETING = bool(triton.knobs.runtime.interpret)

if INTERPRETING:
    from trainkit.kernels import interpreter

    interpreter.install()

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INT32_END = 1 << 31
_address = Tensor.data_ptr
_dtype = operator.attrgetter("dtype")
_NO_GUARD = contextlib.nullcontext()


_shapes_only: list[float] | None = None


@contextlib.contextmanager
def shapes_only() -> Iterator[list[float]]:
    """Within, ops on fake tensors do all that they do on a GPU, but launch nothing.

    What they allocate, save and return is then what a GPU would hold, and no GPU is needed. Yields
    the floating-point operations of products inside kernels, which the dispatcher does not see.
    """
    global _shapes_only
    before, _shapes_only = _shapes_only, []
    try:
        yield _shapes_only
    finally:
        _shapes_only = before


def launches(flops: float = 0.0) -> bool:
    """Whether kernels run at all; where shapes alone are asked for, a product's work is noted."""
    if _shapes_only is None:
        return True
    _shapes_only.append(flops)
    return False


def run_jitted(
    jitted: Any,
    grid: tuple[int, ...],
    on: Tensor,
    *arguments: Any,
    **options: Any,
) -> None:
    """Launch a kernel by Triton's own way on a tensor's device, where kernels run at all."""
    if not launches():
        ahead.note(jitted, arguments, options)
        return
    if not torch.compiler.is_compiling():
        ahead.wait_for(jitted)
    with device_of(on):
        jitted[grid](*arguments, **options)


def is_on_gpu(tensor: Tensor) -> bool:
    return _shapes_only is not None or tensor.is_cuda


def runs_kernel(*tensors: Tensor) -> bool:
    """Whether an op on these tensors runs its Triton kernel; otherwise it runs its reference.

    The reference serves CPU tensors (unless ``TRITON_INTERPRET=1``), machines without Triton,
    dtypes a kernel does not know, and tensor subclasses such as DTensor, whose data a kernel
    cannot address.
    """
    if not (HAS_TRITON and (INTERPRETING or is_on_gpu(tensors[0]))):
        return False
    return all(each.dtype in _served and is_plain(each) for each in tensors)


_served: tuple[torch.dtype, ...] = KERNEL_DTYPES


@contextlib.contextmanager
def by_reference(*dtypes: torch.dtype) -> Iterator[None]:
    """Within, ops on tensors of these dtypes run their references, so that nothing is compiled."""
    global _served
    before, _served = _served, tuple(each for each in _served if each not in dtypes)
    try:
        yield
    finally:
        _served = before


def is_plain(tensor: Tensor) -> bool:
    """Whether a kernel can address a tensor: no subclass, but for one that has a shape alone."""
    kind = type(tensor)
    return kind is Tensor or kind is torch.nn.Parameter or _shapes_only is not None


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which the tensor's device is the current one; free when it already is."""
    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return _NO_GUARD
    if tensor.get_device() == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(tensor.get_device())


Result = TypeVar("Result")


def remembered(function: Callable[..., Result]) -> Callable[..., Result]:
    """`functools.cache`, stepping aside while torch.compile traces (it would warn of the cache)."""
    cached = functools.cache(function)

    @functools.wraps(function)
    def call(*arguments: Any) -> Result:
        return function(*arguments) if torch.compiler.is_compiling() else cached(*arguments)

    return call


@remembered
def _multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def gpu_of(tensor: Tensor) -> int | None:
    return tensor.get_device() if tensor.is_cuda else ahead.device()


def num_multiprocessors(tensor: Tensor) -> int:
    """Multiprocessors of the tensor's GPU; two under the interpreter, to exercise the loops."""
    device = gpu_of(tensor)
    if device is None:
        return 2 if _shapes_only is None else 132  # an H100's, H200's
    return _multiprocessors(device)


SMALLEST_SHARED_BYTES = 99 * 1024
"""Shared memory a block can have on the least of the GPUs served (RTX 4090, 5090); A100 163 KiB."""


@remembered
def _shared_bytes(device_index: int) -> int:
    properties: Any = torch.cuda.get_device_properties(device_index)
    return int(properties.shared_memory_per_block_optin)


def shared_bytes(tensor: Tensor) -> int:
    """Bytes of shared memory a block can have on the tensor's GPU; the least of all without one."""
    device = gpu_of(tensor)
    return SMALLEST_SHARED_BYTES if device is None else _shared_bytes(device)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def largest_power_of_2_dividing(n: int) -> int:
    return n & -n


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor as (M, N) rows with unit column stride; a copy only where no such view exists."""
    rows = tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def row_layout(tensor: Tensor) -> tuple[Tensor, int]:
    """(tensor, S): rows of the last axis that lie S elements apart, their columns dense.

    The tensor itself, without a view of it, where it is contiguous; else as `as_rows`.
    """
    if tensor.is_contiguous():
        return tensor, tensor.shape[-1]
    rows = as_rows(tensor)
    return rows, rows.stride(0)


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised contiguous memory of the tensor's shape and device."""
    if tensor.is_contiguous():
        if dtype is None or dtype is tensor.dtype:
            return torch.empty_like(tensor)
        return torch.empty_like(tensor, dtype=dtype)
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)


class KernelFunction(torch.autograd.Function):
    """An autograd function whose call costs the host less.

    ``Function.apply`` looks at every argument for what a finished functorch transform may have left
    behind. Kernels cannot address such tensors anyway.
    """

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*arguments)  # says that there is no way through
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]


class Kernel:
    """A jitted kernel with a short way to launch it.

    Its parameters must come in this order: descriptors, pointers, integers that Triton may
    specialise (strides), free numbers that it must not (named in ``do_not_specialize``; the largest
    first), constexprs.
    """

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self._ready: dict[tuple, tuple[Any, Any, Any]] = {}

    def launch(
        self,
        programs: int,
        pointers: Sequence[Tensor],
        strides: Sequence[int],
        free: Sequence[float],
        constants: tuple,
        num_warps: int,
        num_stages: int = 1,
        products: int = 0,
        descriptors: Sequence[Any] = (),
    ) -> None:
        """Launch on the tensors' device, on its current stream.

        Args:
            programs: size of the grid's only axis.
            pointers: tensors of one device.
            strides: integers Triton may specialise; the short way needs them divisible by 16.
            free: numbers whose value does not change the code.
            constants: constexpr values; part of the signature.
            num_warps: warps of a program.
            num_stages: depth of software pipelining.
            products: how often it multiplies and adds in products of matrices.
            descriptors: of tensors that are read or written tile by tile.
        """
        if not launches(2.0 * products):
            arguments = (*descriptors, *map(_dtype, pointers), *strides, *free, *constants)
            ahead.note(self.jitted, arguments, {"num_warps": num_warps, "num_stages": num_stages})
            return
        if torch.compiler.is_compiling() or INTERPRETING:
            self.jitted[programs,](
                *descriptors, *pointers, *strides, *free, *constants,
                num_warps=num_warps, num_stages=num_stages,
            )  # fmt: skip
            return
        device = pointers[0].get_device()
        addresses = [*map(_address, pointers)]
        key = (constants, num_warps, num_stages, device, *map(_dtype, pointers))
        if descriptors:
            key += tuple((each.base.dtype, *each.block_shape) for each in descriptors)
        ready = self._ready.get(key)
        # Triton specialises pointers and strides on divisibility by 16, integers on their width.
        mixed = 0
        for stride in strides:
            mixed |= stride
        as_compiled = mixed < _INT32_END and (not free or free[0] < _INT32_END)
        for address in addresses:
            mixed |= address
        as_compiled = as_compiled and not mixed & 15
        if ready is None or not as_compiled or device != torch._C._cuda_getDevice():
            ahead.wait_for(self.jitted)
            with torch.cuda.device(device):
                compiled = self.jitted[programs,](
                    *descriptors,
                    *pointers,
                    *strides,
                    *free,
                    *constants,
                    num_warps=num_warps,
                    num_stages=num_stages,
                )
            if as_compiled:
                self._ready[key] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = ready
        stream = torch._C._cuda_getCurrentRawStream(device)
        # Addresses, because Triton would look every tensor's address up in the driver.
        run(
            programs, 1, 1, stream, function, metadata, None, None, None,
            *descriptors, *addresses, *strides, *free, *constants,
        )  # fmt: skip
