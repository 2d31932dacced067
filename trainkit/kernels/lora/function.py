"""Adapted linear layers that share an input, as one autograd function.

With x (M, K), W (N, K) frozen, A (R, K), B (N, R) and s the scaling::

    y  = x W^T + b + (x A^T) (s B)^T
    dB = s dy^T (x A^T)            dA = P^T x            with P = dy (s B), (M, R)
    dx = dy W + P A

Every product of the backward pass has R on one side: ``x^T dy`` never exists. ``x A^T`` is kept
from the forward pass (M R numbers). The A of all layers that read x are stacked, so x is read once
for all of them in each direction; sums are accumulated by the matrix products themselves.

M tokens, K inputs, N outputs, R rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trainkit.kernels.launch import as_rows
from trainkit.kernels.lora import products
from trainkit.kernels.lora.projection import Projection, Unpack, read_weight


def lora_linear(x: Tensor, projection: Projection) -> Tensor:
    """A frozen linear layer with its adapter.

    Under autocast it computes in autocast's dtype, else in x's; the adapter's parameters may have
    another (fp32 masters): they are cast, never x or the weight up to theirs.

    Args:
        x: (..., K).
        projection: the layer and its adapter.

    Returns:
        (..., N) in the dtype of the computation.
    """
    return _apply(x, (projection,))[0]


def lora_qkv(
    x: Tensor, query: Projection, key: Projection, value: Projection
) -> tuple[Tensor, Tensor, Tensor]:
    """Three adapted projections of one input; see `lora_linear`.

    A projection without an adapter takes part: its share of x's gradient joins the same sum.
    """
    q, k, v = _apply(x, (query, key, value))
    return q, k, v


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype a linear layer would compute in: autocast's, where it applies, else x's."""
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, operands keep the dtypes they were given; free when autocast is off already."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Layer:
    """One layer inside an autograd function: its four tensors and what is not a tensor."""

    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    scaling: float
    unpack: Unpack | None

    @property
    def lora_rank(self) -> int:
        """R; 0 without an adapter."""
        return 0 if self.lora_a is None else self.lora_a.shape[0]

    def read(self, dtype: torch.dtype) -> Tensor:
        """The frozen weight (N, K)."""
        return read_weight(self.weight, self.unpack, dtype)

    def scaled_b(self, dtype: torch.dtype) -> Tensor:
        """The scaled factor s B (N, R), contiguous."""
        assert self.lora_b is not None
        return products.cast_scaled(self.lora_b, self.scaling, dtype).contiguous()

    def base(self, x: Tensor) -> Tensor:
        """The frozen layer alone, x W^T + b."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.read(x.dtype), bias)

    def adapted(self, x: Tensor, xa: Tensor | None) -> Tensor:
        """Base plus xa (s B)^T, the small product first so that the large one adds to it."""
        if xa is None:
            return self.base(x)
        b = self.scaled_b(x.dtype).t()
        out = torch.mm(xa, b) if self.bias is None else torch.addmm(self.bias.to(x.dtype), xa, b)
        return out.addmm_(x, self.read(x.dtype).t())


NOT_TENSORS = tuple[float, Unpack | None]
TENSORS_PER_LAYER = 4


def layers_of(tensors: Sequence[Tensor | None], extras: Sequence[NOT_TENSORS]) -> list[Layer]:
    """The layers from a flat list of tensors, as autograd passes and saves them."""
    layers = []
    for index, (scaling, unpack) in enumerate(extras):
        start = index * TENSORS_PER_LAYER
        weight, bias, lora_a, lora_b = tensors[start : start + TENSORS_PER_LAYER]
        assert weight is not None
        layers.append(Layer(weight, bias, lora_a, lora_b, scaling, unpack))
    return layers


def inner_products(x: Tensor, layers: Sequence[Layer]) -> list[Tensor | None]:
    """For every layer with an adapter x A^T, as views of one (M, sum of R) product."""
    factors = [layer.lora_a for layer in layers if layer.lora_a is not None]
    if not factors:
        return [None] * len(layers)
    stacked = products.rows(x, products.cast_stacked(factors, x.dtype))
    views = iter(stacked.split([factor.shape[0] for factor in factors], dim=1))
    return [None if layer.lora_a is None else next(views) for layer in layers]


def input_gradient(
    p: Tensor | None, a: Tensor | None, terms: Sequence[tuple[Tensor, Layer]]
) -> Tensor:
    """P A plus the sum of dy W: one buffer, added to by every product."""
    dx = torch.mm(p, a) if p is not None and a is not None else None
    for dy, layer in terms:
        weight = layer.read(dy.dtype)
        dx = torch.mm(dy, weight) if dx is None else dx.addmm_(dy, weight)
    assert dx is not None
    return dx


def _apply(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    extras = tuple((each.scaling, each.unpack) for each in projections)
    tensors = [tensor for each in projections for tensor in each.tensors()]
    return _SharedInput.apply(x, compute_dtype(x), extras, *tensors)


class _SharedInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dtype: torch.dtype,
        extras: tuple[NOT_TENSORS, ...],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        with no_autocast(x):
            layers = layers_of(tensors, extras)
            x_rows = as_rows(x).to(dtype)
            inner = inner_products(x_rows, layers)
            outputs = [layer.adapted(x_rows, xa) for layer, xa in zip(layers, inner, strict=True)]
        ctx.save_for_backward(x, *inner, *tensors)
        ctx.dtype = dtype
        ctx.extras = extras
        ctx.set_materialize_grads(False)
        return tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *rest = ctx.saved_tensors
        number = len(ctx.extras)
        layers = layers_of(rest[number:], ctx.extras)
        result: list[Tensor | None] = [None] * (3 + TENSORS_PER_LAYER * number)
        present = [index for index in range(number) if grads[index] is not None]
        if not present:
            return tuple(result)
        with no_autocast(x):
            dys = {i: as_rows(grads[i]).to(ctx.dtype) for i in present}  # type: ignore[arg-type]
            adapted = [i for i in present if layers[i].lora_a is not None]
            p = a = None
            if adapted:
                p, a = _through_the_rank(layers, dys, adapted, ctx.dtype)
                _factor_gradients(ctx, result, x, rest, layers, dys, adapted, p)
            if ctx.needs_input_grad[0]:
                dx = input_gradient(p, a, [(dys[i], layers[i]) for i in present])
                result[0] = dx.view(x.shape).to(x.dtype)
        return tuple(result)


def _through_the_rank(
    layers: Sequence[Layer], dys: dict[int, Tensor], adapted: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """P = [dy s B, ...] (M, sum of R) and the stacked A (sum of R, K)."""
    sizes = [layers[i].lora_rank for i in adapted]
    p = dys[adapted[0]].new_empty((dys[adapted[0]].shape[0], sum(sizes)))
    for i, place in zip(adapted, p.split(sizes, dim=1), strict=True):
        products.rows(dys[i], layers[i].scaled_b(dtype).t(), out=place)
    factors = [factor for i in adapted if (factor := layers[i].lora_a) is not None]
    return p, products.cast_stacked(factors, dtype)


def _factor_gradients(
    ctx: Any,
    result: list[Tensor | None],
    x: Tensor,
    inner: Sequence[Tensor],
    layers: Sequence[Layer],
    dys: dict[int, Tensor],
    adapted: list[int],
    p: Tensor,
) -> None:
    """Put dA and dB of every adapter that wants them into the result."""
    places = {i: 3 + TENSORS_PER_LAYER * i for i in adapted}
    if any(ctx.needs_input_grad[places[i] + 2] for i in adapted):
        first = layers[adapted[0]].lora_a
        assert first is not None
        stacked = products.columns(as_rows(x).to(ctx.dtype), p, first.dtype, transposed=True)
        parts = stacked.split([layers[i].lora_rank for i in adapted])
        for i, da in zip(adapted, parts, strict=True):
            result[places[i] + 2] = da
    for i in adapted:
        layer = layers[i]
        if ctx.needs_input_grad[places[i] + 3] and layer.lora_b is not None:
            result[places[i] + 3] = products.columns(
                dys[i], inner[i], layer.lora_b.dtype, scale=layer.scaling
            )
