"""Columns in e4m3, transposed: what a product that contracts over the rows wants of a gradient.

M rows, N columns; a perfect kernel moves 5 MN bytes of 16-bit numbers: two reads, a code written.
First the largest magnitudes of a column in each part of the rows, then of whole columns, then the
codes: four rows of a column make a word, and words are transposed.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.fp8.kernel import _codes, _magnitude, _scale
from trainkit.kernels.fp8.reference import FP8
from trainkit.kernels.launch import INTERPRETING, Kernel

ALIGNMENT = 16
"""Columns of the transposed codes are padded with zeros to a multiple of this."""


@triton.jit
def _tile(x_ptr, factor_ptr, x_stride, rows, cols, num_rows, num_cols):
    """x times its rows' factors, in fp32; zeros beyond the edges."""
    in_rows = rows < num_rows
    mask = in_rows[:, None] & (cols < num_cols)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
    factor = tl.load(factor_ptr + rows, mask=in_rows, other=0.0)
    return x.to(tl.float32) * factor[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def _column_magnitudes(
    x_ptr,
    factor_ptr,
    magnitudes_ptr,
    x_stride,
    num_cols,
    num_rows,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """magnitudes (parts of TILES * BLOCK_M rows, N)."""
    blocks = tl.cdiv(num_cols, BLOCK_N)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Threads compare once, behind the loop.
    most = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for tile in range(TILES):
        rows = (part * TILES + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        x = _tile(x_ptr, factor_ptr, x_stride, rows, cols, num_rows, num_cols)
        most = tl.maximum(most, _magnitude(x))
    tl.store(magnitudes_ptr + part * num_cols + cols, tl.max(most, axis=0), mask=cols < num_cols)


@triton.jit(do_not_specialize=["num_blocks", "width"])
def _scales(
    magnitudes_ptr, scales_ptr, num_blocks, width, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Scales (width,) of magnitudes (num_blocks, width)."""
    places = tl.program_id(0).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
    most = tl.zeros((BLOCK, BLOCK_W), dtype=tl.int32)
    for start in range(0, num_blocks, BLOCK):
        blocks = (start + tl.arange(0, BLOCK)).to(tl.int64)
        mask = (blocks < num_blocks)[:, None] & (places < width)[None, :]
        at = magnitudes_ptr + blocks[:, None] * width + places[None, :]
        most = tl.maximum(most, tl.load(at, mask=mask, other=0))
    scale, _ = _scale(tl.max(most, axis=0), False)
    tl.store(scales_ptr + places, scale, mask=places < width)


@triton.jit
def _inverse(scale):
    """1 / scale of a power of two, from its bits; 0 for NaN, as `_codes` wants it."""
    bits = 0x7F000000 - scale.to(tl.int32, bitcast=True)
    return tl.where(scale == scale, bits.to(tl.float32, bitcast=True), 0.0)


@triton.jit(do_not_specialize=["num_rows", "padded_sixteens"])
def _column_codes(
    x_ptr,
    factor_ptr,
    scales_ptr,
    turned_ptr,
    x_stride,
    num_cols,
    num_rows,
    padded_sixteens,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """turned (N, padded rows / 4) in words of four codes; zeros beyond M."""
    words = padded_sixteens * 4  # so that it is known, and a thread writes 16 codes at once
    blocks = tl.cdiv(num_cols, BLOCK_N)
    groups = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_cols = cols < num_cols
    inverse = _inverse(tl.load(scales_ptr + cols, mask=in_cols, other=1.0))
    word = tl.zeros((BLOCK_GROUPS, BLOCK_N), dtype=tl.int32)
    for which in tl.static_range(4):
        rows = groups * 4 + which
        x = _tile(x_ptr, factor_ptr, x_stride, rows, cols, num_rows, num_cols)
        codes = _codes(x, inverse[None, :]).to(tl.uint8, bitcast=True)
        word |= codes.to(tl.int32) << (8 * which)
    places = turned_ptr + cols[:, None] * words + groups[None, :]
    tl.store(places, tl.trans(word), mask=in_cols[:, None] & (groups < words)[None, :])


COLUMN_MAGNITUDES = Kernel(_column_magnitudes)
SCALES = Kernel(_scales)
COLUMN_CODES = Kernel(_column_codes)

FIRST = (8, 32, 256, 4) if not INTERPRETING else (2, 64, 256, 4)
"""Tiles of a program that finds magnitudes, their rows and columns, and its warps."""

SECOND = (32, 64, 4) if not INTERPRETING else (32, 256, 4)
"""Groups of four rows and columns of a tile that is quantised, and its warps."""


def launch_columns(
    parts: Sequence[Tensor], row_factor: Tensor, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Columns of parts (M, N_i) of unit column stride, below each other."""
    num_rows, total = parts[0].shape[0], sum(part.shape[1] for part in parts)
    padded = -(-num_rows // ALIGNMENT) * ALIGNMENT
    turned = torch.empty((total, padded), dtype=FP8, device=parts[0].device)
    found = row_factor.new_empty((total, 1)) if scales is None else scales
    start = 0
    for part in parts:
        end = start + part.shape[1]
        if scales is None:
            _find_scales(part, row_factor, found[start:end])
        if num_rows:
            _turn(part, row_factor, found[start:end], turned[start:end])
        start = end
    return turned, found


def _find_scales(x: Tensor, row_factor: Tensor, scales: Tensor) -> None:
    """Write the columns' scales (K, 1), by the largest magnitudes."""
    num_rows, width = x.shape
    if not num_rows:
        scales.fill_(2.0**-126)
        return
    tiles, block_m, block_n, warps = FIRST
    parts = -(-num_rows // (tiles * block_m))
    magnitudes = torch.empty((parts, width), dtype=torch.int32, device=x.device)
    COLUMN_MAGNITUDES.launch(
        parts * -(-width // block_n),
        (x, row_factor, magnitudes),
        (x.stride(0), width),
        (num_rows,),
        (tiles, block_m, block_n),
        warps,
    )
    block, block_width = (32, 64) if not INTERPRETING else (128, 1024)
    SCALES.launch(
        -(-width // block_width), (magnitudes, scales), (), (parts, width), (block, block_width), 4
    )


def _turn(x: Tensor, row_factor: Tensor, scales: Tensor, turned: Tensor) -> None:
    """Write the codes (K, padded rows)."""
    num_rows, width = x.shape
    block_groups, block_n, warps = SECOND
    padded = turned.shape[1]
    COLUMN_CODES.launch(
        -(-padded // (4 * block_groups)) * -(-width // block_n),
        (x, row_factor, scales, turned.view(torch.int32)),
        (x.stride(0), width),
        (num_rows, padded // ALIGNMENT),
        (block_groups, block_n),
        warps,
    )
