"""What only a GPU can show: sizes past 2^31 elements, no host synchronisation, memory."""

import pytest
import torch

from trainkit import kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def room():
    """Tensors of several gigabytes must not pile up between tests."""
    yield
    torch.cuda.empty_cache()


def big(*shape):
    return torch.empty(shape, dtype=BF16, device="cuda").normal_()


def last(function, *tensors, rows=64):
    """The op on everything and on the last rows alone agree there, backward too."""
    whole = [tensor.detach().requires_grad_() for tensor in tensors]
    part = [tensor[-rows:].detach().clone().requires_grad_() for tensor in tensors]
    for leaves in (whole, part):
        output = function(*leaves)
        output.backward(output.detach())
    for left, right in zip(whole, part, strict=True):
        assert torch.equal(left.grad[-rows:], right.grad)


def test_norm_past_int32():
    weight = big(4096)
    last(lambda x: kernels.rms_norm(x, weight), big(2**19 + 100, 4096))


def test_add_norm_past_int32():
    weight = big(4096)
    x, residual = (big(2**19 + 100, 4096) for _ in range(2))
    last(lambda x, residual: kernels.add_rms_norm(x, residual, weight)[0], x, residual)


def test_gates_past_int32():
    last(kernels.swiglu, *(big(2**18 + 100, 8192) for _ in range(2)))


def test_packed_gate_past_int32():
    last(kernels.swiglu_packed, big(2**17 + 100, 16384))


def test_row_max_past_int32():
    last(lambda x: kernels.row_max(x)[0], big(2**19 + 100, 4096))


def test_rope_past_int32():
    tokens, heads = 2**19 + 64, 32
    q = big(1, tokens, heads, 128).transpose(1, 2)
    k = big(1, tokens, 1, 128).transpose(1, 2)
    angles = torch.rand(1, tokens, 128, device="cuda")
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    end = slice(-64, None)
    whole = q.detach().requires_grad_()
    part = q[:, :, end].detach().requires_grad_()
    turned, _ = kernels.apply_rope(whole, k, cos, sin)
    last_turned, _ = kernels.apply_rope(part, k[:, :, end], cos[:, end], sin[:, end])
    assert torch.equal(turned[:, :, end], last_turned)
    turned.backward(turned.detach())
    last_turned.backward(last_turned.detach())
    assert torch.equal(whole.grad[:, :, end], part.grad)


def test_cross_entropy_past_int32():
    vocab, rows = 151936, 14200
    logits = big(rows, vocab).requires_grad_()
    labels = torch.randint(vocab, (rows,), device="cuda")
    kernels.cross_entropy(logits, labels, num_items=1).backward()
    part = logits.detach()[-8:].clone().requires_grad_()
    kernels.cross_entropy(part, labels[-8:], num_items=1).backward()
    assert torch.equal(logits.grad[-8:], part.grad)


def test_cross_entropy_takes_one_extra_tensor_and_never_waits():
    logits = big(2048, 151936).requires_grad_()
    labels = torch.randint(151936, (2048,), device="cuda")
    count = torch.tensor(2048, device="cuda")
    kernels.cross_entropy(logits, labels, num_items=count).backward()  # compiles
    logits.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for factor in (1.0, 8.0):
            (gradient,) = torch.autograd.grad(
                kernels.cross_entropy(logits, labels, num_items=count) * factor, logits
            )
            del gradient
    finally:
        torch.cuda.set_sync_debug_mode("default")
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 1.01 * logits.numel() * logits.itemsize


def test_misaligned_rows():
    """A row stride that is not a multiple of 16 elements, and a pointer inside the first vector."""
    storage = big(33 * 131 + 1)
    x = storage[1:].view(33, 131)[:, :128].requires_grad_()
    weight = torch.ones(128, dtype=BF16, device="cuda")
    for _ in range(2):
        got = kernels.rms_norm(x, weight)
        want = kernels.rms_norm(x.detach().clone(), weight)
        assert torch.equal(got, want)
