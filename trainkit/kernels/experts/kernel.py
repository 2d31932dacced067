"""What lies between the products of a block of experts, each in one pass.

S sorted rows of T tokens, H wide; I the experts' width; R the adapters' rank (0: none), a power of
two of at least 16: that is the least a matrix unit sums over.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.experts.route_kernel import ROWS, Route
from trainkit.kernels.launch import INTERPRETING, Kernel, next_power_of_2
from trainkit.kernels.lora.products import precision
from trainkit.kernels.swiglu.kernel import _activation_and_slope

_ROWS = 64
_GATE_ROWS = 32
"""Rows of a program: a part of a tile."""


@triton.jit
def _part(
    tile_expert_ptr, tile_row_ptr, num_tiles_ptr, ends_ptr, TILE: tl.constexpr, ROWS: tl.constexpr
):
    """(expert, rows, which of them are real) of this program."""
    tile = tl.program_id(0) // (TILE // ROWS)
    live = tile < tl.load(num_tiles_ptr)
    expert = tl.load(tile_expert_ptr + tile, mask=live, other=0)
    row = tl.load(tile_row_ptr + tile, mask=live, other=0)
    end = tl.load(ends_ptr + expert)
    rows = row + tl.program_id(0) % (TILE // ROWS) * ROWS + tl.arange(0, ROWS)
    return expert, rows, (rows < end) & live


@triton.jit(do_not_specialize=["top_k", "scaling"])
def _gather(
    x_ptr, slots_ptr, factor_ptr, out_ptr, low_ptr,
    ends_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr,
    top_k, scaling,
    WIDTH: tl.constexpr, R: tl.constexpr, GATHERED: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tokens of sorted rows, written in that order, or rows as they lie; inner products."""
    expert, rows, live = _part(tile_expert_ptr, tile_row_ptr, num_tiles_ptr, ends_ptr, TILE, ROWS)
    wide = rows.to(tl.int64)[:, None]
    source = wide
    if GATHERED:
        token = tl.load(slots_ptr + rows, mask=live, other=0) // top_k
        source = token.to(tl.int64)[:, None]
    low = tl.zeros((ROWS, R if R > 0 else 1), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        inside = (cols < WIDTH)[None, :]
        mask = live[:, None] & inside
        x = tl.load(x_ptr + source * WIDTH + cols[None, :], mask=mask, other=0.0)
        if GATHERED:
            tl.store(out_ptr + wide * WIDTH + cols[None, :], x, mask=mask)
        if R > 0:
            rank = expert.to(tl.int64) * R + tl.arange(0, R)
            at = factor_ptr + rank[:, None] * WIDTH + cols[None, :]
            factor = tl.load(at, mask=inside, other=0.0)
            low = tl.dot(x, tl.trans(factor), low, input_precision=PRECISION)
    if R > 0:
        low = (low * scaling).to(low_ptr.dtype.element_ty)
        tl.store(low_ptr + wide * R + tl.arange(0, R)[None, :], low, mask=live[:, None])


@triton.jit
def _gate_and_up(
    u_ptr, bias_ptr, expert, wide, cols, mask,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    UP: tl.constexpr = 1 if STEP == 2 else WIDTH
    at = u_ptr + wide * (2 * WIDTH) + cols[None, :] * STEP
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + UP, mask=mask, other=0.0).to(tl.float32)
    if BIASED:
        at = bias_ptr + expert * (2 * WIDTH) + cols * STEP
        gate += tl.load(at, mask=cols < WIDTH, other=0.0).to(tl.float32)[None, :]
        up += tl.load(at + UP, mask=cols < WIDTH, other=0.0).to(tl.float32)[None, :]
    return gate, up


@triton.jit
def _gated(
    gate, up,
    TANH_GELU: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """(act(gate), its slope, what it is multiplied by); comparisons let NaN through."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    act, slope = _activation_and_slope(gate * ALPHA, TANH_GELU)
    return act / ALPHA, slope, up + OFFSET


@triton.jit(do_not_specialize=["unused"])
def _forward(
    u_ptr, bias_ptr, h_ptr, ends_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr,
    unused,
    TANH_GELU: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr,
    STEP: tl.constexpr, BIASED: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert, rows, live = _part(tile_expert_ptr, tile_row_ptr, num_tiles_ptr, ends_ptr, TILE, ROWS)
    wide = rows.to(tl.int64)[:, None]
    for first in range(0, WIDTH, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        mask = live[:, None] & (cols < WIDTH)[None, :]
        gate, up = _gate_and_up(u_ptr, bias_ptr, expert, wide, cols, mask, WIDTH, BIASED, STEP)
        act, _, times = _gated(gate, up, TANH_GELU, LIMIT, ALPHA, OFFSET)
        h = (act * times).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + wide * WIDTH + cols[None, :], h, mask=mask)


@triton.jit(do_not_specialize=["unused"])
def _backward(
    u_ptr, bias_ptr, dh_ptr, slots_ptr, scale_ptr, du_ptr, h_ptr, dscale_ptr,
    ends_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr,
    unused,
    TANH_GELU: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr,
    STEP: tl.constexpr, BIASED: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of u and of the slots' scales, from dh = dy W2 before it is scaled.

    The scale of a slot multiplies all that follows h, so its gradient is h dot dh; y is not needed.
    """
    dtype: tl.constexpr = du_ptr.dtype.element_ty
    UP: tl.constexpr = 1 if STEP == 2 else WIDTH
    expert, rows, live = _part(tile_expert_ptr, tile_row_ptr, num_tiles_ptr, ends_ptr, TILE, ROWS)
    wide = rows.to(tl.int64)[:, None]
    slot = tl.load(slots_ptr + rows, mask=live, other=0)
    scale = tl.load(scale_ptr + slot, mask=live, other=0.0).to(tl.float32)
    dscale = tl.zeros((ROWS,), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        mask = live[:, None] & (cols < WIDTH)[None, :]
        gate, up = _gate_and_up(u_ptr, bias_ptr, expert, wide, cols, mask, WIDTH, BIASED, STEP)
        dh = tl.load(dh_ptr + wide * WIDTH + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        act, slope, times = _gated(gate, up, TANH_GELU, LIMIT, ALPHA, OFFSET)
        h = act * times
        dscale += tl.sum(h * dh, 1)
        dh *= scale[:, None]
        dgate, dup = dh * times * slope, dh * act
        if LIMIT > 0:  # beyond a clamp nothing comes back
            dgate = tl.where(gate > LIMIT, 0.0, dgate)
            dup = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, dup)
        at = du_ptr + wide * (2 * WIDTH) + cols[None, :] * STEP
        tl.store(at, dgate.to(dtype), mask=mask)
        tl.store(at + UP, dup.to(dtype), mask=mask)
        tl.store(h_ptr + wide * WIDTH + cols[None, :], (h * scale[:, None]).to(dtype), mask=mask)
    tl.store(dscale_ptr + slot, dscale.to(dscale_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["top_k"])
def _combine(
    y_ptr, places_ptr, scale_ptr, out_ptr, ends_ptr,
    top_k,
    E: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[token] = sum of its rows, scaled; in fp32 and in the order of its slots."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    real = tl.load(ends_ptr + E - 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(top_k):
        place = tl.load(places_ptr + token * top_k + k)
        y = tl.load(
            y_ptr + place.to(tl.int64) * WIDTH + cols, mask=inside & (place < real), other=0.0
        )
        y = y.to(tl.float32)
        if SCALED:
            y *= tl.load(scale_ptr + token * top_k + k).to(tl.float32)
        total += y
    tl.store(out_ptr + token * WIDTH + cols, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["top_k"])
def _gram(
    left_ptr, right_ptr, slots_ptr, scale_ptr, out_ptr, ends_ptr,
    top_k,
    WIDTH: tl.constexpr, R: tl.constexpr, GATHERED: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[e] = left[rows of e]^T right[rows of e], (R, WIDTH) in fp32."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    expert = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = (cols < WIDTH)[None, :]
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    total = tl.zeros((R, BLOCK), tl.float32)
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        live = rows < end
        left = tl.load(
            left_ptr + rows.to(tl.int64)[:, None] * R + tl.arange(0, R)[None, :],
            mask=live[:, None],
            other=0.0,
        )
        source = rows
        if GATHERED or SCALED:
            slot = tl.load(slots_ptr + rows, mask=live, other=0)
            if GATHERED:
                source = slot // top_k
            if SCALED:
                scale = tl.load(scale_ptr + slot, mask=live, other=0.0).to(tl.float32)
                left = (left * scale[:, None]).to(left_ptr.dtype.element_ty)
        at = right_ptr + source.to(tl.int64)[:, None] * WIDTH + cols[None, :]
        right = tl.load(at, mask=live[:, None] & inside, other=0.0)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    rank = expert.to(tl.int64) * R + tl.arange(0, R)
    tl.store(out_ptr + rank[:, None] * WIDTH + cols[None, :], total, mask=inside)


@triton.jit
def _turn(
    x_ptr, y_ptr,
    ROWS: tl.constexpr, RANK: tl.constexpr, COLS: tl.constexpr, TURNED_RANK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y[c, r, i] = x[i, r, c], and zero beyond x's rank."""
    blocks: tl.constexpr = (COLS + BLOCK - 1) // BLOCK
    rank = tl.program_id(0) % TURNED_RANK
    tile = tl.program_id(0) // TURNED_RANK
    rows = (tile // blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    cols = (tile % blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (rows < ROWS)[:, None] & (cols < COLS)[None, :]
    at = x_ptr + (rows[:, None] * RANK + rank) * COLS + cols[None, :]
    x = tl.load(at, mask=inside & (rank < RANK), other=0.0)
    at = y_ptr + (cols[:, None] * TURNED_RANK + rank) * ROWS + rows[None, :]
    tl.store(at, tl.trans(x).to(y_ptr.dtype.element_ty), mask=tl.trans(inside))


GATHER, FORWARD, BACKWARD = Kernel(_gather), Kernel(_forward), Kernel(_backward)
COMBINE, GRAM, TURN = Kernel(_combine), Kernel(_gram), Kernel(_turn)


def _tiles(route: Route) -> tuple[Tensor, ...]:
    return route.ends, route.tile_expert, route.tile_row, route.num_tiles


def gather(
    x: Tensor, route: Route, factor: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor | None]:
    """Tokens x as sorted rows (T, H): (S, H); and their `inner` product with factor."""
    rows = x.new_empty((route.slots.shape[0], x.shape[1]))
    return rows, _gathered(x, route, factor, scaling, rows)


def inner(x: Tensor, route: Route, factor: Tensor | None, scaling: float) -> Tensor | None:
    """scaling times sorted rows x (S, N) times their expert's factor (E, R, N): (S, R), or None."""
    return None if factor is None else _gathered(x, route, factor, scaling, None)


def _gathered(
    x: Tensor, route: Route, factor: Tensor | None, scaling: float, rows: Tensor | None
) -> Tensor | None:
    num_slots, width = route.slots.shape[0], x.shape[1]
    rank = 0 if factor is None else factor.shape[1]
    low = x.new_empty((num_slots, rank)) if rank else None
    if num_slots:
        unused = x if rows is None else rows
        GATHER.launch(
            route.most_tiles * (ROWS // _ROWS),
            (
                x,
                route.slots,
                x if factor is None else factor,
                unused,
                unused if low is None else low,
                *_tiles(route),
            ),
            (),
            (route.top_k, scaling),
            (width, rank, rows is not None, ROWS, _ROWS, 128, precision(x.dtype)),
            8,
            2,
        )
    return low


def _gate_constants(gate: tuple[Any, ...], bias: Tensor | None, width: int) -> tuple[Any, ...]:
    *others, interleaved = gate
    return *others, 2 if interleaved else 1, bias is not None, width, ROWS, _GATE_ROWS, 128


def gate_forward(u: Tensor, route: Route, bias: Tensor | None, gate: tuple[Any, ...]) -> Tensor:
    """The gated activation of u (S, 2I), plus the experts' bias (E, 2I): (S, I).

    Args:
        u: the first product's rows.
        route: whose they are.
        bias: None for none.
        gate: whether the tanh GELU; the limit, 0 for none; alpha; the offset; whether interleaved.
    """
    num_slots, width = u.shape[0], u.shape[1] // 2
    h = u.new_empty((num_slots, width))
    if h.numel():
        FORWARD.launch(
            route.most_tiles * (ROWS // _GATE_ROWS),
            (u, u if bias is None else bias, h, *_tiles(route)),
            (),
            (1,),
            _gate_constants(gate, bias, width),
            8,
        )
    return h


def gate_backward(
    u: Tensor, dh: Tensor, scale: Tensor, route: Route, bias: Tensor | None, gate: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """(du (S, 2I), h (S, I) times its slot's scale, the gradient of scale (T, K))."""
    du, h, dscale = torch.empty_like(u), torch.empty_like(dh), torch.zeros_like(scale)
    if dh.numel():
        BACKWARD.launch(
            route.most_tiles * (ROWS // _GATE_ROWS),
            (
                u, u if bias is None else bias, dh, route.slots, scale, du, h, dscale,
                *_tiles(route),
            ),
            (),
            (1,),
            _gate_constants(gate, bias, dh.shape[1]),
            8,
            2,
        )  # fmt: skip
    return du, h, dscale


def combine(y: Tensor, route: Route, scale: Tensor | None, num_tokens: int) -> Tensor:
    """Each token's rows of y (S, H) in one sum, scaled by scale (T, K) if given: (T, H)."""
    width = y.shape[1]
    out = y.new_empty((num_tokens, width))
    if out.numel():
        COMBINE.launch(
            num_tokens,
            (y, route.places, y if scale is None else scale, out, route.ends),
            (),
            (route.top_k,),
            (route.ends.shape[0], width, scale is not None, next_power_of_2(width)),
            8 if width > 1024 else 4,
        )
    return out


def gram(
    left: Tensor,
    right: Tensor,
    route: Route,
    *,
    gathered: bool = False,
    scale: Tensor | None = None,
) -> Tensor:
    """Each expert's rows of left (S, R), transposed, times right's: (E, R, N) in fp32.

    Args:
        left: sorted rows.
        right: (S, N) sorted rows, or (T, N) of tokens if ``gathered``.
        route: which rows are whose.
        gathered: right's rows are tokens'.
        scale: (T, K), multiplies the rows of left.
    """
    rank, width = left.shape[1], right.shape[1]
    num_experts = route.ends.shape[0]
    out = torch.empty((num_experts, rank, width), dtype=torch.float32, device=left.device)
    if not left.shape[0]:
        return out.zero_()
    block = 64 if INTERPRETING else 128
    GRAM.launch(
        num_experts * -(-width // block),
        (left, right, route.slots, left if scale is None else scale, out, route.ends),
        (),
        (route.top_k,),
        (width, rank, gathered, scale is not None, 128, block, precision(left.dtype)),
        4,
        3,
    )
    return out


def turn(x: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """x (N, R, E), contiguous, as (E, rank, N) in a dtype: cut, or with zeros, to the rank.

    peft keeps B with the expert's number fastest. torch's copy into another order and dtype goes
    number by number, and takes four times as long.
    """
    rows, _, cols = x.shape
    y = torch.empty((cols, rank, rows), dtype=dtype, device=x.device)
    block = 64
    TURN.launch(
        -(-rows // block) * -(-cols // block) * rank,
        (x, y),
        (),
        (),
        (rows, x.shape[1], cols, rank, block),
        4,
    )
    return y
