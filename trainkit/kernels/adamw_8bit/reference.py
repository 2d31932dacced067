"""AdamW with 8-bit moments in plain torch: bitsandbytes' format, and rounding by chance.

A moment is kept as one code a number and one fp32 scale for each 256 numbers, the largest
magnitude among them. A code stands for a number of ``code_values``: seven decades down from 1, each
with twice as many steps as the one below it. A signed map has codes for both signs.
"""

import functools

import torch
from torch import Tensor

GROUP = 256
"""Numbers that share a scale."""

SMALLEST_SCALE = 1e-30
"""A group without a larger number counts as zero: what is left of fp32 divides no more."""

_DECADES = 7
_PHILOX = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


@functools.cache
def code_values(*, signed: bool) -> Tensor:
    """(256,) fp64: what each code stands for, in ascending order."""
    above = [0.0, 1.0]
    for decade in range(_DECADES):
        steps = 2 ** (decade if signed else decade + 1)
        size = 10.0 ** (decade - _DECADES + 1)
        centres = [size * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]
        above += centres + ([-centre for centre in centres] if signed else [])
    return torch.tensor(sorted(above), dtype=torch.float64)


def _groups(x: Tensor) -> Tensor:
    """(N / 256, 256): the numbers that share a scale, the last group filled up with zeros."""
    return torch.nn.functional.pad(x.flatten(), (0, -x.numel() % GROUP)).view(-1, GROUP)


def quantize_reference(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes (N,) uint8 and scales (N / 256,) fp32 of x (N,), each number given the nearest code.

    Of what is never negative no number but 0 is given the code of 0: it is divided by its root.
    """
    groups = _groups(x.float())
    scales = groups.abs().amax(1) if groups.numel() else groups.new_zeros(0)
    values = code_values(signed=signed).to(x.device)
    shares = groups.double() / scales.double()[:, None]
    shares = torch.where(scales[:, None] > SMALLEST_SCALE, shares, 0.0)
    codes = torch.bucketize(shares, (values[1:] + values[:-1]) / 2, right=True)
    if not signed:
        codes = torch.where(shares > 0, codes.clamp(min=1), codes)
    return codes.flatten()[: x.numel()].to(torch.uint8), scales


def dequantize_reference(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """(N,) fp32 of codes (N,) and scales (N / 256,)."""
    values = code_values(signed=signed).float().to(codes.device)
    groups = _groups(codes)
    return (values[groups.long()] * scales[:, None]).flatten()[: codes.numel()]


def noise_reference(numel: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """(N,) int32 in [0, 2**16): halves of the words of Philox 4x32-10, the counter first."""
    counter = torch.arange(-(-numel // 8), dtype=torch.int64, device=device)
    words = [counter, *(torch.zeros_like(counter) for _ in range(3))]
    keys = [seed & _LOW, seed >> 32]
    for _ in range(10):
        high, low = zip(*(_product(words[2 * i], _PHILOX[i]) for i in (0, 1)), strict=True)
        words = [high[1] ^ words[1] ^ keys[0], low[1], high[0] ^ words[3] ^ keys[1], low[0]]
        keys = [(key + step) & _LOW for key, step in zip(keys, _WEYL, strict=True)]
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, 1).flatten()[:numel].int()


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Upper and lower half of a product of two 32-bit numbers, without more than 63 bits."""
    top, bottom = (word >> 16) * factor, (word & 0xFFFF) * factor
    middle = (bottom >> 16) + (top & _LOW)
    return (middle >> 16) + ((top >> 32) << 16), ((middle << 16) & _LOW) | (bottom & 0xFFFF)


def round_reference(values: Tensor, noise: Tensor) -> Tensor:
    """bfloat16 of fp32 values, away from zero with the probability of their place between two."""
    bits = values.contiguous().view(torch.int32)
    moved = (bits + noise * values.isfinite()) & -(2**16)
    return moved.view(torch.float32).to(torch.bfloat16)
