"""What only a GPU can show: sizes past 2^31 elements, no host synchronisation, memory."""

import pytest
import torch

from trainkit import kernels

pytestmark = pytest.mark.gpu
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


def document_bounds(*lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def delta_rule(q, k, v, lengths):
    """The op with a decay and a rate that every token shares."""
    tokens, heads = v.shape[:2]
    g = torch.full((tokens, heads), -0.05, device="cuda")
    beta = torch.full((tokens, heads), 0.5, device="cuda")
    return kernels.gated_delta_rule(q, k, v, g, beta, document_bounds(*lengths))


def test_delta_rule_past_int32():
    tokens, tail = 2**19, 64
    q, k, v = (big(tokens + tail, heads, 128) for heads in (4, 4, 32))
    last(lambda *given: delta_rule(*given, [len(given[0]) - tail, tail]), q, k, v, rows=tail)


def test_convolution_past_int32():
    rows, tail = 2**18, 64
    weight = big(8192, 4)

    def function(x):
        return kernels.causal_conv(x, weight, document_bounds(len(x) - tail, tail))

    last(function, big(rows + tail, 8192), rows=tail)


def test_delta_rule_gives_the_same_bits_each_time():
    """A race shows now and then: once in thirty passes a compiled loop had another dk."""
    lengths = (1000, 1, 63, 2000, 500, 532)
    q, k, v = (big(sum(lengths), heads, 128).requires_grad_() for heads in (16, 16, 32))
    o = delta_rule(q, k, v, lengths)
    do = torch.randn_like(o)
    want = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    for _ in range(100):
        got = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        assert all(torch.equal(left, right) for left, right in zip(got, want, strict=True))


def test_delta_rule_and_convolution_never_wait():
    q, k, v = (big(256, heads, 128).requires_grad_() for heads in (2, 2, 4))
    g = torch.full((256, 4), -0.05, device="cuda")
    beta = torch.full((256, 4), 0.5, device="cuda")
    weight = big(512, 4)

    def step(bounds):
        x = kernels.causal_conv(v.flatten(1), weight, bounds).view_as(v)
        kernels.gated_delta_rule(q, k, x, g, beta, bounds).sum().backward()

    step(document_bounds(100, 156))  # compiles
    bounds = document_bounds(56, 200)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(bounds)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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


def test_a_proof_compiles_no_kernel_in_fp64(monkeypatch):
    """Each would take a third of a second, for this alone; estimates compile none at all."""
    triton = pytest.importorskip("triton")
    from tiny import make_qwen2

    from trainkit.estimate.build import _proved
    from trainkit.patching import patch

    compiled = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda src, **_: compiled.append(src.signature)
    )
    model = make_qwen2(300).to("cuda", BF16)
    _proved.cache_clear()
    _proved(model.config.to_json_string(use_diff=False), 2)
    assert not compiled
    patch(model)
    assert compiled
    assert not [each for each in compiled if "*fp64" in each.values()]
