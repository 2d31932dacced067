"""The loss out of an output layer in fp8, against fp64."""

import math

import pytest
import torch
from torch.nn import functional

from trainkit.kernels import linear_cross_entropy, linear_token_losses
from trainkit.kernels.contract import Draw
from trainkit.kernels.fp8.trained import Directions

BF16 = torch.bfloat16
RMS_STEP = 2.0**-3 / math.sqrt(12)
VOCAB = {80: "rows a multiple of 128 bytes need more", 64: "logits lie without a gap"}


def drawn(device, vocab):
    draw = Draw.seeded(BF16, device, 0)
    hidden, weight = draw.normal(300, 32), draw.normal(vocab, 32)
    labels = draw.integers(vocab, 300)
    labels[::3] = -100
    return hidden, weight, labels, draw.normal(vocab)


@pytest.mark.parametrize("vocab", VOCAB)
@pytest.mark.parametrize("directions", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("each_token", [False, True])
def test_losses_and_gradients_are_as_far_off_as_rounding_explains(
    directions, vocab, each_token, device
):
    *tensors, labels, bias = drawn(device, vocab)
    in_fp8 = Directions(*directions)
    results = []
    for options in ({"in_fp8": in_fp8, "chunk_tokens": 256}, {}):
        leaves = [each.clone().requires_grad_() for each in (*tensors, bias)]
        if options:
            op = linear_token_losses if each_token else linear_cross_entropy
            loss = op(leaves[0], leaves[1], labels, bias=leaves[2], **options)
            loss = loss.sum() if each_token else loss * (labels >= 0).sum()
        else:
            leaves = [each.detach().double().requires_grad_() for each in leaves]
            logits = leaves[0] @ leaves[1].t() + leaves[2]
            loss = functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    (loss, *found), (wanted, *exact) = results
    # Logits are off by sqrt(2) roundings of each term, sqrt(32) of them; 200 independent losses.
    noise = math.sqrt(2) * RMS_STEP * math.sqrt(32) if directions[0] else 2.0**-8 * math.sqrt(32)
    assert abs(loss.double() - wanted) < 4 * noise * math.sqrt(200) + 200 * noise**2
    errors = [
        ((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)
    ]
    limit = 2 * noise + math.sqrt(2) * RMS_STEP * directions[1]
    assert all(error < limit for error in errors), errors
    if directions == (True, True):  # it does run in fp8
        plain = linear_cross_entropy(*tensors, labels, bias=bias)
        assert linear_cross_entropy(*tensors, labels, bias=bias, in_fp8=in_fp8) != plain


def test_backward_products_alone_leave_the_loss_and_the_weight_alone(device):
    hidden, weight, labels, _ = drawn(device, 64)
    results = []
    for in_fp8 in (None, Directions(False, True)):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        loss = linear_cross_entropy(*leaves, labels, in_fp8=in_fp8)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    plain, found = results
    assert torch.equal(plain[0], found[0])
    assert not torch.equal(plain[1], found[1])
    assert torch.equal(plain[2], found[2])
