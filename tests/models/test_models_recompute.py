"""What each way of recomputing keeps, tensor by tensor, and that gradients stay the same."""

import weakref
from collections import Counter

import pytest
import torch
from families.family_models import FAMILIES, like_model, make, make_batch
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.lora import LoraOptions, attach
from trainkit.models.recompute import WAYS, Recomputed, SelectiveCheckpoint, every
from trainkit.patching import patch

LAYERS = 3


class Alive(TorchDispatchMode):
    """Bytes of all tensors made within that still exist."""

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata)
        return result


class Computed(TorchDispatchMode):
    """How often each operation ran; what a mode within answers by itself does not come here."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def kept_and_gradients(model, batch, steps=1):
    """Bytes that are there between forward and backward, and all gradients, of the last step."""
    for _ in range(steps):
        model.zero_grad()
        with Alive() as alive:
            loss = model(**batch, use_cache=False).loss
            kept = sum(alive.sizes.values())
            loss.backward()
    trained = (p for p in model.parameters() if p.grad is not None)
    return kept, [loss.detach(), *(p.grad.clone() for p in trained)]


@pytest.mark.sample("qwen2-*", "qwen2_vl-lora", "glm4-kernels", "gemma-plain", "mistral-lora")
@pytest.mark.parametrize(
    ("kernels", "adapted"),
    [(False, False), (True, False), (True, True)],
    ids=["plain", "kernels", "lora"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_keeps_less_and_computes_the_same(family, kernels, adapted):
    model = make(family, num_hidden_layers=LAYERS, device="cpu").train()
    if adapted:
        torch.manual_seed(0)
        model = attach(model, LoraOptions(r=2, init_lora_weights=False))
    if kernels:
        patch(model)
    batch = like_model(make_batch(family), model)
    _, expected = kept_and_gradients(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = Recomputed(model)
    count = len(layers.layers)
    kept = {}
    for way in WAYS:
        layers.apply(every(count, 1, way))
        # The first backward pass shows which products nobody asks for.
        steps = 2 if way == "selective" else 1
        kept[way], found = kept_and_gradients(model, batch, steps)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), way
    assert kept["offload"] == kept["full"], "on a CPU nothing travels"
    assert kept["full"] < kept["selective"] < kept["keep"]
    layers.apply(every(count, 2, "full"))
    assert kept["full"] < kept_and_gradients(model, batch)[0] < kept["keep"]
    assert [layer.gradient_checkpointing for layer in layers.layers] == [
        index % 2 == 0 for index in range(count)
    ]


def test_selective_computes_no_product_and_no_attention_again():
    model = make("qwen2", num_hidden_layers=2, device="cpu").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = like_model(make_batch("qwen2"), model)
    layers = Recomputed(model)
    calls = {}
    for way in ("keep", "selective", "full"):
        layers.apply((way,) * 2)
        with Computed() as computed:
            model(**batch, use_cache=False).loss.backward()
        calls[way] = computed.calls
    products = ("mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu")
    for name in products:
        assert calls["selective"][name] == calls["keep"][name], name
    assert sum(calls["full"][n] for n in products) > sum(calls["keep"][n] for n in products)
    assert calls["selective"]["silu"] == calls["full"]["silu"] == 2 * calls["keep"]["silu"]


def test_a_second_backward_pass_computes_what_was_given_out():
    model = make("qwen2", num_hidden_layers=2, device="cpu").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    Recomputed(model).apply(("selective",) * 2)
    loss = model(**like_model(make_batch("qwen2"), model), use_cache=False).loss
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_was_given_out_and_let_go_is_not_taken_for_what_comes_after():
    """A tensor that is made where a kept product was, and written to in place."""
    x, w = (torch.randn(16, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def layer(x):
        for _ in range(20):
            product = torch.mm(x, w) + 1  # which keeps no reference to the product
            doubled = x * 2
            doubled.add_(1)
            x = torch.tanh(product * doubled)
        return x.sum()

    expected = torch.autograd.grad(layer(x), (x, w))
    checkpointed = SelectiveCheckpoint()
    for _ in range(3):
        found = torch.autograd.grad(checkpointed(layer, x), (x, w))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
