"""Quantising rows to e4m3. M rows, K columns of up to three parts.

Programs hold whole rows in registers, so that a number is read once. Rows too long for that are
read twice, the second time from the cache. Magnitudes are compared as the integers that their bits
are, where infinity and NaN are larger than any number and do not get lost.

Bytes a perfect kernel moves, of 16-bit rows: 3 MK.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.fp8.reference import FP8, SMALLEST_EXPONENT
from trainkit.kernels.launch import (
    INTERPRETING,
    Kernel,
    next_power_of_2,
    num_multiprocessors,
    remembered,
)

MAX_PARTS = 3
MAX_HELD = 32768
"""Columns, each part padded, that a program holds in registers."""


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(largest, KEEP_LARGEST: tl.constexpr, SMALLEST: tl.constexpr = 1):
    """(scale, 1 / scale) from the bits of the largest magnitude; at least 2^(SMALLEST - 127)."""
    is_finite = largest < 0x7F800000
    if KEEP_LARGEST:  # it is 256 scales, which is a code
        scale = tl.maximum(largest.to(tl.float32, bitcast=True), 2.0**-118) * 2.0**-8
        inverse = tl.div_rn(1.0, scale)
    else:  # powers of two
        # 448 = 1.75 * 2^8: a mantissa above 1.75 carries into the exponent.
        exponent = tl.maximum((largest + 0x1FFFFF) >> 23, SMALLEST + 8)
        scale = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
        inverse = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite, scale, float("nan")), tl.where(is_finite, inverse, 0.0)


@triton.jit
def _codes(x, inverse):
    # Where the row is not finite the inverse is 0, and its scale says so.
    return tl.where(inverse == 0.0, 0.0, x * inverse).to(tl.float8e4nv)


@triton.jit
def _factor(factor_ptr, cols, WIDTH: tl.constexpr, HAS_FACTOR: tl.constexpr):
    if HAS_FACTOR:
        factor = tl.load(factor_ptr + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    else:
        factor = cols
    return factor


@triton.jit
def _rows(
    x_ptr, stride, rows, row_mask, cols, factor, WIDTH: tl.constexpr, HAS_FACTOR: tl.constexpr
):
    """A tile (rows, columns) of x times its factors."""
    mask = row_mask[:, None] & (cols < WIDTH)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    if HAS_FACTOR:
        x = x * factor[None, :]
    return x


@triton.jit
def _put(codes_ptr, total, x, inverse, rows, row_mask, cols, WIDTH: tl.constexpr):
    mask = row_mask[:, None] & (cols < WIDTH)[None, :]
    places = codes_ptr + rows[:, None] * total + cols[None, :]
    tl.store(places, _codes(x, inverse[:, None]), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _quantize(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    factor0_ptr,
    factor1_ptr,
    factor2_ptr,
    codes_ptr,
    scales_ptr,
    stride0,
    stride1,
    stride2,
    total,
    num_rows,
    num_programs,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    BLOCK0: tl.constexpr,
    BLOCK1: tl.constexpr,
    BLOCK2: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    KEEP_LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Whole rows in registers; ``total`` is the columns of all parts."""
    cols0 = tl.arange(0, BLOCK0)
    cols1 = tl.arange(0, BLOCK1)
    cols2 = tl.arange(0, BLOCK2)
    factor0 = _factor(factor0_ptr, cols0, WIDTH0, HAS_FACTOR)
    factor1 = _factor(factor1_ptr, cols1, WIDTH1, HAS_FACTOR)
    factor2 = _factor(factor2_ptr, cols2, WIDTH2, HAS_FACTOR)
    num_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    for tile in tl.range(tl.program_id(0), num_tiles, num_programs, num_stages=STAGES):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        mask = rows < num_rows
        x0 = _rows(x0_ptr, stride0, rows, mask, cols0, factor0, WIDTH0, HAS_FACTOR)
        largest = tl.max(_magnitude(x0), axis=1)
        if WIDTH1 > 0:
            x1 = _rows(x1_ptr, stride1, rows, mask, cols1, factor1, WIDTH1, HAS_FACTOR)
            largest = tl.maximum(largest, tl.max(_magnitude(x1), axis=1))
        if WIDTH2 > 0:
            x2 = _rows(x2_ptr, stride2, rows, mask, cols2, factor2, WIDTH2, HAS_FACTOR)
            largest = tl.maximum(largest, tl.max(_magnitude(x2), axis=1))
        scale, inverse = _scale(largest, KEEP_LARGEST, SMALLEST)
        tl.store(scales_ptr + rows, scale, mask=mask)
        _put(codes_ptr, total, x0, inverse, rows, mask, cols0, WIDTH0)
        if WIDTH1 > 0:
            _put(codes_ptr + WIDTH0, total, x1, inverse, rows, mask, cols1, WIDTH1)
        if WIDTH2 > 0:
            _put(codes_ptr + WIDTH0 + WIDTH1, total, x2, inverse, rows, mask, cols2, WIDTH2)


@triton.jit
def _read(x_ptr, factor_ptr, cols, WIDTH: tl.constexpr, HAS_FACTOR: tl.constexpr):
    mask = cols < WIDTH
    x = tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        x = x * tl.load(factor_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _largest(
    best, x_ptr, factor_ptr, WIDTH: tl.constexpr, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr
):
    for start in range(0, WIDTH, BLOCK):
        x = _read(x_ptr, factor_ptr, start + tl.arange(0, BLOCK), WIDTH, HAS_FACTOR)
        best = tl.maximum(best, _magnitude(x))
    return best


@triton.jit
def _write(
    codes_ptr,
    x_ptr,
    factor_ptr,
    inverse,
    WIDTH: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for start in range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = _read(x_ptr, factor_ptr, cols, WIDTH, HAS_FACTOR)
        tl.store(codes_ptr + cols, _codes(x, inverse), mask=cols < WIDTH)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_long(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    factor0_ptr,
    factor1_ptr,
    factor2_ptr,
    codes_ptr,
    scales_ptr,
    stride0,
    stride1,
    stride2,
    num_rows,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    KEEP_LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row of any length, read twice."""
    row = tl.program_id(0).to(tl.int64)
    x0_ptr += row * stride0
    x1_ptr += row * stride1
    x2_ptr += row * stride2
    codes_ptr += row * (WIDTH0 + WIDTH1 + WIDTH2)
    best = tl.zeros([BLOCK], dtype=tl.int32)
    best = _largest(best, x0_ptr, factor0_ptr, WIDTH0, HAS_FACTOR, BLOCK)
    best = _largest(best, x1_ptr, factor1_ptr, WIDTH1, HAS_FACTOR, BLOCK)
    best = _largest(best, x2_ptr, factor2_ptr, WIDTH2, HAS_FACTOR, BLOCK)
    scale, inverse = _scale(tl.max(best, axis=0), KEEP_LARGEST, SMALLEST)
    _write(codes_ptr, x0_ptr, factor0_ptr, inverse, WIDTH0, HAS_FACTOR, BLOCK)
    _write(codes_ptr + WIDTH0, x1_ptr, factor1_ptr, inverse, WIDTH1, HAS_FACTOR, BLOCK)
    _write(codes_ptr + WIDTH0 + WIDTH1, x2_ptr, factor2_ptr, inverse, WIDTH2, HAS_FACTOR, BLOCK)
    tl.store(scales_ptr + row, scale)


@triton.jit(do_not_specialize=["num_rows"])
def _read_codes(
    codes_ptr,
    scales_ptr,
    out_ptr,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Codes (M, K) of a byte times their rows' scales; a perfect kernel moves 3 MK to bf16."""
    blocks: tl.constexpr = (WIDTH + BLOCK_COLS - 1) // BLOCK_COLS
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (tl.program_id(0) % blocks) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    mask = (rows < num_rows)[:, None] & (cols < WIDTH)[None, :]
    places = rows[:, None] * WIDTH + cols[None, :]
    scales = tl.load(scales_ptr + rows, mask=rows < num_rows, other=1.0)
    codes = tl.load(codes_ptr + places, mask=mask)
    read = codes.to(tl.float32) * scales[:, None]
    tl.store(out_ptr + places, read.to(out_ptr.dtype.element_ty), mask=mask)


READ_CODES = Kernel(_read_codes)
QUANTIZE = Kernel(_quantize)
QUANTIZE_LONG = Kernel(_quantize_long)


class Plan(NamedTuple):
    """How rows are held in registers: (columns, padded columns) of each piece, and the launch.

    Attributes:
        programs: of a multiprocessor, which walk over the rows; 0 for one program a tile.
    """

    pieces: tuple[tuple[int, int], ...]
    rows: int
    warps: int
    stages: int
    programs: int


@remembered
def plan_rows(widths: tuple[int, ...], has_factor: bool) -> Plan | None:
    """How rows of these parts are held, as measured on an H200; None where they are too long.

    Without factors a program a tile is fastest: the next one's reads hide the reduction. With them
    few programs walk over the rows, so that each reads the factors once.
    """
    pieces = [(width, next_power_of_2(width)) for width in widths]
    held = next_power_of_2(sum(padded for _, padded in pieces))
    if held > MAX_HELD:
        return None
    width, padded = pieces[0]
    if has_factor and held > 8192 and len(pieces) == 1 and width < padded * 7 // 8:
        rest = width - padded // 2  # two pieces leave fewer lanes idle
        pieces = [(padded // 2, padded // 2), (rest, next_power_of_2(rest))]
    rows = max(1, 4096 // held)
    if INTERPRETING:
        return Plan(tuple(pieces), 2**15 // held, 4, 1, 1)
    if not has_factor:
        return Plan(tuple(pieces), 1 if held > 1024 else rows, 4 if held <= 4096 else 8, 1, 0)
    if held <= 1024:
        return Plan(tuple(pieces), rows, 4, 1, 0)
    if held <= 8192:
        return Plan(tuple(pieces), rows, 4 if padded <= 4096 else 8, 3, 4)
    return Plan(tuple(pieces), 1, 8, 3, 1)


def launch_read_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes (M, K) times scales (M, 1), in a dtype."""
    out = torch.empty_like(codes, dtype=dtype)
    num_rows, width = codes.shape
    block_rows, block_cols = (64, 512) if INTERPRETING else (16, 256)
    READ_CODES.launch(
        -(-num_rows // block_rows) * -(-width // block_cols),
        (codes, scales, out),
        (),
        (num_rows,),
        (width, block_rows, block_cols),
        4,
    )
    return out


def launch_quantize(
    parts: Sequence[Tensor],
    factors: Sequence[Tensor] | None,
    keep_largest: bool,
    smallest: int = SMALLEST_EXPONENT,
) -> tuple[Tensor, Tensor]:
    """(codes (M, sum of K), scales (M, 1)) of at most three parts (M, K), unit column strides."""
    num_rows = parts[0].shape[0]
    widths = tuple(part.shape[1] for part in parts)
    codes = torch.empty((num_rows, sum(widths)), dtype=FP8, device=parts[0].device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=parts[0].device)
    if not num_rows:
        return codes, scales
    plan = plan_rows(widths, factors is not None)
    if plan is None:
        _launch_long(parts, factors, (keep_largest, smallest + 127), codes, scales)
        return codes, scales
    given = list(factors or [parts[0]] * len(parts))
    read = list(parts)
    if len(plan.pieces) > len(read):
        first = plan.pieces[0][0]
        read.append(read[0][:, first:])
        given.append(given[0][first:] if factors else read[0])
    missing = MAX_PARTS - len(read)
    read += [read[0]] * missing
    given += [given[0]] * missing
    pieces = [*plan.pieces, *[(0, 1)] * missing]
    programs = -(-num_rows // plan.rows)
    if plan.programs:
        programs = min(programs, plan.programs * num_multiprocessors(codes))
    QUANTIZE.launch(
        programs,
        (*read, *given, codes, scales),
        (*(part.stride(0) for part in read), codes.shape[1]),
        (num_rows, programs),
        (
            *(width for width, _ in pieces),
            *(padded for _, padded in pieces),
            factors is not None,
            keep_largest,
            smallest + 127,
            plan.rows,
            plan.stages,
        ),
        plan.warps,
        plan.stages,
    )
    return codes, scales


def _launch_long(
    parts: Sequence[Tensor],
    factors: Sequence[Tensor] | None,
    how: tuple[bool, int],
    codes: Tensor,
    scales: Tensor,
) -> None:
    widths = [part.shape[1] for part in parts]
    missing = MAX_PARTS - len(parts)
    read = [*parts, *[parts[0]] * missing]
    by = [*(factors or [parts[0]] * len(parts)), *[parts[0]] * missing]
    QUANTIZE_LONG.launch(
        codes.shape[0],
        (*read, *by, codes, scales),
        tuple(part.stride(0) for part in read),
        (codes.shape[0],),
        (
            *widths,
            *[0] * missing,
            factors is not None,
            *how,
            next_power_of_2(max(widths)) if INTERPRETING else 4096,
        ),
        8,
    )
