"""Linear layers that train, with their products in e4m3 in all three directions ("fold").

The tensor cores want both operands stored along the contraction, with scales across it::

    y  = x W^T      codes of x (M, K), codes of W (N, K); a scale for each token and each output
    dx = dy W       codes of dy w, with w the scales of W multiplied into dy's columns first, and
                    the transposed codes of W
    dW = dy^T x     codes of (s dy)^T (N, M), with s the scales of x multiplied into dy's rows
                    first, and the transposed codes of x; or, where x is no wider than twice dy,
                    what `fp8_weight_gradients` does

So x is quantised once and kept as one byte a number for the backward pass. W's codes are asked for
at each use: whoever holds the layer knows how long they are good. The weight itself is what
autograd keeps, so nothing of a weight that ZeRO-3 has gathered outlives its gathering.

Rounding the forward product costs loss; rounding the gradients does not, as far as it was measured.
A layer may therefore have the one without the other.

M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trainkit.kernels.autocast import compute_dtype, no_autocast
from trainkit.kernels.fp8.function import (
    fp8_matmul,
    fp8_quantize,
    fp8_quantize_both,
    fp8_quantize_columns,
    fp8_quantize_joint,
    fp8_transpose,
)
from trainkit.kernels.fp8.linear import Fp8Weight, SharedInput, fp8_input_gradient, take_rows
from trainkit.kernels.launch import as_rows
from trainkit.kernels.sums import column_sums

Codes = tuple[Tensor, Tensor]
"""Codes (N, K) e4m3 and scales (N, 1) fp32 of a weight."""

_ALIGNMENT = 16
"""Tokens are the contraction of dW, and must be a multiple of this many."""

SMALLEST_WEIGHT_SCALE = -18
"""As a power of two. Scales of W are multiplied into the gradients of its rows, which share a scale
with those of all others: with a scale of its own, the gradient of a row that is zero, or just no
longer, would be rounded away. e4m3 holds a row whose largest weight is 1e-5 at this scale as well
as any other."""


def quantize_weight(weight: Tensor) -> Codes:
    """Codes and scales of a weight (N, K) that trains."""
    return fp8_quantize(weight.detach(), smallest=SMALLEST_WEIGHT_SCALE)


@dataclass(frozen=True)
class Directions:
    """Which products of a layer run in fp8.

    Attributes:
        codes: gives the weight's codes; called at each use.
    """

    forward: bool = False
    backward: bool = False
    codes: Callable[[Tensor], Codes] = quantize_weight


def fp8_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    directions: Sequence[Directions],
) -> tuple[Tensor, ...]:
    """Linear layers of one input, in fp8 as far as their directions say.

    Under autocast they compute in autocast's dtype, else in x's; fp8 products give numbers that
    are rounded to bf16.

    Args:
        x: (..., K).
        weights: (N, K) each.
        biases: (N,) each, or None.
        directions: of each layer.
    """
    dtype = compute_dtype(x)
    quantized = take_rows(x)  # made where x was
    if x.dtype != dtype or not any(each.forward or each.backward for each in directions):
        quantized = None
    outputs: tuple[Tensor, ...] = _Linears.apply(
        x, dtype, tuple(directions), quantized, *weights, *biases
    )
    return outputs


def fp8_weight_gradient(dy: Tensor, scales: Tensor, turned: Tensor) -> Tensor:
    """``dy^T x`` (N, K), rounded to bf16.

    Args:
        dy: (M, N).
        scales: of x's rows, (M, 1).
        turned: x's codes transposed, (K, M).
    """
    missing = -dy.shape[0] % _ALIGNMENT
    if missing:
        dy, scales = (functional.pad(each, (0, 0, 0, missing)) for each in (dy, scales))
    return _weight_gradient(*fp8_quantize(dy.t(), scales), padded(turned))


def _weight_gradient(codes: Tensor, scales: Tensor, turned: Tensor) -> Tensor:
    """Of dy's columns in e4m3 (N, M), times x's scales, and x's codes transposed (K, M)."""
    return fp8_matmul(codes, scales, turned, scales.new_ones((turned.shape[0], 1)))


def fp8_weight_gradients(quantized: Codes, factors: Sequence[Tensor], x: Codes) -> Iterator[Tensor]:
    """DW (N, K) of layers that share their input, from what their dx is made of.

    ``dW = dy^T x`` and dy = r c / w, with codes c, the tokens' scales r and the weights' scales w.
    A product's scales lie across the contraction, so r is multiplied into x, which is quantised
    again, and c is only transposed: dW = 1/w c^T (r x). That is less work than quantising dy twice
    unless x is much wider. It asks for weights' scales that do not differ too much
    (`SMALLEST_WEIGHT_SCALE`).

    Args:
        quantized: codes (M, sum of N) and scales (M, 1) of the dys times w.
        factors: w (N, 1) of each layer.
        x: codes (M, K) and scales (M, 1).
    """
    codes, scales = quantized
    turned = padded(fp8_transpose([codes]))
    again = fp8_quantize_columns(x[0], x[1] * scales)
    for part, factor in zip(turned.split([len(each) for each in factors]), factors, strict=True):
        yield fp8_matmul(part, factor.reciprocal(), *again)


def padded(turned: Tensor) -> Tensor:
    """Codes (K, M) with zeros up to a multiple of 16 columns."""
    missing = -turned.shape[1] % _ALIGNMENT
    if not missing:
        return turned
    return functional.pad(turned.view(torch.uint8), (0, missing)).view(turned.dtype)


_BEFORE_WEIGHTS = 4
"""Arguments of `_Linears` before the weights."""


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dtype: torch.dtype,
        directions: tuple[Directions, ...],
        quantized: tuple[Tensor, Tensor] | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        count = len(directions)
        weights, biases = parameters[:count], parameters[count:]
        outputs = []
        with no_autocast(x):
            shared = SharedInput(as_rows(x).to(dtype), quantized)
            for each, weight, bias in zip(directions, weights, biases, strict=True):
                assert weight is not None
                if each.forward:
                    out = fp8_matmul(*shared.quantized(), *each.codes(weight), bias).to(dtype)
                else:
                    wide = None if bias is None else bias.to(dtype)
                    out = functional.linear(shared.rows, weight.to(dtype), wide)
                outputs.append(out.view(*x.shape[:-1], out.shape[-1]))
            wanted = list(
                zip(
                    directions,
                    ctx.needs_input_grad[_BEFORE_WEIGHTS : _BEFORE_WEIGHTS + count],
                    strict=True,
                )
            )
            in_fp8 = any(each.backward and wants for each, wants in wanted)
            in_full = any(wants and not each.backward for each, wants in wanted)
            codes, scales = shared.quantized() if in_fp8 else (None, None)
        ctx.save_for_backward(codes, scales, shared.rows if in_full else None, *weights)
        ctx.directions, ctx.dtype, ctx.like = directions, dtype, x.dtype
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        codes, scales, rows, *weights = ctx.saved_tensors
        count = len(weights)
        wants_dx, _, _, _, *wanted = ctx.needs_input_grad
        result: list[Tensor | None] = [None] * (_BEFORE_WEIGHTS + 2 * count)
        reached = [
            (place, as_rows(dy).to(ctx.dtype), weights[place], ctx.directions[place])
            for place, dy in enumerate(gradients)
            if dy is not None
        ]
        if not reached:
            return tuple(result)
        first = next(dy for dy in gradients if dy is not None)
        with no_autocast(first):
            terms = [each[1:] for each in reached]
            in_fp8 = [(place, dy) for place, dy, _, each in reached if each.backward]
            twice = wants_dx and all(wanted[place] for place, _ in in_fp8)
            quantized = None
            dweights: dict[int, Tensor] = {}
            if in_fp8 and twice:
                quantized, dweights = _both_ways(terms, in_fp8, codes, scales)
            elif any(wanted[place] for place, _ in in_fp8):
                turned = fp8_transpose([codes])
                dweights = {
                    place: fp8_weight_gradient(dy, scales, turned)
                    for place, dy in in_fp8
                    if wanted[place]
                }
            if wants_dx:
                dx = _input_gradient(terms, quantized)
                result[0] = dx.view(*first.shape[:-1], dx.shape[1]).to(ctx.like)
            for place, dy, weight, _ in reached:
                if wanted[place]:
                    dweight = dweights[place] if place in dweights else torch.mm(dy.t(), rows)
                    result[_BEFORE_WEIGHTS + place] = dweight.to(weight.dtype)
                if wanted[count + place]:
                    result[_BEFORE_WEIGHTS + count + place] = column_sums(dy)
        return tuple(result)


def _both_ways(
    terms: Sequence[tuple[Tensor, Tensor, Directions]],
    in_fp8: Sequence[tuple[int, Tensor]],
    codes: Tensor,
    scales: Tensor,
) -> tuple[tuple[Tensor, Tensor], dict[int, Tensor]]:
    """What dx needs of the dys in e4m3, and dW by place."""
    dys = [dy for _, dy in in_fp8]
    factors = [each.codes(weight)[1] for _, weight, each in terms if each.backward]
    sizes = [dy.shape[1] for dy in dys]
    if 2 * sum(sizes) > codes.shape[1]:
        quantized = fp8_quantize_joint(dys, factors)
        dweights = fp8_weight_gradients(quantized, factors, (codes, scales))
        return quantized, dict(zip([place for place, _ in in_fp8], dweights, strict=True))
    row_codes, row_scales, turned_dys, own = fp8_quantize_both(dys, factors, scales)
    turned = padded(fp8_transpose([codes]))
    parts = zip(in_fp8, turned_dys.split(sizes), own.split(sizes), strict=True)
    found = {place: _weight_gradient(part, its, turned) for (place, _), part, its in parts}
    return (row_codes, row_scales), found


def _input_gradient(
    terms: Sequence[tuple[Tensor, Tensor, Directions]],
    quantized: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The sum of dy W over the layers: one product for those in fp8, added to by the others."""
    in_fp8 = []
    for dy, weight, each in terms:
        if each.backward:
            codes, scales = each.codes(weight)
            in_fp8.append((dy, codes.view(torch.uint8), Fp8Weight(scales)))
    dx = fp8_input_gradient(in_fp8, quantized=quantized) if in_fp8 else None
    for dy, weight, each in terms:
        if not each.backward:
            wide = weight.to(dy.dtype)
            dx = torch.mm(dy, wide) if dx is None else dx.addmm_(dy, wide)
    assert dx is not None
    return dx
