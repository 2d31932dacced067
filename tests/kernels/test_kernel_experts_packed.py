"""Stacks kept as codes: the same bits as over the weights that they stand for, and no gradient."""

import weakref

import pytest
import torch
from op_cases.experts import MOE_MLP

from trainkit.kernels import launch
from trainkit.kernels.contract import Draw
from trainkit.kernels.experts.function import Packed, moe_mlp

CASES = [case for case in MOE_MLP.cases if case.label in ("top 1", "biased with adapters")]


@pytest.mark.sample("top 1-dtype0", "biased*-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_codes_are_read_in_both_directions(case, dtype, device):
    tensors = case.inputs(Draw.seeded(torch.bfloat16, device, 0))
    reads, made = [], []

    def unpack(codes, wanted):
        reads.append(wanted)
        if launch.runs_kernel(tensors["x"]):  # one stack at a time
            assert not any(each() is not None for each in made)
        weights = codes.view(torch.bfloat16).to(wanted, copy=True)
        made.append(weakref.ref(weights))
        return weights

    results = []
    for packs in (False, True):
        given = {
            name: each.detach().to(dtype) if each.is_floating_point() else each
            for name, each in tensors.items()
        }
        leaves = [given[name].requires_grad_() for name in case.grads]
        for name in ("gate_up", "down") if packs else ():
            codes = tensors[name].contiguous().view(torch.int16).view(torch.bfloat16)
            given[name] = Packed(codes, tuple(tensors[name].shape), unpack)
        y = moe_mlp(**given, **case.options)
        forward = len(reads)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    assert set(reads) == {dtype}
    assert forward == 2
    for plain, packed in zip(*results, strict=True):
        assert torch.equal(plain, packed)
