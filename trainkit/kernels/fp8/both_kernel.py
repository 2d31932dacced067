"""Quantising a gradient twice, along its rows and along its columns, in two reads of it.

dx contracts dy over its columns and dW over its rows, and the tensor cores want both operands
stored along the contraction with scales across it. M rows, N columns; a perfect kernel moves 6 MN
bytes of 16-bit numbers: two reads, two writes of a byte.

First the largest magnitudes of each tile's rows and columns, then of whole rows and columns, then
the codes, those of the columns transposed on the way.
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
def _tile(x_ptr, x_stride, num_rows, num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(places, x in fp32) of this program's tile; zeros beyond the edges."""
    blocks = tl.cdiv(num_cols, BLOCK_N)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
    return rows, cols, x.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "first_block"])
def _tile_magnitudes(
    x_ptr,
    column_factor_ptr,
    row_factor_ptr,
    of_rows_ptr,
    of_cols_ptr,
    x_stride,
    num_cols,
    num_rows,
    first_block,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """of_cols (blocks of rows, N); with ROWS, of_rows (blocks of columns, M)."""
    rows, cols, x = _tile(x_ptr, x_stride, num_rows, num_cols, BLOCK_M, BLOCK_N)
    in_rows, in_cols = rows < num_rows, cols < num_cols
    blocks = tl.cdiv(num_cols, BLOCK_N)
    if ROWS:
        factor = tl.load(column_factor_ptr + cols, mask=in_cols, other=0.0)
        largest = tl.max(_magnitude(x * factor[None, :]), axis=1)
        place = (first_block + tl.program_id(0) % blocks).to(tl.int64) * num_rows
        tl.store(of_rows_ptr + place + rows, largest, mask=in_rows)
    factor = tl.load(row_factor_ptr + rows, mask=in_rows, other=0.0)
    largest = tl.max(_magnitude(x * factor[:, None]), axis=0)
    place = (tl.program_id(0) // blocks).to(tl.int64) * num_cols
    tl.store(of_cols_ptr + place + cols, largest, mask=in_cols)


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
def _tile_codes(
    x_ptr,
    column_factor_ptr,
    row_factor_ptr,
    row_scales_ptr,
    col_scales_ptr,
    codes_ptr,
    turned_ptr,
    x_stride,
    codes_stride,
    num_cols,
    num_rows,
    padded_sixteens,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """codes (M, codes_stride), if wanted, and turned (N, padded_rows), zeros beyond M."""
    padded_rows = padded_sixteens * 16  # so that it is known, and a thread writes 16 codes at once
    rows, cols, x = _tile(x_ptr, x_stride, num_rows, num_cols, BLOCK_M, BLOCK_N)
    in_rows, in_cols = rows < num_rows, cols < num_cols
    if ROWS:
        factor = tl.load(column_factor_ptr + cols, mask=in_cols, other=0.0)
        inverse = _inverse(tl.load(row_scales_ptr + rows, mask=in_rows, other=1.0))
        places = codes_ptr + rows[:, None] * codes_stride + cols[None, :]
        codes = _codes(x * factor[None, :], inverse[:, None])
        tl.store(places, codes, mask=in_rows[:, None] & in_cols[None, :])
    factor = tl.load(row_factor_ptr + rows, mask=in_rows, other=0.0)
    inverse = _inverse(tl.load(col_scales_ptr + cols, mask=in_cols, other=1.0))
    places = turned_ptr + cols[:, None] * padded_rows + rows[None, :]
    codes = _codes(x * factor[:, None], inverse[None, :])
    mask = in_cols[:, None] & (rows < padded_rows)[None, :]
    tl.store(places, tl.trans(codes), mask=mask)


TILE_MAGNITUDES = Kernel(_tile_magnitudes)
SCALES = Kernel(_scales)
TILE_CODES = Kernel(_tile_codes)

FIRST = (64, 128, 4) if not INTERPRETING else (64, 256, 4)
"""Rows, columns and warps of a tile whose magnitudes are found."""

SECOND = (64, 128, 4) if not INTERPRETING else (128, 256, 4)
"""Of a tile that is quantised."""


def launch_both(
    parts: Sequence[Tensor], column_factors: Sequence[Tensor], row_factor: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `fp8_quantize_both`; parts (M, N_i) of unit column stride, factors fp32 and flat."""
    num_rows, like = parts[0].shape[0], row_factor
    widths = [part.shape[1] for part in parts]
    total, padded = sum(widths), -(-num_rows // ALIGNMENT) * ALIGNMENT
    codes = torch.empty((num_rows, total), dtype=FP8, device=like.device)
    turned = torch.empty((total, padded), dtype=FP8, device=like.device)
    scales, turned_scales = like.new_empty((num_rows, 1)), like.new_empty((total, 1))
    if not num_rows:
        return codes, scales, turned, turned_scales.fill_(2.0**-126)
    block_m, block_n, warps = FIRST
    row_blocks, col_blocks = -(-num_rows // block_m), [-(-width // block_n) for width in widths]
    of_rows = torch.empty((sum(col_blocks), num_rows), dtype=torch.int32, device=like.device)
    of_cols = torch.empty(row_blocks * total, dtype=torch.int32, device=like.device)
    starts = [sum(widths[:index]) for index in range(len(widths))]
    for index, (part, factor, width) in enumerate(zip(parts, column_factors, widths, strict=True)):
        place = of_cols[row_blocks * starts[index] :]
        TILE_MAGNITUDES.launch(
            row_blocks * col_blocks[index],
            (part, factor, row_factor, of_rows, place),
            (part.stride(0), width),
            (num_rows, sum(col_blocks[:index])),
            (True, block_m, block_n),
            warps,
        )
        _launch_scales(place, turned_scales[starts[index] :], row_blocks, width)
    _launch_scales(of_rows, scales, sum(col_blocks), num_rows)
    block_m, block_n, warps = SECOND
    for part, factor, width, start in zip(parts, column_factors, widths, starts, strict=True):
        TILE_CODES.launch(
            -(-padded // block_m) * -(-width // block_n),
            (
                *(part, factor, row_factor, scales, turned_scales[start:]),
                *(codes[:, start:], turned[start:]),
            ),
            (part.stride(0), total, width),
            (num_rows, padded // ALIGNMENT),
            (True, block_m, block_n),
            warps,
        )
    return codes, scales, turned, turned_scales


def launch_columns(
    x: Tensor, row_factor: Tensor, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `fp8_quantize_columns`; x (M, K) of unit column stride, also codes."""
    num_rows, width = x.shape
    padded = -(-num_rows // ALIGNMENT) * ALIGNMENT
    turned = torch.empty((width, padded), dtype=FP8, device=x.device)
    if scales is None:
        scales = _column_scales(x, row_factor)
    if num_rows:
        block_m, block_n, warps = SECOND
        TILE_CODES.launch(
            -(-padded // block_m) * -(-width // block_n),
            (x, row_factor, row_factor, row_factor, scales, turned, turned),
            (x.stride(0), width, width),
            (num_rows, padded // ALIGNMENT),
            (False, block_m, block_n),
            warps,
        )
    return turned, scales


def _column_scales(x: Tensor, row_factor: Tensor) -> Tensor:
    """(K, 1), by the largest magnitudes."""
    num_rows, width = x.shape
    scales = row_factor.new_empty((width, 1))
    if not num_rows:
        return scales.fill_(2.0**-126)
    block_m, block_n, warps = FIRST
    row_blocks = -(-num_rows // block_m)
    magnitudes = torch.empty((row_blocks, width), dtype=torch.int32, device=x.device)
    TILE_MAGNITUDES.launch(
        row_blocks * -(-width // block_n),
        (x, row_factor, row_factor, magnitudes, magnitudes),
        (x.stride(0), width),
        (num_rows, 0),
        (False, block_m, block_n),
        warps,
    )
    _launch_scales(magnitudes, scales, row_blocks, width)
    return scales


def _launch_scales(magnitudes: Tensor, scales: Tensor, num_blocks: int, width: int) -> None:
    block, block_width = (64, 64) if not INTERPRETING else (128, 1024)
    SCALES.launch(
        -(-width // block_width),
        (magnitudes, scales),
        (),
        (num_blocks, width),
        (block, block_width),
        4,
    )
