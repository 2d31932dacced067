"""Feed-forward blocks a tile at a time: the gradients of the whole, in the memory of a tile."""

import pytest
import torch
from families.family_models import FAMILIES, exact, excess_errors, like_model, make, make_batch, run
from lora.lora_models import adapt
from torch import nn

from trainkit.bench.lora import quantize
from trainkit.errors import PatchError
from trainkit.models.fp8.base import quantize_to_fp8
from trainkit.models.tiled import TiledMLP, tile
from trainkit.patching import patch
from trainkit.train.recompute import CountedMemory

CPU = torch.device("cpu")
CHUNK = 5  # of 26 tokens: tiles of 4 and 5


def bases(kind):
    """A model whose feed-forward blocks are made of this."""
    model = make("qwen2", device="cpu", dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
    if kind == "nf4":
        model = quantize(model, torch.float32)
    if kind == "fp8":
        quantize_to_fp8(model, CPU)
    if kind not in ("bf16", "plain"):
        model = adapt(model, dropout=0.0)
    if kind != "peft":
        patch(model)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole_block_in_fp64(family):
    model, batch = exact(make(family, device="cpu")), make_batch(family)
    expected = run(model, batch, want_logits=False)
    swaps = tile(model, CHUNK)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = run(model, batch, want_logits=False)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-15)
    swaps.revert()
    assert not any(isinstance(module, TiledMLP) for module in model.modules())


@pytest.mark.parametrize("kind", ["plain", "bf16", "peft", "lora", "nf4", "fp8"])
def test_every_kind_of_block_rounds_no_worse(kind):
    """Against fp64 where the base can be one; a packed base is its own truth."""
    model, batch = bases(kind), make_batch("qwen2")
    expected = run(model, batch, want_logits=False)
    tile(model, CHUNK)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = run(model, batch, want_logits=False)
    assert found.keys() == expected.keys()
    if kind in ("plain", "bf16"):
        whole = make("qwen2", device="cpu", dtype=torch.bfloat16 if kind == "bf16" else None)
        assert not excess_errors(expected, found, run(exact(whole), batch, want_logits=False))
        return
    for name, value in expected.items():
        # fp8 codes of a gradient follow from its row alone; sums over tokens are in fp32 here.
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-6)


def test_gradients_of_half_precision_weights_are_summed_in_fp32():
    """Of 128 tiles, all pulling one way: sums in bf16 stop growing long before the last."""
    gradients = {}
    for dtype in (torch.float64, torch.bfloat16):
        torch.manual_seed(0)
        block = make("llama", device="cpu").model.layers[0].mlp.to(dtype)
        if dtype is torch.bfloat16:
            tile(block, 8)
        block(torch.ones(1, 1024, 64, dtype=dtype)).sum().backward()
        gradients[dtype] = block.down_proj.weight.grad.double()
    exact_one, found = gradients.values()
    # Weights and activations are rounded to 2**-9 a few times; nothing else is.
    assert (found - exact_one).norm() < 0.02 * exact_one.norm()


def test_dropout_draws_the_same_in_both_passes():
    model = adapt(make("qwen2", device="cpu"), dropout=0.5)
    tile(model, CHUNK)
    block = next(m for m in model.modules() if isinstance(m, TiledMLP)).train()
    weight = next(p for n, p in block.named_parameters() if "up_proj.lora_B" in n)
    x = torch.randn(2, 13, 64)

    def loss():
        torch.manual_seed(0)
        return block(x).square().sum()

    (gradient,) = torch.autograd.grad(loss(), weight)
    direction = torch.randn_like(weight)
    with torch.no_grad():
        weight.add_(direction, alpha=1e-2)
        above = loss()
        weight.add_(direction, alpha=-2e-2)
        slope = (above - loss()) / 2e-2
    assert slope == pytest.approx((gradient * direction).sum().item(), rel=2e-3)


def test_chance_goes_on_where_it_was():
    model = make("qwen2", device="cpu")
    tile(model, CHUNK)
    batch = like_model(make_batch("qwen2"), model)
    loss = model(**batch).loss
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_autocast_is_the_same_in_both_passes():
    model, batch = adapt(make("qwen2", device="cpu")), make_batch("qwen2")
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(model, batch, want_logits=False)
        tile(model, CHUNK)
        loss = model(**batch).loss
    model.zero_grad()
    loss.backward()  # outside of autocast, as Trainer has it
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, value in found.items():
        assert (value - expected[name]).norm() <= 2**-7 * expected[name].norm(), name


def test_only_a_tile_is_wide_at_a_time():
    peaks = {}
    for chunk in (None, 256):
        model = make("qwen2", device="cpu", intermediate_size=1024, num_hidden_layers=1)
        if chunk:
            tile(model, chunk)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        hidden = torch.randn(1, 2048, 64, requires_grad=True)
        layer, memory = model.model.layers[0], CountedMemory()
        rotary = model.model.rotary_emb(hidden, torch.arange(2048)[None])
        memory.start()
        layer(hidden, position_embeddings=rotary, attention_mask=None).sum().backward()
        peaks[chunk] = memory.peak() - 4 * 64 * 2048
        memory.stop()
    wide = 4 * 1024 * 2048  # a number for every token of gate, up or their product
    assert peaks[None] - peaks[256] > 2 * wide


def test_a_model_without_known_blocks_is_refused():
    with pytest.raises(PatchError, match="feed-forward"):
        tile(nn.Sequential(nn.Linear(2, 2)), 128)
