"""Grouped products: rows of each expert times its own weight, with a low rank added on the way.

S sorted rows (`route`), E experts, K summed over, N columns, R rank. A program walks over tiles
(128 rows of one expert, a block of columns) with a stride of all programs, so that it loads the
next tile's operands while it stores this one's result. Tiles of one expert lie side by side: its
weight is read from memory once. What a tile loads beyond its expert's last row is not stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trainkit.kernels.experts.route_kernel import ROWS, Route
from trainkit.kernels.launch import INTERPRETING, Kernel, num_multiprocessors, shared_bytes
from trainkit.kernels.lora.products import precision

_LARGE_SHARED = 200 * 1024


def _block(x: Tensor) -> tuple[int, int]:
    """Columns of a tile, and how much of the sum it takes at a time."""
    if INTERPRETING:
        return 64, 32
    roomy = shared_bytes(x) > _LARGE_SHARED and x.dtype != torch.float32
    return (256, 64) if roomy else (128, 32)


@triton.jit
def _grouped(
    x_desc, w_desc, y_desc, left_desc, right_desc,
    y_ptr, ends_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr,
    N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, R: tl.constexpr,
    TRANSPOSED: tl.constexpr, PROGRAMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    blocks: tl.constexpr = (N + COLS - 1) // COLS
    steps: tl.constexpr = (K + DEPTH - 1) // DEPTH
    tile = tl.program_id(0) - PROGRAMS
    tiles = (tl.load(num_tiles_ptr) * blocks - tile - 1) // PROGRAMS
    step = steps - 1
    expert, row, col = 0, 0, 0
    total = tl.zeros((ROWS, COLS), tl.float32)
    # One loop over the steps of all tiles: loads for the next tile run while this one is stored.
    for _ in range(0, tiles * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += PROGRAMS
            expert = tl.load(tile_expert_ptr + tile // blocks)
            row = tl.load(tile_row_ptr + tile // blocks)
            col = (tile % blocks) * COLS
        x = x_desc.load([row, step * DEPTH])
        if TRANSPOSED:  # w (E N, K)
            w = w_desc.load([expert * N + col, step * DEPTH]).T
        else:  # w (E K, N)
            w = w_desc.load([expert * K + step * DEPTH, col])
        total = tl.dot(x, w, total, input_precision=PRECISION)
        if step == steps - 1:
            if R > 0:
                left, right = left_desc.load([row, 0]), right_desc.load([expert * R, col])
                total = tl.dot(left, right, total, input_precision=PRECISION)
            end = tl.load(ends_ptr + expert)
            if row + ROWS <= end:
                halves = tl.permute(tl.reshape(total, (ROWS, 2, COLS // 2)), (0, 2, 1))
                first, second = tl.split(halves)
                y_desc.store([row, col], first.to(dtype))
                y_desc.store([row, col + COLS // 2], second.to(dtype))
            else:
                rows = row + tl.arange(0, ROWS)
                cols = col + tl.arange(0, COLS)
                at = y_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
                tl.store(at, total.to(dtype), mask=(rows < end)[:, None] & (cols < N)[None, :])
            total = tl.zeros((ROWS, COLS), tl.float32)


def grouped_product(
    x: Tensor,
    weight: Tensor,
    route: Route,
    *,
    transposed: bool,
    low_rank: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """The rows of each expert times its weight.

    Args:
        x: (S, K), sorted rows.
        weight: (E, N, K) if ``transposed``, else (E, K, N); contiguous.
        route: which rows are whose.
        transposed: which way the weight lies.
        low_rank: (left (S, R), right (E, R, N)): left times right is added, if there is one.

    Returns:
        (S, N); rows that go nowhere are not written.
    """
    rows, depth = x.shape
    cols = weight.shape[1 if transposed else 2]
    y = x.new_empty((rows, cols))
    if not y.numel():
        return y
    block_cols, block_depth = _block(x)
    block_rows = ROWS
    w = weight.view(-1, weight.shape[2])
    left, right = low_rank
    rank = 0 if left is None else left.shape[1]
    programs = num_multiprocessors(x)
    w_block = [block_cols, block_depth] if transposed else [block_depth, block_cols]
    x_desc = TensorDescriptor.from_tensor(x, [block_rows, block_depth])
    w_desc = TensorDescriptor.from_tensor(w, w_block)
    y_desc = TensorDescriptor.from_tensor(y, [block_rows, block_cols // 2])
    left_desc, right_desc = x_desc, w_desc
    if left is not None and right is not None:
        left_desc = TensorDescriptor.from_tensor(left, [block_rows, rank])
        right_desc = TensorDescriptor.from_tensor(right.view(-1, cols), [rank, block_cols])
    GROUPED.launch(
        programs,
        (y, route.ends, route.tile_expert, route.tile_row, route.num_tiles),
        (),
        (),
        (
            *(cols, depth, block_rows, block_cols, block_depth),
            *(rank, transposed, programs, precision(x.dtype)),
        ),
        8,
        3,
        products=rows * depth * cols,
        descriptors=(x_desc, w_desc, y_desc, left_desc, right_desc),
    )
    return y


GROUPED = Kernel(_grouped)


@triton.jit
def _outer(
    a_desc, b_desc, a_ptr, b_ptr, out_ptr, ends_ptr,
    M, N,
    E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[e] = a[rows of e]^T b[rows of e]; (E, M, N)."""
    m_blocks, n_blocks = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), E * m_blocks * n_blocks, PROGRAMS):
        expert = tile // (m_blocks * n_blocks)
        m = (tile % m_blocks) * BM
        n = (tile // m_blocks % n_blocks) * BN
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_ptr + expert)
        whole = start + (end - start) // DEPTH * DEPTH
        total = tl.zeros((BM, BN), tl.float32)
        for row in range(start, whole, DEPTH):
            a = a_desc.load([row, m])
            b = b_desc.load([row, n])
            total = tl.dot(a.T, b, total, input_precision=PRECISION)
        cols_m = m + tl.arange(0, BM)
        cols_n = n + tl.arange(0, BN)
        if whole < end:
            rows = whole + tl.arange(0, DEPTH)
            live = (rows < end)[:, None]
            wide = rows.to(tl.int64)[:, None]
            a = tl.load(
                a_ptr + wide * M + cols_m[None, :], mask=live & (cols_m < M)[None, :], other=0.0
            )
            b = tl.load(
                b_ptr + wide * N + cols_n[None, :], mask=live & (cols_n < N)[None, :], other=0.0
            )
            total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
        at = (
            out_ptr
            + expert.to(tl.int64) * M * N
            + cols_m.to(tl.int64)[:, None] * N
            + cols_n[None, :]
        )
        tl.store(
            at,
            total.to(out_ptr.dtype.element_ty),
            mask=(cols_m < M)[:, None] & (cols_n < N)[None, :],
        )


OUTER = Kernel(_outer)


def grouped_outer(a: Tensor, b: Tensor, route: Route) -> Tensor:
    """For each expert its rows of a (S, M), transposed, times its rows of b (S, N): (E, M, N)."""
    num_experts = route.ends.shape[0]
    out = a.new_empty((num_experts, a.shape[1], b.shape[1]))
    if not a.shape[0]:
        return out.zero_()
    block_m = 64 if INTERPRETING else 128
    block_n, depth = _block(a)
    programs = num_multiprocessors(a)
    OUTER.launch(
        programs,
        (a, b, out, route.ends),
        (a.shape[1], b.shape[1]),
        (),
        (num_experts, block_m, block_n, depth, programs, precision(a.dtype)),
        8,
        3,
        products=a.shape[0] * a.shape[1] * b.shape[1],
        descriptors=(
            TensorDescriptor.from_tensor(a, [depth, block_m]),
            TensorDescriptor.from_tensor(b, [depth, block_n]),
        ),
    )
    return out
