"""AdamW kernels over flat buffers. N numbers, P programs.

Bytes a perfect step moves for each number: fp32 weight and two moments read and written, 24; the
gradient read and cleared, 4 or 8; a bfloat16 weight written, 2. The norm reads the gradient once
more. Everything that changes from step to step on the device, the clip factor and the verdict that
holds a step back, is read from memory, so the host waits for nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.launch import Kernel, next_power_of_2, num_multiprocessors

BLOCK = 1024
WARPS = 4
NORM_PROGRAMS = 4
"""For each multiprocessor: the partial sums are as many for every N, and added in a fixed order."""


@triton.jit(do_not_specialize=["numel"])
def _square_sums(x_ptr, out_ptr, numel, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    WIDE: tl.constexpr = out_ptr.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK,), dtype=WIDE)
    for first in range(program, tl.cdiv(numel, BLOCK), PROGRAMS * 8):
        # Squares of bfloat16 numbers lie so often halfway between two sums that adding them to one
        # long sum, one by one, is biased: 1.2e-6 of half a billion. Eight at a time are not.
        part = tl.zeros((BLOCK,), dtype=WIDE)
        for which in tl.static_range(8):
            at = (first + which * PROGRAMS) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < numel, other=0.0).to(WIDE)
            part += x * x
        sums += part
    tl.store(out_ptr + program, tl.sum(sums, axis=0))


@triton.jit(do_not_specialize=["count"])
def _add_up(sums_ptr, total_ptr, bad_ptr, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(sums_ptr + at, mask=at < count, other=0.0), axis=0).to(tl.float32)
    is_finite = tl.abs(total) < float("inf")
    tl.store(total_ptr, tl.load(total_ptr) + total)
    tl.store(bad_ptr, tl.where(is_finite, tl.load(bad_ptr), 1.0))


@triton.jit(do_not_specialize=["numel"])
def _step(
    weight_ptr,
    gradient_ptr,
    first_ptr,
    second_ptr,
    copy_ptr,
    factor_ptr,
    held_ptr,
    steps_ptr,
    scalars_ptr,
    numel,
    HAS_COPY: tl.constexpr,
    CLEAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    WIDE: tl.constexpr = weight_ptr.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    held = tl.load(held_ptr).to(tl.float32) != 0
    factor = tl.load(factor_ptr).to(WIDE)
    # In fp64: 1 - 0.999 in fp32 is off by 5e-5, and so is 1 - 0.999**step.
    keep = tl.load(scalars_ptr).to(WIDE)
    eps = tl.load(scalars_ptr + 2).to(WIDE)
    new_first = tl.load(scalars_ptr + 3).to(WIDE)
    old_second = tl.load(scalars_ptr + 4).to(WIDE)
    new_second = tl.load(scalars_ptr + 5).to(WIDE)
    count = tl.load(steps_ptr).to(tl.float64) + 1
    first_share = 1 - tl.exp2(count * tl.load(scalars_ptr + 6))
    second_share = 1 - tl.exp2(count * tl.load(scalars_ptr + 7))
    step_size = (tl.load(scalars_ptr + 1) / first_share).to(WIDE)
    root_scale = (1 / tl.sqrt(second_share)).to(WIDE)
    raw = tl.load(gradient_ptr + at, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0)
    first = tl.load(first_ptr + at, mask=mask, other=0.0)
    second = tl.load(second_ptr + at, mask=mask, other=0.0)

    g = raw.to(WIDE) * factor
    first += (g - first) * new_first
    second = second * old_second + g * g * new_second
    weight = weight * keep - step_size * first / (tl.sqrt(second) * root_scale + eps)

    taken = mask & (held == 0)
    tl.store(weight_ptr + at, weight, mask=taken)
    tl.store(first_ptr + at, first, mask=taken)
    tl.store(second_ptr + at, second, mask=taken)
    if HAS_COPY:
        tl.store(copy_ptr + at, weight.to(copy_ptr.dtype.element_ty), mask=taken)
    if CLEAR:
        tl.store(gradient_ptr + at, tl.zeros_like(raw), mask=mask)


SQUARE_SUMS, ADD_UP, STEP = Kernel(_square_sums), Kernel(_add_up), Kernel(_step)


def launch_square_sum(x: Tensor) -> Tensor:
    """The sum of squares of x (N,): 0-d, fp32 (fp64 of fp64), the same bits in every run."""
    return _square_sums_of(x).sum()


def launch_add_square_sum(x: Tensor, total: Tensor, is_bad: Tensor) -> None:
    """Add it to ``total``, 0-d fp32, and set ``is_bad``, 0-d fp32, where it is not finite."""
    sums = _square_sums_of(x)
    ADD_UP.launch(1, (sums, total, is_bad), (), (len(sums),), (next_power_of_2(len(sums)),), WARPS)


def _square_sums_of(x: Tensor) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    programs = NORM_PROGRAMS * num_multiprocessors(x)
    sums = torch.empty(programs, dtype=wide, device=x.device)
    SQUARE_SUMS.launch(programs, (x, sums), (), (x.numel(),), (BLOCK, programs), WARPS)
    return sums


def launch_step(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    copy: Tensor | None,
    factor: Tensor,
    held: Tensor,
    steps: Tensor,
    scalars: Tensor,
    *,
    clear: bool,
) -> None:
    """Update weight, first, second and copy (all (N,)) in place; see ``function.adamw_``."""
    STEP.launch(
        -(-weight.numel() // BLOCK),
        (
            weight,
            gradient,
            first,
            second,
            weight if copy is None else copy,
            factor,
            held,
            steps,
            scalars,
        ),
        (),
        (weight.numel(),),
        (copy is not None, clear, BLOCK),
        WARPS,
    )
