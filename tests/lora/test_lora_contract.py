"""What every op promises (`trainkit/kernels/contract.py`), for the adapters' functions.

They are not in the registry because they do not take tensors: their operands are layers, whose
weights are frozen, whose factors have a dtype of their own, and which may be absent. Accuracy,
gradcheck and the interpreter are in `test_lora_kernels.py`.
"""

import copy

import pytest
import torch
from lora.lora_kernel_cases import PROBLEMS, H, Problem, errors, results
from torch.utils.checkpoint import checkpoint

every_problem = pytest.mark.parametrize("name", PROBLEMS)
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def leaves_of(x, projections):
    return [x, *(t for p in projections if p for t in (p.lora_a, p.lora_b) if t is not None)]


def call(problem, x, projections):
    out = problem.function(x, *projections, **problem.arguments)
    return out if isinstance(out, tuple) else (out,)


def incoming(outputs):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in outputs]


def gradients(problem, x, projections, *, wanted=None):
    outputs = call(problem, x, projections)
    wanted = leaves_of(x, projections) if wanted is None else wanted
    return [*outputs, *torch.autograd.grad(outputs, wanted, incoming(outputs))]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@every_problem
def test_nothing_is_mutated(name, device):
    problem = Problem(name)
    x, projections = problem.tensors(BF16, FP32, device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outputs = call(problem, x, projections)
    grads = incoming(outputs)
    frozen = [t for p in projections if p for t in (p.weight, p.bias) if t is not None]
    watched = [*leaves_of(x, projections), *frozen, *grads, *kept, *outputs]
    before = [(copy.deepcopy(tensor.detach()), tensor._version) for tensor in watched]
    torch.autograd.backward(outputs, grads)
    assert kept
    for tensor, (values, version) in zip(watched, before, strict=True):
        # A stand-in of no memory carries dy back; its values are never read.
        assert torch.equal(tensor, values) or 0 in tensor.stride()
        assert tensor._version == version


@every_problem
def test_second_backward_equals_the_first(name, device):
    problem = Problem(name)
    x, projections = problem.tensors(BF16, FP32, device=device)
    outputs, wanted = call(problem, x, projections), leaves_of(x, projections)
    grads = incoming(outputs)
    first = torch.autograd.grad(outputs, wanted, grads, retain_graph=True)
    copies = [gradient.clone() for gradient in first]
    doubled = torch.autograd.grad(outputs, wanted, [2 * g for g in grads], retain_graph=True)
    second = torch.autograd.grad(outputs, wanted, grads)
    assert same(first, second)
    assert same(first, copies)
    for one, two in zip(first, doubled, strict=True):
        torch.testing.assert_close(two, 2 * one, rtol=2**-7, atol=1e-6)


@every_problem
def test_the_same_bits_every_time(name, device):
    problem = Problem(name, tokens=(3, 517))  # sums in several splits
    x, projections = problem.tensors(BF16, FP32, device=device)
    first = gradients(problem, x, projections)
    for _ in range(3):
        assert same(first, gradients(problem, x, projections))


@every_problem
@pytest.mark.parametrize("layout", ["tokens first", "columns first", "sliced", "one row expanded"])
def test_any_strides_of_x(name, layout, device):
    problem = Problem(name, tokens=(4, 6))
    x, projections = problem.tensors(BF16, FP32, device=device)
    if layout == "one row expanded":
        x = x[:1, :1].expand(4, 6, H).contiguous()
        strided = x[:1, :1].detach().expand(4, 6, H)
    elif layout == "sliced":
        strided = torch.cat([x, x], dim=-1).detach()[..., :H]
    else:
        axes = (0, 1) if layout == "tokens first" else (1, 2)
        strided = x.detach().transpose(*axes).contiguous().transpose(*axes)
    dense = gradients(problem, x.detach().requires_grad_(), projections, wanted=None)
    found = gradients(problem, strided.requires_grad_(), projections, wanted=None)
    assert not strided.is_contiguous()
    if device == "cpu":
        assert same(found, dense)
    else:
        # cuBLAS may choose another kernel for another row stride: a few roundings of bf16.
        assert max(errors(found, dense)) < 2e-2


@every_problem
def test_expanded_gradients(name, device):
    """``.sum().backward()`` hands in a gradient whose strides are all zero."""
    problem = Problem(name)
    x, projections = problem.tensors(BF16, FP32, device=device)
    wanted = leaves_of(x, projections)
    found = []
    for expanded in (True, False):
        outputs = call(problem, x, projections)
        grads = [torch.full((), 0.5, device=o.device, dtype=o.dtype).expand_as(o) for o in outputs]
        if not expanded:
            grads = [grad.contiguous() for grad in grads]
        found.append(torch.autograd.grad(outputs, wanted, grads))
    assert same(*found)


@every_problem
def test_under_autocast(name, device):
    """fp32 activations, weights and factors compute in bf16, as plain linear layers do."""
    problem = Problem(name)
    x, projections = problem.tensors(FP32, FP32, rounded_to=BF16, device=device)
    plain = gradients(problem, *problem.tensors(BF16, FP32, rounded_to=BF16, device=device))
    with torch.autocast(device, dtype=BF16):
        inside = gradients(problem, x, projections)
    number = len(inside) - len(leaves_of(x, projections))
    assert all(out.dtype == BF16 for out in inside[:number])
    assert all(grad.dtype == FP32 for grad in inside[number:])
    assert same([each.to(BF16) for each in inside], [each.to(BF16) for each in plain])


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@every_problem
def test_under_checkpointing(name, reentrant, device):
    problem = Problem(name)
    x, projections = problem.tensors(BF16, FP32, device=device)
    wanted = leaves_of(x, projections)
    expected = gradients(problem, x, projections)
    outputs = checkpoint(lambda x: call(problem, x, projections), x, use_reentrant=reentrant)
    torch.autograd.backward(outputs, incoming(outputs))
    assert same([*outputs, *(leaf.grad for leaf in wanted)], expected)


@every_problem
def test_without_gradients(name, device):
    problem = Problem(name)
    x, projections = problem.tensors(BF16, FP32, device=device)
    with torch.no_grad():
        outputs = call(problem, x, projections)
    assert not any(out.requires_grad for out in outputs)
    assert same(outputs, call(problem, x, projections))


@pytest.mark.parametrize("tokens", [(0,), (2, 0), (1,), (1, 1, 5)], ids=str)
@every_problem
def test_no_rows_and_few(name, tokens, device):
    problem = Problem(name, tokens=tokens)
    x, projections = problem.tensors(BF16, FP32, rounded_to=BF16, device=device)
    found = results(problem.function, x, projections, problem.arguments)
    exact = problem.tensors(FP64, FP64, rounded_to=BF16)
    truth = results(problem.reference, *exact, problem.arguments)
    assert [f.shape for f in found] == [t.shape for t in truth]
    assert all(torch.isfinite(f).all() for f in found)
    if 0 not in tokens:
        # bf16 keeps 8 bits: 2e-3 a rounding, and at most a dozen follow one another.
        assert max(errors(found, truth)) < 2e-2


@pytest.mark.parametrize("frozen", ["x", "a", "b"])
@every_problem
def test_frozen_operands_get_no_gradient(name, frozen, device):
    problem = Problem(name)
    x, projections = problem.tensors(BF16, FP32, device=device)
    expected = gradients(problem, x, projections)
    adapters = [p for p in projections if p and p.lora_rank]
    if frozen == "x":
        off = [x]
    else:
        off = [p.lora_a if frozen == "a" else p.lora_b for p in adapters]
    for tensor in off:
        tensor.requires_grad_(False)
    outputs = call(problem, x, projections)
    torch.autograd.backward(outputs, incoming(outputs))
    number = len(outputs)
    for leaf, gradient in zip(leaves_of(x, projections), expected[number:], strict=True):
        if any(leaf is tensor for tensor in off):
            assert leaf.grad is None
        else:
            assert torch.equal(leaf.grad, gradient)
    frozen_weights = [t for p in projections if p for t in (p.weight, p.bias) if t is not None]
    assert all(weight.grad is None for weight in frozen_weights)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@every_problem
def test_on_a_device_that_is_not_the_current_one(name):
    problem = Problem(name)
    here, there = (
        results(problem.function, *problem.tensors(BF16, FP32, device=each), problem.arguments)
        for each in ("cuda:0", "cuda:1")
    )
    assert torch.cuda.current_device() == 0
    assert same(here, there)
