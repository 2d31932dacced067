"""Linear cross entropy on a GPU: accuracy, memory, determinism, and a host that never waits."""

import pytest
import torch

from trainkit.kernels.linear_cross_entropy.divergence import linear_divergence
from trainkit.kernels.linear_cross_entropy.function import (
    linear_cross_entropy,
)

pytestmark = pytest.mark.gpu


def make_case(rows, hidden, vocab, dtype, *, trained=0.7, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    states = torch.randn(rows, hidden, generator=generator, device="cuda")
    weight = torch.randn(vocab, hidden, generator=generator, device="cuda") * hidden**-0.5
    labels = torch.randint(0, vocab, (rows,), generator=generator, device="cuda")
    labels[torch.rand(rows, generator=generator, device="cuda") >= trained] = -100
    return states.to(dtype), weight.to(dtype), labels


def run(op, states, weight, labels, **options):
    leaves = [states.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = op(*leaves, labels, **options)
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def test_runs_repeat_bit_for_bit():
    case = make_case(3000, 512, 50257, torch.bfloat16)
    first, second = (run(linear_cross_entropy, *case, chunk_tokens=1024) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_the_host_never_waits():
    states, weight, labels = make_case(2048, 256, 32000, torch.bfloat16)
    states.requires_grad_(), weight.requires_grad_()
    count = int((labels != -100).sum())
    items = torch.tensor(count, device="cuda")
    scale = torch.tensor(3.0, device="cuda")
    linear_cross_entropy(states, weight, labels, num_trained=count).backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for num_items in (None, items, 5):
            loss = linear_cross_entropy(
                states, weight, labels, num_items=num_items, num_trained=count, chunk_tokens=512
            )
            (loss * scale).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_extra_memory_is_bounded_by_the_chunk():
    rows, hidden, vocab = 16384, 896, 151936
    states, weight, labels = make_case(rows, hidden, vocab, torch.bfloat16, trained=1.0)
    states.requires_grad_(), weight.requires_grad_()

    def extra(chunk_tokens):
        weight.grad = states.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(states, weight, labels, chunk_tokens=chunk_tokens).backward()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    assert extra(None) <= 2.2
    # What remains is the fp32 gradients of the weight and the hidden states, and their bf16 ones.
    gradients = (vocab * hidden + rows * hidden) * 6 / 2**30
    assert extra(256) <= gradients + 0.15


def test_what_is_logged_of_a_divergence_repeats_bit_for_bit():
    """The label's logit is read before its gradient is written over it, by any of the threads."""
    states, weight, labels = make_case(2048, 64, 1999, torch.float32)
    states.requires_grad_()
    first, *others = (
        linear_divergence(states, weight, labels, states.detach(), weight)[1] for _ in range(50)
    )
    assert all(torch.equal(first, other) for other in others)
