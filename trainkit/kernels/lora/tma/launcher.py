"""Launches the gate's kernels for GPUs with a tensor memory accelerator.

M tokens, F feed-forward, R rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trainkit.kernels.launch import (
    HAS_TRITON,
    INTERPRETING,
    device_of,
    num_multiprocessors,
    remembered,
)
from trainkit.kernels.lora.products import pad_rank, precision, total

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from trainkit.kernels.lora.tma import kernel

if TYPE_CHECKING:
    from trainkit.kernels.lora.gate import GateOperands

MAX_RANK = 16
"""Above it the three sums of the backward pass crowd the registers; not measured."""

_MAX_SPLITS = 16
_GOOD_FILL = 0.95


class TileTma(NamedTuple):
    """One way to run a kernel: features and tokens a tile, warps, loads ahead, programs an SM."""

    features: int
    tokens: int
    warps: int
    stages: int
    programs: int


FORWARD = TileTma(128, 64, 4, 2, 2)
BACKWARD = TileTma(128, 32, 8, 3, 2)
_INTERPRETED = TileTma(64, 128, 4, 1, 1)


def takes_tiles(largest_rank: int, *wide: Tensor) -> bool:
    """Whether the copy engine can address these operands, on a GPU these kernels were tuned for."""
    if largest_rank > MAX_RANK:
        return False
    for tensor in wide:
        if tensor.element_size() != 2 or tensor.numel() == 0 or tensor.stride(1) != 1:
            return False
        if tensor.stride(0) % 8 or tensor.data_ptr() % 16:  # in units of 16 bytes
            return False
    return INTERPRETING or (wide[0].is_cuda and _is_hopper(wide[0].get_device()))


@remembered
def _is_hopper(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index)[0] == 9


def fill(num_blocks: int, num_tiles: int, slots: int) -> int:
    """Into how many splits to cut ``num_tiles`` so that programs fill whole rounds of the GPU.

    The fewest that leave at most a twentieth of the last round idle, else what idles least. It
    depends on shapes and the GPU only, so the order of sums never changes.
    """
    best, best_fill = 1, 0.0
    for splits in range(1, max(1, min(_MAX_SPLITS, num_tiles // 4)) + 1):
        programs = num_blocks * splits
        rounds = -(-programs // slots)
        share = programs / (rounds * slots)
        if share >= _GOOD_FILL:
            return splits
        if share > best_fill:
            best, best_fill = splits, share
    return best


def _tiles(tensor: Tensor, tile: TileTma) -> TensorDescriptor:
    block = [tile.tokens, tile.features]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def gate_forward_tma(ops: GateOperands) -> tuple[Tensor, Tensor | None]:
    """As `trainkit.kernels.lora.gate.gate_forward`."""
    num_rows, num_cols = ops.gate.shape
    r_gate, r_up, r_down = ops.ranks()
    tile = _INTERPRETED if INTERPRETING else FORWARD
    h = ops.gate.new_empty((num_rows, num_cols))
    num_blocks, num_tiles = -(-num_rows // tile.tokens), -(-num_cols // tile.features)
    splits = fill(num_blocks, num_tiles, tile.programs * num_multiprocessors(h))
    per_split = -(-num_tiles // splits)
    splits = -(-num_tiles // per_split)
    parts = h.new_empty((splits, num_rows, r_down), dtype=torch.float32) if r_down else h
    with device_of(h):
        kernel.gate_forward_tma_kernel[(num_blocks, splits)](
            _tiles(ops.gate, tile),
            _tiles(ops.up, tile),
            *ops.inner(in_place_of_none=h),
            *ops.factors(in_place_of_none=h),
            _tiles(h, tile),
            parts,
            ops.xa_stride(),
            num_cols,
            num_rows,
            per_split,
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


def gate_backward_tma(
    ops: GateOperands,
    dh: Tensor,
    p_down: Tensor | None,
    dgate: Tensor,
    dup: Tensor,
    scales: tuple[float, float],
) -> Tensor:
    """Write dgate and dup; give (3, F, R): the gradients of b_gate, b_up and a_down^T, in fp32."""
    num_rows, num_cols = ops.gate.shape
    r_gate, r_up, r_down = ops.ranks()
    widest = max(r_gate, r_up, r_down)
    tile = _INTERPRETED if INTERPRETING else BACKWARD
    num_blocks, num_tiles = -(-num_cols // tile.features), -(-num_rows // tile.tokens)
    splits = fill(num_blocks, num_tiles, tile.programs * num_multiprocessors(dh))
    per_split = -(-num_tiles // splits)
    splits = -(-num_tiles // per_split)
    parts = dh.new_empty((splits, 3, num_cols, widest), dtype=torch.float32)
    with device_of(dh):
        kernel.gate_backward_tma_kernel[(num_blocks, splits)](
            _tiles(ops.gate, tile),
            _tiles(ops.up, tile),
            _tiles(dh, tile),
            *ops.inner(in_place_of_none=dh),
            p_down if p_down is not None else dh,
            *ops.factors(in_place_of_none=dh),
            _tiles(dgate, tile),
            _tiles(dup, tile),
            parts,
            ops.xa_stride(),
            num_cols,
            num_rows,
            per_split * tile.tokens,
            float(scales[0]),
            float(scales[1]),
            R_GATE=r_gate,
            R_UP=r_up,
            R_DOWN=r_down,
            R_MAX=widest,
            R_PAD=pad_rank(widest),
            TANH_GELU=ops.tanh_gelu,
            PRECISION=precision(dh.dtype),
            BLOCK_F=tile.features,
            BLOCK_M=tile.tokens,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
    return total(parts)
