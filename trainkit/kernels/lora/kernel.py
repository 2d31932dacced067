"""Kernels for adapters: skinny products, and the gate with its adapters folded in.

M tokens, K inputs, N outputs, R rank (padded to a power of two of at least 16), F feed-forward.

The adapters' arithmetic is free; what they cost is memory traffic. Two things keep it down. A
skinny product reads its wide operand once, for all the adapters stacked on it. And the gate, which
reads the projections' outputs anyway, adds the adapters' share on the fly, in registers: the sums
``x W^T + (x A^T) B^T`` of the feed-forward never exist in memory, forward or backward, and the
gate's backward pass takes the gradients of three adapter factors along while it has the values.

Everything is summed in fp32 and in a fixed order, so results repeat bit for bit.
"""

import triton
import triton.language as tl

from trainkit.kernels.swiglu.kernel import _activation, _activation_and_slope


@triton.jit
def _accumulate(a, b, acc, PRECISION: tl.constexpr):
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows"])
def rows_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    x_batch_stride,
    x_stride,
    w_batch_stride,
    w_stride_r,
    w_stride_k,
    out_batch_stride,
    out_stride,
    num_inner,
    num_rows,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out (M, R) = x (M, K) w (R, K)^T, for each of a batch of pairs on axis 1 of the grid."""
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = tl.arange(0, R_PAD)
    inner = tl.arange(0, BLOCK_K)
    x_ptr += batch * x_batch_stride + rows[:, None] * x_stride
    w_ptr += batch * w_batch_stride + ranks[None, :] * w_stride_r
    acc = tl.zeros((BLOCK_M, R_PAD), dtype=tl.float32)
    for start in tl.range(0, num_inner, BLOCK_K, num_stages=STAGES):
        cols = start + inner
        x = tl.load(
            x_ptr + cols[None, :],
            mask=(rows[:, None] < num_rows) & (cols[None, :] < num_inner),
            other=0.0,
        )
        w = tl.load(
            w_ptr + cols[:, None] * w_stride_k,
            mask=(ranks[None, :] < R) & (cols[:, None] < num_inner),
            other=0.0,
        )
        acc = _accumulate(x, w, acc, PRECISION)
    out_ptr += batch * out_batch_stride + rows[:, None] * out_stride + ranks[None, :]
    mask = (rows[:, None] < num_rows) & (ranks[None, :] < R)
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "rows_per_split", "scale"])
def columns_kernel(
    y_ptr,
    p_ptr,
    out_ptr,
    y_stride,
    p_stride,
    num_cols,
    out_stride_n,
    out_stride_r,
    num_rows,
    rows_per_split,
    scale,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Part of out (N, R) = scale y (M, N)^T p (M, R): the rows of split ``program_id(1)``."""
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1).to(tl.int64)
    ranks = tl.arange(0, R_PAD)
    first = split * rows_per_split
    last = tl.minimum(first + rows_per_split, num_rows)
    acc = tl.zeros((BLOCK_N, R_PAD), dtype=tl.float32)
    for start in tl.range(first, last, BLOCK_M, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        y = tl.load(
            y_ptr + rows[None, :] * y_stride + cols[:, None],
            mask=(rows[None, :] < last) & (cols[:, None] < num_cols),
            other=0.0,
        )
        p = tl.load(
            p_ptr + rows[:, None] * p_stride + ranks[None, :],
            mask=(rows[:, None] < last) & (ranks[None, :] < R),
            other=0.0,
        )
        acc = _accumulate(y, p, acc, PRECISION)
    out_ptr += split * num_cols * R + cols[:, None] * out_stride_n + ranks[None, :] * out_stride_r
    tl.store(out_ptr, acc * scale, mask=(cols[:, None] < num_cols) & (ranks[None, :] < R))


@triton.jit(do_not_specialize=["num_rows", "blocks_per_split"])
def gate_forward_kernel(
    gate_ptr,
    up_ptr,
    xa_gate_ptr,
    xa_up_ptr,
    b_gate_ptr,
    b_up_ptr,
    a_down_ptr,
    h_ptr,
    xa_down_ptr,
    gate_stride,
    xa_gate_stride,
    xa_up_stride,
    num_cols,
    num_rows,
    blocks_per_split,
    R_GATE: tl.constexpr,
    R_UP: tl.constexpr,
    R_DOWN: tl.constexpr,
    R_GATE_PAD: tl.constexpr,
    R_UP_PAD: tl.constexpr,
    R_DOWN_PAD: tl.constexpr,
    TANH_GELU: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
):
    """h = act(gate + xa_gate b_gate^T) * (up + xa_up b_up^T), and part of h a_down^T.

    gate, up (M, F) with one row stride; b_gate, b_up (F, R); a_down (R, F); h (M, F) contiguous;
    xa_down (splits, M, R) in fp32. A rank of 0 means that there is no such adapter. Tiles are held
    transposed, (BLOCK_F, BLOCK_M): in the other order Triton loads and stores them in the layout
    of the matrix instructions, four bytes at a time.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1).to(tl.int64)
    row_mask = rows < num_rows
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    ranks_gate = tl.arange(0, R_GATE_PAD)
    ranks_up = tl.arange(0, R_UP_PAD)
    ranks_down = tl.arange(0, R_DOWN_PAD)
    if R_GATE > 0:
        xa_gate = tl.load(
            xa_gate_ptr + rows[:, None] * xa_gate_stride + ranks_gate[None, :],
            mask=row_mask[:, None] & (ranks_gate[None, :] < R_GATE),
            other=0.0,
        )
    if R_UP > 0:
        xa_up = tl.load(
            xa_up_ptr + rows[:, None] * xa_up_stride + ranks_up[None, :],
            mask=row_mask[:, None] & (ranks_up[None, :] < R_UP),
            other=0.0,
        )
    acc = tl.zeros((BLOCK_M, R_DOWN_PAD), dtype=tl.float32)
    # In whole blocks, so that the compiler can tell that every tile is aligned.
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, tl.cdiv(num_cols, BLOCK_F))
    next_cols = first * BLOCK_F + tl.arange(0, BLOCK_F)
    next_mask = (next_cols[:, None] < num_cols) & row_mask[None, :]
    places = rows[None, :] * gate_stride + next_cols[:, None]
    next_gate = tl.load(gate_ptr + places, mask=next_mask, other=0.0)
    next_up = tl.load(up_ptr + places, mask=next_mask, other=0.0)
    for block in tl.range(first, last, num_stages=STAGES):
        cols, mask = next_cols, next_mask
        col_mask = cols[:, None] < num_cols
        gate, up = next_gate.to(tl.float32), next_up.to(tl.float32)
        # The compiler loads ahead only what goes into a product as it is; these go ahead by hand.
        next_cols = (block + 1) * BLOCK_F + tl.arange(0, BLOCK_F)
        next_mask = (next_cols[:, None] < num_cols) & row_mask[None, :]
        places = rows[None, :] * gate_stride + next_cols[:, None]
        next_gate = tl.load(gate_ptr + places, mask=next_mask, other=0.0)
        next_up = tl.load(up_ptr + places, mask=next_mask, other=0.0)
        if R_GATE > 0:
            b_gate = tl.load(
                b_gate_ptr + cols[:, None] * R_GATE + ranks_gate[None, :],
                mask=col_mask & (ranks_gate[None, :] < R_GATE),
                other=0.0,
            )
            gate = _accumulate(b_gate, tl.trans(xa_gate), gate, PRECISION)
        if R_UP > 0:
            b_up = tl.load(
                b_up_ptr + cols[:, None] * R_UP + ranks_up[None, :],
                mask=col_mask & (ranks_up[None, :] < R_UP),
                other=0.0,
            )
            up = _accumulate(b_up, tl.trans(xa_up), up, PRECISION)
        h = (_activation(gate, TANH_GELU) * up).to(dtype)
        tl.store(h_ptr + rows[None, :] * num_cols + cols[:, None], h, mask=mask)
        if R_DOWN > 0:
            a_down = tl.load(
                a_down_ptr + ranks_down[None, :] * num_cols + cols[:, None],
                mask=col_mask & (ranks_down[None, :] < R_DOWN),
                other=0.0,
            )
            acc = _accumulate(tl.trans(h), a_down, acc, PRECISION)
    if R_DOWN > 0:
        out = xa_down_ptr + (split * num_rows + rows[:, None]) * R_DOWN + ranks_down[None, :]
        tl.store(out, acc, mask=row_mask[:, None] & (ranks_down[None, :] < R_DOWN))


@triton.jit(do_not_specialize=["num_rows", "rows_per_split", "scale_gate", "scale_up"])
def gate_backward_kernel(
    gate_ptr,
    up_ptr,
    dh_ptr,
    xa_gate_ptr,
    xa_up_ptr,
    p_down_ptr,
    b_gate_ptr,
    b_up_ptr,
    a_down_ptr,
    dgate_ptr,
    dup_ptr,
    db_gate_ptr,
    db_up_ptr,
    da_down_ptr,
    gate_stride,
    dgate_stride,
    dh_stride,
    xa_gate_stride,
    xa_up_stride,
    num_cols,
    num_rows,
    rows_per_split,
    scale_gate,
    scale_up,
    R_GATE: tl.constexpr,
    R_UP: tl.constexpr,
    R_DOWN: tl.constexpr,
    R_GATE_PAD: tl.constexpr,
    R_UP_PAD: tl.constexpr,
    R_DOWN_PAD: tl.constexpr,
    TANH_GELU: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dgate and dup, and parts of the gradients of b_gate, b_up (F, R) and a_down (R, F).

    dh (M, F) is dy W_down; what the down adapter adds to it, p_down a_down with p_down = s dy
    B_down (M, R), is added here. Tiles are held transposed, (BLOCK_F, BLOCK_M), so that h, dgate
    and dup enter the factors' sums from the registers in which they are computed. dup may be dh's
    own memory: every element is read before it is written, by the same program.
    """
    cols = tl.program_id(0).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    split = tl.program_id(1).to(tl.int64)
    col_mask = cols[:, None] < num_cols
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    ranks_gate = tl.arange(0, R_GATE_PAD)
    ranks_up = tl.arange(0, R_UP_PAD)
    ranks_down = tl.arange(0, R_DOWN_PAD)
    if R_GATE > 0:
        b_gate = tl.load(
            b_gate_ptr + cols[:, None] * R_GATE + ranks_gate[None, :],
            mask=col_mask & (ranks_gate[None, :] < R_GATE),
            other=0.0,
        )
    if R_UP > 0:
        b_up = tl.load(
            b_up_ptr + cols[:, None] * R_UP + ranks_up[None, :],
            mask=col_mask & (ranks_up[None, :] < R_UP),
            other=0.0,
        )
    if R_DOWN > 0:
        a_down = tl.load(
            a_down_ptr + ranks_down[None, :] * num_cols + cols[:, None],
            mask=col_mask & (ranks_down[None, :] < R_DOWN),
            other=0.0,
        )
    acc_gate = tl.zeros((BLOCK_F, R_GATE_PAD), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_F, R_UP_PAD), dtype=tl.float32)
    acc_down = tl.zeros((BLOCK_F, R_DOWN_PAD), dtype=tl.float32)
    first = split * rows_per_split
    last = tl.minimum(first + rows_per_split, num_rows)
    next_rows = first + tl.arange(0, BLOCK_M)
    next_mask = col_mask & (next_rows < last)[None, :]
    places = next_rows[None, :] * gate_stride + cols[:, None]
    next_gate = tl.load(gate_ptr + places, mask=next_mask, other=0.0)
    next_up = tl.load(up_ptr + places, mask=next_mask, other=0.0)
    dh_places = next_rows[None, :] * dh_stride + cols[:, None]
    next_dh = tl.load(dh_ptr + dh_places, mask=next_mask, other=0.0)
    for start in tl.range(first, last, BLOCK_M, num_stages=STAGES):
        rows, mask = next_rows, next_mask
        row_mask = rows < last
        gate, up = next_gate.to(tl.float32), next_up.to(tl.float32)
        dh = next_dh.to(tl.float32)
        # The compiler loads ahead only what goes into a product as it is; these go ahead by hand.
        next_rows = start + BLOCK_M + tl.arange(0, BLOCK_M)
        next_mask = col_mask & (next_rows < last)[None, :]
        places = next_rows[None, :] * gate_stride + cols[:, None]
        next_gate = tl.load(gate_ptr + places, mask=next_mask, other=0.0)
        next_up = tl.load(up_ptr + places, mask=next_mask, other=0.0)
        dh_places = next_rows[None, :] * dh_stride + cols[:, None]
        next_dh = tl.load(dh_ptr + dh_places, mask=next_mask, other=0.0)
        if R_GATE > 0:
            xa_gate = tl.load(
                xa_gate_ptr + rows[:, None] * xa_gate_stride + ranks_gate[None, :],
                mask=row_mask[:, None] & (ranks_gate[None, :] < R_GATE),
                other=0.0,
            )
            gate = _accumulate(b_gate, tl.trans(xa_gate), gate, PRECISION)
        if R_UP > 0:
            xa_up = tl.load(
                xa_up_ptr + rows[:, None] * xa_up_stride + ranks_up[None, :],
                mask=row_mask[:, None] & (ranks_up[None, :] < R_UP),
                other=0.0,
            )
            up = _accumulate(b_up, tl.trans(xa_up), up, PRECISION)
        if R_DOWN > 0:
            p_down = tl.load(
                p_down_ptr + rows[:, None] * R_DOWN + ranks_down[None, :],
                mask=row_mask[:, None] & (ranks_down[None, :] < R_DOWN),
                other=0.0,
            )
            dh = _accumulate(a_down, tl.trans(p_down), dh, PRECISION)
        activated, slope = _activation_and_slope(gate, TANH_GELU)
        dgate = (dh * up * slope).to(dtype)
        dup = (dh * activated).to(dtype)
        dplaces = rows[None, :] * dgate_stride + cols[:, None]
        tl.store(dgate_ptr + dplaces, dgate, mask=mask)
        tl.store(dup_ptr + dplaces, dup, mask=mask)
        if R_GATE > 0:
            acc_gate = _accumulate(dgate, xa_gate, acc_gate, PRECISION)
        if R_UP > 0:
            acc_up = _accumulate(dup, xa_up, acc_up, PRECISION)
        if R_DOWN > 0:
            acc_down = _accumulate((activated * up).to(dtype), p_down, acc_down, PRECISION)
    if R_GATE > 0:
        out = db_gate_ptr + (split * num_cols + cols[:, None]) * R_GATE + ranks_gate[None, :]
        tl.store(out, acc_gate * scale_gate, mask=col_mask & (ranks_gate[None, :] < R_GATE))
    if R_UP > 0:
        out = db_up_ptr + (split * num_cols + cols[:, None]) * R_UP + ranks_up[None, :]
        tl.store(out, acc_up * scale_up, mask=col_mask & (ranks_up[None, :] < R_UP))
    if R_DOWN > 0:
        out = da_down_ptr + (split * R_DOWN + ranks_down[None, :]) * num_cols + cols[:, None]
        tl.store(out, acc_down, mask=col_mask & (ranks_down[None, :] < R_DOWN))
