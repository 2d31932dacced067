"""Norm kernels: RMSNorm, and LayerNorm, which takes a row's mean off first and may add a bias.

M rows, H hidden size, P programs of the backward pass.

Bytes a perfect kernel moves, in elements: forward 2MH (4MH with the addition), backward 3MH (4MH).
The forward keeps whole rows in registers. The backward is persistent: P programs walk over the rows
with the next tiles in flight, because a reduction along the row otherwise leaves the memory idle;
each keeps its share of dw in registers and leaves one fp32 row of a (P, H) buffer, which a second
kernel sums in a fixed order. So dw is the same bits in every run. So is db, next to it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.fp8.kernel import _codes, _magnitude, _scale
from trainkit.kernels.fp8.reference import FP8
from trainkit.kernels.launch import (
    INTERPRETING,
    Kernel,
    empty_like,
    next_power_of_2,
    num_multiprocessors,
    remembered,
    row_layout,
    shared_bytes,
)

MAX_HIDDEN = 65536  # one row must fit the registers of a program


@triton.jit
def _load_rows(ptr, rows, stride, cols, mask):
    # What was read stays in the cache in place of what was written: up to 4% faster, measured.
    at = ptr + rows[:, None] * stride + cols[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["num_rows"])
def _forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    rstd_ptr,
    codes_ptr,
    scales_ptr,
    x_stride,
    residual_stride,
    num_rows,
    eps: tl.constexpr,
    offset: tl.constexpr,
    GEMMA: tl.constexpr,
    CENTRE: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    CODES: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    WIDE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    # The row that is normalised: x itself, or the rounded sum.
    NARROW: tl.constexpr = total_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_H)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (cols < H)[None, :]

    weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(WIDE) + offset
    x = _load_rows(x_ptr, rows, x_stride, cols, mask).to(WIDE)
    if ADD:
        residual = _load_rows(residual_ptr, rows, residual_stride, cols, mask)
        total = (x + residual.to(WIDE)).to(NARROW)
        tl.store(total_ptr + rows[:, None] * H + cols[None, :], total, mask=mask)
        x = total.to(WIDE)

    if CENTRE:
        mean = tl.sum(x, axis=1) / H
        tl.store(rstd_ptr + num_rows + rows, mean, mask=row_mask)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    normal = x * rstd[:, None]
    if not GEMMA:
        normal = normal.to(NARROW).to(WIDE)
    y = normal * weight[None, :]
    if BIAS:
        y += tl.load(bias_ptr + cols, mask=cols < H, other=0.0).to(WIDE)[None, :]
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + rows[:, None] * H + cols[None, :], y, mask=mask)
    if CODES:
        y = y.to(tl.float32)
        scale, inverse = _scale(tl.max(_magnitude(y), axis=1), True)
        tl.store(scales_ptr + rows, scale, mask=row_mask)
        places = codes_ptr + rows[:, None] * H + cols[None, :]
        tl.store(places, _codes(y, inverse[:, None]), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _backward(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dy_ptr,
    dtotal_ptr,
    dx_ptr,
    partial_ptr,
    x_stride,
    dy_stride,
    dtotal_stride,
    num_rows,
    num_programs,
    offset: tl.constexpr,
    CENTRE: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    WANT_DX: tl.constexpr,
    WANT_DW: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    WIDE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_H)
    col_mask = cols < H
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(WIDE) + offset
    if WANT_DW:
        dw = tl.zeros([BLOCK_ROWS, BLOCK_H], dtype=WIDE)
        db = tl.zeros([BLOCK_ROWS, BLOCK_H] if BIAS else [1, 1], dtype=WIDE)

    num_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    for tile in tl.range(program, num_tiles, num_programs, num_stages=STAGES):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        row_mask = rows < num_rows
        mask = row_mask[:, None] & col_mask[None, :]
        at = rows[:, None]
        x = tl.load(x_ptr + at * x_stride + cols[None, :], mask=mask, other=0.0).to(WIDE)
        dy = tl.load(dy_ptr + at * dy_stride + cols[None, :], mask=mask, other=0.0).to(WIDE)
        if ADD:
            dtotal = tl.load(
                dtotal_ptr + at * dtotal_stride + cols[None, :], mask=mask, other=0.0
            ).to(WIDE)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        if CENTRE:
            x -= tl.load(rstd_ptr + num_rows + rows, mask=row_mask, other=0.0)[:, None]
        normal = x * rstd[:, None]
        if WANT_DX:
            # y = w * x * rstd(x), so with g = w * dy: dx = rstd * (g - normal * mean(g * normal)).
            # Of a row without its mean, dx has none either: mean(normal) = 0, so g's comes off.
            g = dy * weight[None, :]
            mean = tl.sum(g * normal, axis=1) / H
            if CENTRE:
                g -= (tl.sum(g, axis=1) / H)[:, None]
            dx = (g - normal * mean[:, None]) * rstd[:, None]
            if ADD:
                dx += dtotal
            tl.store(dx_ptr + at * H + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WANT_DW:
            dw += dy * normal
            if BIAS:
                db += dy

    if WANT_DW:
        place = partial_ptr + program.to(tl.int64) * (2 * H if BIAS else H) + cols
        tl.store(place, tl.sum(dw, axis=0), mask=col_mask)
        if BIAS:
            tl.store(place + H, tl.sum(db, axis=0), mask=col_mask)


@triton.jit(do_not_specialize=["num_partials"])
def _sum_partials(
    partial_ptr, dw_ptr, num_partials, H: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr
):
    cols = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_P, BLOCK_H], dtype=partial_ptr.dtype.element_ty)
    for start in range(0, num_partials, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        mask = (rows < num_partials)[:, None] & (cols < H)[None, :]
        total += tl.load(partial_ptr + rows[:, None] * H + cols[None, :], mask=mask, other=0.0)
    dw = tl.sum(total, axis=0).to(dw_ptr.dtype.element_ty)
    tl.store(dw_ptr + cols, dw, mask=cols < H)


FORWARD = Kernel(_forward)
BACKWARD = Kernel(_backward)
SUM_PARTIALS = Kernel(_sum_partials)

SUM_CONFIG = (64, 512, 4) if INTERPRETING else (128, 16, 4)  # BLOCK_P, BLOCK_H, num_warps
_REDUCTION_BYTES = 2048  # what the sums along a row pass between warps, at most
_WIDE = torch.float32


@remembered
def forward_config(hidden: int) -> tuple[int, int, int]:
    """(BLOCK_H, BLOCK_ROWS, num_warps) by hidden size."""
    block = next_power_of_2(hidden)
    if INTERPRETING:
        return block, max(1, min(64, 2**18 // block)), 4
    if hidden <= 3584:
        return block, max(1, 2048 // block), 4
    return block, 1, max(8, min(32, block // 1024))


@remembered
def backward_config(hidden: int) -> tuple[int, int, int, int, int]:
    """(BLOCK_H, BLOCK_ROWS, num_warps, STAGES, programs per multiprocessor) by hidden size."""
    block = next_power_of_2(hidden)
    if INTERPRETING:
        return block, max(1, min(64, 2**18 // block)), 4, 1, 1
    if block <= 1024:
        return block, 4096 // block, 4, 3, 2
    if block <= 2048:
        return block, 1, 4, 4, 2
    if hidden <= 3584:
        return block, 1, 4, 3, 2
    if block <= 4096:
        return block, 2, 16, 3, 1
    if block <= 8192:
        return block, 1, 16, 3, 1
    return block, 1, min(32, block // 1024), 2, 1


@remembered
def fitting(block: int, block_rows: int, stages: int, width: int, limit: int) -> tuple[int, int]:
    """(BLOCK_ROWS, STAGES) of the backward, lowered until its tiles fit the shared memory.

    All tiles in flight but the one in hand wait there.
    """
    room = limit - _REDUCTION_BYTES
    while block * block_rows * width * (stages - 1) > room:
        if block_rows > 1:
            block_rows //= 2
        else:
            stages -= 1
    return block_rows, stages


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float,
    gemma: bool,
    centre: bool,
    made: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise the rows of x (..., H), or of x + residual.

    Args:
        x: (..., H).
        residual: shaped as x, or None.
        weight: (H,).
        bias: (H,), or None.
        eps: added to the mean square.
        offset: added to the weight.
        gemma: all in fp32, rounded once.
        centre: the mean of a row comes off it first.
        made: gets y's rows in e4m3: codes (M, H) and scales (M, 1); None for no such.

    Returns:
        y, contiguous; what was normalised (x itself, or the sum); rstd, one a row, and behind
        them the means.
    """
    rows, stride = row_layout(x)
    others, other_stride = (rows, stride) if residual is None else row_layout(residual)
    hidden = x.shape[-1]
    num_rows = x.numel() // hidden
    total = x if residual is None else empty_like(x, _promote(x.dtype, residual.dtype))
    y = empty_like(x, total.dtype if gemma else _promote(total.dtype, weight.dtype))
    rstd = x.new_empty(
        num_rows * (1 + centre), dtype=_WIDE if x.dtype is not torch.float64 else x.dtype
    )
    codes, scales = y, rstd
    if made is not None:
        codes = torch.empty((num_rows, hidden), dtype=FP8, device=x.device)
        scales = rstd.new_empty((num_rows, 1))
        made += [codes, scales]
    if num_rows:
        block, block_rows, warps = forward_config(hidden)
        FORWARD.launch(
            -(-num_rows // block_rows),
            (rows, others, weight, weight if bias is None else bias, y, total, rstd, codes, scales),
            (stride, other_stride),
            (num_rows,),
            (
                *(eps, offset, gemma, centre, bias is not None),
                *(residual is not None, made is not None),
                *(hidden, block, block_rows),
            ),
            warps,
        )
    return y, total, rstd


def launch_backward(
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dy: Tensor,
    dtotal: Tensor | None,
    offset: float,
    centre: bool,
    has_bias: bool,
    want_dx: bool,
    want_dw: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of what was normalised, x (..., H), of weight and bias; None where not wanted."""
    rows, stride = row_layout(x)
    dy, dy_stride = row_layout(dy)
    others, other_stride = (rows, stride) if dtotal is None else row_layout(dtotal)
    hidden = x.shape[-1]
    num_rows = x.numel() // hidden
    dx = empty_like(x) if want_dx else None
    if not num_rows:
        zeros = torch.zeros_like(weight) if want_dw else None
        return dx, zeros, zeros if has_bias else None
    block, block_rows, warps, stages, per_multiprocessor = backward_config(hidden)
    width = rows.itemsize + dy.itemsize + (0 if dtotal is None else others.itemsize)
    block_rows, stages = fitting(block, block_rows, stages, width, shared_bytes(x))
    programs = min(num_multiprocessors(x) * per_multiprocessor, -(-num_rows // block_rows))
    partial = rstd
    if want_dw:
        partial = rstd.new_empty((programs, hidden * (1 + has_bias)))
    BACKWARD.launch(
        programs,
        (rows, weight, rstd, dy, others, x if dx is None else dx, partial),
        (stride, dy_stride, other_stride),
        (num_rows, programs),
        (
            *(offset, centre, has_bias, dtotal is not None, want_dx, want_dw),
            *(hidden, block, block_rows, stages),
        ),
        warps,
        stages,
    )
    if not want_dw:
        return dx, None, None
    sums = sum_partials(partial, weight)
    return (dx, sums[:hidden], sums[hidden:]) if has_bias else (dx, sums, None)


def sum_partials(partial: Tensor, like: Tensor) -> Tensor:
    """The sum of the rows of (P, H), in a fixed order, in the dtype of ``like``."""
    programs, width = partial.shape
    sums = like.new_empty(width)
    block_p, block_h, warps = SUM_CONFIG
    SUM_PARTIALS.launch(
        -(-width // block_h), (partial, sums), (), (programs,), (width, block_p, block_h), warps
    )
    return sums


def _promote(left: torch.dtype, right: torch.dtype) -> torch.dtype:
    return left if left is right else torch.promote_types(left, right)
