"""What single ops promise beyond the common contract."""

import math

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from trainkit import kernels
from trainkit.kernels import interpreter, launch
from trainkit.kernels.contract import Draw
from trainkit.kernels.rms_norm.function import rms_norm_reference

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def draw(device, dtype=FP32, seed=0):
    return Draw.seeded(dtype, device, seed)


def launched(monkeypatch):
    """Names of the kernels launched from here on."""
    names = []
    original = launch.Kernel.launch

    def record(self, *args, **kwargs):
        names.append(self.jitted.__name__)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(launch.Kernel, "launch", record)
    return names


def test_frozen_weight_costs_no_reduction(device, kernels_run, monkeypatch):
    x = draw(device).normal(5, 64).requires_grad_()
    weight = draw(device).normal(64)
    names = launched(monkeypatch)
    kernels.rms_norm(x, weight).sum().backward()
    assert names == ["_forward", "_backward"]
    assert weight.grad is None


def test_unused_sum_costs_no_gradient(device, kernels_run):
    x, residual = (draw(device, seed=s).normal(5, 64).requires_grad_() for s in (1, 2))
    weight = draw(device).normal(64)
    y, _ = kernels.add_rms_norm(x, residual, weight)
    y.sum().backward()
    both = (x.detach() + residual.detach()).requires_grad_()
    rms_norm_reference(both, weight).sum().backward()
    torch.testing.assert_close(x.grad, both.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(x.grad, residual.grad)
    _, total = kernels.add_rms_norm(x, residual, weight)
    (gradient,) = torch.autograd.grad(total.sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))


def test_norm_rounds_like_the_plain_module(device):
    x, weight = draw(device, BF16).normal(64, 896), draw(device, BF16).normal(896)
    same = kernels.rms_norm(x, weight) == rms_norm_reference(x, weight)
    assert same.float().mean() > 0.999  # a different order of summation flips a few roundings


def test_the_sum_is_rounded_before_it_is_normalised(device):
    """As an addition and a norm of their own would; a sum kept wider gives other bits."""
    x, residual = (draw(device, BF16, seed).normal(64, 896) for seed in (1, 2))
    weight = draw(device, BF16).normal(896)
    y, total = kernels.add_rms_norm(x, residual, weight)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, kernels.rms_norm(total, weight))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("factor", [1.0, 0.125, 65536.0])
def test_scaled_loss(dtype, factor, device):
    """The incoming gradient may be anything: a loss scale, a number of ranks."""
    logits = draw(device, dtype).normal(6, 300, scale=3.0).requires_grad_()
    labels = draw(device).integers(300, 6)
    (got,) = torch.autograd.grad(kernels.cross_entropy(logits, labels) * factor, logits)
    exact = logits.detach().double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(exact, labels) * factor
    (want,) = torch.autograd.grad(loss, exact)
    # One rounding of each element; fp16 below 2^-14 loses relative precision, by 2^-24 at most.
    tiny = 2**-25 if dtype == FP16 else 0.0
    torch.testing.assert_close(
        got.double(), want, rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=tiny + 1e-7 * factor
    )


def test_the_prepared_gradient_is_given_once(device):
    """A loss that is the end of its graph may be differentiated again."""
    logits = draw(device).normal(6, 500).requires_grad_()
    labels = draw(device).integers(500, 6)
    loss = kernels.cross_entropy(logits, labels)
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)


def test_sure_tokens_keep_their_precision(device, kernels_run):
    """p - 1 comes from the other tokens' share, not from 1 - 1."""
    logits = torch.zeros(1, 50, device=device)
    logits[0, 7] = 25.0
    logits.requires_grad_()
    loss = kernels.cross_entropy(logits, torch.tensor([7], device=device))
    loss.backward()
    share = 49 * math.exp(-25.0)
    assert float(loss) == pytest.approx(math.log1p(share), rel=1e-5)
    assert float(logits.grad[0, 7]) == pytest.approx(-share / (1 + share), rel=1e-5)


def test_unknown_label_is_loud(device, kernels_run):
    logits = draw(device).normal(3, 20)
    labels = torch.tensor([1, 20, 3], device=device)
    assert kernels.cross_entropy(logits, labels).isnan()


def test_misfitting_shapes_are_refused(device):
    with pytest.raises(ValueError, match="misfit"):
        kernels.cross_entropy(torch.ones(3, 5), torch.ones(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="does not fit"):
        kernels.rms_norm(torch.ones(3, 5), torch.ones(4))
    with pytest.raises(ValueError, match="cast is"):
        kernels.rms_norm(torch.ones(3, 5), torch.ones(5), cast="bert")
    with pytest.raises(ValueError, match="differ"):
        kernels.swiglu(torch.ones(3, 5), torch.ones(3, 4))
    with pytest.raises(ValueError, match="order is"):
        kernels.swiglu_packed(torch.ones(3, 6), order="gate")
    with pytest.raises(ValueError, match="do not fit"):
        kernels.apply_rope(*(torch.ones(1, 2, 3, 4),) * 2, *(torch.ones(1, 4, 4),) * 2)


def test_chunks_overwrite_their_logits(device):
    """The building block of the linear loss, on rows of a padded buffer."""
    buffer = draw(device).normal(6, 128)
    logits = buffer[:, :101]
    labels = torch.tensor([0, 5, -100, 100, 7, 3], device=device)
    before = logits.clone().requires_grad_()
    losses, correct = torch.empty(6, device=device), torch.empty(6, device=device)
    scale = torch.tensor(0.25, device=device)
    pad = buffer[:, 101:].clone()
    kernels.cross_entropy_chunk(logits, labels, losses, scale, correct_out=correct)
    want = torch.nn.functional.cross_entropy(before, labels, reduction="none")
    (gradient,) = torch.autograd.grad(want.sum() * 0.25, before)
    torch.testing.assert_close(losses, want.detach())
    torch.testing.assert_close(logits, gradient)
    assert torch.equal(buffer[:, 101:], pad)
    hits = (before.argmax(-1) == labels).float()
    assert torch.equal(correct, hits)


def test_labels_may_be_a_slice(device):
    logits = draw(device).normal(2, 4, 30)
    labels = draw(device).integers(30, 2, 5)[:, 1:]
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(kernels.cross_entropy(logits, labels), want)


def test_interpreter_rounds_bf16_as_torch_does():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.4e38, 1e-40])
    for numbers in (values, special):
        bits = interpreter.float32_to_bf16_bits(numbers.numpy())
        want = numbers.to(BF16).view(torch.uint16).numpy()
        assert (bits == want).all()
        assert (interpreter.bf16_bits_to_float32(bits) == numbers.to(BF16).float().numpy()).all()
    assert math.isnan(
        interpreter.bf16_bits_to_float32(
            interpreter.float32_to_bf16_bits(torch.tensor([math.nan]).numpy())
        )[0]
    )


def test_a_functorch_transform_is_refused(device, kernels_run):
    """A kernel cannot be traced through; silence would be a wrong gradient."""
    x, weight = draw(device).normal(3, 8), draw(device).normal(8)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda values: kernels.rms_norm(values, weight).sum())(x)


class _Jitted:
    """Stands for a compiled kernel: counts which road a launch takes."""

    def __init__(self):
        self.slow, self.fast = 0, 0
        self.function = self.packed_metadata = None

    def __getitem__(self, grid):
        def analyse(*args, **kwargs):
            self.slow += 1
            return self

        return analyse

    def run(self, *args):
        self.fast += 1


def test_the_short_launch_needs_what_was_compiled_for(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETING", False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    current = -1
    jitted = _Jitted()
    kernel = launch.Kernel(jitted)
    storage = torch.empty(256, dtype=BF16)

    def go(pointer=storage, stride=64, free=3, constants=(1,), tile=()):
        before = jitted.slow, jitted.fast
        tiles = [TensorDescriptor.from_tensor(storage.view(16, 16), tile)] if tile else ()
        kernel.launch(1, (pointer,), (stride,), (free,), constants, 4, descriptors=tiles)
        return (jitted.slow - before[0], jitted.fast - before[1])

    assert go() == (1, 0)
    assert go() == (0, 1)
    assert go(free=5, stride=128) == (0, 1)
    assert go(pointer=storage[1:]) == (1, 0)  # not aligned to 16 bytes
    assert go(stride=65) == (1, 0)
    assert go(free=2**31) == (1, 0)
    assert go(constants=(2,)) == (1, 0)
    assert go(pointer=storage.float()) == (1, 0)
    assert [go(tile=[16, n]) for n in (16, 16, 8)] == [(1, 0), (0, 1), (1, 0)]
    assert go() == (0, 1)
    current = 0
    assert go() == (1, 0)  # the tensor's device is not the current one
