"""A feed-forward block that trains in fp8, ``y = down(act(gate(x)) * up(x))``, as one function.

What passes between its products is quantised where it is made. Unlike in `trained`, h and the
gradients of gate and up never exist in 16 bits, and h is not kept: the backward pass makes its
codes again while it reads gate and up.

M tokens, H hidden, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trainkit.kernels.autocast import no_autocast
from trainkit.kernels.fp8.function import (
    fp8_gate,
    fp8_gate_backward,
    fp8_matmul,
    fp8_quantize,
    fp8_quantize_both,
    fp8_quantize_joint,
    fp8_transpose,
)
from trainkit.kernels.fp8.linear import SharedInput, take_rows
from trainkit.kernels.fp8.trained import Directions, fp8_weight_gradients, padded
from trainkit.kernels.launch import as_rows
from trainkit.kernels.sums import column_sums
from trainkit.kernels.swiglu.function import geglu_tanh, swiglu


def fp8_feed_forward(
    x: Tensor,
    weights: Sequence[Tensor],
    down_bias: Tensor | None,
    directions: Sequence[Directions],
    *,
    tanh_gelu: bool = False,
) -> Tensor:
    """The block, with all backward products in fp8 and the forward ones that ask for it.

    Args:
        x: (..., H) in bf16, what it computes in.
        weights: gate (F, H), up (F, H) and down (H, F).
        down_bias: (H,), or None; gate and up have none.
        directions: of each layer, all with `Directions.backward`.
        tanh_gelu: the activation is the tanh GELU instead of SiLU.
    """
    quantized = take_rows(x)
    y: Tensor = _FeedForward.apply(x, quantized, tuple(directions), tanh_gelu, *weights, down_bias)
    return y


_BEFORE_WEIGHTS = 4
"""Arguments of `_FeedForward` before the weights."""


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        quantized: tuple[Tensor, Tensor] | None,
        directions: tuple[Directions, ...],
        tanh_gelu: bool,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        down_bias: Tensor | None,
    ) -> Tensor:
        *first, last = directions
        with no_autocast(x):
            shared = SharedInput(as_rows(x), quantized)
            outputs = [
                fp8_matmul(*shared.quantized(), *each.codes(weight))
                if each.forward
                else functional.linear(shared.rows, weight.to(x.dtype))
                for each, weight in zip(first, (gate, up), strict=True)
            ]
            if last.forward:
                codes, scales = fp8_gate(*outputs, tanh_gelu=tanh_gelu)
                y = fp8_matmul(codes, scales, *last.codes(down), down_bias)
            else:
                h = (geglu_tanh if tanh_gelu else swiglu)(*outputs)
                _, scales = fp8_quantize(h, keep_largest=True)
                bias = None if down_bias is None else down_bias.to(x.dtype)
                y = functional.linear(h, down.to(x.dtype), bias)
            ctx.save_for_backward(*shared.quantized(), *outputs, scales, gate, up, down)
        ctx.directions, ctx.tanh_gelu, ctx.shape = directions, tanh_gelu, x.shape
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scales, gate, up, h_scales, *weights = ctx.saved_tensors
        wants_dx, _, _, _, wants_gate, wants_up, wants_down, wants_bias = ctx.needs_input_grad
        result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        with no_autocast(dy):
            rows = as_rows(dy).to(gate.dtype)
            w_gate, w_up, w_down = (
                each.codes(weight) for each, weight in zip(ctx.directions, weights, strict=True)
            )
            if wants_bias:
                result[_BEFORE_WEIGHTS + 3] = column_sums(rows)
            if wants_down:
                *quantized, turned, own = fp8_quantize_both([rows], [w_down[1]], h_scales)
            else:
                quantized = [*fp8_quantize_joint([rows], [w_down[1]])]
            dh = _times_weights(*quantized, w_down[0]).to(gate.dtype)
            factors = (w_gate[1], w_up[1])
            codes, scales, h_codes = fp8_gate_backward(
                gate, up, dh, factors, h_scales, tanh_gelu=ctx.tanh_gelu
            )
            del dh
            if wants_down:
                h_turned = padded(fp8_transpose([h_codes]))
                dweight = fp8_matmul(turned, own, h_turned, _ones(h_turned))
                result[_BEFORE_WEIGHTS + 2] = dweight.to(weights[2].dtype)
                del h_turned, turned
            del h_codes
            if wants_dx:
                dx = _times_weights(codes, scales, w_gate[0], w_up[0])
                result[0] = dx.to(gate.dtype).view(ctx.shape)
            if wants_gate or wants_up:
                dweights = fp8_weight_gradients((codes, scales), factors, (x_codes, x_scales))
                for place, dweight in enumerate(dweights):
                    if (wants_gate, wants_up)[place]:
                        result[_BEFORE_WEIGHTS + place] = dweight.to(weights[place].dtype)
        return tuple(result)


def _times_weights(codes: Tensor, scales: Tensor, *weights: Tensor) -> Tensor:
    """Codes (M, sum of N) of gradients times weights' codes (N, K) each: (M, K)."""
    turned = fp8_transpose(weights)
    return fp8_matmul(codes, scales, turned, _ones(turned))


def _ones(codes: Tensor) -> Tensor:
    return torch.ones((codes.shape[0], 1), dtype=torch.float32, device=codes.device)
