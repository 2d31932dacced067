"""The gate of a feed-forward block with its adapters folded in, forward and backward.

M tokens, F feed-forward, R rank. Only the kernels fold; `folds` says whether they serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.kernels.fp8.reference import FP8
from trainkit.kernels.launch import (
    HAS_TRITON,
    INTERPRETING,
    gpu_of,
    launches,
    num_multiprocessors,
    remembered,
    run_jitted,
)
from trainkit.kernels.lora.products import pad_rank, precision, takes_kernel, total

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from trainkit.kernels.lora import gate_kernel

MAX_GATE_RANK = 64
"""Above it the three sums of the backward pass no longer fit the registers."""

MAX_TILES_RANK = 16
"""Above it they crowd the registers along with tiles that the copy engine fetches; not measured."""

_MAX_SPLITS = 16
_GOOD_FILL = 0.95


class Tile(NamedTuple):
    """One way to run a kernel: features and tokens a tile, warps, loads ahead, programs an SM."""

    features: int
    tokens: int
    warps: int
    stages: int
    programs: int


class Way(NamedTuple):
    """How the wide operands travel, and the tiles for it."""

    tiles: bool
    forward: Tile
    backward: Tile


BLOCKS = Way(True, Tile(128, 64, 4, 2, 2), Tile(128, 32, 8, 3, 2))
"""By a Hopper GPU's copy engine, 16 bits an element."""

POINTERS = {
    2: Way(False, Tile(64, 32, 4, 3, 3), Tile(64, 16, 4, 2, 3)),
    4: Way(False, Tile(32, 32, 4, 2, 3), Tile(32, 32, 4, 2, 3)),
}
"""By ordinary loads, by bytes of an element."""

CODES = Tile(128, 64, 4, 3, 2)
"""Of the kernel that quantises what comes back through the gate."""

_MOST_AT_ONCE = 64
"""Blocks of features whose magnitudes are compared at once."""

_REGISTERS = 65536
"""Of a multiprocessor."""

_INTERPRETED = {True: Tile(64, 128, 4, 1, 1), False: Tile(256, 128, 4, 1, 1)}
"""Under the interpreter a program costs milliseconds, so few large ones."""


@dataclass(frozen=True)
class GateOperands:
    """What the gate reads in both directions.

    Attributes:
        gate: (M, F), the frozen projection's output, bias included.
        up: (M, F), same row stride.
        xa_gate: (M, R) inner product of the gate's adapter, or None.
        b_gate: (F, R) contiguous, scaled, in gate's dtype, or None.
        a_down: (R, F) contiguous, in gate's dtype, or None.
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


def same_adapters(b_gate: Tensor | None, b_up: Tensor | None) -> bool:
    """Whether gate and up have adapters of one rank, or both have none."""
    if b_gate is None or b_up is None:
        return b_gate is b_up
    return b_gate.shape == b_up.shape


def folds(largest_rank: int, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the gate's kernels serve a block of these adapters on x, computing in dtype."""
    return largest_rank <= MAX_GATE_RANK and takes_kernel(largest_rank, dtype, x)


def way_for(largest_rank: int, *wide: Tensor) -> Way:
    """How these wide operands travel: as blocks where a GPU was tuned for it, else by pointers."""
    element_size = wide[0].element_size()
    way = BLOCKS if _takes_blocks(largest_rank, wide) else POINTERS[element_size]
    if INTERPRETING:
        return Way(way.tiles, _INTERPRETED[way.tiles], _INTERPRETED[way.tiles])
    return way


def _takes_blocks(largest_rank: int, wide: tuple[Tensor, ...]) -> bool:
    """Whether the copy engine can address the operands, on a GPU these tiles were tuned for."""
    if largest_rank > MAX_TILES_RANK:
        return False
    for tensor in wide:
        if tensor.element_size() != 2 or tensor.numel() == 0 or tensor.stride(1) != 1:
            return False
        if tensor.stride(0) % 8 or (launches() and tensor.data_ptr() % 16):  # in units of 16 bytes
            return False
    device = gpu_of(wide[0])
    return INTERPRETING or (device is not None and _is_hopper(device))


@remembered
def _is_hopper(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index)[0] == 9


def split(num_blocks: int, num_tiles: int, slots: int) -> tuple[int, int]:
    """(splits, tiles a split) that fill whole rounds of the GPU.

    The fewest splits that leave at most a twentieth of the last round idle, else what idles least.
    It depends on shapes and the GPU only, so the order of sums never changes.
    """
    best, best_fill = 1, 0.0
    for splits in range(1, max(1, min(_MAX_SPLITS, num_tiles // 4)) + 1):
        programs = num_blocks * splits
        share = programs / (-(-programs // slots) * slots)
        if share > best_fill:
            best, best_fill = splits, share
        if share >= _GOOD_FILL:
            break
    per_split = max(1, -(-num_tiles // best))
    return max(1, -(-num_tiles // per_split)), per_split


def gate_forward(ops: GateOperands) -> tuple[Tensor, Tensor | None]:
    """(h, h a_down^T): (M, F) contiguous and (M, R), or None without a down adapter."""
    r_gate, r_up, r_down = ops.ranks()
    num_rows, num_cols = ops.gate.shape
    h = ops.gate.new_empty((num_rows, num_cols))
    way = way_for(max(r_gate, r_up, r_down), ops.gate, ops.up)
    tile = way.forward
    num_blocks, num_tiles = -(-num_rows // tile.tokens), -(-num_cols // tile.features)
    slots = tile.programs * num_multiprocessors(h)
    splits, per_split = split(max(num_blocks, 1), num_tiles, slots)
    parts = h.new_empty((splits, num_rows, r_down), dtype=torch.float32) if r_down else h
    if h.numel():
        run_jitted(
            gate_kernel.gate_forward_kernel,
            (num_blocks, splits),
            h,
            _wide(ops.gate, tile, way),
            _wide(ops.up, tile, way),
            *ops.inner(in_place_of_none=h),
            *ops.factors(in_place_of_none=h),
            _wide(h, tile, way),
            parts,
            ops.gate.stride(0),
            ops.xa_stride(),
            num_cols,
            num_rows,
            per_split,
            **_constants(ops, tile, way),
        )
    return h, total(parts).to(h.dtype) if r_down else None


@dataclass(frozen=True)
class GateGradients:
    """What the gate's backward pass gives; the factors' gradients are fp32, None without adapter.

    Attributes:
        db_gate: (F, R).
        db_up: (F, R).
        da_down: (R, F).
        largest: (blocks, M), magnitudes as bits, for `codes_of_gradients`, if asked for.
    """

    db_gate: Tensor | None
    db_up: Tensor | None
    da_down: Tensor | None
    largest: Tensor | None = None


def gate_backward(
    ops: GateOperands,
    dh: Tensor,
    p_down: Tensor | None,
    dgate: Tensor,
    dup: Tensor,
    scales: tuple[float, float],
    column_factors: tuple[Tensor, Tensor] | None = None,
) -> GateGradients:
    """Write dgate and dup, and give the gradients of three factors.

    Args:
        ops: what the forward pass read.
        dh: (M, F), dy W_down, without the down adapter's share.
        p_down: (M, R) contiguous, s dy B_down, or None without a down adapter.
        dgate: (M, F), written.
        dup: (M, F) of dgate's row stride, written; may be dh itself.
        scales: scalings of the gate's and up's adapters.
        column_factors: (F,) each: also find the largest magnitudes of dgate and dup times these.
    """
    widest = max(ops.ranks())
    num_rows, num_cols = ops.gate.shape
    way = way_for(widest, ops.gate, ops.up, dh, dgate, dup)
    tile = way.backward
    num_blocks, num_tiles = -(-num_cols // tile.features), -(-num_rows // tile.tokens)
    slots = tile.programs * num_multiprocessors(dh)
    splits, per_split = split(num_blocks, num_tiles, slots)
    # With no rows the kernel still runs, and writes zero sums.
    parts = dh.new_empty((splits, 3, num_cols, widest), dtype=torch.float32)
    largest = None
    if column_factors is not None:
        largest = dh.new_empty((num_blocks, num_rows), dtype=torch.int32)
    run_jitted(
        gate_kernel.gate_backward_kernel,
        (num_blocks, splits),
        dh,
        _wide(ops.gate, tile, way),
        _wide(ops.up, tile, way),
        _wide(dh, tile, way),
        *ops.inner(in_place_of_none=dh),
        p_down if p_down is not None else dh,
        *ops.factors(in_place_of_none=dh),
        _wide(dgate, tile, way),
        _wide(dup, tile, way),
        parts,
        *(column_factors or (dh, dh)),
        dh if largest is None else largest,
        ops.gate.stride(0),
        dgate.stride(0),
        dh.stride(0),
        ops.xa_stride(),
        num_cols,
        num_rows,
        per_split * tile.tokens,
        float(scales[0]),
        float(scales[1]),
        R_MAX=widest,
        LARGEST=largest is not None,
        **_constants(ops, tile, way),
        **_registers(tile, way) if largest is not None else {},
    )
    return _gradients(total(parts), ops, largest)


def _registers(tile: Tile, way: Way) -> dict[str, int]:
    """Keeps the compiler from using so many that fewer programs than the tile's fit an SM.

    With the magnitudes it would: at Qwen2-7B's shape 0.66 instead of 0.46 ms on an H200.
    """
    if INTERPRETING or not way.tiles:
        return {}
    return {"maxnreg": _REGISTERS // (32 * tile.warps * tile.programs)}


def codes_of_gradients(
    pair: Tensor,
    column_factors: tuple[Tensor, Tensor],
    largest: Tensor,
    b_pair: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What both products of the first layers' backward pass need of dgate and dup, in one read.

    Args:
        pair: dgate and dup, (2, M, F).
        column_factors: (F,) each, multiplied in first.
        largest: what `gate_backward` found with the same factors.
        b_pair: (F, R) contiguous each, of one rank in pair's dtype, or None.
    """
    _, num_rows, num_cols = pair.shape
    lora_rank = 0 if b_pair is None else b_pair[0].shape[1]
    codes = torch.empty((num_rows, 2 * num_cols), dtype=FP8, device=pair.device)
    scales = pair.new_empty((num_rows, 1), dtype=torch.float32)
    p = pair.new_empty((num_rows, 2 * lora_rank)) if lora_rank else None
    tile = _INTERPRETED[False] if INTERPRETING else CODES
    if num_rows:
        gate_kernel.GATE_CODES.launch(
            -(-num_rows // tile.tokens) * 2,
            (
                *(pair[0], pair[1], *column_factors, largest),
                *(b_pair or (pair, pair)),
                *(codes, scales, pair if p is None else p),
            ),
            (pair.stride(1), 2 * lora_rank, num_cols),
            (num_rows, largest.shape[0]),
            (
                *(_MOST_AT_ONCE, lora_rank, pad_rank(lora_rank), precision(pair.dtype)),
                *(tile.tokens, tile.features, tile.stages),
            ),
            tile.warps,
            3,
        )
    return codes, scales, p


def _wide(tensor: Tensor, tile: Tile, way: Way) -> Tensor | TensorDescriptor:
    """A wide operand as the kernels take it."""
    if not way.tiles:
        return tensor
    block = [tile.tokens, tile.features]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def _constants(ops: GateOperands, tile: Tile, way: Way) -> dict[str, Any]:
    r_gate, r_up, r_down = ops.ranks()
    return {
        "R_GATE": r_gate,
        "R_UP": r_up,
        "R_DOWN": r_down,
        "R_PAD": pad_rank(max(r_gate, r_up, r_down)),
        "TANH_GELU": ops.tanh_gelu,
        "PRECISION": precision(ops.gate.dtype),
        "BLOCK_M": tile.tokens,
        "BLOCK_F": tile.features,
        "STAGES": tile.stages,
        "TILES": way.tiles,
        "num_warps": tile.warps,
    }


def _gradients(sums: Tensor, ops: GateOperands, largest: Tensor | None) -> GateGradients:
    """Cut (3, F, R) sums to the ranks that there are."""
    r_gate, r_up, r_down = ops.ranks()
    db_gate, db_up, da_down = sums
    return GateGradients(
        db_gate[:, :r_gate].contiguous() if r_gate else None,
        db_up[:, :r_up].contiguous() if r_up else None,
        da_down[:, :r_down].t().contiguous() if r_down else None,
        largest,
    )
