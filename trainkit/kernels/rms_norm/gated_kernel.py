"""Kernels of RMSNorm with a gate, before or after it, over whole rows or in groups of columns.

M rows, H columns in groups of G, P programs a group of the backward pass. Bytes a perfect kernel
moves, in elements: forward 3MH, backward 5MH. A program stays in one group, so that its part of the
weight and of dw stays in registers; dw is summed in a fixed order, as in ``kernel``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.launch import (
    Kernel,
    empty_like,
    num_multiprocessors,
    row_layout,
    shared_bytes,
)
from trainkit.kernels.rms_norm.kernel import (
    _load_rows,
    _promote,
    backward_config,
    fitting,
    forward_config,
    sum_partials,
)
from trainkit.kernels.swiglu.kernel import _activation_and_slope, _sigmoid


@triton.jit
def _opened(gate, SIGMOID: tl.constexpr):
    """(the gate's activation, its slope)."""
    if SIGMOID:
        share = _sigmoid(gate)
        slope = share * (1.0 - share)
    else:
        share, slope = _activation_and_slope(gate, False)
    return share, slope


@triton.jit(do_not_specialize=["num_rows"])
def _forward(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    gate_stride,
    num_rows,
    eps: tl.constexpr,
    GEMMA: tl.constexpr,
    FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    WIDE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    NARROW: tl.constexpr = x_ptr.dtype.element_ty
    group = tl.program_id(0) % GROUPS
    tile = (tl.program_id(0) // GROUPS).to(tl.int64)
    rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = tl.arange(0, BLOCK_G) < G
    cols = group * G + tl.arange(0, BLOCK_G)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & inside[None, :]

    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0)
    x = _load_rows(x_ptr, rows, x_stride, cols, mask).to(WIDE)
    share, _ = _opened(_load_rows(gate_ptr, rows, gate_stride, cols, mask).to(WIDE), SIGMOID)
    if FIRST:
        x *= share
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / G + eps)
    tl.store(rstd_ptr + rows * GROUPS + group, rstd, mask=row_mask)
    y = x * rstd[:, None]
    if not GEMMA:
        y = y.to(NARROW).to(WIDE)
    y *= weight.to(WIDE)[None, :]
    if not FIRST:
        if not GEMMA and weight.dtype == NARROW:  # else the product was in the wider of the two
            y = y.to(NARROW).to(WIDE)
        y *= share
    at = y_ptr + rows[:, None] * (GROUPS * G) + cols[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _backward(
    x_ptr,
    gate_ptr,
    weight_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    dgate_ptr,
    partial_ptr,
    x_stride,
    gate_stride,
    dy_stride,
    num_rows,
    num_programs,
    FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    WANT_DW: tl.constexpr,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    WIDE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    group = tl.program_id(0) % GROUPS
    program = tl.program_id(0) // GROUPS
    inside = tl.arange(0, BLOCK_G) < G
    cols = group * G + tl.arange(0, BLOCK_G)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(WIDE)
    dw = tl.zeros([BLOCK_ROWS, BLOCK_G], dtype=WIDE)
    for tile in tl.range(program, tl.cdiv(num_rows, BLOCK_ROWS), num_programs, num_stages=STAGES):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        row_mask = rows < num_rows
        mask = row_mask[:, None] & inside[None, :]
        at = rows[:, None]
        x = tl.load(x_ptr + at * x_stride + cols[None, :], mask=mask, other=0.0).to(WIDE)
        gate = tl.load(gate_ptr + at * gate_stride + cols[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + at * dy_stride + cols[None, :], mask=mask, other=0.0).to(WIDE)
        rstd = tl.load(rstd_ptr + rows * GROUPS + group, mask=row_mask, other=0.0)[:, None]
        share, slope = _opened(gate.to(WIDE), SIGMOID)
        # Of n = v * rstd(v) and its gradient h: dv = rstd * (h - n * mean(h * n)).
        normal = (x * share if FIRST else x) * rstd
        dnormal = dy if FIRST else dy * share
        if WANT_DW:
            dw += dnormal * normal
        dnormal *= weight[None, :]
        dv = (dnormal - normal * (tl.sum(dnormal * normal, axis=1) / G)[:, None]) * rstd
        dgate = (dv * x if FIRST else dy * weight[None, :] * normal) * slope
        dx = dv * share if FIRST else dv
        out = at * (GROUPS * G) + cols[None, :]
        tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dgate_ptr + out, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if WANT_DW:
        place = partial_ptr + program.to(tl.int64) * (GROUPS * G) + cols
        tl.store(place, tl.sum(dw, axis=0), mask=inside)


FORWARD = Kernel(_forward)
BACKWARD = Kernel(_backward)


def launch_forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    gemma: bool,
    first: bool,
    sigmoid: bool,
    group: int,
) -> tuple[Tensor, Tensor]:
    rows, stride = row_layout(x)
    gates, gate_stride = row_layout(gate)
    hidden = x.shape[-1]
    num_rows, groups = x.numel() // hidden, hidden // group
    keeps_weights = first and not gemma
    y = empty_like(x, _promote(x.dtype, weight.dtype) if keeps_weights else x.dtype)
    rstd = x.new_empty(num_rows * groups, dtype=_promote(x.dtype, torch.float32))
    if num_rows:
        block, block_rows, warps = forward_config(group)
        FORWARD.launch(
            -(-num_rows // block_rows) * groups,
            (rows, gates, weight, y, rstd),
            (stride, gate_stride),
            (num_rows,),
            (eps, gemma, first, sigmoid, groups, group, block, block_rows),
            warps,
        )
    return y, rstd


def launch_backward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dy: Tensor,
    want_dw: bool,
    first: bool,
    sigmoid: bool,
    group: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, of the gate, and of the weight where it is wanted."""
    rows, stride = row_layout(x)
    gates, gate_stride = row_layout(gate)
    dy, dy_stride = row_layout(dy)
    hidden = x.shape[-1]
    num_rows, groups = x.numel() // hidden, hidden // group
    dx, dgate = empty_like(x), empty_like(gate)
    if not num_rows:
        return dx, dgate, torch.zeros_like(weight) if want_dw else None
    block, block_rows, warps, stages, per_multiprocessor = backward_config(group)
    width = rows.itemsize + gates.itemsize + dy.itemsize
    block_rows, stages = fitting(block, block_rows, stages, width, shared_bytes(x))
    resident = num_multiprocessors(x) * per_multiprocessor
    programs = min(-(-resident // groups), -(-num_rows // block_rows))
    partial = rstd.new_empty((programs, hidden)) if want_dw else rstd
    BACKWARD.launch(
        programs * groups,
        (rows, gates, weight, rstd, dy, dx, dgate, partial),
        (stride, gate_stride, dy_stride),
        (num_rows, programs),
        (first, sigmoid, want_dw, groups, group, block, block_rows, stages),
        warps,
        stages,
    )
    return dx, dgate, sum_partials(partial, weight) if want_dw else None
