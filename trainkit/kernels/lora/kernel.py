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


@triton.jit
def _cast_part(from_ptr, to_ptr, number, scale, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < number
    values = tl.load(from_ptr + places, mask=inside, other=0.0).to(tl.float32) * scale
    tl.store(to_ptr + places, values.to(to_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scale_0", "scale_1", "scale_2", "scale_3"])
def cast_kernel(
    ptr_0,
    ptr_1,
    ptr_2,
    ptr_3,
    out_ptr,
    number_0,
    number_1,
    number_2,
    number_3,
    start_1,
    start_2,
    start_3,
    scale_0,
    scale_1,
    scale_2,
    scale_3,
    BLOCK: tl.constexpr,
):
    """Up to four dense tensors, scaled and cast into one buffer; which, is axis 1 of the grid."""
    which = tl.program_id(1)
    if which == 0:
        _cast_part(ptr_0, out_ptr, number_0, scale_0, BLOCK)
    elif which == 1:
        _cast_part(ptr_1, out_ptr + start_1, number_1, scale_1, BLOCK)
    elif which == 2:
        _cast_part(ptr_2, out_ptr + start_2, number_2, scale_2, BLOCK)
    else:
        _cast_part(ptr_3, out_ptr + start_3, number_3, scale_3, BLOCK)


@triton.jit
def _factor(ptr, items, ranks, item_stride, rank_stride, mask, R: tl.constexpr):
    """A tile (items, ranks) of a factor, zero beyond the rank; nothing is read at rank 0."""
    places = items[:, None] * item_stride + ranks[None, :] * rank_stride
    return tl.load(ptr + places, mask=mask[:, None] & (ranks[None, :] < R), other=0.0)


@triton.jit
def _put_factor(ptr, tile, items, ranks, item_stride, mask, R: tl.constexpr):
    if R > 0:
        places = items[:, None] * item_stride + ranks[None, :]
        tl.store(ptr + places, tile, mask=mask[:, None] & (ranks[None, :] < R))


@triton.jit
def _wide(ptr, rows, cols, stride, in_rows, in_cols):
    """A tile (cols, rows) of a wide operand."""
    places = rows[None, :] * stride + cols[:, None]
    return tl.load(ptr + places, mask=in_cols[:, None] & in_rows[None, :], other=0.0)


@triton.jit
def _put_wide(ptr, tile, rows, cols, stride, in_rows, in_cols):
    places = rows[None, :] * stride + cols[:, None]
    tl.store(ptr + places, tile, mask=in_cols[:, None] & in_rows[None, :])


@triton.jit
def _adapt(wide, factor, inner, R: tl.constexpr, PRECISION: tl.constexpr):
    """A tile (cols, rows) with its adapter's share, factor (cols, R) times inner (rows, R)^T."""
    wide = wide.to(tl.float32)
    if R > 0:
        wide = _accumulate(factor, tl.trans(inner), wide, PRECISION)
    return wide


@triton.jit
def _collect(tile, inner, acc, R: tl.constexpr, PRECISION: tl.constexpr):
    if R > 0:
        acc = _accumulate(tile, inner, acc, PRECISION)
    return acc


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
    xa_stride,
    num_cols,
    num_rows,
    blocks_per_split,
    R_GATE: tl.constexpr,
    R_UP: tl.constexpr,
    R_DOWN: tl.constexpr,
    R_PAD: tl.constexpr,
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
    of the matrix instructions, four bytes at a time. Splits are whole blocks of columns, so that
    the compiler can tell that every tile is aligned.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(1).to(tl.int64)
    in_rows = rows < num_rows
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    ranks = tl.arange(0, R_PAD)
    xa_gate = _factor(xa_gate_ptr, rows, ranks, xa_stride, 1, in_rows, R_GATE)
    xa_up = _factor(xa_up_ptr, rows, ranks, xa_stride, 1, in_rows, R_UP)
    acc = tl.zeros((BLOCK_M, R_PAD), dtype=tl.float32)
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, tl.cdiv(num_cols, BLOCK_F))
    for block in tl.range(first, last, num_stages=STAGES):
        cols = block * BLOCK_F + tl.arange(0, BLOCK_F)
        in_cols = cols < num_cols
        gate = _wide(gate_ptr, rows, cols, gate_stride, in_rows, in_cols)
        up = _wide(up_ptr, rows, cols, gate_stride, in_rows, in_cols)
        b_gate = _factor(b_gate_ptr, cols, ranks, R_GATE, 1, in_cols, R_GATE)
        b_up = _factor(b_up_ptr, cols, ranks, R_UP, 1, in_cols, R_UP)
        gate_sum = _adapt(gate, b_gate, xa_gate, R_GATE, PRECISION)
        up_sum = _adapt(up, b_up, xa_up, R_UP, PRECISION)
        h = (_activation(gate_sum, TANH_GELU) * up_sum).to(dtype)
        _put_wide(h_ptr, h, rows, cols, num_cols, in_rows, in_cols)
        a_down = _factor(a_down_ptr, cols, ranks, 1, num_cols, in_cols, R_DOWN)
        acc = _collect(tl.trans(h), a_down, acc, R_DOWN, PRECISION)
    _put_factor(xa_down_ptr + split * num_rows * R_DOWN, acc, rows, ranks, R_DOWN, in_rows, R_DOWN)


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
    parts_ptr,
    gate_stride,
    dgate_stride,
    dh_stride,
    xa_stride,
    num_cols,
    num_rows,
    rows_per_split,
    scale_gate,
    scale_up,
    R_GATE: tl.constexpr,
    R_UP: tl.constexpr,
    R_DOWN: tl.constexpr,
    R_MAX: tl.constexpr,
    R_PAD: tl.constexpr,
    TANH_GELU: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dgate and dup, and parts (splits, 3, F, R_MAX) of the gradients of b_gate, b_up, a_down^T.

    dh (M, F) is dy W_down; the down adapter's share, p_down a_down with p_down = s dy B_down
    (M, R), is added here. Tiles are held transposed, (BLOCK_F, BLOCK_M), so that h, dgate and dup
    enter the sums from the registers in which they are computed. dup may be dh's own memory:
    every element is read before it is written, by the same program.
    """
    cols = tl.program_id(0).to(tl.int64) * BLOCK_F + tl.arange(0, BLOCK_F)
    in_cols = cols < num_cols
    ranks = tl.arange(0, R_PAD)
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    b_gate = _factor(b_gate_ptr, cols, ranks, R_GATE, 1, in_cols, R_GATE)
    b_up = _factor(b_up_ptr, cols, ranks, R_UP, 1, in_cols, R_UP)
    a_down = _factor(a_down_ptr, cols, ranks, 1, num_cols, in_cols, R_DOWN)
    sum_gate = tl.zeros((BLOCK_F, R_PAD), dtype=tl.float32)
    sum_up, sum_down = sum_gate, sum_gate
    first = tl.program_id(1).to(tl.int64) * rows_per_split
    last = tl.minimum(first + rows_per_split, num_rows)
    for start in tl.range(first, last, BLOCK_M, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        gate = _wide(gate_ptr, rows, cols, gate_stride, rows < last, in_cols)
        up = _wide(up_ptr, rows, cols, gate_stride, rows < last, in_cols)
        dh = _wide(dh_ptr, rows, cols, dh_stride, rows < last, in_cols)
        xa_gate = _factor(xa_gate_ptr, rows, ranks, xa_stride, 1, rows < last, R_GATE)
        xa_up = _factor(xa_up_ptr, rows, ranks, xa_stride, 1, rows < last, R_UP)
        p_down = _factor(p_down_ptr, rows, ranks, R_DOWN, 1, rows < last, R_DOWN)
        dh_sum = _adapt(dh, a_down, p_down, R_DOWN, PRECISION)
        up_sum = _adapt(up, b_up, xa_up, R_UP, PRECISION)
        gate_sum = _adapt(gate, b_gate, xa_gate, R_GATE, PRECISION)
        activated, slope = _activation_and_slope(gate_sum, TANH_GELU)
        dgate, dup = (dh_sum * up_sum * slope).to(dtype), (dh_sum * activated).to(dtype)
        _put_wide(dgate_ptr, dgate, rows, cols, dgate_stride, rows < last, in_cols)
        _put_wide(dup_ptr, dup, rows, cols, dgate_stride, rows < last, in_cols)
        sum_gate = _collect(dgate, xa_gate, sum_gate, R_GATE, PRECISION)
        sum_up = _collect(dup, xa_up, sum_up, R_UP, PRECISION)
        sum_down = _collect((activated * up_sum).to(dtype), p_down, sum_down, R_DOWN, PRECISION)
    parts_ptr += tl.program_id(1).to(tl.int64) * (3 * num_cols * R_MAX)
    _put_factor(parts_ptr, sum_gate * scale_gate, cols, ranks, R_MAX, in_cols, R_GATE)
    parts_ptr += num_cols * R_MAX
    _put_factor(parts_ptr, sum_up * scale_up, cols, ranks, R_MAX, in_cols, R_UP)
    parts_ptr += num_cols * R_MAX
    _put_factor(parts_ptr, sum_down, cols, ranks, R_MAX, in_cols, R_DOWN)
