"""Quantising, transposing and multiplying in e4m3, in plain torch: the numbers of the kernels.

e4m3 has 3 bits behind the point, numbers up to 448 and no infinity. A row's scale is one of two:

- the smallest power of two that brings its largest magnitude to 448 or less: multiplying by it
  rounds nothing, and code times scale is exact in bf16. For weights and gradients.
- 1/256 of the largest magnitude, which is then a code and not rounded at all. For activations: a
  few large ones decide much of what a model says, and kept so its predictions are moved a third
  less (`docs/guides/fp8.md`).

Either is computed exactly, so codes are the same bits on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.kernels.swiglu.function import geglu_tanh_reference, swiglu_reference

FP8 = torch.float8_e4m3fn
_ALIGNMENT = 16
SMALLEST_EXPONENT = -126
"""Of a scale: the smallest normal fp32 number."""


def fp8_quantize_reference(
    x: Tensor,
    factor: Tensor | None = None,
    keep_largest: bool = False,
    smallest: int = SMALLEST_EXPONENT,
) -> tuple[Tensor, Tensor]:
    """(codes (M, K) e4m3, scales (M, 1) fp32) of the rows of x times factor (K,).

    Scales that are powers of two are at least ``2**smallest``.
    """
    values = x if x.dtype == torch.float64 else x.float()
    if factor is not None:
        values = values * factor.to(values.dtype)
    if not x.shape[1]:
        return values.to(FP8), values.new_ones((x.shape[0], 1), dtype=torch.float32)
    largest = values.abs().amax(1, keepdim=True)
    is_finite = largest.isfinite()
    if keep_largest:
        scales = torch.where(is_finite, largest.float().clamp_min(2.0**-118) * 2.0**-8, torch.nan)
        return torch.where(is_finite, values * scales.reciprocal(), 0.0).to(FP8), scales
    # largest = mantissa * 2^exponent with a mantissa in [0.5, 1), and 448 = 0.875 * 2^9.
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - 9 + (mantissa > 0.875).int()
    exponent = torch.where(largest == 0, smallest, exponent).clamp(smallest, 126)
    one = torch.ones_like(largest)
    codes = torch.where(is_finite, values * torch.ldexp(one, -exponent), 0.0).to(FP8)
    scales = torch.where(is_finite, torch.ldexp(one, exponent), torch.nan)
    return codes, scales.float()


def fp8_quantize_joint_reference(
    parts: Sequence[Tensor],
    factors: Sequence[Tensor] | None = None,
    keep_largest: bool = False,
    smallest: int = SMALLEST_EXPONENT,
) -> tuple[Tensor, Tensor]:
    """The same of several matrices side by side."""
    factor = None if factors is None else torch.cat([each.flatten() for each in factors])
    return fp8_quantize_reference(torch.cat(tuple(parts), dim=1), factor, keep_largest, smallest)


def fp8_quantize_both_reference(
    parts: Sequence[Tensor], column_factors: Sequence[Tensor], row_factor: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes, scales = fp8_quantize_joint_reference(parts, column_factors)
    turned, turned_scales = fp8_quantize_columns_reference(torch.cat(tuple(parts), 1), row_factor)
    return codes, scales, turned, turned_scales


def fp8_quantize_columns_reference(
    x: Tensor, row_factor: Tensor, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Columns of x (M, K) with their rows' factors: codes (K, M and some zeros), scales (K, 1)."""
    given = scales
    if scales is None:
        turned, scales = fp8_quantize_reference(x.t(), row_factor)
    else:
        values = x.t() if x.dtype == torch.float64 else x.t().float()
        turned = values * row_factor.to(values.dtype) * scales.reciprocal().to(values.dtype)
        turned = torch.where(scales.isfinite(), turned, 0.0).to(FP8)
    missing = -turned.shape[1] % _ALIGNMENT
    if turned.dtype == FP8:
        turned = functional.pad(turned.view(torch.uint8), (0, missing)).view(FP8)
    else:
        turned = functional.pad(turned, (0, missing))
    if not x.shape[0] and given is None:
        scales = torch.full_like(scales, 2.0**SMALLEST_EXPONENT)
    return turned, scales


def fp8_transpose_reference(parts: Sequence[Tensor]) -> Tensor:
    """(K, sum of N) contiguous, of codes (N, K) each."""
    if parts[0].dtype != FP8:
        return torch.cat([part.t() for part in parts], dim=1)
    return torch.cat([part.view(torch.uint8).t() for part in parts], dim=1).view(FP8)


def fp8_gate_reference(gate: Tensor, up: Tensor, tanh_gelu: bool = False) -> tuple[Tensor, Tensor]:
    """Codes (M, F) and scales (M, 1) of h = act(gate) * up."""
    return fp8_quantize_reference(gated(gate, up, tanh_gelu), keep_largest=True)


def fp8_gate_backward_reference(
    gate: Tensor,
    up: Tensor,
    dh: Tensor,
    factors: Sequence[Tensor],
    h_scales: Tensor,
    tanh_gelu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (M, 2F) and scales of [dgate, dup] times their factors; codes (M, F) of h again."""
    codes, scales = fp8_quantize_joint_reference(gated_backward(gate, up, dh, tanh_gelu), factors)
    h = gated(gate, up, tanh_gelu)
    values = h if h.dtype == torch.float64 else h.float()
    inverse = torch.where(h_scales.isfinite(), h_scales.reciprocal(), 0.0)
    return codes, scales, torch.where(inverse == 0, 0.0, values * inverse).to(FP8)


def gated(gate: Tensor, up: Tensor, tanh_gelu: bool) -> Tensor:
    """h, of gate's shape (M, F)."""
    return (geglu_tanh_reference if tanh_gelu else swiglu_reference)(gate, up)


def gated_backward(gate: Tensor, up: Tensor, dh: Tensor, tanh_gelu: bool) -> tuple[Tensor, Tensor]:
    if tanh_gelu:
        activated = functional.gelu(gate, approximate="tanh")
        dgate = torch.ops.aten.gelu_backward(dh * up, gate, approximate="tanh")
    else:
        activated = functional.silu(gate)
        dgate = torch.ops.aten.silu_backward(dh * up, gate)
    return dgate, dh * activated


def fp8_matmul_reference(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """``(a a_scales) (b b_scales)^T + bias``: (M, K) by (N, K) to (M, N), summed in fp32, in bf16.

    fp64 operands give fp64.
    """
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    out = torch.mm(a.to(wide), b.to(wide).t()) * a_scales.to(wide) * b_scales.to(wide).t()
    if bias is not None:
        out = out + bias.to(wide)
    return out if wide == torch.float64 else out.to(torch.bfloat16)
