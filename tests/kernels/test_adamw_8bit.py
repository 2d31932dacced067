"""AdamW with 8-bit moments: bitsandbytes' codes, Philox's noise, and nothing done where held."""

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map

from trainkit.kernels.adamw_8bit.function import adamw_8bit_
from trainkit.kernels.adamw_8bit.reference import (
    code_values,
    dequantize_reference,
    noise_reference,
    quantize_reference,
    round_reference,
)

NUMBERS = {"seed": 2**61 + 5, "step": 1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
STILL = {**NUMBERS, "lr": 0.0, "weight_decay": 0.0}


def step(weight, gradient, moments, scales, held=0.0, **numbers):
    one = torch.ones((), device=weight.device)
    adamw_8bit_(weight, gradient, moments, scales, one, one * held, **numbers)


def empty(like):
    """Codes and scales of moments that are zero."""
    moments = tuple(torch.full(like.shape, c, dtype=torch.uint8).to(like.device) for c in (127, 0))
    scales = tuple(torch.zeros(-(-like.numel() // 256), device=like.device) for _ in range(2))
    return moments, scales


@pytest.mark.parametrize("signed", [True, False])
def test_the_codes_are_those_of_bitsandbytes(signed):
    ours = code_values(signed=signed)
    theirs = create_dynamic_map(signed=signed).double()
    # Theirs are made in fp32, of boundaries that are rounded themselves.
    assert ((ours - theirs).abs() <= 2**-22 * theirs.abs()).all()


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_kept_and_every_number_gets_the_nearest(signed, device):
    """All codes, and numbers 1e-3 of a step to either side of the middle between two."""
    values = code_values(signed=signed)
    middles, steps = (values[1:] + values[:-1]) / 2, values[1:] - values[:-1]
    numbers = torch.cat([values, middles - 1e-3 * steps, middles + 1e-3 * steps]).float()
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 255)).view(-1, 255)
    numbers = torch.cat([numbers, torch.ones(len(numbers), 1)], 1).flatten().to(device)
    want, scales = quantize_reference(numbers, signed=signed)
    nearest = (numbers.double()[:, None] - values.to(device)).abs().argmin(1)
    if not signed:
        nearest = torch.where(numbers > 0, nearest.clamp(min=1), nearest)
    assert torch.equal(want.long(), nearest)
    # Without betas the moments are the gradient and its square.
    moments, both = empty(numbers)
    for beta in (0.0, 0.5):  # the second time they stay: decoded and encoded
        gradient = numbers if signed else numbers.sqrt()
        numbers = dequantize_reference(want, scales, signed=signed)
        step(torch.zeros_like(numbers), gradient, moments, both, **{
            **STILL, "beta1": beta, "beta2": beta,
        })  # fmt: skip
        assert torch.equal(moments[0 if signed else 1], want)


def test_the_kernel_gives_the_references_codes(device):
    """A thousand groups of numbers over ten decades: equal but for ties, one in 10,000 at most."""
    generator = torch.Generator().manual_seed(3)
    shape = (200, 256)
    size = 10 ** (torch.rand(shape, generator=generator) * -10)
    gradient = (torch.randn(shape, generator=generator) * size).flatten().to(device)
    moments, scales = empty(gradient)
    numbers = {**STILL, "beta1": 0.5, "beta2": 0.5}
    step(torch.zeros_like(gradient), gradient, moments, scales, **numbers)
    for number, values in enumerate((gradient / 2, gradient.square() / 2)):
        codes, scale = quantize_reference(values, signed=not number)
        assert torch.allclose(scales[number], scale, rtol=2**-22)
        differ = (codes.int() - moments[number].int()).abs()
        assert differ.max() <= 1
        assert (differ > 0).sum() <= 1e-4 * differ.numel()


def test_noise_is_philoxs(device):
    """Random123's known answer for a key and a counter of zeros; the kernel draws the same."""
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    assert noise_reference(8, 0).tolist() == halves
    weight = torch.full((3000,), 2.0, dtype=torch.bfloat16, device=device)
    none = torch.zeros(3000, device=device)
    step(weight, none, (none, none.clone()), None, **NUMBERS, lr=1.0, weight_decay=0.4995)
    exact = torch.full((3000,), 2.0) * torch.tensor(1 - 0.4995)
    want = round_reference(exact, noise_reference(3000, NUMBERS["seed"]))
    assert torch.equal(weight.cpu(), want)
    assert len(want.unique()) == 2


def test_where_held_nothing_changes(device):
    gradient = torch.full((300,), torch.nan, device=device)
    weight = torch.ones(300, dtype=torch.bfloat16, device=device)
    moments, scales = empty(gradient)
    kept = [each.clone() for each in (weight, *moments, *scales)]
    step(weight, gradient, moments, scales, 1.0, **NUMBERS, lr=1.0, weight_decay=0.1)
    for one, other in zip(kept, (weight, *moments, *scales), strict=True):
        assert torch.equal(one, other)


def test_a_second_moment_that_is_not_zero_does_not_become_zero(device):
    """A step divides by its root: at zero, the next one without a gradient would be huge."""
    gradient = torch.full((256,), 1e-6, device=device)
    gradient[0] = 1.0
    weight = torch.zeros(256, device=device)
    moments, scales = empty(gradient)
    numbers = {**NUMBERS, "lr": 1e-3, "weight_decay": 0.0}
    step(weight, gradient, moments, scales, **numbers)
    assert (dequantize_reference(moments[1], scales[1], signed=False) > 0).all()
    before = weight.clone()
    step(weight, torch.zeros_like(gradient), moments, scales, **{**numbers, "step": 2})
    assert (weight - before).abs().max() < 1e-2
