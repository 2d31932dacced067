"""Row maximum and its gradient. M rows, D columns.

Every lane keeps the best value of its columns and where it stood; one reduction per row picks among
the lanes: a NaN before any number, the lowest column among equals. The minimum is the maximum of
the negated row. The gradient writes each row once, zeros and the one value together.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.launch import INTERPRETING, Kernel, next_power_of_2, remembered, row_layout

NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["num_rows"])
def _forward(
    x_ptr,
    value_ptr,
    index_ptr,
    x_stride,
    num_rows,
    MINIMUM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    WIDE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows < num_rows
    best = tl.full([BLOCK_ROWS, BLOCK_D], -float("inf"), dtype=WIDE)
    at = tl.full([BLOCK_ROWS, BLOCK_D], NO_COLUMN, dtype=tl.int32)
    for start in range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        mask = row_mask[:, None] & (cols < D)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
        x = x.to(WIDE)
        if MINIMUM:
            x = -x
        # A lane starts with no column, so that a row of -inf still finds its first.
        better = (x > best) | ((x != x) & (best == best)) | (at == NO_COLUMN)
        better = better & mask
        best = tl.where(better, x, best)
        at = tl.where(better, cols[None, :], at)

    is_nan = best != best
    nan_at = tl.min(tl.where(is_nan, at, NO_COLUMN), axis=1)
    top = tl.max(tl.where(is_nan, -float("inf"), best), axis=1)
    top_at = tl.min(tl.where((best == top[:, None]), at, NO_COLUMN), axis=1)
    has_nan = nan_at != NO_COLUMN
    value = tl.where(has_nan, float("nan"), -top if MINIMUM else top)
    index = tl.where(has_nan, nan_at, top_at)
    tl.store(value_ptr + rows, value.to(value_ptr.dtype.element_ty), mask=row_mask)
    tl.store(index_ptr + rows, index.to(tl.int64), mask=row_mask)


@triton.jit(do_not_specialize=["num_rows"])
def _backward(
    index_ptr,
    dy_ptr,
    dx_ptr,
    num_rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows < num_rows
    index = tl.load(index_ptr + rows, mask=row_mask, other=0)
    dy = tl.load(dy_ptr + rows, mask=row_mask, other=0.0)
    for start in range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        mask = row_mask[:, None] & (cols < D)[None, :]
        dx = tl.where(cols[None, :] == index[:, None], dy[:, None], 0.0)
        tl.store(
            dx_ptr + rows[:, None] * D + cols[None, :],
            dx.to(dx_ptr.dtype.element_ty),
            mask=mask,
        )


FORWARD = Kernel(_forward)
BACKWARD = Kernel(_backward)


@remembered
def config(width: int) -> tuple[int, int, int]:
    """(BLOCK_D, BLOCK_ROWS, num_warps) by row length."""
    if INTERPRETING:
        block = min(next_power_of_2(width), 1024)
        return block, max(1, 2**16 // block), 4
    block = min(next_power_of_2(width), 4096)
    return block, max(1, 2048 // block), 4


def launch_forward(x: Tensor, minimum: bool) -> tuple[Tensor, Tensor]:
    """(values, indices) of the rows of x (..., D), D >= 1."""
    rows, stride = row_layout(x)
    *shape, width = x.shape
    num_rows = math.prod(shape)
    values = x.new_empty(shape)
    indices = x.new_empty(shape, dtype=torch.int64)
    if num_rows:
        block, block_rows, warps = config(width)
        FORWARD.launch(
            -(-num_rows // block_rows),
            (rows, values, indices),
            (stride,),
            (num_rows,),
            (minimum, width, block, block_rows),
            warps,
        )
    return values, indices


def launch_backward(indices: Tensor, dy: Tensor, width: int) -> Tensor:
    """The gradient of x (..., D) from indices (...) and dy (...)."""
    dy = dy.contiguous()
    num_rows = dy.numel()
    dx = dy.new_empty((*dy.shape, width))
    if num_rows:
        block, block_rows, warps = config(width)
        BACKWARD.launch(
            -(-num_rows // block_rows),
            (indices, dy, dx),
            (),
            (num_rows,),
            (width, block, block_rows),
            warps,
        )
    return dx
