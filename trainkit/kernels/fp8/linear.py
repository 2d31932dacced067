"""A frozen weight kept as e4m3 codes, and its products in both directions ("fold").

The tensor cores want both operands stored along the contraction, with scales across it::

    y  = x W^T      codes of x (M, K), codes of W (N, K); a scale for each token and each output
    dx = dy W       codes of dy w (M, N), with w the scales of W multiplied into dy's columns first,
                    and the transposed codes of W, whose scales are 1 then

So one copy of W serves both, and both see the same numbers. Layers that share their input give
their dx as one product over all their outputs: these products cannot add to what is there.

M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainkit.kernels.fp8.function import (
    fp8_matmul,
    fp8_quantize,
    fp8_quantize_joint,
    fp8_transpose,
    read_codes,
)
from trainkit.kernels.fp8.reference import FP8

_CARRIED = "_trainkit_fp8_rows"


def carry_rows(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Let x (..., K) carry its rows in e4m3, made where x itself was made, to who reads it next.

    Args:
        x: what was quantised.
        codes: (M, K).
        scales: (M, 1).
    """
    if not x.is_inference():  # else nobody knows whether it was changed since
        setattr(x, _CARRIED, (codes, scales, x._version))


def take_rows(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The codes and scales that x carries, which it then carries no more; None without any.

    Taken, because x is kept for the backward pass and would keep them. Numbers that were changed
    in place since are not in them.
    """
    if _CARRIED not in x.__dict__:
        return None
    codes, scales, version = x.__dict__.pop(_CARRIED)
    return (codes, scales) if version == x._version else None


class SharedInput:
    """Rows that several layers read: quantised once, when the first of them asks."""

    def __init__(self, rows: Tensor, quantized: tuple[Tensor, Tensor] | None = None) -> None:
        """Remember the rows (M, K), and their codes and scales if they are there already."""
        self.rows = rows
        self._quantized = quantized

    def quantized(self) -> tuple[Tensor, Tensor]:
        """Codes (M, K) and scales (M, 1)."""
        if self._quantized is None:
            self._quantized = fp8_quantize(self.rows, keep_largest=True)
        return self._quantized


@dataclass(frozen=True)
class Fp8Weight:
    """How a weight (N, K) kept as codes is read, and its products.

    The storage, uint8 (N, K), is given at each use, as for every packed weight.

    Attributes:
        scales: (N, 1) fp32, powers of two.
    """

    scales: Tensor

    def __call__(self, storage: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in a dtype: exact in bf16 and wider."""
        return read_codes(storage, self.scales, dtype)

    def product(self, x: SharedInput, storage: Tensor, bias: Tensor | None) -> Tensor:
        """``x W^T + b`` (M, N): rounded to bf16, in the rows' dtype."""
        codes, scales = x.quantized()
        return fp8_matmul(codes, scales, storage.view(FP8), self.scales, bias).to(x.rows.dtype)


@dataclass(frozen=True)
class Fp8Gradient:
    """How a frozen weight (N, K) kept in 16 bits is read where only dx is in fp8."""

    def __call__(self, storage: Tensor, dtype: torch.dtype) -> Tensor:
        return storage.to(dtype)

    def quantized(self, storage: Tensor) -> tuple[Tensor, Fp8Weight]:
        """Codes (N, K) as uint8, and how they are read."""
        codes, scales = fp8_quantize(storage)
        return codes.view(torch.uint8), Fp8Weight(scales)


def fp8_input_gradient(
    terms: Sequence[tuple[Tensor, Tensor, Fp8Weight]],
    out: Tensor | None = None,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The sum of dy W over layers that share their input.

    Args:
        terms: dy (M, N_i), the layer's storage (N_i, K) and how it is read.
        out: where to put the result; bf16, (M, K) contiguous.
        quantized: codes (M, sum of N_i) and scales (M, 1) of the dys times their layers' scales,
            where the caller has them.
    """
    dys, storages, weights = zip(*terms, strict=True)
    if quantized is None:
        quantized = fp8_quantize_joint(dys, [weight.scales for weight in weights])
    codes, scales = quantized
    turned = fp8_transpose([storage.view(FP8) for storage in storages])
    ones = scales.new_ones((turned.shape[0], 1))
    dtype = dys[0].dtype
    if out is not None and dtype != torch.bfloat16:
        return out.copy_(fp8_matmul(codes, scales, turned, ones))
    return fp8_matmul(codes, scales, turned, ones, out=out).to(dtype)
