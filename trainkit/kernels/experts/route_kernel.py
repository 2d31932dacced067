"""Which rows go to which expert: a stable counting sort, without the host ever waiting.

T tokens, K experts a token, S = T K slots (slot = token K + k), E experts. Slots are sorted by
expert; an expert number outside [0, E) routes its slot nowhere: such slots come last. Products work
on tiles of `ROWS` sorted slots of one expert.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.launch import Kernel, next_power_of_2

ROWS = 128
"""Rows of a tile."""
_BLOCK = 256


class Route(NamedTuple):
    """Sorted slots.

    Attributes:
        slots: (S,) int32, the slot of each sorted row.
        places: (S,) int32, the sorted row of each slot.
        ends: (E,) int32, where the rows of each expert end.
        num_tiles: (1,) int32, how many tiles there are; the two above have room for the most.
    """

    slots: Tensor
    places: Tensor
    ends: Tensor
    tile_expert: Tensor
    tile_row: Tensor
    num_tiles: Tensor
    top_k: int

    @property
    def most_tiles(self) -> int:
        return self.tile_expert.shape[0]


@triton.jit
def _experts_of(index_ptr, slot, num_slots, E: tl.constexpr):
    """The expert of each slot; E for nowhere, E + 1 beyond the last slot."""
    expert = tl.load(index_ptr + slot, mask=slot < num_slots, other=0).to(tl.int32)
    expert = tl.where((expert < 0) | (expert > E), E, expert)
    return tl.where(slot < num_slots, expert, E + 1)


@triton.jit(do_not_specialize=["num_slots"])
def _count(
    index_ptr, counts_ptr, num_slots, E: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    counts = tl.histogram(_experts_of(index_ptr, slot, num_slots, E), WIDTH)
    tl.store(counts_ptr + block * WIDTH + tl.arange(0, WIDTH), counts)


@triton.jit(do_not_specialize=["num_blocks"])
def _scan(
    counts_ptr,
    ends_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    num_blocks,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Turns the counts of each block into how many came in blocks before it."""
    expert = tl.arange(0, WIDTH)
    before = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, num_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        at = counts_ptr + block[:, None] * WIDTH + expert[None, :]
        mask = (block < num_blocks)[:, None]
        counts = tl.load(at, mask=mask, other=0)
        tl.store(at, before[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        before += tl.sum(counts, 0)
    ends = tl.cumsum(before, 0)
    real = expert < E
    tl.store(ends_ptr + expert, ends, mask=expert <= E)  # where slots that go nowhere end, too
    tiles = tl.where(real, (before + ROWS - 1) // ROWS, 0)
    first_tile = tl.cumsum(tiles, 0) - tiles
    tl.store(num_tiles_ptr + expert, tl.sum(tiles, 0), mask=expert == 0)
    for number in range(tl.max(tiles, 0)):
        mask = number < tiles
        tl.store(tile_expert_ptr + first_tile + number, expert, mask=mask)
        tl.store(tile_row_ptr + first_tile + number, ends - before + number * ROWS, mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def _place(
    index_ptr, before_ptr, ends_ptr, slots_ptr, places_ptr, num_slots,
    E: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    slot = block * BLOCK + lane
    mask = slot < num_slots
    expert = _experts_of(index_ptr, slot, num_slots, E)
    others = _experts_of(index_ptr, block * BLOCK + tl.arange(0, BLOCK), num_slots, E)
    same = (expert[:, None] == others[None, :]) & (lane[None, :] < lane[:, None])
    start = tl.load(ends_ptr + expert - 1, mask=mask & (expert > 0), other=0)
    before = tl.load(before_ptr + block * WIDTH + expert, mask=mask, other=0)
    place = start + before + tl.sum(same.to(tl.int32), 1)
    tl.store(places_ptr + slot, place, mask=mask)
    tl.store(slots_ptr + place, slot, mask=mask)


COUNT, SCAN, PLACE = Kernel(_count), Kernel(_scan), Kernel(_place)


def route(index: Tensor, num_experts: int) -> Route:
    """Sort the slots of index (T, K), integers, by expert."""
    index = index.contiguous()
    num_slots, device = index.numel(), index.device

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    width = next_power_of_2(num_experts + 2)
    num_blocks = -(-num_slots // _BLOCK)
    counts, ends = integers(num_blocks, width), integers(num_experts + 1)
    slots, places = integers(num_slots), integers(num_slots)
    most = -(-num_slots // ROWS) + min(num_experts, num_slots)
    tile_expert, tile_row, num_tiles = integers(most), integers(most), integers(1)
    if num_slots:
        COUNT.launch(num_blocks, (index, counts), (), (num_slots,), (num_experts, width, _BLOCK), 4)
    SCAN.launch(
        1,
        (counts, ends, tile_expert, tile_row, num_tiles),
        (),
        (num_blocks,),
        (num_experts, width, max(8192 // width, 1), ROWS),
        8,
    )
    if num_slots:
        pointers = (index, counts, ends, slots, places)
        PLACE.launch(num_blocks, pointers, (), (num_slots,), (num_experts, width, _BLOCK), 4)
    return Route(
        slots, places, ends[:num_experts], tile_expert, tile_row, num_tiles, index.shape[-1]
    )
