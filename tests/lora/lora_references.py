"""Blocks of adapted layers in plain torch: the truth that the fused functions are tested against.

Shapes: K inputs, N outputs, R rank, H hidden, F feed-forward; leading axes are free.
"""

from torch import Tensor
from torch.nn import functional

from trainkit.kernels.lora.function import activate
from trainkit.kernels.lora.products import Projection


def lora_linear_reference(x: Tensor, projection: Projection) -> Tensor:
    """``x W^T + b + s (x A^T) B^T``: (..., K) to (..., N)."""
    out = functional.linear(x, projection.read(x.dtype), projection.bias)
    if projection.lora_a is None or projection.lora_b is None:
        return out
    inner = functional.linear(x.to(projection.lora_a.dtype), projection.lora_a)
    delta = functional.linear(inner, projection.lora_b) * projection.scaling
    return (out + delta).to(out.dtype)


def lora_qkv_reference(
    x: Tensor, query: Projection, key: Projection, value: Projection
) -> tuple[Tensor, Tensor, Tensor]:
    """Three adapted projections of one input."""
    return (
        lora_linear_reference(x, query),
        lora_linear_reference(x, key),
        lora_linear_reference(x, value),
    )


def lora_mlp_reference(
    x: Tensor,
    gate: Projection,
    up: Projection | None,
    down: Projection,
    *,
    activation: str = "silu",
) -> Tensor:
    """``down(act(gate(x)) * up(x))``; without ``up``, ``gate`` gives both halves, gate first."""
    if up is None:
        gated, raised = lora_linear_reference(x, gate).chunk(2, dim=-1)
    else:
        gated, raised = lora_linear_reference(x, gate), lora_linear_reference(x, up)
    return lora_linear_reference(activate(gated, activation) * raised, down)
