"""A feed-forward block in fp8: its gate's codes, and all of its products."""

import math

import pytest
import torch

from trainkit import kernels
from trainkit.kernels.contract import Draw
from trainkit.kernels.fp8.feed_forward import fp8_feed_forward
from trainkit.kernels.fp8.function import (
    fp8_gate,
    fp8_gate_backward,
    fp8_quantize,
    fp8_quantize_both,
    fp8_quantize_columns,
    fp8_quantize_joint,
)
from trainkit.kernels.fp8.trained import Directions

BF16 = torch.bfloat16
WIDTHS = [32, 123, 4864, 18944]
RMS_STEP = 2.0**-3 / math.sqrt(12)


def bits(codes):
    return codes.view(torch.uint8)


def same_but_for_ties(found, wanted):
    """Another exponential moves a number over the middle between two codes now and then."""
    apart = (found.float() - wanted.float()).abs() > 0.13 * wanted.float().abs() + 2.0**-9
    return not apart.any() and (bits(found) != bits(wanted)).double().mean() < 2e-3


def gated(tanh_gelu):
    return kernels.geglu_tanh if tanh_gelu else kernels.swiglu


@pytest.mark.parametrize("tanh_gelu", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_gates_rows_are_those_of_its_result(width, tanh_gelu, device):
    draw = Draw.seeded(BF16, device, 0)
    gate, up = draw.normal(5, 2 * width, scale=2.0).chunk(2, dim=1)
    up[3, 7] = torch.inf
    up[4] = 0
    found = fp8_gate(gate, up, tanh_gelu=tanh_gelu)
    wanted = fp8_quantize(gated(tanh_gelu)(gate, up), keep_largest=True)
    assert same_but_for_ties(found[0], wanted[0])
    assert torch.allclose(found[1], wanted[1], rtol=2.0**-7, equal_nan=True)


@pytest.mark.parametrize("tanh_gelu", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_what_comes_back_is_quantised_as_it_is(width, tanh_gelu, device):
    draw = Draw.seeded(BF16, device, 0)
    gate, up, dh = (draw.normal(4, width) for _ in range(3))
    dh[2, 5] = torch.nan
    dh[1] *= 2.0**-20
    factors = [draw.normal(width, 1).float().abs().log2().round().exp2() for _ in range(2)]
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    h = gated(tanh_gelu)(*leaves)
    gradients = torch.autograd.grad(h, leaves, dh)
    codes, scales = fp8_gate(gate, up, tanh_gelu=tanh_gelu)
    found = fp8_gate_backward(gate, up, dh, factors, scales, tanh_gelu=tanh_gelu)
    wanted = fp8_quantize_joint(gradients, [factor.flatten() for factor in factors])
    fine = [0, 1, 3]
    assert torch.equal(found[1].nan_to_num(), wanted[1].nan_to_num())
    assert found[1].isnan().flatten().tolist() == [False, False, True, False]
    assert same_but_for_ties(found[0][fine], wanted[0][fine])
    assert same_but_for_ties(found[2], codes)


@pytest.mark.parametrize("num_rows", [16, 33, 0])
def test_columns_are_those_of_both_directions(num_rows, device):
    draw = Draw.seeded(BF16, device, 0)
    x, factor = draw.normal(num_rows, 80), draw.normal(num_rows).float().exp()
    found = fp8_quantize_columns(x, factor)
    wanted = fp8_quantize_both([x], [torch.ones(80, device=device)], factor)[2:]
    assert torch.equal(bits(found[0]), bits(wanted[0]))
    assert torch.equal(found[1], wanted[1])
    codes, scales = fp8_quantize(x)
    again = fp8_quantize_columns(codes, scales.flatten() * factor)
    wanted = fp8_quantize_columns(codes.float() * scales, factor)
    assert torch.equal(bits(again[0]), bits(wanted[0]))
    assert torch.equal(again[1], wanted[1])


def block(device, draw, hidden=48, width=96, num_rows=40):
    x = draw.normal(num_rows, hidden)
    weights = [draw.normal(width, hidden), draw.normal(width, hidden), draw.normal(hidden, width)]
    return x, [weight / weight.shape[1] ** 0.5 for weight in weights], draw.normal(num_rows, hidden)


def exact(x, weights, dy, tanh_gelu=False):
    leaves = [each.double().requires_grad_() for each in (x, *weights)]
    activate = torch.nn.functional.gelu if tanh_gelu else torch.nn.functional.silu
    options = {"approximate": "tanh"} if tanh_gelu else {}
    gate, up = leaves[0] @ leaves[1].t(), leaves[0] @ leaves[2].t()
    y = (activate(gate, **options) * up) @ leaves[3].t()
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.double())]


def run(x, weights, dy, directions, **options):
    leaves = [each.clone().requires_grad_() for each in (x, *weights)]
    y = fp8_feed_forward(leaves[0], leaves[1:], None, directions, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.sample("False-forward[02]", "True-forward[13]")
@pytest.mark.parametrize("forward", [(1, 1, 1), (0, 0, 0), (1, 0, 1), (1, 1, 0)])
@pytest.mark.parametrize("tanh_gelu", [False, True])
def test_the_block_is_as_far_from_fp64_as_rounding_explains(forward, tanh_gelu, device):
    x, weights, dy = block(device, Draw.seeded(BF16, device, 0), num_rows=37)
    directions = [Directions(bool(each), True) for each in forward]
    found = run(x, weights, dy, directions, tanh_gelu=tanh_gelu)
    # Roundings on the way to each result add up as squares. To y: x, W (gate and up), h, W. Back to
    # x: dy, W, the gate's values of four, the gradients, W; x itself twice for its weights' dW.
    for place, (one, other) in enumerate(zip(found, exact(x, weights, dy, tanh_gelu), strict=True)):
        roundings = 6 if place == 0 else 10
        limit = math.sqrt(roundings) * RMS_STEP
        assert ((one.double() - other).norm() / other.norm()).item() < limit, place


def test_a_row_of_zeros_learns(device):
    """Weights that begin at zero have a gradient, and one as good as any other's."""
    x, weights, dy = block(device, Draw.seeded(BF16, device, 0))
    weights[1][3] = 0  # of up: the gradient through the gate is what is left
    weights[1][4] *= 2.0**-12
    found = run(x, weights, dy, [Directions(True, True)] * 3)
    wanted = exact(x, weights, dy)
    errors = (found[3].double() - wanted[3]).norm(dim=1) / wanted[3].norm(dim=1)
    assert errors.max() < math.sqrt(10) * RMS_STEP * 1.5  # of one row, with the luck of the worst
