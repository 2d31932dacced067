"""Makes Triton's CPU interpreter numerically honest for bf16 and e4m3.

``TRITON_INTERPRET=1`` runs kernels with numpy, which has no bfloat16: Triton 3.6 to 3.9 keep such
values as ``uint16`` bit patterns. Arithmetic on them then adds bit patterns, and a cast from fp32
truncates instead of rounding to nearest even. No error is raised; the numbers are just wrong. The
repair lifts every bf16 operand to fp32 before an operation and rounds the result back, as a
GPU does. A cast to e4m3 is wrong as well (126 becomes 64) and is done by torch. The repair also
serialises launches, because the interpreter swaps the functions of
``triton.language`` globally while a kernel runs.

Private names of Triton are wrapped. A Triton that no longer has one of them raises here, at import,
and not later with a wrong number.
"""

import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_WRAPPED_METHODS = ("cast_impl", "create_fp_to_fp", "binary_op", "unary_op", "create_dot")
_installed = False


def bf16_bits_to_float32(bits: np.ndarray) -> np.ndarray:
    """Widen bfloat16 bit patterns (uint16) to float32; exact."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16 bit patterns (uint16), to nearest even; NaN stays a quiet NaN."""
    source = np.ascontiguousarray(values, dtype=np.float32)
    bits = source.view(np.uint32)
    # Adding 0x7FFF, or 0x8000 when the last kept bit is odd, carries exactly when rounding is up.
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    halves = np.where(np.isnan(source), np.uint32(0x7FC0), rounded).astype(np.uint16)
    return halves.reshape(np.shape(values))


def float32_to_e4m3_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 to e4m3 bit patterns (uint8), to nearest even."""
    source = torch.from_numpy(np.array(values, dtype=np.float32, ndmin=1))
    codes = source.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return codes.reshape(np.shape(values))


def install() -> None:
    """Wrap the interpreter once per process; a second call does nothing."""
    global _installed
    if _installed:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    missing = [name for name in _WRAPPED_METHODS if not hasattr(builder, name)]
    if missing:
        raise RuntimeError(
            f"this Triton's interpreter has no {', '.join(missing)}; bf16 would be silently wrong. "
            "Use a Triton between 3.6 and 3.9, or fix trainkit/kernels/interpreter.py."
        )
    _wrap_bf16(builder, interpreter, tl)
    _serialise_launches(interpreter)
    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):
        _remember_names(interpreter, tl)
    if hasattr(interpreter, "_patch_lang_tensor"):
        _index_by_item(interpreter)
    _installed = True


def _remember_names(interpreter: Any, tl: Any) -> None:
    """Every call of a jitted function looks through all of ``triton.language``; once is enough."""
    builtins: dict[Any, list[str]] = {}

    def patch(package: Any, *rest: Any) -> None:
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [name for name, member in members if tl.core.is_builtin(member)]
        for name in builtins[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # else swapped by the function that called this one
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._patch_builtin = patch


def _index_by_item(interpreter: Any) -> None:
    """Triton 3.6 asks numpy for the int of an array of one number, which numpy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _wrap_bf16(builder: Any, interpreter: Any, tl: Any) -> None:
    handle = interpreter.TensorHandle
    cast, fp_to_fp = builder.cast_impl, builder.create_fp_to_fp
    binary, unary, dot = builder.binary_op, builder.unary_op, builder.create_dot

    def is_bf16(value: Any) -> bool:
        return value.dtype.scalar == tl.bfloat16

    def is_e4m3(value: Any) -> bool:
        return value.dtype.scalar == tl.float8e4nv

    def lift(value: Any) -> Any:
        if not is_bf16(value):
            return value
        return handle(bf16_bits_to_float32(value.data), tl.float32)

    def lower(value: Any) -> Any:
        # Comparisons of bf16 operands give booleans, which pass through.
        if not np.issubdtype(value.data.dtype, np.floating):
            return handle(value.data, tl.bfloat16)
        return handle(float32_to_bf16_bits(value.data), tl.bfloat16)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        scalar = target.scalar
        if scalar == tl.bfloat16 and not is_bf16(source):
            return handle(float32_to_bf16_bits(source.data.astype(np.float32)), tl.bfloat16)
        if scalar == tl.float8e4nv and not is_e4m3(source):
            return handle(float32_to_e4m3_bits(lift(source).data), tl.float8e4nv)
        if is_bf16(source) and scalar != tl.bfloat16:
            wide = lift(source)
            return wide if scalar == tl.float32 else cast(self, wide, target)
        return cast(self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        toward_zero = rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if target.scalar in (tl.bfloat16, tl.float8e4nv) and not toward_zero:
            return self.cast_impl(source, target)
        return fp_to_fp(self, source, target, rounding)

    def binary_op(self: Any, left: Any, right: Any, op: Callable) -> Any:
        if is_bf16(left) and is_bf16(right):
            return lower(binary(self, lift(left), lift(right), op))
        return binary(self, left, right, op)

    def unary_op(self: Any, value: Any, op: Callable) -> Any:
        return lower(unary(self, lift(value), op)) if is_bf16(value) else unary(self, value, op)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, lift(a), lift(b), d, *rest)

    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    builder.binary_op = binary_op
    builder.unary_op = unary_op
    builder.create_dot = create_dot


def _serialise_launches(interpreter: Any) -> None:
    patched: set[str] = set()
    executor, patch = interpreter.GridExecutor, interpreter._patch_lang
    lock = threading.RLock()
    launch = executor.__call__

    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        # One numpy program after another already uses the machine; torch's own threads would only
        # wait for each other around tiny copies.
        with lock, torch.no_grad():
            patched.clear()
            return launch(self, *args, **kwargs)

    def patch_once(function: Any) -> Any:
        """A function that a kernel calls finds what was swapped for the kernel, until it ends."""
        if function.__module__ in patched:
            return None
        patched.add(function.__module__)
        return patch(function)

    executor.__call__, interpreter._patch_lang = locked, patch_once
