"""Packed documents attend as if each were alone; nothing else changes."""

import pytest
import torch
from families.family_models import make
from peft import LoraConfig, get_peft_model

from trainkit.errors import ModelError, TrainkitError
from trainkit.models import attend as attend_module
from trainkit.models import attention, document_masks
from trainkit.models.families import FAMILIES
from trainkit.models.leak_test import leak_test, packed_bounds
from trainkit.patching import patch

PACKS = sorted(set(FAMILIES) - {"qwen2_vl"})
LENGTHS = ((7, 11, 3), (13, 5))
ROW = 24


def model_with(name, implementation=attention.NAME, **overrides):
    attention.register()
    model = make(name, **overrides)
    model.set_attn_implementation(implementation)
    if implementation == attention.NAME:
        attention.install(model)
    return model.eval()


def packed_batch(lengths=LENGTHS, row=ROW, seed=0):
    positions, bounds, longest = packed_bounds(lengths, row)
    ids = torch.randint(3, 119, positions.shape, generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": ids,
        "position_ids": positions,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def documents(lengths=LENGTHS):
    for row, inside in enumerate(lengths):
        start = 0
        for length in inside:
            yield row, slice(start, start + length)
            start += length


def assert_documents_are_alone(model, plain, batch=None):
    batch = batch or packed_batch()
    packed = model(**batch).logits
    for row, part in documents():
        alone = plain(batch["input_ids"][row : row + 1, part]).logits[0]
        # fp32 logits of order one; the kernels sum in another order.
        torch.testing.assert_close(packed[row, part], alone, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kernels", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize("name", PACKS)
def test_packed_equals_alone(name, kernels):
    model, plain = model_with(name), model_with(name, "eager")
    if kernels:
        patch(model)
    assert_documents_are_alone(model, plain)
    assert leak_test(model, attention=attention.NAME, vocab_size=128) > 0


@pytest.mark.parametrize("name", ["mistral", "phi3", "qwen2"])
def test_sliding_windows(name):
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


def test_flex_sees_what_the_dense_mask_shows():
    bounds = packed_batch()["cu_seq_lens_q"]
    blocks = document_masks.document_blocks(bounds, 2, ROW)
    query, key = (torch.arange(ROW).view(shape) for shape in ((1, -1, 1), (1, 1, -1)))
    shown = blocks.mask_mod(torch.arange(2).view(-1, 1, 1), torch.tensor(0), query, key)
    assert torch.equal(shown, document_masks.document_mask(bounds, 2, ROW)[:, 0])


@pytest.mark.parametrize("reason", ["window", "dropout"])
def test_what_flex_cannot_do_runs_on_the_dense_mask(reason, monkeypatch):
    """No flex kernel runs here, so a call of it would fail."""
    sizes = {"window": {"sliding_window": 4}, "dropout": {"attention_dropout": 1e-9}}[reason]
    attention.register()
    model = make("mistral", **sizes)
    model.set_attn_implementation(attention.NAME)
    attention.install(model, "flex")
    monkeypatch.setattr(attend_module, "flex_attention_forward", None)
    plain = model_with("mistral", "eager", **sizes)
    assert_documents_are_alone(model.train(reason == "dropout"), plain)


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
    sdpa = attend_module.sdpa_attention_forward
    monkeypatch.setattr(
        attend_module,
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


def test_the_leak_test_sees_broken_isolation(monkeypatch):
    model = model_with("qwen2")
    number = document_masks._document_numbers
    monkeypatch.setattr(
        document_masks, "_document_numbers", lambda *sizes: torch.zeros_like(number(*sizes))
    )
    with pytest.raises(TrainkitError, match="document 0 moved the logits of document 1") as failure:
        leak_test(model, attention="broken", vocab_size=128)
    assert "attention broken" in str(failure.value)


def test_the_leak_test_sees_a_single_shifted_bound(monkeypatch):
    model = model_with("qwen2")
    number = document_masks._document_numbers

    def shifted(bounds, *sizes):
        return number(torch.cat((bounds[:1], bounds[1:2] + 1, bounds[2:])), *sizes)

    monkeypatch.setattr(document_masks, "_document_numbers", shifted)
    with pytest.raises(TrainkitError, match="leak"):
        leak_test(model, attention="shifted", vocab_size=128)


def test_the_leak_test_sees_a_model_that_ignores_its_input(monkeypatch):
    model = model_with("qwen2")
    with torch.no_grad():
        model.model.norm.weight.zero_()
    with pytest.raises(TrainkitError, match="saw no change"):
        leak_test(model, attention="deaf", vocab_size=128)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_hugging_faces_own_masks_pass_too(implementation):
    assert leak_test(model_with("qwen2", implementation), attention="hf", vocab_size=128) > 0


def test_the_leak_test_leaves_the_mode_alone():
    model = model_with("qwen2").train()
    leak_test(model, attention=attention.NAME, vocab_size=128)
    assert model.training


# -- refusals and choices -----------------------------------------------------------------------


def test_a_cache_and_packing_are_refused():
    model = model_with("qwen2")
    with pytest.raises(TrainkitError, match="use_cache"):
        model(**packed_batch(), use_cache=True)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "mamba2", "qwen3_next"])
def test_families_that_cannot_pack(model_type):
    with pytest.raises(ModelError, match="cannot be trained on packed rows"):
        attention.resolve_attention(model_type, packed=True, device="cpu")
    assert attention.resolve_attention(model_type, packed=False, device="cpu").engine is None


def test_what_auto_means(monkeypatch):
    chosen = attention.resolve_attention("qwen2", packed=True, device="cpu")
    assert (chosen.name, chosen.engine) == ("trainkit", "mask")
    assert "cpu" in chosen.reason
    gpu = {"packed": True, "device": "cuda"}
    assert attention.resolve_attention("qwen2", **gpu).engine == "varlen"
    for change in ({"dtype": torch.float32}, {"head_size": 512}):
        assert attention.resolve_attention("qwen2", **gpu, **change).engine == "flex"
    monkeypatch.setattr(attend_module, "varlen_attn", None)
    chosen = attention.resolve_attention("qwen2", **gpu)
    assert chosen.engine == "flex"
    assert "no varlen attention" in chosen.reason


def test_soft_caps_are_refused():
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match="soft cap"):
        attend_module.attend(torch.nn.Module(), states, states, states, None, softcap=30.0)


def test_varlen_gets_grouped_heads_as_they_are(monkeypatch):
    """The GPU path on the CPU: the call that varlen attention would get, and its result's shape."""
    seen = {}

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, **options):
        seen.update(options, q=q, k=k, cu=cu_q, longest=max_q)
        return torch.zeros_like(q)

    monkeypatch.setattr(attend_module, "flash_obstacle", lambda *_: None)
    monkeypatch.setattr(attend_module, "varlen_attn", varlen)
    monkeypatch.setattr(
        attend_module,
        "_varlen_options",
        lambda window, scaling, grouped: {"window": window, "scale": scaling, "grouped": grouped},
    )
    batch = packed_batch()
    query = torch.randn(2, ROW, 4, 16).transpose(1, 2)
    key = torch.randn(2, ROW, 2, 16).transpose(1, 2)
    output, weights = attend_module.attend(
        torch.nn.Module(),
        query,
        key,
        key,
        document_masks.no_mask(torch.device("cpu")),
        scaling=0.25,
        sliding_window=5,
        cu_seq_lens_q=batch["cu_seq_lens_q"],
        max_length_q=batch["max_length_q"],
    )
    assert output.shape == (2, ROW, 4, 16)
    assert weights is None
    assert seen["q"].data_ptr() == query.data_ptr()
    assert seen["k"].shape == (2 * ROW, 2, 16)
    assert (seen["window"], seen["scale"], seen["grouped"]) == (5, 0.25, True)
    assert seen["longest"] == 13
