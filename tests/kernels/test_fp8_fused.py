"""e4m3 made where numbers are made: the bits of quantising them afterwards."""

import math

import pytest
import torch

from trainkit import kernels
from trainkit.kernels.contract import Draw
from trainkit.kernels.fp8.function import fp8_quantize, fp8_quantize_both, fp8_quantize_joint
from trainkit.kernels.fp8.linear import Fp8Gradient, Fp8Weight, SharedInput, carry_rows, take_rows
from trainkit.kernels.launch import runs_kernel
from trainkit.kernels.lora import gate, mlp, products
from trainkit.kernels.lora.mlp import lora_mlp
from trainkit.kernels.lora.products import Projection
from trainkit.models.fp8.base import PRODUCT_LIMIT

BF16 = torch.bfloat16


def same(found, wanted):
    return all(
        torch.equal(one.view(torch.uint8), two.view(torch.uint8))
        for one, two in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("shape", [(5, 123), (2, 7, 896), (3, 3584), (2, 9000)])
@pytest.mark.parametrize("add", [False, True], ids=["norm", "add and norm"])
@pytest.mark.parametrize("cast", ["llama", "gemma"])
def test_norms_give_the_codes_of_their_result(shape, add, cast, device, kernels_run):
    draw = Draw.seeded(BF16, device, 0)
    x, weight = draw.normal(*shape), draw.normal(shape[-1])
    x.view(-1, shape[-1])[0] *= 2.0**20
    x.view(-1, shape[-1])[-1, 3] = float("inf")

    def normed(**options):
        if add:
            return kernels.add_rms_norm(x, x * 0.5, weight, cast=cast, **options)[0]
        return kernels.rms_norm(x, weight, cast=cast, **options)

    y = normed(fp8_rows=True)
    assert torch.equal(torch.nan_to_num(y), torch.nan_to_num(normed()))
    codes, scales = take_rows(y)
    wanted = fp8_quantize(y, keep_largest=True)
    assert torch.equal(codes.view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(scales[:-1], wanted[1][:-1])
    assert scales[-1].isnan().all()
    assert wanted[1][-1].isnan().all()


def test_rows_are_carried_to_one_reader_and_not_past_a_change(device):
    x = Draw.seeded(BF16, device, 0).normal(4, 32)
    rows = fp8_quantize(x)
    carry_rows(x, *rows)
    assert SharedInput(x, take_rows(x)).quantized()[0] is rows[0]
    assert take_rows(x) is None
    carry_rows(x, *rows)
    x.mul_(2)
    assert take_rows(x) is None
    with torch.inference_mode():  # whose tensors do not count their changes
        x = x * 2
        carry_rows(x, *rows)
        assert take_rows(x) is None


def test_gradients_pass_through_a_norm_that_also_quantises(device, kernels_run):
    results = []
    for fp8_rows in (False, True):
        draw = Draw.seeded(BF16, device, 0)
        x, residual, weight = (draw.normal(6, 64).requires_grad_() for _ in range(3))
        one = kernels.rms_norm(x, weight[0], fp8_rows=fp8_rows)
        two, total = kernels.add_rms_norm(one, residual, weight[1], fp8_rows=fp8_rows)
        results.append(torch.autograd.grad((two * total).sum(), (x, residual, weight)))
    assert all(map(torch.equal, *results))


def test_numbers_in_full_precision_carry_no_codes(device, kernels_run):
    x = Draw.seeded(torch.float32, device, 0).normal(4, 32)
    assert take_rows(kernels.rms_norm(x, x[0], fp8_rows=True)) is None


@pytest.mark.parametrize(
    ("num_rows", "width", "lora_rank"), [(33, 80, 4), (7, 144, 0), (130, 272, 8), (0, 64, 4)]
)
def test_codes_of_what_comes_back_through_the_gate(num_rows, width, lora_rank, device, kernels_run):
    """The codes of dgate and dup side by side, and their products with the adapters."""
    draw = Draw.seeded(BF16, device, 0)
    stack = draw.normal(num_rows, 2 * lora_rank) if lora_rank else None
    xa = (None, None) if stack is None else (stack[:, :lora_rank], stack[:, lora_rank:])
    b = [draw.normal(width, lora_rank) if lora_rank else None for _ in range(2)]
    a = draw.normal(lora_rank, width) if lora_rank else None
    ops = gate.GateOperands(
        draw.normal(num_rows, width), draw.normal(num_rows, width), *xa, *b, a, False
    )
    p = draw.normal(num_rows, lora_rank) if lora_rank else None
    factors = tuple(draw.normal(width).float().abs().log2().round().exp2() for _ in range(2))
    dh = draw.normal(num_rows, width)
    pair = torch.full((2, num_rows, width), torch.nan, dtype=BF16, device=device)
    pair[1] = dh  # dup replaces dh
    plain = pair.clone()
    grads = gate.gate_backward(ops, pair[1], p, *pair, (1.0, 1.0), factors)
    gate.gate_backward(ops, plain[1], p, *plain, (1.0, 1.0))
    assert torch.equal(pair, plain)
    codes, scales, products_ = gate.codes_of_gradients(
        pair, factors, grads.largest, None if lora_rank == 0 else tuple(b)
    )
    assert same((codes, scales), fp8_quantize_joint(list(pair), list(factors)))
    if lora_rank == 0:
        assert products_ is None
        return
    exact = torch.cat([pair[i].double() @ b[i].double() for i in range(2)], dim=1)
    assert (products_.double() - exact).norm() <= 2.0**-8 * exact.norm()  # rounded once, to bf16


def test_a_block_with_gradients_in_fp8_quantises_them_behind_the_gate(monkeypatch, device):
    """Of gate and up one may be kept in fp8 and the other in 16 bits: their gradients are one
    product of codes all the same, and those come from the gate's kernels."""
    draw, taken, real = Draw.seeded(BF16, device, 0), [], mlp.codes_of_gradients
    monkeypatch.setattr(
        mlp, "codes_of_gradients", lambda *given: (taken.append(1), real(*given))[1]
    )
    shapes = [(96, 64), (96, 64), (64, 96)]
    weights = [draw.normal(n, k) / 8 for n, k in shapes]
    factors = [(draw.normal(4, k) / 8, draw.normal(n, 4) / 8) for n, k in shapes]
    x, dy = draw.normal(33, 64), draw.normal(33, 64)

    def results(unpack, *, kept=False):
        storages, unpacks = list(weights), [unpack] * 3
        if kept:
            codes, scales = fp8_quantize(weights[0])
            storages[0], unpacks[0] = codes.view(torch.uint8), Fp8Weight(scales)
        leaves = [each.clone().requires_grad_() for pair in factors for each in pair]
        pairs = zip(leaves[::2], leaves[1::2], strict=True)
        layers = [
            Projection(storage, None, a, b, 2.0, how)
            for storage, (a, b), how in zip(storages, pairs, unpacks, strict=True)
        ]
        rows = x.clone().requires_grad_()
        y = lora_mlp(rows, *layers)
        y.backward(dy)
        return [y, rows.grad, *(leaf.grad for leaf in leaves)]

    plain = results(None)
    assert not taken
    for kept in (False, True):
        found = results(Fp8Gradient(), kept=kept)
        errors = [
            ((one - two).double().norm() / two.double().norm()).item()
            for one, two in zip(found, plain, strict=True)
        ]
        assert kept or errors[0] == 0
        # Up to three products behind each other, whose errors are independent.
        assert 0.005 < max(errors) < math.sqrt(3) * PRODUCT_LIMIT
    assert len(taken) == (2 if runs_kernel(x) else 0)


@pytest.mark.parametrize("lora_rank", [1, 16, 48])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_product_is_added_in_place(lora_rank, dtype, device):
    draw = Draw.seeded(dtype, device, 0)
    out = draw.normal(70, 400)[:, :300]
    p = draw.normal(70, 64)[:, :lora_rank]
    a = draw.normal(300, lora_rank)
    for factor in (a.t(), a.t().contiguous()):
        exact = out.double() + p.double() @ factor.double()
        found = products.add_product(out.clone(), p, factor)
        # One rounding of the result; in fp32, of products in tf32 at the worst.
        limit = torch.finfo(dtype).eps if dtype == BF16 else 2.0**-10
        assert (found.double() - exact).norm() <= limit * exact.norm()
    assert products.add_product(out[:0], p[:0], a.t()).shape == (0, 300)


@pytest.mark.parametrize("num_rows", [16, 33, 0])
def test_both_directions_are_those_of_each_alone(num_rows, device):
    draw = Draw.seeded(BF16, device, 0)
    parts = [draw.normal(num_rows, 400)[:, :336], draw.normal(num_rows, 16)]
    if num_rows:
        parts[0][3, 5] = torch.inf
        parts[1][:, 2] = 0
    columns = [draw.normal(part.shape[1]).float().exp() for part in parts]
    rows = draw.normal(num_rows).float().exp()
    codes, scales, turned, own = fp8_quantize_both(parts, columns, rows)
    wanted = fp8_quantize_joint(parts, columns)
    assert torch.equal(codes.view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(scales.nan_to_num(), wanted[1].nan_to_num())
    assert turned.shape == (352, -(-num_rows // 16) * 16)
    assert not turned[:, num_rows:].float().any()
    if num_rows:
        wanted = fp8_quantize(torch.cat(parts, 1).t(), rows)
        assert torch.equal(
            turned[:, :num_rows].contiguous().view(torch.uint8), wanted[0].view(torch.uint8)
        )
        assert torch.equal(own.nan_to_num(), wanted[1].nan_to_num())
        assert own.isnan().sum() == 1
