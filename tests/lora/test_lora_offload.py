"""Checkpointed inputs on the host: the same numbers, and the right tensors travel."""

import pytest
import torch
from families.family_models import make, make_batch, run

from trainkit.errors import PatchError
from trainkit.lora import offload


@pytest.fixture
def journeys(monkeypatch):
    """Without a GPU the way to the host and back is a copy; this counts them."""
    seen = {"sent": 0, "fetched": 0}

    def to_host(self, tensor):
        seen["sent"] += 1
        return tensor.clone()

    def start(self, away):
        seen["fetched"] += 1
        away.back = away.host.clone()

    monkeypatch.setattr(offload._Travel, "travels", lambda self, tensor: tensor.dim() == 3)
    monkeypatch.setattr(offload._Travel, "to_host", to_host)
    monkeypatch.setattr(offload._Travel, "start", start)
    return seen


@pytest.mark.parametrize("reentrant", [True, False])
def test_nothing_changes_and_every_layer_but_the_last_travels(journeys, reentrant):
    model = make("qwen2", num_hidden_layers=4)
    expected = run(model, make_batch("qwen2"), want_logits=False)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    undo = offload.offload_checkpoints(model)
    for step in range(1, 3):
        found = run(model, make_batch("qwen2"), want_logits=False)
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert journeys == {"sent": 3 * step, "fetched": 3 * step}
    undo()
    run(model, make_batch("qwen2"), want_logits=False)
    assert journeys["sent"] == 6


def test_a_second_backward_pass_fetches_again(journeys):
    model = make("qwen2", num_hidden_layers=3)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    offload.offload_checkpoints(model)
    loss = model(**make_batch("qwen2")).loss
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert journeys["fetched"] == 2 * journeys["sent"]


def test_without_checkpointing_it_is_refused():
    with pytest.raises(PatchError, match="no layer"):
        offload.offload_checkpoints(make("qwen2"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("reentrant", [True, False])
def test_on_a_gpu_nothing_changes(reentrant):
    model = make("qwen2", num_hidden_layers=6).cuda()
    batch = {key: value.cuda() for key, value in make_batch("qwen2", length=64).items()}
    expected = run(model, batch, want_logits=False)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    offload.offload_checkpoints(model, min_bytes=0)
    for _ in range(5):
        found = run(model, batch, want_logits=False)
        assert all(torch.equal(found[key], expected[key]) for key in expected)
