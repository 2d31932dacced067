"""The gated delta rule in chunks of 64 tokens.

T tokens of all documents end to end, N documents, HK key heads, HV value heads (value head h reads
key head h // (HV // HK)), K and V head sizes, C = 64 tokens of a chunk. Every document starts
a chunk of its own, so that nothing of one reaches another.

Rows of q and k are scaled to length 1 by a factor of their own (rq, rk), which multiplies results
and not operands: these stay as they are given. With cum_i = g_1 + .. + g_i of a chunk,
D_ij = exp(cum_i - cum_j) for i >= j, A = tril(beta_i <k_i, k_j> D_ij, -1), S the state before it:

    T = (I + A)^-1       V' = T (beta (V - exp(cum) K S))       P = tril(<q_i, k_j> D_ij)
    O = scale (exp(cum) Q S + P V')            S <- exp(cum_C) S + (exp(cum_C - cum) K)^T V'

`_prepare` finds T, `_scan` walks a document's chunks for S and V', `_output` takes all chunks at
once; backward `_inner` prepares what `_scan_back` needs to walk from the end, and `_inside` and
`_gradients` take all chunks at once. The mathematics: arXiv 2412.06464; backward, with X = T^T dV':

    dV' = scale P^T dO + exp(cum_C - cum) K dS       dV = beta X       dA = -tril(X V'^T, -1)
    dS <- exp(cum_C) dS + scale (exp(cum) Q)^T dO - (exp(cum) K)^T (beta X)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.documents import CHUNK, chunk_table
from trainkit.kernels.launch import INTERPRETING, Kernel, launches, next_power_of_2


@triton.jit
def _dot(a, b, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    return tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision=PRECISION)


@triton.jit
def _tile(ptr, rows, stride, cols, mask, SIZE: tl.constexpr):
    """Rows of a matrix (len(rows), len(cols)); zero beyond ``mask`` and column ``SIZE``."""
    at = ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :]
    return tl.load(at, mask=mask[:, None] & (cols < SIZE)[None, :], other=0.0)


@triton.jit
def _sums(cum_ptr, rows, end, head, HV: tl.constexpr):
    """cum of the rows; past the end the last one, whose differences stay below zero."""
    known = tl.maximum(tl.minimum(rows, end - 1), 0)
    return tl.load(cum_ptr + known.to(tl.int64) * HV + head)


@triton.jit
def _decay(cum, STRICT: tl.constexpr, TRANSPOSED: tl.constexpr):
    """D_ij, or D_ji where ``TRANSPOSED``: differences are masked before they are exponentiated."""
    at = tl.arange(0, cum.shape[0])
    if TRANSPOSED:
        row, col = at[None, :], at[:, None]
        difference = cum[None, :] - cum[:, None]
    else:
        row, col = at[:, None], at[None, :]
        difference = cum[:, None] - cum[None, :]
    inside = row > col if STRICT else row >= col
    return tl.where(inside, tl.exp(tl.where(inside, difference, 0.0)), 0.0)


@triton.jit
def _inverse(a, scratch_ptr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular (64, 64).

    Its blocks of 16 on the diagonal by substitution, one lane a column; the rest by the series that
    ends after four blocks: with B = block diagonal and Y = B^-1 (A - blocks), (I + Y)^-1 B^-1.

    Args:
        a: the matrix.
        scratch_ptr: 64 x 16 floats of this program's own.
        PRECISION: of the products.
    """
    at = tl.arange(0, 64)
    block = at // 16
    same = block[:, None] == block[None, :]
    compact = at[:, None] * 16 + (at % 16)[None, :]
    tl.store(scratch_ptr + compact, a, mask=same)
    tl.debug_barrier()
    rows = ((at % 16 == 0).to(tl.float32),)
    for row in tl.static_range(1, 16):
        found = (at % 16 == row).to(tl.float32)
        for col in tl.static_range(row):
            found -= tl.load(scratch_ptr + (block * 16 + row) * 16 + col) * rows[col]
        rows = rows + (found,)  # noqa: RUF005
    tl.debug_barrier()
    for row in tl.static_range(16):
        tl.store(scratch_ptr + (block * 16 + row) * 16 + at % 16, rows[row])
    tl.debug_barrier()
    diagonal = tl.load(scratch_ptr + compact, mask=same, other=0.0)
    y = tl.dot(diagonal, tl.where(same, 0.0, a), input_precision=PRECISION)
    square = tl.dot(y, y, input_precision=PRECISION)
    z = diagonal + tl.dot(square, diagonal, input_precision=PRECISION)
    return z - tl.dot(y, z, input_precision=PRECISION)


@triton.jit
def _prepare(
    q_ptr, k_ptr, g_ptr, beta_ptr, chunk_ptr, cum_ptr, inverse_ptr, rq_ptr, rk_ptr, scratch_ptr,
    q_token, q_head, k_token, k_head, eps,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    NORMALIZE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    start, end = tl.load(chunk_ptr + 2 * chunk), tl.load(chunk_ptr + 2 * chunk + 1)
    if start >= end:
        return
    repeat: tl.constexpr = HV // HK
    key_head = head // repeat
    at = tl.arange(0, 64)
    rows = start + at
    mask = rows < end
    cols = tl.arange(0, BLOCK_K)
    wide_rows = rows.to(tl.int64)
    key = _tile(k_ptr + key_head * k_head, rows, k_token, cols, mask, K)
    if NORMALIZE:
        wide = key.to(tl.float32)
        rk = tl.rsqrt(tl.sum(wide * wide, axis=1) + eps)
        if head % repeat == 0:
            query = _tile(q_ptr + key_head * q_head, rows, q_token, cols, mask, K).to(tl.float32)
            rq = tl.rsqrt(tl.sum(query * query, axis=1) + eps)
            tl.store(rq_ptr + wide_rows * HK + key_head, rq, mask=mask)
            tl.store(rk_ptr + wide_rows * HK + key_head, rk, mask=mask)
    else:
        rk = tl.full((64,), 1.0, tl.float32)
    g = tl.load(g_ptr + wide_rows * HV + head, mask=mask, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + wide_rows * HV + head, mask=mask, other=0.0).to(tl.float32)
    cum = tl.cumsum(g, axis=0)
    tl.store(cum_ptr + wide_rows * HV + head, cum, mask=mask)
    kk = _dot(key, tl.trans(key), OPERAND, PRECISION)
    a = (beta * rk)[:, None] * rk[None, :] * kk * _decay(cum, True, False)
    inverse = _inverse(a, scratch_ptr + tl.program_id(0).to(tl.int64) * 1024, PRECISION)
    to = inverse_ptr + (wide_rows * HV + head)[:, None] * 64 + at[None, :]
    tl.store(to, inverse.to(inverse_ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _scan(
    k_ptr, v_ptr, beta_ptr, cum_ptr, inverse_ptr, rk_ptr, bound_ptr, offset_ptr,
    state_ptr, new_ptr, wrong_ptr,
    k_token, k_head, v_token, v_head,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NORMALIZE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    WANT_WRONG: tl.constexpr,
):  # fmt: skip
    num_parts: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    part = tl.program_id(0) % num_parts
    head = tl.program_id(0) // num_parts % HV
    document = tl.program_id(0) // (num_parts * HV)
    key_head = head // (HV // HK)
    begin, end = tl.load(bound_ptr + document), tl.load(bound_ptr + document + 1)
    first = tl.load(offset_ptr + document).to(tl.int64)
    at, cols = tl.arange(0, 64), tl.arange(0, BLOCK_K)
    values = part * BLOCK_V + tl.arange(0, BLOCK_V)
    own = cols[:, None] * V + values[None, :]
    inside = (cols < K)[:, None] & (values < V)[None, :]
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for start in tl.range(begin, end, 64, num_stages=STAGES):
        chunk = first + (start - begin) // 64
        rows = start + at
        mask = rows < end
        spot = rows.to(tl.int64) * HV + head
        key = _tile(k_ptr + key_head * k_head, rows, k_token, cols, mask, K)
        value = _tile(v_ptr + head * v_head, rows, v_token, values, mask, V).to(tl.float32)
        beta = tl.load(beta_ptr + spot, mask=mask, other=0.0).to(tl.float32)
        cum = _sums(cum_ptr, rows, end, head, HV)
        last = tl.maximum(tl.minimum(start + 64, end) - 1, 0)  # also where nothing follows
        total = tl.load(cum_ptr + last.to(tl.int64) * HV + head)
        inverse = tl.load(
            inverse_ptr + spot[:, None] * 64 + at[None, :], mask=mask[:, None], other=0.0
        )
        growth, tail = tl.exp(cum), tl.exp(total - cum)
        if NORMALIZE:
            rk = tl.load(rk_ptr + rows.to(tl.int64) * HK + key_head, mask=mask, other=0.0)
            growth *= rk
            tail *= rk
        narrow = state.to(state_ptr.dtype.element_ty)
        tl.store(state_ptr + (chunk * HV + head) * (K * V) + own, narrow, mask=inside)
        known = _dot(key, narrow, OPERAND, PRECISION)
        wrong = value - growth[:, None] * known
        new = _dot(inverse, beta[:, None] * wrong, OPERAND, PRECISION)
        to = (spot * V)[:, None] + values[None, :]
        here = mask[:, None] & (values < V)[None, :]
        tl.store(new_ptr + to, new.to(new_ptr.dtype.element_ty), mask=here)
        if WANT_WRONG:
            tl.store(wrong_ptr + to, wrong.to(wrong_ptr.dtype.element_ty), mask=here)
        state = tl.exp(total) * state
        state += _dot(tl.trans(key), tail[:, None] * new, OPERAND, PRECISION)


@triton.jit
def _output(
    q_ptr, k_ptr, cum_ptr, rq_ptr, rk_ptr, chunk_ptr, state_ptr, new_ptr, o_ptr,
    q_token, q_head, k_token, k_head, factor,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NORMALIZE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    start, end = tl.load(chunk_ptr + 2 * chunk), tl.load(chunk_ptr + 2 * chunk + 1)
    if start >= end:
        return
    key_head = head // (HV // HK)
    at, cols = tl.arange(0, 64), tl.arange(0, BLOCK_K)
    rows = start + at
    mask = rows < end
    spot = rows.to(tl.int64) * HV + head
    query = _tile(q_ptr + key_head * q_head, rows, q_token, cols, mask, K)
    key = _tile(k_ptr + key_head * k_head, rows, k_token, cols, mask, K)
    cum = _sums(cum_ptr, rows, end, head, HV)
    p = _dot(query, tl.trans(key), OPERAND, PRECISION) * _decay(cum, False, False)
    if NORMALIZE:
        both = rows.to(tl.int64) * HK + key_head
        p *= tl.load(rk_ptr + both, mask=mask, other=0.0)[None, :]
        factor *= tl.load(rq_ptr + both, mask=mask, other=0.0)
    else:
        factor += tl.zeros((64,), tl.float32)
    for part in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        values = part * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = (cols < K)[:, None] & (values < V)[None, :]
        own = cols[:, None] * V + values[None, :]
        state = tl.load(
            state_ptr + (chunk.to(tl.int64) * HV + head) * (K * V) + own, mask=inside, other=0.0
        )
        new = _tile(new_ptr + head * V, rows, HV * V, values, mask, V)
        o = tl.exp(cum)[:, None] * _dot(query, state, OPERAND, PRECISION)
        o = factor[:, None] * (o + _dot(p, new, OPERAND, PRECISION))
        to = o_ptr + (spot * V)[:, None] + values[None, :]
        tl.store(to, o.to(o_ptr.dtype.element_ty), mask=mask[:, None] & (values < V)[None, :])


@triton.jit
def _inner(
    q_ptr, k_ptr, cum_ptr, rq_ptr, rk_ptr, chunk_ptr, do_ptr, dnew_ptr,
    q_token, q_head, k_token, k_head, do_token, do_head, factor,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NORMALIZE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scale P^T dO, the part of dV' that needs no state."""
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    start, end = tl.load(chunk_ptr + 2 * chunk), tl.load(chunk_ptr + 2 * chunk + 1)
    if start >= end:
        return
    key_head = head // (HV // HK)
    at, cols = tl.arange(0, 64), tl.arange(0, BLOCK_K)
    rows = start + at
    mask = rows < end
    spot = rows.to(tl.int64) * HV + head
    query = _tile(q_ptr + key_head * q_head, rows, q_token, cols, mask, K)
    key = _tile(k_ptr + key_head * k_head, rows, k_token, cols, mask, K)
    cum = _sums(cum_ptr, rows, end, head, HV)
    p = _dot(key, tl.trans(query), OPERAND, PRECISION) * _decay(cum, False, True) * factor
    if NORMALIZE:
        both = rows.to(tl.int64) * HK + key_head
        p *= tl.load(rk_ptr + both, mask=mask, other=0.0)[:, None]
        p *= tl.load(rq_ptr + both, mask=mask, other=0.0)[None, :]
    for part in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        values = part * BLOCK_V + tl.arange(0, BLOCK_V)
        do = _tile(do_ptr + head * do_head, rows, do_token, values, mask, V)
        dnew = _dot(p, do, OPERAND, PRECISION)
        to = dnew_ptr + (spot * V)[:, None] + values[None, :]
        tl.store(to, dnew.to(dnew_ptr.dtype.element_ty), mask=mask[:, None] & (values < V)[None, :])


@triton.jit
def _scan_back(
    q_ptr, k_ptr, beta_ptr, cum_ptr, inverse_ptr, rq_ptr, rk_ptr, bound_ptr, offset_ptr,
    do_ptr, dnew_ptr, new_ptr, x_ptr, dstate_ptr, carried_ptr,
    q_token, q_head, k_token, k_head, do_token, do_head, factor,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NORMALIZE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    num_parts: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    part = tl.program_id(0) % num_parts
    head = tl.program_id(0) // num_parts % HV
    document = tl.program_id(0) // (num_parts * HV)
    key_head = head // (HV // HK)
    begin, end = tl.load(bound_ptr + document), tl.load(bound_ptr + document + 1)
    first = tl.load(offset_ptr + document).to(tl.int64)
    at, cols = tl.arange(0, 64), tl.arange(0, BLOCK_K)
    values = part * BLOCK_V + tl.arange(0, BLOCK_V)
    own = cols[:, None] * V + values[None, :]
    inside = (cols < K)[:, None] & (values < V)[None, :]
    dstate = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    num_chunks = (end - begin + 63) // 64
    for step in tl.range(0, num_chunks, num_stages=STAGES):
        number = tl.maximum(num_chunks - 1 - step, 0)  # also where nothing follows
        start = begin + number * 64
        rows = start + at
        mask = rows < end
        spot = rows.to(tl.int64) * HV + head
        query = _tile(q_ptr + key_head * q_head, rows, q_token, cols, mask, K)
        key = _tile(k_ptr + key_head * k_head, rows, k_token, cols, mask, K)
        do = _tile(do_ptr + head * do_head, rows, do_token, values, mask, V).to(tl.float32)
        dnew = _tile(dnew_ptr + head * V, rows, HV * V, values, mask, V).to(tl.float32)
        beta = tl.load(beta_ptr + spot, mask=mask, other=0.0).to(tl.float32)
        cum = _sums(cum_ptr, rows, end, head, HV)
        last = tl.maximum(tl.minimum(start + 64, end) - 1, 0)  # also where nothing follows
        total = tl.load(cum_ptr + last.to(tl.int64) * HV + head)
        from_q, from_k = factor * tl.exp(cum), tl.exp(cum)
        tail = tl.exp(total - cum)
        if NORMALIZE:
            both = rows.to(tl.int64) * HK + key_head
            rk = tl.load(rk_ptr + both, mask=mask, other=0.0)
            from_q *= tl.load(rq_ptr + both, mask=mask, other=0.0)
            from_k *= rk
            tail *= rk
        # T^T, as it lies
        inverse = tl.load(
            inverse_ptr + spot[None, :] * 64 + at[:, None], mask=mask[None, :], other=0.0
        )
        narrow = dstate.to(dstate_ptr.dtype.element_ty)
        tl.store(dstate_ptr + ((first + number) * HV + head) * (K * V) + own, narrow, mask=inside)
        from_dstate = tail[:, None] * _dot(key, narrow, OPERAND, PRECISION)
        new = _tile(new_ptr + head * V, rows, HV * V, values, mask, V).to(tl.float32)
        tl.store(carried_ptr + spot * num_parts + part, tl.sum(from_dstate * new, 1), mask=mask)
        dnew += from_dstate
        x = _dot(inverse, dnew, OPERAND, PRECISION)
        to = x_ptr + (spot * V)[:, None] + values[None, :]
        tl.store(to, x.to(x_ptr.dtype.element_ty), mask=mask[:, None] & (values < V)[None, :])
        dstate *= tl.exp(total)
        dstate += _dot(tl.trans(query), from_q[:, None] * do, OPERAND, PRECISION)
        dstate -= _dot(tl.trans(key), (from_k * beta)[:, None] * x, OPERAND, PRECISION)


@triton.jit
def _inside(
    q_ptr, k_ptr, beta_ptr, cum_ptr, rq_ptr, rk_ptr, chunk_ptr,
    new_ptr, wrong_ptr, do_ptr, x_ptr, carried_ptr,
    m_ptr, m_t_ptr, n_ptr, dv_ptr, dcum_ptr, dbeta_ptr,
    q_token, q_head, k_token, k_head, do_token, do_head, factor,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr, NORMALIZE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv and dbeta; of dcum what the states do not give; and what q and k are multiplied by.

    These are dP o D, its transpose, and N + N^T with N = beta dA o D; scaled so that the products
    take the rows of q and k as they are.
    """
    chunk, head = tl.program_id(0) // HV, tl.program_id(0) % HV
    start, end = tl.load(chunk_ptr + 2 * chunk), tl.load(chunk_ptr + 2 * chunk + 1)
    if start >= end:
        return
    key_head = head // (HV // HK)
    at, cols = tl.arange(0, 64), tl.arange(0, BLOCK_K)
    rows = start + at
    mask = rows < end
    spot = rows.to(tl.int64) * HV + head
    if NORMALIZE:
        both = rows.to(tl.int64) * HK + key_head
        rq = tl.load(rq_ptr + both, mask=mask, other=0.0)
        rk = tl.load(rk_ptr + both, mask=mask, other=0.0)
    else:
        rq = tl.full((64,), 1.0, tl.float32)
        rk = rq
    beta = tl.load(beta_ptr + spot, mask=mask, other=0.0).to(tl.float32)
    cum = _sums(cum_ptr, rows, end, head, HV)
    square = (chunk.to(tl.int64) * HV + head) * 4096 + at[:, None] * 64 + at[None, :]
    dtype: tl.constexpr = m_ptr.dtype.element_ty

    dp = tl.zeros((64, 64), tl.float32)
    dp_t = tl.zeros((64, 64), tl.float32)
    for part in range((V + BLOCK_V - 1) // BLOCK_V):
        values = part * BLOCK_V + tl.arange(0, BLOCK_V)
        new = _tile(new_ptr + head * V, rows, HV * V, values, mask, V)
        do = _tile(do_ptr + head * do_head, rows, do_token, values, mask, V)
        dp += _dot(do, tl.trans(new), OPERAND, PRECISION)
        dp_t += _dot(new, tl.trans(do), OPERAND, PRECISION)
    m = factor * dp_t * _decay(cum, False, True) * rq[None, :]
    tl.store(m_t_ptr + square, m.to(dtype))
    m = factor * dp * _decay(cum, False, False) * rk[None, :]
    tl.store(m_ptr + square, m.to(dtype))
    query = _tile(q_ptr + key_head * q_head, rows, q_token, cols, mask, K)
    key = _tile(k_ptr + key_head * k_head, rows, k_token, cols, mask, K)
    y = rq[:, None] * _dot(query, tl.trans(key), OPERAND, PRECISION) * m
    pairs = tl.where(at[:, None] > at[None, :], y, 0.0)  # the diagonal has no decay

    xn = tl.zeros((64, 64), tl.float32)
    xn_t = tl.zeros((64, 64), tl.float32)
    dbeta = tl.zeros((64,), tl.float32)
    for part in range((V + BLOCK_V - 1) // BLOCK_V):
        values = part * BLOCK_V + tl.arange(0, BLOCK_V)
        new = _tile(new_ptr + head * V, rows, HV * V, values, mask, V)
        x = _tile(x_ptr + head * V, rows, HV * V, values, mask, V)
        xn += _dot(x, tl.trans(new), OPERAND, PRECISION)
        xn_t += _dot(new, tl.trans(x), OPERAND, PRECISION)
        wide = x.to(tl.float32)
        wrong = _tile(wrong_ptr + head * V, rows, HV * V, values, mask, V).to(tl.float32)
        dbeta += tl.sum(wide * wrong, axis=1)
        to = dv_ptr + (spot * V)[:, None] + values[None, :]
        dv = (beta[:, None] * wide).to(dv_ptr.dtype.element_ty)
        tl.store(to, dv, mask=mask[:, None] & (values < V)[None, :])
    n = -xn * _decay(cum, True, False)
    y = rk[:, None] * _dot(key, tl.trans(key), OPERAND, PRECISION) * n * rk[None, :]
    tl.store(dbeta_ptr + spot, dbeta + tl.sum(y, axis=1), mask=mask)
    # The two nearly cancel where one key comes again and again: added before they are summed up.
    pairs += beta[:, None] * y
    dcum = tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0)
    n = beta[:, None] * n - beta[None, :] * xn_t * _decay(cum, True, True)
    tl.store(n_ptr + square, (n * rk[None, :]).to(dtype))
    carried = tl.zeros((64,), tl.float32)
    for part in range(PARTS):
        carried += tl.load(carried_ptr + spot * PARTS + part, mask=mask, other=0.0)
    carried = tl.where(rows == end - 1, 0.0, carried)  # its decay to itself is 1
    dcum -= carried
    dcum = tl.where(rows == end - 1, dcum + tl.sum(carried, axis=0), dcum)
    tl.store(dcum_ptr + spot, dcum, mask=mask)


@triton.jit
def _gradients(
    q_ptr, k_ptr, beta_ptr, cum_ptr, rq_ptr, rk_ptr, chunk_ptr,
    state_ptr, new_ptr, do_ptr, x_ptr, dstate_ptr, m_ptr, m_t_ptr, n_ptr,
    dq_ptr, dk_ptr, dcum_ptr,
    q_token, q_head, k_token, k_head, do_token, do_head, factor,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, NORMALIZE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk, through the states and inside the chunk; dg in dcum's place."""
    chunk, key_head = tl.program_id(0) // HK, tl.program_id(0) % HK
    start, end = tl.load(chunk_ptr + 2 * chunk), tl.load(chunk_ptr + 2 * chunk + 1)
    if start >= end:
        return
    at, cols = tl.arange(0, 64), tl.arange(0, BLOCK_K)
    rows = start + at
    mask = rows < end
    wide_rows = rows.to(tl.int64)
    q_ptr += key_head * q_head
    k_ptr += key_head * k_head
    if NORMALIZE:
        rq = tl.load(rq_ptr + wide_rows * HK + key_head, mask=mask, other=0.0)
        rk = tl.load(rk_ptr + wide_rows * HK + key_head, mask=mask, other=0.0)
    else:
        rq = tl.full((64,), 1.0, tl.float32)
        rk = rq
    dquery = tl.zeros((64, BLOCK_K), tl.float32)
    dkey = tl.zeros((64, BLOCK_K), tl.float32)
    before = tl.zeros((64,), tl.float32)
    for number in range(HV // HK):
        head = key_head * (HV // HK) + number
        spot = wide_rows * HV + head
        beta = tl.load(beta_ptr + spot, mask=mask, other=0.0).to(tl.float32)
        cum = _sums(cum_ptr, rows, end, head, HV)
        total = tl.load(cum_ptr + (end - 1).to(tl.int64) * HV + head)
        grown = tl.exp(cum)
        from_do, from_x, tail = factor * grown, -beta * grown, tl.exp(total - cum)
        kept = 0.0
        read = tl.zeros((64,), tl.float32)
        key = _tile(k_ptr, rows, k_token, cols, mask, K)
        for part in range((V + BLOCK_V - 1) // BLOCK_V):
            values = part * BLOCK_V + tl.arange(0, BLOCK_V)
            inside = (cols < K)[None, :] & (values < V)[:, None]
            # S^T and dS^T
            own = (chunk.to(tl.int64) * HV + head) * (K * V) + cols[None, :] * V + values[:, None]
            state = tl.load(state_ptr + own, mask=inside, other=0.0)
            dstate = tl.load(dstate_ptr + own, mask=inside, other=0.0)
            kept += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1), axis=0)
            do = _tile(do_ptr + head * do_head, rows, do_token, values, mask, V).to(tl.float32)
            dquery += _dot(from_do[:, None] * do, state, OPERAND, PRECISION)
            x = _tile(x_ptr + head * V, rows, HV * V, values, mask, V).to(tl.float32)
            through = _dot(from_x[:, None] * x, state, OPERAND, PRECISION)
            read += tl.sum(key.to(tl.float32) * through, axis=1)
            dkey += through
            new = _tile(new_ptr + head * V, rows, HV * V, values, mask, V).to(tl.float32)
            dkey += _dot(tail[:, None] * new, dstate, OPERAND, PRECISION)
        query = _tile(q_ptr, rows, q_token, cols, mask, K)
        dcum = tl.load(dcum_ptr + spot, mask=mask, other=0.0) - before
        dcum += rq * tl.sum(query.to(tl.float32) * dquery, axis=1) + rk * read
        dcum = tl.where(rows == end - 1, dcum + tl.exp(total) * kept, dcum)
        tl.store(dcum_ptr + spot, tl.sum(dcum, axis=0) - tl.cumsum(dcum, axis=0) + dcum, mask=mask)
        square = (chunk.to(tl.int64) * HV + head) * 4096 + at[:, None] * 64 + at[None, :]
        dkey += _dot(tl.load(m_t_ptr + square), query, OPERAND, PRECISION)
        dkey += _dot(tl.load(n_ptr + square), key, OPERAND, PRECISION)
        dquery += _dot(tl.load(m_ptr + square), key, OPERAND, PRECISION)
        query = _tile(q_ptr, rows, q_token, cols, mask, K).to(tl.float32)
        before = rq * tl.sum(query * dquery, axis=1)
    if NORMALIZE:
        unit = rq[:, None] * _tile(q_ptr, rows, q_token, cols, mask, K).to(tl.float32)
        dquery = rq[:, None] * (dquery - unit * before[:, None])
        unit = rk[:, None] * _tile(k_ptr, rows, k_token, cols, mask, K).to(tl.float32)
        dkey = rk[:, None] * (dkey - unit * tl.sum(unit * dkey, axis=1)[:, None])
    to = (wide_rows * HK + key_head)[:, None] * K + cols[None, :]
    inside = mask[:, None] & (cols < K)[None, :]
    tl.store(dq_ptr + to, dquery.to(dq_ptr.dtype.element_ty), mask=inside)
    tl.store(dk_ptr + to, dkey.to(dk_ptr.dtype.element_ty), mask=inside)


class Settings:
    """What the kernels of one call share."""

    def __init__(self, q: Tensor, v: Tensor, *, normalize: bool, scale: float) -> None:
        self.heads = (q.shape[1], v.shape[1])
        self.sizes = (q.shape[2], v.shape[2])
        self.block_k = max(16, next_power_of_2(q.shape[2]))
        self.block_v = max(16, next_power_of_2(v.shape[2]))
        self.normalize, self.scale = normalize, scale
        single = q.dtype == torch.float32
        self.operand = tl.float32 if single else _TRITON[q.dtype]
        self.precision = "ieee" if single else "tf32"
        self.store = torch.float32 if single else q.dtype

    def options_of(self, kernel: Kernel) -> tuple[int, tuple[int, int]]:
        """The columns of a value that a program takes at once; warps and stages."""
        block_v, *options = LAUNCH[kernel]
        return min(block_v, self.block_v), (options[0], options[1])


PREPARE, SCAN, OUTPUT = Kernel(_prepare), Kernel(_scan), Kernel(_output)
INNER, SCAN_BACK = Kernel(_inner), Kernel(_scan_back)
INSIDE, GRADIENTS = Kernel(_inside), Kernel(_gradients)
LAUNCH = {
    PREPARE: (0, 4, 3),
    SCAN: (32, 4, 3),
    OUTPUT: (64, 4, 1),
    INNER: (64, 4, 1),
    SCAN_BACK: (32, 4, 3),
    INSIDE: (64, 4, 1),
    GRADIENTS: (64, 4, 1),
}
"""Columns that a program takes at once, warps, stages. What Triton 3.6 makes of others is not
always right on Hopper: `_gradients` with two stages has another dk each time, and `_output` over
fewer than 64 columns reads beyond its shared memory (docs/LOG.md, 2026-11-26)."""
LEAST_SIZE, MOST_KEY, MOST_VALUE = (1, 128, 256) if INTERPRETING else (33, 128, 256)
"""Of heads; what is smaller or larger runs the reference."""
_TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    known = q.dtype == k.dtype == v.dtype and q.dtype != torch.float64 and v.numel() > 0
    size, values = q.shape[-1], v.shape[-1]
    fits = LEAST_SIZE <= size <= MOST_KEY and LEAST_SIZE <= values <= MOST_VALUE
    return known and (fits or not launches())  # shapes alone are the same of any size


def strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for each in tensors for stride in each.stride()[:2])


def _run(kernel, programs, products, pointers, strides, free, constants, options) -> None:
    kernel.launch(programs, pointers, strides, free, constants, *options, products)


class Prepared:
    """What both passes need of the chunks."""

    def __init__(self, q, k, g, beta, cu_seqlens, eps, s: Settings) -> None:
        num_tokens = q.shape[0]
        hk, hv = s.heads
        self.bounds = cu_seqlens
        self.chunks, self.offsets = chunk_table(cu_seqlens, num_tokens)
        self.cum = torch.empty((num_tokens, hv), dtype=torch.float32, device=q.device)
        self.inverse = torch.empty((num_tokens, hv, CHUNK), dtype=s.store, device=q.device)
        self.rq = torch.empty((num_tokens, hk), dtype=torch.float32, device=q.device)
        self.rk = torch.empty_like(self.rq)
        programs = len(self.chunks) * hv
        scratch = torch.empty((programs, CHUNK, 16), dtype=torch.float32, device=q.device)
        size = s.sizes[0]
        _run(
            PREPARE, programs, num_tokens * hv * CHUNK * (size + CHUNK),
            (q, k, g, beta, self.chunks, self.cum, self.inverse, self.rq, self.rk, scratch),
            strides(q, k), (eps,), (hk, hv, size, s.block_k, s.normalize, s.operand, s.precision),
            s.options_of(PREPARE)[1],
        )  # fmt: skip


def scan(k, v, beta, p: Prepared, s: Settings, wants_wrong: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The states before the chunks (chunks, HV, K, V), V' and V - exp(cum) K S, (T, HV, V)."""
    hk, hv = s.heads
    states = torch.empty((len(p.chunks), hv, *s.sizes), dtype=s.store, device=k.device)
    new = torch.empty(v.shape, dtype=s.store, device=k.device)
    wrong = torch.empty_like(new) if wants_wrong else new
    block_v, options = s.options_of(SCAN)
    size, values = s.sizes
    _run(
        SCAN, (len(p.bounds) - 1) * hv * -(-values // block_v),
        v.numel() * (2 * size + CHUNK),
        (k, v, beta, p.cum, p.inverse, p.rk, p.bounds, p.offsets, states, new, wrong),
        strides(k, v), (),
        (hk, hv, *s.sizes, s.block_k, block_v, s.normalize, s.operand, s.precision, options[1],
         wants_wrong),
        options,
    )  # fmt: skip
    return states, new, wrong


def forward(q, k, v, g, beta, cu_seqlens, eps, s: Settings) -> tuple[Tensor, Prepared]:
    """o (T, HV, V), and what the backward pass needs."""
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    p = Prepared(q, k, g, beta, cu_seqlens, eps, s)
    states, new, _ = scan(k, v, beta, p, s, False)
    hk, hv = s.heads
    size = s.sizes[0]
    block_v, options = s.options_of(OUTPUT)
    _run(
        OUTPUT, len(p.chunks) * hv,
        v.numel() * (size + CHUNK) + len(v) * hv * size * CHUNK,
        (q, k, p.cum, p.rq, p.rk, p.chunks, states, new, o),
        strides(q, k), (s.scale,),
        (hk, hv, *s.sizes, s.block_k, block_v, s.normalize, s.operand, s.precision),
        options,
    )  # fmt: skip
    return o, p


def backward(q, k, v, beta, do, p: Prepared, s: Settings) -> tuple[Tensor, ...]:
    """dq, dk, dv in the tensors' dtypes; dg and dbeta in fp32."""
    states, new, wrong = scan(k, v, beta, p, s, True)
    hk, hv = s.heads
    dnew = torch.empty(v.shape, dtype=s.store, device=v.device)
    x = torch.empty_like(dnew)
    dstates = torch.empty_like(states)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dg, dbeta = torch.empty_like(p.cum), torch.empty_like(p.cum)
    shared = (hk, hv, *s.sizes, s.block_k)
    size, values = s.sizes
    square = len(v) * hv * CHUNK  # what a product inside the chunks takes, a column
    block_v, options = s.options_of(INNER)
    _run(
        INNER, len(p.chunks) * hv, square * (size + values),
        (q, k, p.cum, p.rq, p.rk, p.chunks, do, dnew),
        strides(q, k, do), (s.scale,), (*shared, block_v, s.normalize, s.operand, s.precision),
        options,
    )  # fmt: skip
    block_v, options = s.options_of(SCAN_BACK)
    parts = -(-values // block_v)
    carried = torch.empty((*dg.shape, parts), dtype=torch.float32, device=q.device)
    _run(
        SCAN_BACK, (len(p.bounds) - 1) * hv * parts, v.numel() * (3 * size + CHUNK),
        (q, k, beta, p.cum, p.inverse, p.rq, p.rk, p.bounds, p.offsets,
        do, dnew, new, x, dstates, carried),
        strides(q, k, do), (s.scale,),
        (*shared, block_v, s.normalize, s.operand, s.precision, options[1]),
        options,
    )  # fmt: skip
    m = torch.empty((3, len(p.chunks), hv, CHUNK, CHUNK), dtype=s.store, device=q.device)
    block_v, options = s.options_of(INSIDE)
    _run(
        INSIDE, len(p.chunks) * hv, square * (4 * values + 2 * size),
        (q, k, beta, p.cum, p.rq, p.rk, p.chunks, new, wrong, do, x, carried,
        *m, dv, dg, dbeta),
        strides(q, k, do), (s.scale,),
        (*shared, block_v, parts, s.normalize, s.operand, s.precision),
        options,
    )  # fmt: skip
    block_v, options = s.options_of(GRADIENTS)
    _run(
        GRADIENTS, len(p.chunks) * hk, 3 * v.numel() * size + 3 * square * size,
        (q, k, beta, p.cum, p.rq, p.rk, p.chunks, states, new, do, x, dstates, *m,
        dq, dk, dg),
        strides(q, k, do), (s.scale,), (*shared, block_v, s.normalize, s.operand, s.precision),
        options,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta
