"""e4m3: the same bits everywhere, errors no larger than the format's, and nothing hidden."""

import math

import pytest
import torch
from op_cases.table import OPS

from trainkit.kernels.contract import Draw
from trainkit.kernels.fp8.function import (
    fits_fp8,
    fp8_matmul,
    fp8_quantize,
    fp8_quantize_joint,
    fp8_transpose,
    read_codes,
)
from trainkit.kernels.fp8.reference import FP8, fp8_quantize_reference

HALF_STEP = 2.0**-4  # of a number with 3 bits behind the point
RMS_STEP = 2.0**-3 / math.sqrt(12)  # of an error spread evenly over a step, at a mantissa of 1


@pytest.mark.parametrize(
    "case",
    [case for case in OPS["fp8_quantize"].cases if not case.large],
    ids=lambda case: case.label,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_codes_and_scales_are_the_references_bits(case, dtype, device):
    tensors = case.inputs(Draw.seeded(dtype, device, 0))
    ours, want = fp8_quantize(**tensors), fp8_quantize_reference(**tensors)
    assert torch.equal(ours[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(ours[1], want[1])


def test_every_bf16_number_is_rounded_to_the_nearest_code(device):
    """All of one exponent range, against the exact list of e4m3's numbers."""
    bits = torch.arange(0x3C00, 0x43E1, dtype=torch.int32).to(torch.int16)  # 2^-7 to 448
    x = torch.cat([bits.view(torch.bfloat16), torch.tensor([448.0]).bfloat16()])[None].to(device)
    codes, scales = fp8_quantize(torch.cat([x, -x]))
    assert (scales == 1).all()
    numbers = torch.arange(0, 127, dtype=torch.uint8).view(FP8).double()
    error = (codes.double()[0].cpu() - x[0].double().cpu()).abs()
    nearest = (numbers[None] - x[0].double().cpu()[:, None]).abs().amin(1)
    assert torch.equal(error, nearest)
    assert torch.equal(codes[0].float(), -codes[1].float())


@pytest.mark.parametrize("size", [1e-28, 1e-20, 1e-4, 1.0, 447.0, 449.0, 1e4, 1e30, 3e38])
def test_error_is_the_formats_whatever_the_size(size, device):
    x = Draw.seeded(torch.float32, device, 0).normal(8, 512)
    x = x / x.abs().max() * size
    codes, scales = fp8_quantize(x)
    assert codes.float().abs().max() <= 448
    assert torch.equal(scales.log2(), scales.log2().round())
    back = codes.double() * scales.double()
    error = (back - x.double()).norm() / x.double().norm()
    assert error < RMS_STEP
    kept = x.abs() > x.abs().amax(1, keepdim=True) * 2.0**-13  # what is not below the range
    assert ((back - x.double()).abs() <= HALF_STEP * x.double().abs())[kept].all()
    assert torch.equal(back.bfloat16().double(), back)  # the code's number needs no rounding


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 5000])
def test_a_number_that_is_none_spoils_its_row_and_no_other(bad, where, device):
    x = Draw.seeded(torch.bfloat16, device, 0).normal(4, 5008)
    clean, _ = fp8_quantize(x.clone())
    x[2, where] = bad
    codes, scales = fp8_quantize(x)
    assert scales.isnan().flatten().tolist() == [False, False, True, False]
    assert torch.equal(codes[[0, 1, 3]].float(), clean[[0, 1, 3]].float())
    weight = fp8_quantize(Draw.seeded(torch.bfloat16, device, 1).normal(16, 5008))
    assert fp8_matmul(codes, scales, *weight).isnan().any(1).tolist() == [False, False, True, False]


def test_joint_codes_are_those_of_the_matrices_side_by_side(device):
    draw = Draw.seeded(torch.bfloat16, device, 0)
    parts = [draw.normal(5, 16), draw.normal(5, 64)[:, 32:], draw.normal(5, 48), draw.normal(5, 16)]
    factors = [draw.normal(part.shape[1]).float().exp() for part in parts]
    for number in range(1, 5):
        codes, scales = fp8_quantize_joint(parts[:number], factors[:number])
        want = fp8_quantize(torch.cat(parts[:number], 1), torch.cat(factors[:number]))
        assert torch.equal(codes.float(), want[0].float())
        assert torch.equal(scales, want[1])


def test_product_is_within_the_formats_error(device):
    """Two operands, independent errors: their squares add."""
    draw = Draw.seeded(torch.bfloat16, device, 0)
    x, weight = draw.normal(64, 256), draw.normal(96, 256)
    exact = x.double() @ weight.double().t()
    found = fp8_matmul(*fp8_quantize(x), *fp8_quantize(weight))
    error = ((found.double() - exact).norm() / exact.norm()).item()
    assert 0.02 < error < math.sqrt(2) * RMS_STEP


def test_transposed_codes_give_the_product_with_the_weight_itself(device):
    """dy W from the forward's codes: W's scales go into dy ("fold")."""
    draw = Draw.seeded(torch.bfloat16, device, 0)
    weights = [draw.normal(n, 64) * scale for n, scale in ((32, 1.0), (16, 30.0))]
    dys = [draw.normal(8, 32), draw.normal(8, 16)]
    stored = [fp8_quantize(weight) for weight in weights]
    codes, scales = fp8_quantize_joint(dys, [scale for _, scale in stored])
    turned = fp8_transpose([code for code, _ in stored])
    found = fp8_matmul(codes, scales, turned, torch.ones(64, 1, device=device))
    same = sum(
        dy.double() @ (code.double() * scale.double())
        for dy, (code, scale) in zip(dys, stored, strict=True)
    )
    assert (found.double() - same).norm() / same.norm() < RMS_STEP  # dy's rounding alone


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_codes_are_read_as_they_stand(dtype, device):
    """Every code but NaN, at scales from small to large; exact where the dtype holds them."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(13, 3)
    codes[codes & 127 == 127] = 0
    scales = 2.0 ** torch.arange(-6, 7, device=device)[:, None]
    found = read_codes(codes, scales, dtype)
    wanted = codes.cpu().view(torch.float8_e4m3fn).double() * scales.cpu().double()
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=0)
    numbers, scales = codes.view(torch.int8), scales * 1.7  # which bf16 and fp16 round, once
    found = read_codes(numbers, scales, dtype)
    wanted = numbers.cpu().to(torch.promote_types(dtype, torch.float32)) * scales.cpu()
    assert torch.equal(found.cpu(), wanted.to(dtype))


def test_shapes_that_the_tensor_cores_take():
    assert fits_fp8(32, 48)
    assert not fits_fp8(40, 48)
    assert not fits_fp8(48, 8)
