"""One suite for every op of the registry: what trainkit/kernels/contract.py promises."""

import copy
import functools

import pytest
import torch
from op_cases.op import TriedOp
from op_cases.table import OPS
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from trainkit.kernels import launch
from trainkit.kernels.contract import Draw, OpCase, measure, run

GPU = torch.cuda.is_available()
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def accuracy_cases():
    """How bf16 rounds shows a first case, of norms each set of options: others are ``too``."""
    for spec in OPS.values():
        seen, is_norm = [], spec.name.endswith("norm")
        for number, case in enumerate(spec.cases):
            if case.large and not GPU:
                continue
            # The interpreter costs time: fp16 differs from bf16 only in the last rounding.
            dtypes = (BF16, FP32, FP16) if GPU or number == 0 else (BF16, FP32)
            for dtype in (BF16,) if case.large else dtypes:
                name = f"{spec.name}-{case.label}-{str(dtype)[6:]}"
                is_shown = case.options in seen if is_norm else number > 0
                is_shown = is_shown and dtype is BF16 and "wide" not in case.label
                yield pytest.param(spec, case, dtype, id=f"{name} too" if is_shown else name)
            seen.append(case.options)


def each_op(*, with_gradient=False, compiled=False):
    return [
        pytest.param(spec, case, id=f"{spec.name}-{case.label}")
        for spec in OPS.values()
        for case in spec.cases[: spec.has_habits]
        if (case.grads or not with_gradient) and (spec.one_graph is not None or not compiled)
    ]


@functools.cache
def _as_called(name, label, device):
    spec = OPS[name]
    case = next(each for each in spec.cases if each.label == label)
    return run(spec.function, case, case.inputs(Draw.seeded(BF16, device, 0)), incoming)


def as_called(spec, case, device):
    """Outputs and gradients of a plain call: the interpreter takes seconds for some."""
    return _as_called(spec.name, case.label, device)


def incoming(output):
    return Draw.seeded(FP32, output.device, 7).normal(*output.shape).to(output.dtype)


def wide(tensor):
    """8-bit floats compare as what they stand for."""
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def graph(spec: TriedOp, case: OpCase, device: str, dtype=BF16, seed=0):
    """Leaves and outputs of a call, with the graph still attached."""
    tensors = case.inputs(Draw.seeded(dtype, device, seed))
    leaves = {k: v.detach().requires_grad_(k in case.grads) for k, v in tensors.items()}
    result = spec.function(**leaves, **case.options)
    outputs = [o for o in (result if isinstance(result, tuple) else (result,)) if o.requires_grad]
    return leaves, outputs


@pytest.mark.parametrize(("spec", "case"), each_op(with_gradient=True))
def test_shapes_alone_launch_nothing(spec, case):
    """What an estimate runs: fake tensors that stand for a GPU's give the same shapes."""
    drawn = case.inputs(Draw.seeded(BF16, "cpu", 0))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, launch.shapes_only():
        given = {name: mode.from_tensor(each) for name, each in drawn.items()}
        leaves = {name: each.requires_grad_(name in case.grads) for name, each in given.items()}
        result = spec.function(**leaves, **case.options)
        outputs = result if isinstance(result, tuple) else (result,)
        wanted = [o for o in outputs if o.requires_grad]
        gradients = torch.autograd.grad(
            wanted, [leaves[name] for name in case.grads], [torch.ones_like(o) for o in wanted]
        )
    real = spec.reference(**drawn, **case.options)
    real = real if isinstance(real, tuple) else (real,)
    assert [(o.shape, o.dtype) for o in outputs] == [(o.shape, o.dtype) for o in real]
    assert [g.shape for g in gradients] == [drawn[name].shape for name in case.grads]


@pytest.mark.sample("*16", "*32")
@pytest.mark.parametrize(("spec", "case", "dtype"), accuracy_cases())
def test_error_is_no_larger_than_the_plain_models(spec, case, dtype, device):
    errors = measure(spec, case, dtype, device)
    assert errors
    assert not [error for error in errors if not error.ok]


@pytest.mark.parametrize(
    "spec", [each for each in OPS.values() if each.tiny.grads], ids=lambda spec: spec.name
)
def test_gradients_are_the_derivatives(spec, device, kernels_run):
    tensors = spec.tiny.inputs(Draw.seeded(FP64, device, 3))
    names = list(tensors)
    values = [tensors[name].requires_grad_(name in spec.tiny.grads) for name in names]

    def call(*arguments):
        result = spec.function(**dict(zip(names, arguments, strict=True)), **spec.tiny.options)
        outputs = result if isinstance(result, tuple) else (result,)
        return tuple(output for output in outputs if output.is_floating_point())

    assert torch.autograd.gradcheck(call, values, atol=1e-6, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize(("spec", "case"), each_op())
def test_fp64_is_exact(spec, case, device):
    assert not [error for error in measure(spec, case, FP64, device) if not error.ok]


@pytest.mark.parametrize(("spec", "case"), each_op(with_gradient=True))
def test_a_second_backward_equals_the_first_and_nothing_is_mutated(spec, case, device):
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks:
        leaves, outputs = graph(spec, case, device)
    gradients = [incoming(output) for output in outputs]
    watched = [*leaves.values(), *gradients, *kept]
    before = [(copy.deepcopy(tensor.detach()), tensor._version) for tensor in watched]
    wanted = [leaves[name] for name in case.grads]
    first = torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)
    for tensor, (values, version) in zip(watched, before, strict=True):
        assert torch.equal(tensor, values)
        assert tensor._version == version
    copies = [gradient.clone() for gradient in first]
    doubled = torch.autograd.grad(outputs, wanted, [2 * g for g in gradients], retain_graph=True)
    second = torch.autograd.grad(outputs, wanted, gradients)
    for one, two, kept, double in zip(first, second, copies, doubled, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, kept)  # later passes leave it alone
        torch.testing.assert_close(double, 2 * one, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(("spec", "case"), each_op(with_gradient=True))
def test_expanded_gradients(spec, case, device):
    """``.sum().backward()`` hands in a gradient whose strides are all zero."""
    tensors = case.inputs(Draw.seeded(FP32, device, 0))

    def expanded(output):
        return torch.full((), 0.5, device=output.device, dtype=output.dtype).expand(output.shape)

    def dense(output):
        return expanded(output).contiguous()

    ours = run(spec.function, case, tensors, expanded)[1]
    want = run(spec.function, case, tensors, dense)[1]
    for name, gradient in ours.items():
        assert torch.equal(gradient, want[name])


@pytest.mark.parametrize(("spec", "case"), each_op())
def test_under_autocast(spec, case, device):
    tensors = case.inputs(Draw.seeded(BF16, device, 0))
    plain = as_called(spec, case, device)
    with torch.autocast(device, dtype=BF16):
        inside = run(spec.function, case, tensors, incoming)
    for left, right in zip(
        [*plain[0], *plain[1].values()], [*inside[0], *inside[1].values()], strict=True
    ):
        assert left.dtype == right.dtype
        torch.testing.assert_close(wide(left), wide(right), rtol=2**-7, atol=1e-2)


@pytest.mark.sample("*-non-reentrant", "rms_norm-*", "lora_linear-*", "linear_cross_entropy-*")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize(("spec", "case"), each_op(with_gradient=True))
def test_under_checkpointing(spec, case, reentrant, device):
    tensors = case.inputs(Draw.seeded(BF16, device, 0))
    calls = 0

    def counted(**arguments):
        nonlocal calls
        calls += 1
        return spec.function(**arguments)

    def checkpointed(**arguments):
        names, values = list(arguments), list(arguments.values())

        def body(*inner):
            return counted(**dict(zip(names, inner, strict=True)))

        return checkpoint(body, *values, use_reentrant=reentrant)

    plain = as_called(spec, case, device)
    inside = run_with_backward(checkpointed, case, tensors)
    assert calls == 2
    for name, gradient in plain[1].items():
        assert torch.equal(gradient, inside[name])  # the same bits every time


def run_with_backward(function, case, tensors):
    """Gradients through .backward(): reentrant checkpointing knows no torch.autograd.grad."""
    leaves = {k: v.detach().requires_grad_(k in case.grads) for k, v in tensors.items()}
    result = function(**leaves, **case.options)
    outputs = [o for o in (result if isinstance(result, tuple) else (result,)) if o.requires_grad]
    torch.autograd.backward(outputs, [incoming(output) for output in outputs])
    return {name: leaves[name].grad for name in case.grads}


@pytest.mark.parametrize(("spec", "case"), each_op())
def test_without_gradients(spec, case, device):
    tensors = case.inputs(Draw.seeded(BF16, device, 0))
    with torch.no_grad():
        result = spec.function(**tensors, **case.options)
    attached = as_called(spec, case, device)[0]
    outputs = result if isinstance(result, tuple) else (result,)
    for left, right in zip(outputs, attached, strict=True):
        assert torch.equal(left, right)  # the same bits every time
        assert not left.requires_grad


@pytest.mark.skipif(launch.INTERPRETING, reason="the interpreter is not what would be compiled")
@pytest.mark.parametrize(("spec", "case"), each_op(compiled=True))
def test_compiles_as_one_graph(spec, case, device):
    """On a GPU the kernels are traced, forward and backward; on a CPU the references are."""
    tensors = case.inputs(Draw.seeded(BF16, device, 0))
    torch.compiler.reset()
    compiled = torch.compile(
        spec.function, fullgraph=spec.one_graph, backend="inductor" if GPU else "aot_eager"
    )
    ours, want = run(compiled, case, tensors, incoming), as_called(spec, case, device)
    for left, right in zip(
        [*ours[0], *ours[1].values()], [*want[0], *want[1].values()], strict=True
    ):
        torch.testing.assert_close(wide(left), wide(right), rtol=2**-7, atol=1e-3)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(("spec", "case"), each_op())
def test_on_a_device_that_is_not_current(spec, case):
    assert torch.cuda.current_device() == 0
    assert not [error for error in measure(spec, case, BF16, "cuda:1") if not error.ok]


def test_what_is_served_by_reference_alone_is_so_within_and_no_longer(device):
    wide, narrow = torch.ones(2, dtype=torch.float64, device=device), torch.ones(2, device=device)
    served = launch.runs_kernel(narrow)
    with launch.by_reference(torch.float64):
        assert not launch.runs_kernel(wide)
        assert not launch.runs_kernel(narrow, wide)
        assert launch.runs_kernel(narrow) == served
        with launch.by_reference(*launch.KERNEL_DTYPES):
            assert not launch.runs_kernel(narrow)
        assert launch.runs_kernel(narrow) == served
    assert launch.runs_kernel(wide) == served


def test_references_serve_cpu_tensors():
    """A CPU tensor never reaches a kernel unless the interpreter was asked for."""
    assert launch.runs_kernel(torch.ones(2)) == launch.INTERPRETING


def test_unknown_dtypes_take_the_reference(device):
    assert not launch.runs_kernel(torch.ones(2, dtype=torch.complex64, device=device))
