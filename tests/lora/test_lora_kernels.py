"""The adapters' functions: fp64 truth, gradcheck, and the habits every op must have."""

import os
from pathlib import Path

import pytest
import torch
from commands import python
from lora.lora_kernel_cases import PROBLEMS, Problem, compare, too_far
from ranks import run_ranks

from trainkit.kernels.lora.products import Projection

every_problem = pytest.mark.parametrize("name", PROBLEMS)
KERNELS = ["columns_kernel", "rows_kernel"]
GATES = ["gate_backward_kernel", "gate_forward_kernel"]


@every_problem
def test_gradcheck(name):
    problem = Problem(name, tokens=(3,))
    x, projections = problem.tensors(torch.float64, torch.float64)
    leaves = [x, *(t for p in projections if p for t in (p.lora_a, p.lora_b) if t is not None)]

    def call(*_):
        return problem.function(x, *projections, **problem.arguments)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@every_problem
def test_equals_the_reference_in_fp64(name):
    ours, _ = compare(name, "float64")
    assert max(ours) < 2e-15  # a handful of roundings of 1e-16 each


@every_problem
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_further_from_the_truth_than_plain_torch(name, dtype):
    assert not too_far(name, dtype)


@pytest.mark.sample("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_under_the_interpreter(dtype):
    (answer,) = run_ranks(
        "lora.lora_kernel_cases:interpreted", world_size=1, interpret=True, dtype=dtype
    )
    expected = KERNELS + [f"{name} of pointers" for name in GATES]
    if dtype == "bfloat16":
        expected += ["cast_kernel", *(f"{name} of tiles" for name in GATES)]
    assert answer["ran"] == sorted(expected)
    assert not answer["bad"]


def test_edges_under_the_interpreter():
    (bad,) = run_ranks("lora.lora_kernel_cases:interpreted_edges", world_size=1, interpret=True)
    assert not bad


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@every_problem
def test_the_kernels_on_a_gpu(name, dtype):
    assert not too_far(name, dtype, "cuda", tokens=(3, 517))


def test_an_output_that_nobody_uses_gets_no_gradient():
    problem = Problem("qkv")
    x, projections = problem.tensors(torch.float64, torch.float64)
    query, _, _ = problem.function(x, *projections)
    query.sum().backward()
    assert projections[0].lora_a.grad is not None
    assert projections[1].lora_a.grad is None
    reference_x, reference = problem.tensors(torch.float64, torch.float64)
    problem.reference(reference_x, *reference)[0].sum().backward()
    torch.testing.assert_close(x.grad, reference_x.grad)


def test_the_weight_is_unpacked_once_in_each_direction():
    calls = []

    def unpack(storage, dtype):
        calls.append(dtype)
        return storage.to(dtype).view(8, 4)

    x = torch.randn(3, 4, requires_grad=True)
    packed = Projection(
        torch.randn(32, 1),
        None,
        torch.randn(2, 4, requires_grad=True),
        torch.randn(8, 2, requires_grad=True),
        1.0,
        unpack,
    )
    from trainkit.kernels.lora.function import lora_linear

    lora_linear(x, packed).sum().backward()
    assert calls == [torch.float32] * 2


def test_an_unknown_activation_is_refused():
    problem = Problem("mlp")
    x, projections = problem.tensors(torch.float32, torch.float32)
    with pytest.raises(ValueError, match="activation"):
        problem.function(x, *projections, activation="relu")


def test_the_kernels_compile_for_gpus_that_are_not_here():
    script = Path(__file__).with_name("aot_lora_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    said = python(script, env=environment)
    for name in ("cast_kernel", *KERNELS, *GATES):
        assert name in said
