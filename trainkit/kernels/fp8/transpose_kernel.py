"""Transposing codes of a byte each. N rows, K columns; a perfect kernel moves 2 NK bytes."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.fp8.reference import FP8
from trainkit.kernels.launch import INTERPRETING, Kernel


@triton.jit(do_not_specialize=["num_rows"])
def _transpose(
    codes_ptr,
    out_ptr,
    out_stride,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    blocks: tl.constexpr = (WIDTH + BLOCK_COLS - 1) // BLOCK_COLS
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    row_mask, col_mask = rows < num_rows, cols < WIDTH
    mask = row_mask[:, None] & col_mask[None, :]
    codes = tl.load(codes_ptr + rows[:, None] * WIDTH + cols[None, :], mask=mask, other=0)
    mask = col_mask[:, None] & row_mask[None, :]
    tl.store(out_ptr + cols[:, None] * out_stride + rows[None, :], tl.trans(codes), mask=mask)


@triton.jit
def _byte(words, which: tl.constexpr, place: tl.constexpr):
    return ((words >> (8 * which)) & 0xFF) << (8 * place)


@triton.jit(do_not_specialize=["num_groups"])
def _transpose_words(
    codes_ptr,
    out_ptr,
    out_stride,
    num_groups,
    WORDS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """The same in words of four codes: squares of 4 x 4 turn in registers, words in shared memory.

    codes (4 num_groups, WORDS), out (4 WORDS, out_stride), both in words.
    """
    blocks: tl.constexpr = (WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS
    groups = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    words = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    in_groups, in_words = groups < num_groups, words < WORDS
    mask = in_groups[:, None] & in_words[None, :]
    places = codes_ptr + groups[:, None] * (4 * WORDS) + words[None, :]
    row0 = tl.load(places, mask=mask, other=0)
    row1 = tl.load(places + WORDS, mask=mask, other=0)
    row2 = tl.load(places + 2 * WORDS, mask=mask, other=0)
    row3 = tl.load(places + 3 * WORDS, mask=mask, other=0)
    mask = in_words[:, None] & in_groups[None, :]
    for which in tl.static_range(4):
        turned = _byte(row0, which, 0) | _byte(row1, which, 1)
        turned |= _byte(row2, which, 2) | _byte(row3, which, 3)
        places = out_ptr + (words[:, None] * 4 + which) * out_stride + groups[None, :]
        tl.store(places, tl.trans(turned), mask=mask)


TRANSPOSE = Kernel(_transpose)
TRANSPOSE_WORDS = Kernel(_transpose_words)


def launch_transpose(parts: Sequence[Tensor]) -> Tensor:
    """(K, sum of N) contiguous, of contiguous codes (N, K) each."""
    width = parts[0].shape[1]
    total = sum(part.shape[0] for part in parts)
    out = torch.empty((width, total), dtype=torch.uint8, device=parts[0].device)
    in_words = not any(number % 4 for number in (width, *(part.shape[0] for part in parts)))
    start = 0
    for part in parts:
        num_rows = part.shape[0]
        place = out[:, start : start + num_rows]
        start += num_rows
        if not num_rows:
            continue
        if in_words:
            block_groups, block_words = (64, 64) if INTERPRETING else (64, 32)
            groups, words = num_rows // 4, width // 4
            TRANSPOSE_WORDS.launch(
                -(-groups // block_groups) * -(-words // block_words),
                (part.view(torch.int32), place.view(torch.int32)),
                (total // 4,),
                (groups,),
                (words, block_groups, block_words),
                2,
            )
            continue
        block_rows, block_cols = (256, 256) if INTERPRETING else (128, 64)
        TRANSPOSE.launch(
            -(-num_rows // block_rows) * -(-width // block_cols),
            (part.view(torch.uint8), place),
            (total,),
            (num_rows,),
            (width, block_rows, block_cols),
            4,
        )
    return out.view(FP8)
