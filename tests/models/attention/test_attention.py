"""Packed documents attend as if each were alone; nothing else changes."""

import pytest
import torch
from attention_cases import (
    PACKS,
    ROW,
    assert_documents_are_alone,
    documents,
    model_with,
    packed_batch,
    pattern_of,
)
from families.family_models import make
from peft import LoraConfig, get_peft_model
from transformers.masking_utils import causal_mask_function

from trainkit.errors import TrainkitError
from trainkit.models import attention
from trainkit.models.attention import forward, pattern
from trainkit.models.leak_test import leak_test
from trainkit.patching import patch


@pytest.mark.parametrize("kernels", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize("name", PACKS)
def test_packed_equals_alone(name, kernels):
    model, plain = model_with(name), model_with(name, "eager")
    if kernels:
        patch(model)
    assert_documents_are_alone(model, plain)
    assert leak_test(model, attention=attention.NAME, vocab_size=128) > 0


@pytest.mark.parametrize(
    ("name", "block"), [("mistral", 1024), ("phi3", 1024), ("qwen2", 1024), ("mistral", 5)]
)
def test_sliding_windows(name, block, monkeypatch):
    """In blocks of five a window reaches over their borders."""
    monkeypatch.setattr(forward, "BLOCK", block)
    extra = {"use_sliding_window": True, "max_window_layers": 0} if name == "qwen2" else {}
    model, plain = (
        model_with(name, implementation, sliding_window=4, **extra)
        for implementation in (attention.NAME, "eager")
    )
    unlimited = model_with(name, "eager", sliding_window=None)
    batch = packed_batch()
    assert_documents_are_alone(model, plain, batch)
    ids = batch["input_ids"]
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=2e-5)
    assert (unlimited(ids).logits - plain(ids).logits).abs().max() > 1e-2


def chunks_of_four(row, head, query, key):
    return (key <= query) & (query // 4 == key // 4)


@pytest.mark.parametrize("function", [causal_mask_function, chunks_of_four])
def test_flex_sees_what_the_blocks_show(function):
    """Both count from the start of a document, which matters to chunks."""
    shown = torch.zeros(2, ROW, ROW, dtype=torch.bool)
    found = pattern_of(packed_batch()["cu_seq_lens_q"], function)
    for rows, start, stop in found.spans:
        inside = slice(start, stop)
        shown[rows, inside, inside] = found.block(rows, start, inside, inside)[:, 0]
    query, key = (torch.arange(ROW).view(shape) for shape in ((1, -1, 1), (1, 1, -1)))
    seen = found.block_mask.mask_mod(torch.arange(2).view(-1, 1, 1), torch.tensor(0), query, key)
    assert torch.equal(seen.expand(2, ROW, ROW), shown)


def test_flex_gets_the_layers_own_scale(monkeypatch):
    seen = {}

    def flex(module, query, key, value, mask, **options):
        seen.update(options)
        return query.transpose(1, 2), None

    monkeypatch.setattr(forward, "flex_attention_forward", flex)
    states = torch.randn(2, 4, ROW, 16)
    found = pattern_of(packed_batch()["cu_seq_lens_q"], engine="flex")
    options = {"scaling": 0.3, "softcap": 20.0, "s_aux": torch.ones(4)}
    forward.attention_forward(torch.nn.Module(), states, states, states, found, **options)
    assert all(seen[name] is options[name] for name in options)


def test_dropout_runs_on_blocks_where_flex_would_drop_it(monkeypatch):
    """No flex kernel runs here, so a call of it would fail."""
    attention.register()
    model = make("mistral", attention_dropout=1e-9)
    model.set_attn_implementation(attention.NAME)
    attention.install(model, "flex")
    monkeypatch.setattr(forward, "flex_attention_forward", None)
    plain = model_with("mistral", "eager", attention_dropout=1e-9)
    assert_documents_are_alone(model.train(), plain)


@pytest.mark.parametrize("name", PACKS)
def test_unpacked_equals_eager(name):
    model, plain = model_with(name).train(), model_with(name, "eager").train()
    ids = packed_batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    labels = ids.where(mask == 1, -100)
    for batch in ({"input_ids": ids, "labels": ids}, {"input_ids": ids, "attention_mask": mask}):
        batch = {"labels": labels, **batch}
        ours, theirs = model(**batch), plain(**batch)
        torch.testing.assert_close(ours.loss, theirs.loss)
        ours.loss.backward()
        theirs.loss.backward()
    for (parameter, other), name in zip(
        zip(model.parameters(), plain.parameters(), strict=True),
        dict(model.named_parameters()),
        strict=True,
    ):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_training_batch_makes_no_mask(monkeypatch):
    model = model_with("llama").train()
    seen = []
    sdpa = forward.sdpa_attention_forward
    monkeypatch.setattr(
        forward,
        "sdpa_attention_forward",
        lambda module, q, k, v, mask, **rest: (
            seen.append(mask) or sdpa(module, q, k, v, mask, **rest)
        ),
    )
    ids = packed_batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    model(ids)
    model(ids, attention_mask=mask)
    assert seen == [None] * 4


def test_left_padding_in_training_is_refused():
    model = model_with("llama").train()
    ids = packed_batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with pytest.raises(RuntimeError, match="right-padded"):
        model(ids, attention_mask=mask)


def test_generation_with_left_padding_and_a_cache():
    model, plain = model_with("qwen2"), model_with("qwen2", "eager")
    ids = packed_batch()["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "use_cache": True}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_without_the_hook_documents_are_still_apart():
    attention.register()
    model = make("qwen2")
    model.set_attn_implementation(attention.NAME)
    assert_documents_are_alone(model.eval(), model_with("qwen2", "eager"))


def test_removing_the_hook():
    model = make("qwen2")
    handle = attention.install(model)
    handle.remove()
    assert not model.model._forward_pre_hooks
    assert not model.model._forward_hooks


def test_installing_twice_leaves_one_hook_and_no_batch_behind():
    model = model_with("qwen2")
    attention.install(model)
    assert len(model.model._forward_pre_hooks) == len(model.model._forward_hooks) == 1
    model(**packed_batch())
    assert pattern.current_batch.get() is None


def test_another_implementation_set_later_gets_its_own_masks():
    model = model_with("qwen2")
    model.set_attn_implementation("sdpa")
    assert_documents_are_alone(model, model_with("qwen2", "eager"))


def test_a_failed_forward_leaves_no_batch_behind():
    model = model_with("qwen2")
    with pytest.raises((RuntimeError, IndexError)):
        model(**{**packed_batch(), "input_ids": torch.full((2, ROW), 10**6)})
    assert pattern.current_batch.get() is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_under_checkpointing_equal_those_of_documents_alone(reentrant):
    model, plain = model_with("llama").train(), model_with("llama", "eager").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    batch = packed_batch()
    logits = model(**batch).logits
    sum(logits[row, part].square().sum() for row, part in documents()).backward()
    for row, part in documents():
        plain(batch["input_ids"][row : row + 1, part]).logits.square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_lora_on_packed_rows():
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    models = []
    for implementation in (attention.NAME, "eager"):
        model = model_with("qwen2", implementation)
        torch.manual_seed(0)
        models.append(get_peft_model(model, config).eval())
    assert_documents_are_alone(*models)
    assert leak_test(models[0], attention=attention.NAME, vocab_size=128) > 0


# -- the leak test must be able to fail ---------------------------------------------------------


def test_a_cache_and_packing_are_refused():
    model = model_with("qwen2")
    with pytest.raises(TrainkitError, match="use_cache"):
        model(**packed_batch(), use_cache=True)
