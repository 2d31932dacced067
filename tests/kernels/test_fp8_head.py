"""The loss out of an output layer in fp8, against fp64."""

import math

import pytest
import torch
from torch.nn import functional

from trainkit.kernels import linear_cross_entropy, linear_token_losses
from trainkit.kernels.contract import Draw
from trainkit.kernels.cross_entropy.function import LossOptions, cross_entropy_chunk
from trainkit.kernels.fp8.function import fp8_quantize, fp8_quantize_columns
from trainkit.kernels.fp8.reference import FP8
from trainkit.kernels.fp8.trained import Directions, quantize_weight
from trainkit.kernels.linear_cross_entropy.products import products_of

BF16 = torch.bfloat16
RMS_STEP = 2.0**-3 / math.sqrt(12)
VOCAB = {80: "rows a multiple of 128 bytes need more", 64: "logits lie without a gap"}


def drawn(device, vocab):
    draw = Draw.seeded(BF16, device, 0)
    hidden, weight = draw.normal(60, 32), draw.normal(vocab, 32)
    labels = draw.integers(vocab, 60)
    labels[::3] = -100
    return hidden, weight, labels, draw.normal(vocab)


@pytest.mark.sample("True-*0-64", "False-*0-80", "True-*1-64", "False-*2-80")
@pytest.mark.parametrize("vocab", VOCAB)
@pytest.mark.parametrize("directions", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("each_token", [False, True])
def test_losses_and_gradients_are_as_far_off_as_rounding_explains(
    directions, vocab, each_token, device
):
    *tensors, labels, bias = drawn(device, vocab)
    in_fp8 = Directions(*directions)
    results = []
    for options in ({"in_fp8": in_fp8, "chunk_tokens": 48}, {}):
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
    # Logits are off by sqrt(2) roundings of each term, sqrt(32) of them; 40 independent losses.
    noise = math.sqrt(2) * RMS_STEP * math.sqrt(32) if directions[0] else 2.0**-8 * math.sqrt(32)
    assert abs(loss.double() - wanted) < 4 * noise * math.sqrt(40) + 40 * noise**2
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


OPTIONS = {
    "plain": {},
    "all that is added": {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("vocab", [48, 4112])
def test_gradients_of_logits_are_quantised_where_they_are_made(options, vocab, device):
    draw = Draw.seeded(BF16, device, 0)
    plain, labels = draw.normal(6, vocab, scale=3.0), draw.integers(vocab, 6)
    labels[1] = -100
    plain[2, labels[2]] = 40.0  # sure of it: its gradients are tiny
    plain[3, 7], plain[4, labels[4]] = 30.0, float("nan")
    codes = torch.empty(6, vocab, dtype=FP8, device=device), torch.empty(6, 1, device=device)
    alone = tuple(each.clone() for each in codes)
    both = plain.clone()
    losses = torch.empty(6, device=device)
    options = LossOptions(**options)
    cross_entropy_chunk(both, labels, losses, 1.0, options, codes_out=codes)
    untouched = plain.clone()
    cross_entropy_chunk(untouched, labels, losses, 1.0, options, want_grad=False, codes_out=alone)
    assert torch.equal(untouched.nan_to_num(), plain.nan_to_num())  # 16 bits only where asked for
    for one, other in zip(codes, alone, strict=True):
        assert torch.equal(one.float().nan_to_num(7), other.float().nan_to_num(7))
    made, scales = codes
    assert scales[4].isnan()
    assert not made[1].float().any()
    assert not both[1].any()
    kept = [0, 1, 2, 3, 5]
    wide, found = both[kept].float(), (made.float() * scales)[kept]
    # A sixteenth of each number or half the smallest code; both[...] itself is rounded to bf16.
    assert (
        (found - wide).abs() <= wide.abs() * (2.0**-4 + 2.0**-8) + scales[kept] * 2.0**-10
    ).all()
    if not options:  # the largest number is known exactly: no range is given away
        assert torch.equal(scales[kept], fp8_quantize(both[kept])[1])


def test_columns_of_known_scales_are_the_same_numbers(device):
    weight = Draw.seeded(BF16, device, 0).normal(48, 32)
    weight[::5] *= 2.0**-6
    codes, scales = quantize_weight(weight)
    most = scales.amax().expand(32, 1).contiguous()
    turned, same = fp8_quantize_columns(codes, scales.flatten(), most)
    assert torch.equal(same, most)
    assert turned.shape == (32, 48)
    found, wanted = (turned.float() * most).t(), codes.float() * scales
    small = wanted.abs() < most[0] * 2.0**-6  # these lose bits behind the smallest code
    assert torch.equal(found.masked_fill(small, 0), wanted.masked_fill(small, 0))
    assert ((found - wanted).abs() <= most[0] * 2.0**-10).all()
    assert small.any()


def test_chunks_over_a_frozen_weight_only_fill_a_gpu(device):
    weight = torch.zeros(152064, 3584, dtype=BF16, device="meta")
    in_fp8 = Directions(True, True, lambda _: (torch.empty(0), torch.empty(0)))
    products = products_of(weight, None, BF16, in_fp8)
    assert products.chunk_tokens(trained=False) == 512
    assert products.chunk_tokens(trained=True) == 3840
    plain = products_of(weight, None, BF16, None)
    assert plain.chunk_tokens(trained=False) == plain.chunk_tokens(trained=True) == 5632
