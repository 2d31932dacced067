"""A causal depthwise convolution over packed documents, as hybrids have it before their states."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trainkit.kernels.documents import first_tokens
from trainkit.kernels.launch import HAS_TRITON, KernelFunction, runs_kernel

if HAS_TRITON:
    from trainkit.kernels.causal_conv import kernel

MOST_TAPS = 4
"""Of the kernel; more run the reference."""


def causal_conv_reference(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
) -> Tensor:
    """`causal_conv` as torch's convolution does it, one document after another."""
    bounds = cu_seqlens.tolist()
    none = x[:0] * weight[:, 0]  # of no token, with its gradients
    parts = [none if bias is None else none + bias]
    for begin, end in itertools.pairwise(bounds):
        if end > begin:
            padded = F.pad(x[begin:end].mT, (weight.shape[1] - 1, 0))
            parts.append(F.conv1d(padded, weight[:, None], bias, groups=x.shape[1]).mT)
    y = torch.cat(parts)
    return F.silu(y) if activation == "silu" else y


@torch.compiler.disable(reason="kernels over documents of any number")
def causal_conv(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
) -> Tensor:
    """Each channel's weighted sum of the last W tokens of the same document, and its silu.

    Args:
        x: (T, C), documents end to end.
        weight: (C, W), the current token's last.
        cu_seqlens: (N + 1,) int32, where documents begin and end; the last is T.
        bias: (C,) or None.
        activation: "silu" or None.

    Returns:
        (T, C). Nothing of one document reaches another, to the bit.
    """
    known = x.dtype == weight.dtype and x.dtype != torch.float64 and weight.shape[1] <= MOST_TAPS
    if not (known and runs_kernel(x, weight) and x.numel()):
        return causal_conv_reference(x, weight, cu_seqlens, bias, activation=activation)
    first = first_tokens(cu_seqlens, x.shape[0])
    y: Tensor = _CausalConv.apply(x, weight, bias, first, activation == "silu")
    return y


class _CausalConv(KernelFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor, silu: bool
    ) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        weight = weight.contiguous()
        ctx.save_for_backward(x, weight, bias, first)
        ctx.silu = silu
        return kernel.forward(x, weight, bias, first, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, first = ctx.saved_tensors
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
        want_dw = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dx, dweight, dbias = kernel.backward(x, weight, bias, first, dy, ctx.silu, want_dw)
        return dx, dweight, dbias, None, None
