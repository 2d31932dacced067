"""The products of an output layer: logits, and the gradient of the hidden states.

N rows of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainkit.kernels.fp8.function import fits_fp8, fp8_matmul, fp8_quantize, fp8_transpose
from trainkit.kernels.fp8.trained import Directions


def products_of(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype, in_fp8: Directions | None
) -> Products:
    """The products with a weight (V, H) and a bias (V,), in a dtype or in fp8."""
    if in_fp8 is None or not fits_fp8(*weight.shape):
        return Products(weight, bias, dtype)
    return Fp8Products(weight, bias, dtype, in_fp8)


class Products:
    """In the dtype of the computation."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Cast what is multiplied with."""
        self._matrix = weight.to(dtype)
        self._offset = None if bias is None else bias.to(dtype)
        self.bytes_a_logit = dtype.itemsize
        """That a chunk takes."""

    def write_logits(self, logits: Tensor, rows: Tensor) -> None:
        """The logits (N, V) of rows (N, H), in place."""
        if self._offset is None:
            torch.mm(rows, self._matrix.t(), out=logits)
        else:
            torch.addmm(self._offset, rows, self._matrix.t(), out=logits)

    def write_gradient(self, dhidden: Tensor, dlogits: Tensor) -> None:
        """The gradient (N, H) of the rows, from that of the logits (N, V)."""
        add_product(dhidden, dlogits, self._matrix)


class Fp8Products(Products):
    """In fp8 as far as the directions say; the weight's codes are made once for all chunks."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, directions: Directions
    ) -> None:
        """Take the weight's codes, and turn them."""
        super().__init__(weight, bias, dtype)
        self._directions = directions
        self._codes, self._scales = directions.codes(weight)
        self._turned: Tensor | None = None
        self.bytes_a_logit += directions.backward  # the codes of a chunk's gradient

    def write_logits(self, logits: Tensor, rows: Tensor) -> None:
        """As `Products.write_logits`."""
        if not self._directions.forward:
            super().write_logits(logits, rows)
            return
        made = fp8_quantize(rows, keep_largest=True)
        fits = logits.is_contiguous() and logits.dtype == torch.bfloat16
        out = fp8_matmul(*made, self._codes, self._scales, self._offset, logits if fits else None)
        if not fits:
            logits.copy_(out)

    def write_gradient(self, dhidden: Tensor, dlogits: Tensor) -> None:
        """As `Products.write_gradient`."""
        if not self._directions.backward:
            super().write_gradient(dhidden, dlogits)
            return
        if self._turned is None:
            self._turned = fp8_transpose([self._codes])
        made = fp8_quantize(dlogits, self._scales.flatten())
        ones = self._scales.new_ones((self._turned.shape[0], 1))
        dhidden.copy_(fp8_matmul(*made, self._turned, ones))


def logits_buffer(rows: Tensor, chunk: int, vocab_size: int) -> Tensor:
    """(chunk, V or a little more): rows start at multiples of 128 bytes, or cuBLAS goes slow."""
    return rows.new_empty((chunk, -(-vocab_size // 64) * 64))


def add_product(out: Tensor, left: Tensor, right: Tensor, *, add: bool = False) -> None:
    """``out (+)= left @ right``, summed in the dtype of ``out``, which may be the wider one."""
    if left.dtype == out.dtype:
        torch.addmm(out, left, right, beta=float(add), out=out)
    elif left.is_cuda:
        if add:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=float(add), out=out)
