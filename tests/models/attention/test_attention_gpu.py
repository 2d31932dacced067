"""Packed attention on a GPU: every engine keeps documents apart, and no layer waits."""

import functools
from unittest import mock

import pictures
import pytest
import torch
from attention_cases import PACKS, documents, packed_batch
from families.family_models import make
from transformers import AutoModelForImageTextToText

from trainkit.errors import TrainkitError
from trainkit.models import attention
from trainkit.models.attention import choice, forward
from trainkit.models.leak_test import leak_test
from trainkit.models.swap import plain_class
from trainkit.models.vision import attend_in_tower
from trainkit.patching import patch

pytestmark = pytest.mark.gpu


def on_gpu(batch):
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def model_with(name, engine=None, implementation=attention.NAME, dtype=torch.bfloat16, **sizes):
    attention.register()
    model = make(name, **sizes).to("cuda", dtype)
    model.set_attn_implementation(implementation)
    if implementation == attention.NAME:
        attention.install(model, engine)
    return model.eval()


def deviation(model, plain, batch):
    """The largest difference of a packed document's logits to the document alone."""
    with torch.no_grad():
        packed = model(**batch).logits
        return max(
            (packed[row, part] - plain(batch["input_ids"][row : row + 1, part]).logits[0])
            .abs()
            .max()
            .item()
            for row, part in documents()
        )


@pytest.mark.parametrize("name", PACKS)
def test_varlen_keeps_documents_apart(name):
    model = model_with(name, "varlen")
    plain = model_with(name, implementation="eager", dtype=torch.float32)
    batch = on_gpu(packed_batch())
    # bf16 through two layers, logits of order one: 2^-8 a rounding, a few dozen of them.
    assert deviation(model, plain, batch) < 0.15
    assert leak_test(model, attention="varlen", vocab_size=128) > 0
    patch(model)
    assert deviation(model, plain, batch) < 0.15
    assert leak_test(model, attention="varlen", vocab_size=128) > 0


def test_the_leak_test_sees_varlen_given_one_document(monkeypatch):
    model = model_with("qwen2", "varlen")
    documents = choice.Documents
    monkeypatch.setattr(
        choice, "Documents", lambda bounds, longest, shared: documents(bounds[[0, -1]], 2 * 64)
    )
    with pytest.raises(TrainkitError, match="leak"):
        leak_test(model, attention="varlen", vocab_size=128)


@pytest.mark.parametrize("engine", ["flex", "blocks"])
def test_the_fallbacks_in_fp32(engine):
    model = model_with("qwen2", engine, dtype=torch.float32)
    plain = model_with("qwen2", implementation="eager", dtype=torch.float32)
    # fp32 with tf32 off; flex attention may use tf32 inside, 2^-11 a product.
    assert deviation(model, plain, on_gpu(packed_batch())) < 5e-3
    assert leak_test(model, attention=engine, vocab_size=128) > 0
    model.train()
    model(**on_gpu(packed_batch())).logits.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_sliding_window_on_varlen():
    model = model_with("mistral", "varlen", sliding_window=4)
    plain = model_with("mistral", implementation="eager", dtype=torch.float32, sliding_window=4)
    unlimited = model_with("mistral", "varlen", sliding_window=None)
    batch = on_gpu(packed_batch())
    assert deviation(model, plain, batch) < 0.15
    assert deviation(unlimited, plain, batch) > 0.2


@pytest.mark.parametrize("packed", [True, False])
def test_no_step_waits_for_the_device(packed):
    model = model_with("qwen2").train()
    patch(model)
    batch = on_gpu(packed_batch())
    if not packed:
        batch = {"input_ids": batch["input_ids"]}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["labels"] = batch["input_ids"]
    batch["num_items_in_batch"] = torch.tensor(46, device="cuda")
    batch["num_trained_tokens"] = 46
    model(**batch).loss.backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**batch).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gradients_of_packed_rows():
    grads = []
    batch = on_gpu(packed_batch())
    for engine, dtype in (("varlen", torch.bfloat16), ("blocks", torch.float32)):
        model = model_with("llama", engine, dtype=dtype).train()
        logits = model(**batch).logits.float()
        sum(logits[row, part].square().mean() for row, part in documents()).backward()
        grads.append([p.grad.float() for p in model.parameters()])
    for low, high in zip(*grads, strict=True):
        # bf16 weights, activations and gradients through two layers.
        assert (low - high).norm() <= 0.08 * high.norm()


def test_a_tower_attends_to_all_images_in_one_call(tmp_path, monkeypatch):
    """Every image attends to itself alone, ahead and back, as image by image; with kernels, too."""
    directory = pictures.make_model_directory("qwen3_vl", tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.bfloat16).cuda()
    tower, found = model.model.visual, []
    grid = torch.tensor([[1, 4, 6], [1, 8, 2], [1, 2, 2]])
    pixels = torch.randn(int(grid.prod(1).sum()), 96, generator=torch.Generator().manual_seed(0))
    calls = mock.Mock(wraps=forward.varlen_attn)
    monkeypatch.setattr(forward, "varlen_attn", functools.wraps(forward.varlen_attn)(calls))
    for way in ("image by image", "by bounds", "with kernels"):
        attend_in_tower(tower, by_bounds=way != "image by image")
        if way == "with kernels":
            patch(model)
            assert {type(layer) for layer in tower.blocks if plain_class(layer) is not type(layer)}
        given = pixels.to("cuda", torch.bfloat16).requires_grad_()
        seen = tower(given, grid_thw=grid.cuda()).pooler_output
        seen.float().square().sum().backward()
        found.append((seen.detach().float(), given.grad.float()))
    assert calls.call_count == 2 * model.config.vision_config.depth
    for way in found[1:]:
        for plain, ours in zip(found[0], way, strict=True):
            # Each of two layers rounds to 8 bits in another order.
            assert (ours - plain).norm() <= 4 * 2**-8 * plain.norm()
