"""Gated activations in plain torch: Hugging Face's arithmetic, rounding for rounding."""

from torch import Tensor
from torch.nn import functional as F


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
