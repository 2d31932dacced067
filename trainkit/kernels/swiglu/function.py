"""Gated activations with their gradients."""

from typing import Any

from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trainkit.kernels.launch import HAS_TRITON, KernelFunction, as_rows, runs_kernel

# -- Gated activations in plain torch: Hugging Face's arithmetic, rounding for rounding -----------


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``; the activation is rounded before the product, as in HF's modules."""
    return F.silu(gate) * up


def geglu_tanh_reference(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate, approximate="tanh") * up``, gemma's feed-forward gate."""
    return F.gelu(gate, approximate="tanh") * up


def swiglu_packed_reference(gate_up: Tensor, *, order: str = "gate_up") -> Tensor:
    """`swiglu_reference` on the two halves of the last axis."""
    first, second = gate_up.chunk(2, dim=-1)
    gate, up = (first, second) if order == "gate_up" else (second, first)
    return swiglu_reference(gate, up)


if HAS_TRITON:
    from trainkit.kernels.swiglu import kernel


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``.

    Args:
        gate: (..., F), any strides.
        up: shape and dtype of gate.

    Returns:
        h, shaped as gate, contiguous where the kernel runs.
    """
    _check(gate, up)
    if not runs_kernel(gate, up):
        return swiglu_reference(gate, up)
    return _Gated.apply(gate, up, False)


def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """``gelu(gate, approximate="tanh") * up``, gemma's feed-forward gate.

    Args:
        gate: (..., F), any strides.
        up: shape and dtype of gate.

    Returns:
        h, shaped as gate, contiguous where the kernel runs.
    """
    _check(gate, up)
    if not runs_kernel(gate, up):
        return geglu_tanh_reference(gate, up)
    return _Gated.apply(gate, up, True)


def swiglu_packed(gate_up: Tensor, *, order: str = "gate_up") -> Tensor:
    """``silu(gate) * up`` of the two halves of one projection, read where they are.

    Args:
        gate_up: (..., 2F), any strides.
        order: which half comes first: "gate_up" (phi3, glm) or "up_gate".

    Returns:
        h (..., F).
    """
    if order not in ("gate_up", "up_gate"):
        raise ValueError(f"order is {order!r}; it must be 'gate_up' or 'up_gate'")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"the last axis of {tuple(gate_up.shape)} does not halve")
    if not runs_kernel(gate_up):
        return swiglu_packed_reference(gate_up, order=order)
    return _PackedSwiglu.apply(gate_up, order == "up_gate")


def _check(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} differ"
        )


class _Gated(KernelFunction):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, tanh_gelu: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.tanh_gelu = tanh_gelu
        return kernel.launch_forward(gate, up, tanh_gelu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = kernel.launch_backward(gate, up, dy, ctx.tanh_gelu)
        want_gate, want_up = ctx.needs_input_grad[:2]
        return dgate if want_gate else None, dup if want_up else None, None


class _PackedSwiglu(KernelFunction):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, up_first: bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.up_first = up_first
        h = kernel.launch_packed_forward(as_rows(gate_up), up_first)
        return h.view(*gate_up.shape[:-1], h.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        dpacked = kernel.launch_packed_backward(as_rows(gate_up), as_rows(dy), ctx.up_first)
        return dpacked.view(gate_up.shape), None
