"""The products of an output layer: logits, and the gradient of the hidden states.

N rows of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainkit.kernels.fp8.function import fits_fp8, fp8_matmul, fp8_quantize, fp8_quantize_columns
from trainkit.kernels.fp8.trained import Codes, Directions
from trainkit.kernels.launch import HAS_TRITON, is_on_gpu, runs_kernel

ROWS_MULTIPLE = 256
"""Chunks and the compacted rows are multiples of this: whole tiles for the matrix products."""

_LOGITS_BYTES = int(1.65 * 2**30)
"""A chunk's logits. Every chunk reads and writes the weight's fp32 gradient once, so it must not be
small; half as much again gains nothing (measured from 0.9 to 2.3 GiB on an H200)."""

_NUMBERS_THAT_FILL = 112 * 128 * 128
"""Of the hidden states: their gradient is made in tiles of 128 x 128, and a GPU makes about as many
at a time."""


def default_chunk_tokens(vocab_size: int, element_size: int) -> int:
    """Rows in a chunk: as many as ``_LOGITS_BYTES`` hold."""
    rows = _LOGITS_BYTES // (vocab_size * element_size)
    return max(ROWS_MULTIPLE, rows // ROWS_MULTIPLE * ROWS_MULTIPLE)


def rows_that_fill(width: int) -> int:
    """The fewest rows of a chunk whose product by a weight (V, width) fills a GPU."""
    return -(-_NUMBERS_THAT_FILL // (width * ROWS_MULTIPLE)) * ROWS_MULTIPLE


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
        self._matrix = weight.to(dtype)
        self._offset = None if bias is None else bias.to(dtype)
        self.gradient_dtype = torch.promote_types(dtype, torch.float32)
        """Of the hidden states' gradient."""

    def chunk_tokens(self, *, trained: bool) -> int:
        """How many rows' logits exist at a time, if the caller does not say."""
        return default_chunk_tokens(len(self._matrix), self._matrix.element_size())

    def gradient_codes(self, num_rows: int) -> Codes | None:
        """Where a chunk's gradient (N, V) goes in 8 bits, if it is multiplied so."""
        return None

    def write_logits(self, logits: Tensor, rows: Tensor) -> None:
        """The logits (N, V) of rows (N, H), in place."""
        if self._offset is None:
            torch.mm(rows, self._matrix.t(), out=logits)
        else:
            torch.addmm(self._offset, rows, self._matrix.t(), out=logits)

    def write_gradient(self, dhidden: Tensor, dlogits: Tensor, codes: Codes | None) -> None:
        """The gradient (N, H) of the rows, from that of the logits (N, V).

        Where there are codes, of `gradient_codes`, they are read instead of ``dlogits``.
        """
        add_product(dhidden, dlogits, self._matrix)


class Fp8Products(Products):
    """In fp8 as far as the directions say; the weight's codes are made once for all chunks.

    The gradient of the logits is quantised where it is made, without the weight's scales: for the
    product over the vocabulary the weight's codes are turned, and all rows get the largest scale.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, directions: Directions
    ) -> None:
        super().__init__(weight, bias, dtype)
        self._directions = directions
        self._codes, self._scales = directions.codes(weight)
        self._turned: Codes | None = None
        self._made: Codes | None = None
        if directions.backward and dtype == torch.bfloat16:
            self.gradient_dtype = torch.bfloat16  # what the product gives

    def chunk_tokens(self, *, trained: bool) -> int:
        """As `Products.chunk_tokens`.

        A chunk's codes come on top, and the weight's twice. Where nothing is added to the weight's
        gradient a chunk may be small: as long as its product fills a GPU.
        """
        vocab_size, width = self._matrix.shape
        each = self._matrix.element_size() + self._directions.backward
        most = default_chunk_tokens(vocab_size, each)
        if trained or not self._directions.backward:
            return most
        return min(most, rows_that_fill(width))

    def gradient_codes(self, num_rows: int) -> Codes | None:
        """As `Products.gradient_codes`; the next chunk's are written over them."""
        if not self._directions.backward:
            return None
        if self._made is None or len(self._made[0]) < num_rows:
            shape = (num_rows, len(self._matrix))
            self._made = self._codes.new_empty(shape), self._scales.new_empty((num_rows, 1))
        codes, scales = self._made
        return codes[:num_rows], scales[:num_rows]

    def write_logits(self, logits: Tensor, rows: Tensor) -> None:
        if not self._directions.forward:
            super().write_logits(logits, rows)
            return
        made = fp8_quantize(rows, keep_largest=True)
        fits = logits.is_contiguous() and logits.dtype == torch.bfloat16
        out = fp8_matmul(*made, self._codes, self._scales, self._offset, logits if fits else None)
        if not fits:
            logits.copy_(out)

    def write_gradient(self, dhidden: Tensor, dlogits: Tensor, codes: Codes | None) -> None:
        if codes is None:
            super().write_gradient(dhidden, dlogits, codes)
            return
        if self._turned is None:
            most = self._scales.amax().expand(self._matrix.shape[1], 1).contiguous()
            self._turned = fp8_quantize_columns(self._codes, self._scales, most)
        fits = dhidden.is_contiguous() and dhidden.dtype == torch.bfloat16
        out = fp8_matmul(*codes, *self._turned, out=dhidden if fits else None)
        if not fits:
            dhidden.copy_(out)


def logits_buffer(rows: Tensor, chunk: int, vocab_size: int) -> Tensor:
    """(chunk, V or a little more): rows start at multiples of 128 bytes, or cuBLAS goes slow."""
    return rows.new_empty((chunk, -(-vocab_size // 64) * 64))


def add_product(out: Tensor, left: Tensor, right: Tensor, *, add: bool = False) -> None:
    """``out (+)= left @ right``, summed in the dtype of ``out``, which may be the wider one."""
    if left.dtype == out.dtype:
        torch.addmm(out, left, right, beta=float(add), out=out)
    elif is_on_gpu(left):
        if add:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        else:
            torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=float(add), out=out)


# -- Gradients of the plain sum of losses, times what the loss is divided by and what comes in


if HAS_TRITON:
    from trainkit.kernels.linear_cross_entropy import kernel


def inverse(num_items: Tensor | int, like: Tensor) -> Tensor:
    """1 / num_items as a 0-d tensor next to ``like``, and 0 for 0: no item means loss 0."""
    if not isinstance(num_items, Tensor):  # a fill on the device, not a copy from the host
        return like.new_full((), 1 / num_items if num_items else 0.0)
    items = num_items.to(device=like.device, dtype=like.dtype).reshape(())
    return torch.where(items != 0, 1 / items, 0.0)


def scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * scale`` rounded once to ``dtype``, in one pass."""
    if runs_kernel(gradient, scale) and gradient.is_contiguous():
        return kernel.launch(gradient, scale, dtype)
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


PIECE = 2**24
"""Numbers that are scaled at a time."""


def scaled_in_place(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As `scaled`, into the front of the gradient's own memory, piece after piece.

    A piece is read before it is written, and what is written lies before what is still to be read.
    """
    if dtype.itemsize >= gradient.dtype.itemsize:
        return gradient.mul_(scale)
    wide = gradient.view(-1)
    narrow = wide.view(dtype)[: wide.numel()]
    for start in range(0, wide.numel(), PIECE):
        piece = slice(start, start + PIECE)
        narrow[piece] = wide[piece] * scale
    return narrow.view(gradient.shape)
