"""RMSNorm with a gate, as state-space and linear-attention layers end in, with its gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trainkit.kernels.launch import HAS_TRITON, KernelFunction, runs_kernel

if HAS_TRITON:
    from trainkit.kernels.rms_norm import gated_kernel
    from trainkit.kernels.rms_norm.kernel import MAX_HIDDEN


def gated_rms_norm_reference(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    group: int | None = None,
    gate_first: bool = False,
    activation: str = "silu",
    cast: str = "llama",
) -> Tensor:
    """`gated_rms_norm` in plain torch, rounding for rounding.

    Source: MambaRMSNormGated (gate first), Qwen3NextRMSNormGated, KimiLinearRMSNormGated (sigmoid,
    gemma cast) of transformers 5.23. fp64 inputs stay fp64.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    act = torch.sigmoid if activation == "sigmoid" else functional.silu
    share = act(gate.to(wide))
    values = x.to(wide) * share if gate_first else x.to(wide)
    grouped = values.unflatten(-1, (-1, group or x.shape[-1]))
    normal = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)
    normal = normal.flatten(-2)
    if cast == "gemma":
        y = normal * weight.to(wide)
        return (y if gate_first else y * share).to(x.dtype)
    y = weight * normal.to(x.dtype)
    return y if gate_first else (y * share).to(x.dtype)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    group: int | None = None,
    gate_first: bool = False,
    activation: str = "silu",
    cast: str = "llama",
) -> Tensor:
    """``rms_norm(x) * act(gate)``, or ``rms_norm(x * act(gate))``; the gate counts in fp32.

    Args:
        x: (..., H), any strides.
        gate: shaped as x, of any dtype and strides.
        weight: (H,).
        eps: added to the mean square.
        group: columns that are normalised together, a divisor of H; None for all H.
        gate_first: the gate multiplies x and not the norm's result.
        activation: "silu" or "sigmoid".
        cast: "llama": the normalised row is rounded to x's dtype before the weight multiplies it;
            "gemma": all in fp32, rounded once.

    Returns:
        y, shaped as x and in its dtype; with ``gate_first`` and the llama cast, in the wider of
        x's and the weight's.
    """
    hidden = x.shape[-1]
    if x.shape != gate.shape or weight.shape != (hidden,) or hidden % (group or hidden):
        raise ValueError(
            f"x {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {tuple(weight.shape)} and "
            f"groups of {group} columns do not fit each other"
        )
    if activation not in ("silu", "sigmoid") or cast not in ("llama", "gemma"):
        raise ValueError(f"activation {activation!r} or cast {cast!r} is unknown")
    if not runs_kernel(x, gate, weight) or not 0 < (group or hidden) <= MAX_HIDDEN:
        return gated_rms_norm_reference(
            x, gate, weight, eps,
            group=group, gate_first=gate_first, activation=activation, cast=cast,
        )  # fmt: skip
    settings = (gate_first, activation == "sigmoid", group or hidden)
    y: Tensor = _GatedNorm.apply(x, gate, weight, eps, cast == "gemma", settings)
    return y


class _GatedNorm(KernelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        gemma: bool,
        settings: tuple[bool, bool, int],
    ) -> Tensor:
        y, rstd = gated_kernel.launch_forward(x, gate, weight.contiguous(), eps, gemma, *settings)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.settings = settings
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, rstd = ctx.saved_tensors
        want_x, want_gate, want_dw = ctx.needs_input_grad[:3]
        dx, dgate, dw = gated_kernel.launch_backward(
            x, gate, weight.contiguous(), rstd, dy, want_dw, *ctx.settings
        )
        return dx if want_x else None, dgate if want_gate else None, dw, None, None, None
