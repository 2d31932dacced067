"""Layers that share their input, on a GPU in bf16: no less exact than one by one."""

import pytest
import torch
from torch import nn

from trainkit.models.shared_input import apply_linears

pytestmark = pytest.mark.gpu


def gradients(call, layers, x, incoming):
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    torch.autograd.backward(call(x, layers), incoming)
    return [x.grad, *(each.grad for layer in layers for each in layer.parameters())]


@pytest.mark.parametrize("sizes", [(896, 128, 128), (1024, 1024)])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_gradients_are_no_less_exact(sizes, mean):
    """With a mean the column sums grow with the rows, and rounded partial sums would show."""
    torch.manual_seed(0)
    tokens, hidden = 20000, 896
    layers = [nn.Linear(hidden, size, device="cuda", dtype=torch.bfloat16) for size in sizes]
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    incoming = [(torch.randn(tokens, n, device="cuda") + mean).bfloat16() for n in sizes]
    plain = gradients(lambda x, layers: tuple(each(x) for each in layers), layers, x, incoming)
    ours = gradients(apply_linears, layers, x, incoming)
    wide = [
        nn.Linear(hidden, size, device="cuda", dtype=torch.float64).requires_grad_()
        for size in sizes
    ]
    for layer, exact in zip(layers, wide, strict=True):
        exact.load_state_dict({k: v.double() for k, v in layer.state_dict().items()})
    truth = gradients(apply_linears, wide, x.double(), [each.double() for each in incoming])
    for got, theirs, wanted in zip(ours, plain, truth, strict=True):
        error, allowed = ((each.double() - wanted).norm() for each in (got, theirs))
        # Products pick other orders of summation; 2^-10 is half of one rounding to bf16.
        assert error <= 1.05 * allowed + 2**-10 * wanted.norm()
