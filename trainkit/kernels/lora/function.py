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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trainkit.kernels.autocast import compute_dtype, no_autocast
from trainkit.kernels.fp8.linear import (
    Fp8Gradient,
    Fp8Weight,
    SharedInput,
    fp8_input_gradient,
    take_rows,
)
from trainkit.kernels.launch import as_rows
from trainkit.kernels.lora import products
from trainkit.kernels.lora.products import Projection, Unpack, read_weight, reshaped


def lora_linear(x: Tensor, projection: Projection) -> Tensor:
    """A frozen linear layer with its adapter.

    Under autocast it computes in autocast's dtype, else in x's; the adapter's parameters may have
    another (fp32 masters): they are cast, never x or the weight up to theirs.

    Args:
        x: (..., K).
        projection: the layer and its adapter.
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


@dataclass(frozen=True)
class Fixed:
    """What autograd need not see of a layer."""

    lora_rank: int
    scaling: float
    unpack: Unpack | None
    dtype_a: torch.dtype | None
    dtype_b: torch.dtype | None

    @classmethod
    def of(cls, projection: Projection) -> Fixed:
        a, b = projection.lora_a, projection.lora_b
        return cls(
            projection.lora_rank,
            projection.scaling,
            projection.unpack,
            None if a is None else a.dtype,
            None if b is None else b.dtype,
        )


@dataclass(frozen=True)
class Layer:
    """One layer inside an autograd function, its adapter in the dtype of the computation.

    Attributes:
        weight: (N, K) or packed, frozen.
        bias: (N,) or None; not needed in the backward pass.
        b: s B (N, R) contiguous, or None without an adapter.
    """

    weight: Tensor
    bias: Tensor | None
    b: Tensor | None
    fixed: Fixed

    def read(self, dtype: torch.dtype) -> Tensor:
        """The frozen weight (N, K)."""
        return read_weight(self.weight, self.fixed.unpack, dtype)

    def for_gradients(self) -> Layer:
        """Itself as the backward pass multiplies with it: in e4m3 where only that does."""
        if not isinstance(self.fixed.unpack, Fp8Gradient):
            return self
        codes, reader = self.fixed.unpack.quantized(self.weight)
        return replace(self, weight=codes, fixed=replace(self.fixed, unpack=reader))

    def base(self, shared: SharedInput) -> Tensor:
        """The frozen layer alone, x W^T + b."""
        if isinstance(self.fixed.unpack, Fp8Weight):
            return self.fixed.unpack.product(shared, self.weight, self.bias)
        x = shared.rows
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.read(x.dtype), bias)

    def adapted(self, shared: SharedInput, xa: Tensor | None) -> Tensor:
        """Base plus xa (s B)^T, the small product first so that the large one adds to it."""
        if xa is None or self.b is None:
            return self.base(shared)
        x, b = shared.rows, self.b.t()
        if isinstance(self.fixed.unpack, Fp8Weight):  # its product cannot add
            return products.add_product(self.base(shared), xa, b)
        out = torch.mm(xa, b) if self.bias is None else torch.addmm(self.bias.to(x.dtype), xa, b)
        return out.addmm_(x, self.read(x.dtype).t())


TENSORS_PER_LAYER = 4
SAVED_PER_LAYER = 2


def load_layers(
    tensors: Sequence[Tensor | None], fixed: Sequence[Fixed], dtype: torch.dtype
) -> tuple[list[Layer], Tensor | None]:
    """The layers of a flat list of (weight, bias, A, B), cast, and their A stacked (sum of R, K).

    The casts are small and are kept for the backward pass; the factors themselves are not.
    """
    rows = [
        tensors[start : start + TENSORS_PER_LAYER]
        for start in range(0, len(fixed) * TENSORS_PER_LAYER, TENSORS_PER_LAYER)
    ]
    factors_a = [a for _, _, a, _ in rows if a is not None]
    factors_b = [
        (b, each.scaling) for (_, _, _, b), each in zip(rows, fixed, strict=True) if b is not None
    ]
    stack, cast = products.cast_factors(factors_a, factors_b, dtype)
    remaining = iter(cast)
    layers = []
    for (weight, bias, _, lora_b), each in zip(rows, fixed, strict=True):
        assert weight is not None
        b = None if lora_b is None else next(remaining).contiguous()
        layers.append(Layer(weight, bias, b, each))
    return layers, stack


def to_save(layers: Sequence[Layer]) -> list[Tensor | None]:
    """What the backward pass needs of the layers, for `saved_layers`."""
    return [tensor for layer in layers for tensor in (layer.weight, layer.b)]


def saved_layers(tensors: Sequence[Tensor | None], fixed: Sequence[Fixed]) -> list[Layer]:
    layers = []
    for index, each in enumerate(fixed):
        weight, b = tensors[index * SAVED_PER_LAYER : (index + 1) * SAVED_PER_LAYER]
        assert weight is not None
        layers.append(Layer(weight, None, b, each))
    return layers


def split_by_rank(
    stacked: Tensor | None, layers: Sequence[Layer], *, dim: int
) -> list[Tensor | None]:
    """Cut a stack over the adapters into one view a layer; None where there is no adapter."""
    if stacked is None:
        return [None] * len(layers)
    sizes = [layer.fixed.lora_rank for layer in layers if layer.b is not None]
    views = iter(stacked.split(sizes, dim=dim))
    return [None if layer.b is None else next(views) for layer in layers]


def input_gradient(
    p: Tensor | None,
    a: Tensor | None,
    terms: Sequence[tuple[Tensor, Layer]],
    out: Tensor | None = None,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """P A plus the sum of dy W: one buffer, added to by every product.

    Args:
        p: (M, R), or None.
        a: (R, K), or None.
        terms: dy (M, N) and its layer.
        out: where to put the result.
        quantized: codes and scales of all dys, of layers in fp8; see `fp8_input_gradient`.
    """
    in_fp8, plain = [], []
    for dy, given in terms:
        layer = given.for_gradients()
        if isinstance(layer.fixed.unpack, Fp8Weight):
            in_fp8.append((dy, layer.weight, layer.fixed.unpack))
        else:
            plain.append((dy, layer))
    dx = fp8_input_gradient(in_fp8, out, quantized) if in_fp8 else None
    if p is not None and a is not None:
        dx = torch.mm(p, a, out=out) if dx is None else products.add_product(dx, p, a)
    for dy, layer in plain:
        weight = layer.read(dy.dtype)
        dx = torch.mm(dy, weight, out=out) if dx is None else dx.addmm_(dy, weight)
    assert dx is not None
    return dx


def _apply(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    fixed = tuple(map(Fixed.of, projections))
    tensors = [tensor for each in projections for tensor in each.tensors()]
    dtype = compute_dtype(x)
    return _SharedInput.apply(x, dtype, fixed, carried_rows(x, dtype, fixed), *tensors)


def carried_rows(
    x: Tensor, dtype: torch.dtype, fixed: Sequence[Fixed]
) -> tuple[Tensor, Tensor] | None:
    """The rows in e4m3 that x carries, for layers in fp8 that read it in the dtype it has."""
    quantized = take_rows(x)
    wanted = x.dtype == dtype and any(isinstance(each.unpack, Fp8Weight) for each in fixed)
    return quantized if wanted else None


_BEFORE_TENSORS = 4
"""Arguments of `_SharedInput` before the layers' tensors."""


class _SharedInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dtype: torch.dtype,
        fixed: tuple[Fixed, ...],
        quantized: tuple[Tensor, Tensor] | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        with no_autocast(x):
            layers, a = load_layers(tensors, fixed, dtype)
            x_rows = as_rows(x).to(dtype)
            xa = None if a is None else products.rows(x_rows, a)
            inner = split_by_rank(xa, layers, dim=1)
            shared = SharedInput(x_rows, quantized)
            outputs = [
                layer.adapted(shared, each) for layer, each in zip(layers, inner, strict=True)
            ]
        ctx.save_for_backward(x, xa, a, *to_save(layers))
        ctx.dtype = dtype
        ctx.fixed = fixed
        ctx.set_materialize_grads(False)
        return tuple(reshaped(out, (*x.shape[:-1], out.shape[-1])) for out in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, xa, a, *rest = ctx.saved_tensors
        layers = saved_layers(rest, ctx.fixed)
        result: list[Tensor | None] = [None] * (_BEFORE_TENSORS + TENSORS_PER_LAYER * len(layers))
        with no_autocast(x):
            dys = [None if grad is None else as_rows(grad).to(ctx.dtype) for grad in grads]
            terms = [(dy, each) for dy, each in zip(dys, layers, strict=True) if dy is not None]
            if not terms:
                return tuple(result)
            p = None if a is None else through_the_rank(dys, layers, a)
            if p is not None:
                inner = split_by_rank(xa, layers, dim=1)
                _put_factor_gradients(ctx, result, x, dys, layers, inner, p)
            if ctx.needs_input_grad[0]:
                result[0] = input_gradient(p, a, terms).view(x.shape).to(x.dtype)
        return tuple(result)


def through_the_rank(dys: Sequence[Tensor | None], layers: Sequence[Layer], a: Tensor) -> Tensor:
    """P = [dy s B, ...] (M, sum of R); zeros for an output that nobody used."""
    num_rows = next(dy.shape[0] for dy in dys if dy is not None)
    p = a.new_empty((num_rows, a.shape[0]))
    for place, dy, layer in zip(split_by_rank(p, layers, dim=1), dys, layers, strict=True):
        if place is None or layer.b is None:
            continue
        if dy is None:
            place.zero_()
        else:
            products.rows(dy, layer.b.t(), out=place)
    return p


def _put_factor_gradients(
    ctx: Any,
    result: list[Tensor | None],
    x: Tensor,
    dys: Sequence[Tensor | None],
    layers: Sequence[Layer],
    inner: Sequence[Tensor | None],
    p: Tensor,
) -> None:
    """Put dA and dB of every adapter that needs one into the result."""
    wanted = ctx.needs_input_grad
    places = [_BEFORE_TENSORS + TENSORS_PER_LAYER * index for index in range(len(layers))]
    if any(wanted[place + 2] for place in places):
        sums = products.sum_dtype(p.dtype)
        stacked = products.columns(as_rows(x).to(p.dtype), p, sums, transposed=True)
        parts = split_by_rank(stacked, layers, dim=0)
        for place, dy, part, layer in zip(places, dys, parts, layers, strict=True):
            if wanted[place + 2] and dy is not None and part is not None:
                result[place + 2] = part.to(layer.fixed.dtype_a)
    for place, dy, xa, layer in zip(places, dys, inner, layers, strict=True):
        if wanted[place + 3] and dy is not None and xa is not None:
            dtype = layer.fixed.dtype_b or dy.dtype
            result[place + 3] = products.columns(dy, xa, dtype, scale=layer.fixed.scaling)


def activate(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh")
