"""The gate of a feed-forward block with its adapters folded in, forward and backward.

M tokens, F feed-forward, R rank. Only the kernels fold; `folds` says whether they serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainkit.kernels.launch import HAS_TRITON, INTERPRETING, device_of
from trainkit.kernels.lora.products import pad_rank, precision, split_rows, takes_kernel, total
from trainkit.kernels.lora.tma.launcher import gate_backward_tma, gate_forward_tma, takes_tiles

if HAS_TRITON:
    from trainkit.kernels.lora import kernel

MAX_GATE_RANK = 64
"""Above it the three sums of the backward pass no longer fit the registers."""


class Tile(NamedTuple):
    """One way to run a kernel of the gate: features and tokens a tile, warps, loads ahead."""

    features: int
    tokens: int
    warps: int
    stages: int


FORWARD_TILES = {2: Tile(64, 32, 4, 3), 4: Tile(32, 32, 4, 2)}
BACKWARD_TILES = {2: Tile(64, 16, 4, 2), 4: Tile(32, 32, 4, 2)}
"""By bytes of an element. Under the interpreter a program costs milliseconds, so few large ones."""
_INTERPRETED = Tile(256, 128, 4, 1)


def _tile(tiles: dict[int, Tile], like: Tensor) -> Tile:
    return _INTERPRETED if INTERPRETING else tiles[like.element_size()]


@dataclass(frozen=True)
class GateOperands:
    """What the gate reads in both directions.

    Attributes:
        gate: (M, F), the frozen projection's output, bias included.
        up: (M, F), same row stride.
        xa_gate: (M, R) inner product of the gate's adapter, or None.
        xa_up: the same of up's.
        b_gate: (F, R) contiguous, scaled, in gate's dtype, or None.
        b_up: the same of up's.
        a_down: (R, F) contiguous, in gate's dtype, or None.
        tanh_gelu: the activation is the tanh GELU instead of SiLU.
    """

    gate: Tensor
    up: Tensor
    xa_gate: Tensor | None
    xa_up: Tensor | None
    b_gate: Tensor | None
    b_up: Tensor | None
    a_down: Tensor | None
    tanh_gelu: bool

    def ranks(self) -> tuple[int, int, int]:
        """R of gate, up and down; 0 where there is no adapter."""
        return (
            0 if self.b_gate is None else self.b_gate.shape[1],
            0 if self.b_up is None else self.b_up.shape[1],
            0 if self.a_down is None else self.a_down.shape[0],
        )

    def inner(self, *, in_place_of_none: Tensor) -> tuple[Tensor, Tensor]:
        """xa_gate and xa_up as a kernel takes them: it never reads one of rank 0."""
        xas = (self.xa_gate, self.xa_up)
        gate, up = (in_place_of_none if xa is None else xa for xa in xas)
        return gate, up

    def factors(self, *, in_place_of_none: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """b_gate, b_up and a_down likewise."""
        given = (self.b_gate, self.b_up, self.a_down)
        gate, up, down = (in_place_of_none if factor is None else factor for factor in given)
        return gate, up, down

    def xa_stride(self) -> int:
        """Row stride of the inner products, which are views of one stack; 0 where there is none."""
        return max(0 if xa is None else xa.stride(0) for xa in (self.xa_gate, self.xa_up))


def folds(largest_rank: int, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the gate's kernels serve a block of these adapters on x, computing in dtype."""
    return largest_rank <= MAX_GATE_RANK and takes_kernel(largest_rank, dtype, x)


def gate_forward(ops: GateOperands) -> tuple[Tensor, Tensor | None]:
    """(h, h a_down^T): (M, F) contiguous and (M, R), or None without a down adapter."""
    r_gate, r_up, r_down = ops.ranks()
    if takes_tiles(max(r_gate, r_up, r_down), ops.gate, ops.up):
        return gate_forward_tma(ops)
    num_rows, num_cols = ops.gate.shape
    h = ops.gate.new_empty((num_rows, num_cols))
    tile = _tile(FORWARD_TILES, h)
    num_blocks = -(-num_rows // tile.tokens)
    splits, per_split = split_rows(num_cols, num_blocks, tile.features, h)
    parts = h.new_empty((splits, num_rows, r_down), dtype=torch.float32) if r_down else h
    if h.numel():
        with device_of(h):
            kernel.gate_forward_kernel[(num_blocks, splits)](
                ops.gate,
                ops.up,
                *ops.inner(in_place_of_none=h),
                *ops.factors(in_place_of_none=h),
                h,
                parts,
                ops.gate.stride(0),
                ops.xa_stride(),
                num_cols,
                num_rows,
                per_split // tile.features,
                R_GATE=r_gate,
                R_UP=r_up,
                R_DOWN=r_down,
                R_PAD=pad_rank(max(r_gate, r_up, r_down)),
                TANH_GELU=ops.tanh_gelu,
                PRECISION=precision(h.dtype),
                BLOCK_M=tile.tokens,
                BLOCK_F=tile.features,
                STAGES=tile.stages,
                num_warps=tile.warps,
            )
    return h, total(parts).to(h.dtype) if r_down else None


@dataclass(frozen=True)
class GateGradients:
    """What the gate's backward pass gives; the factors' gradients are fp32, None without adapter.

    Attributes:
        db_gate: (F, R).
        db_up: (F, R).
        da_down: (R, F).
    """

    db_gate: Tensor | None
    db_up: Tensor | None
    da_down: Tensor | None


def gate_backward(
    ops: GateOperands,
    dh: Tensor,
    p_down: Tensor | None,
    dgate: Tensor,
    dup: Tensor,
    scales: tuple[float, float],
) -> GateGradients:
    """Write dgate and dup, and give the gradients of three factors.

    Args:
        ops: what the forward pass read.
        dh: (M, F), dy W_down, without the down adapter's share.
        p_down: (M, R) contiguous, s dy B_down, or None without a down adapter.
        dgate: (M, F), written.
        dup: (M, F) of dgate's row stride, written; may be dh itself.
        scales: scalings of the gate's and up's adapters.
    """
    r_gate, r_up, r_down = ops.ranks()
    if takes_tiles(max(r_gate, r_up, r_down), ops.gate, ops.up, dh, dgate, dup):
        return _gradients(gate_backward_tma(ops, dh, p_down, dgate, dup, scales), ops)
    num_rows, num_cols = ops.gate.shape
    tile = _tile(BACKWARD_TILES, dh)
    num_blocks = -(-num_cols // tile.features)
    splits, per_split = split_rows(num_rows, num_blocks, tile.tokens, dh)
    widest = max(r_gate, r_up, r_down)
    # With no rows the kernel still runs, and writes zero sums.
    parts = dh.new_empty((splits, 3, num_cols, widest), dtype=torch.float32)
    with device_of(dh):
        kernel.gate_backward_kernel[(num_blocks, splits)](
            ops.gate,
            ops.up,
            dh,
            *ops.inner(in_place_of_none=dh),
            p_down if p_down is not None else dh,
            *ops.factors(in_place_of_none=dh),
            dgate,
            dup,
            parts,
            ops.gate.stride(0),
            dgate.stride(0),
            dh.stride(0),
            ops.xa_stride(),
            num_cols,
            num_rows,
            per_split,
            float(scales[0]),
            float(scales[1]),
            R_GATE=r_gate,
            R_UP=r_up,
            R_DOWN=r_down,
            R_MAX=widest,
            R_PAD=pad_rank(max(r_gate, r_up, r_down)),
            TANH_GELU=ops.tanh_gelu,
            PRECISION=precision(dh.dtype),
            BLOCK_F=tile.features,
            BLOCK_M=tile.tokens,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
    return _gradients(total(parts), ops)


def _gradients(sums: Tensor, ops: GateOperands) -> GateGradients:
    """Cut (3, F, R) sums to the ranks that there are."""
    r_gate, r_up, r_down = ops.ranks()
    db_gate, db_up, da_down = sums
    return GateGradients(
        db_gate[:, :r_gate].contiguous() if r_gate else None,
        db_up[:, :r_up].contiguous() if r_up else None,
        da_down[:, :r_down].t().contiguous() if r_down else None,
    )
