"""Families that most people train: patched is as plain, and revert gives plain back."""

import copy
from collections import Counter

import pytest
import torch
from families.family_models import (
    DEVICE,
    FAMILIES,
    OFF,
    WINDOWED,
    exact,
    excess_errors,
    like_model,
    make,
    make_batch,
    pooled_excess_errors,
    run,
)
from peft import LoraConfig, get_peft_model
from ranks import run_ranks
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import trainkit
from trainkit import kernels
from trainkit.models.proof.norms import RMSNorm
from trainkit.models.proof.rewritten import Rewritten
from trainkit.options.model import OPS

every_family = pytest.mark.parametrize("name", FAMILIES)


KINDS = ("gemma", "glm4", "phi3", "qwen2_vl")
"""Norms of 1 + weight and GeGLU; norms behind blocks, pairs in turn; packed; with images."""


def each_kind(test):
    return pytest.mark.sample(*KINDS)(every_family(test))


LAYERS = 2


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of every kernel that a forward looks up in ``trainkit.kernels``."""
    counts = Counter()

    def counting(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    names = ("rms_norm", "add_rms_norm", "apply_rope", "swiglu", "geglu_tanh", "swiglu_packed")
    for name in names:
        monkeypatch.setattr(kernels, name, counting(name, getattr(kernels, name)))
    return counts


@every_family
@pytest.mark.sample("bf16-*[!2m]", "fp32-gemma", "fp32-qwen3")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_loss_and_every_gradient(name, dtype, calls):
    model = make(name, dtype=dtype)
    batches = [make_batch(name, seed=seed) for seed in range(1, 5)]
    reference = exact(copy.deepcopy(model))
    truths, plains = ([run(one, batch) for batch in batches] for one in (reference, model))
    assert not calls
    report = trainkit.patch(model)
    calls.clear()  # those of the proof
    patched = run(model, batches[0])
    assert patched.keys() == plains[0].keys() == truths[0].keys()
    # Two forward passes. Each norm runs, but for the one in every layer that the addition takes in.
    fused = LAYERS * (report.row("add_rms_norm").status == "on")
    wanted = {
        "rms_norm": report.row("rms_norm").num_modules - fused,
        "add_rms_norm": fused,
        "apply_rope": report.row("rope").num_modules,
        **dict.fromkeys(report.row("swiglu").kernels, LAYERS),
    }
    assert {each: calls[each] for each in wanted} == {each: 2 * n for each, n in wanted.items()}
    others = [run(model, batch) for batch in batches[1:]]
    assert not pooled_excess_errors(list(zip(plains, [patched, *others], truths, strict=True)))


@each_kind
def test_norms_have_hugging_faces_bits(name):
    """A wrong ``cast`` is as near to the truth, and another function in bf16."""
    model = make(name, dtype=torch.bfloat16)
    plain = copy.deepcopy(model)
    report = trainkit.patch(model)
    assert report.row("rms_norm").other_bits == 0
    allowed = 0.01 if DEVICE == "cuda" else 0  # a kernel adds a row's squares in another order
    torch.manual_seed(0)
    pairs = list(zip(model.modules(), plain.modules(), strict=True))
    for ours, theirs in pairs:
        if isinstance(ours, RMSNorm):
            x = torch.randn(2, 64, ours.weight.shape[0]).to(DEVICE, torch.bfloat16)
            assert (ours(x) != theirs(x)).float().mean() <= allowed
        for joined in ours.joined if isinstance(ours, Rewritten) else ():
            norm = getattr(theirs, joined)
            x, residual = (
                torch.randn(2, 64, norm.weight.shape[0]).to(DEVICE, torch.bfloat16)
                for _ in range(2)
            )
            normed, total = ours.add_norm(joined, x, residual)
            assert torch.equal(total, x + residual)
            assert (normed != norm(total)).float().mean() <= allowed


@each_kind
def test_under_autocast(name):
    """fp32 weights, bf16 products: norms and additions see both dtypes at once."""
    truth = run(exact(make(name)), make_batch(name))
    model = make(name)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        plain = run(model, make_batch(name))
        trainkit.patch(model)
        patched = run(model, make_batch(name))
    assert {key: value.dtype for key, value in patched.items()} == {
        key: value.dtype for key, value in plain.items()
    }
    assert not excess_errors(plain, patched, truth)


@each_kind
def test_every_op_alone(name):
    """Ops do not lean on one another: each one switched on by itself is right."""
    model = make(name)
    plain = run(model, make_batch(name))
    truth = run(exact(make(name)), make_batch(name))
    for op in OPS:
        if op in OFF.get(name, {}):
            continue
        report = trainkit.patch(model, {other: other == op for other in OPS})
        assert [row.op for row in report.rows if row.status == "on"] == [op]
        assert not excess_errors(plain, run(model, make_batch(name)), truth), op
        report.revert()


@every_family
@pytest.mark.sample("True-llama", "False-glm4", "False-qwen2_vl")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_every_layer_once(name, reentrant):
    model = make(name)
    trainkit.patch(model)
    expected = run(model, make_batch(name))
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    assert len(layers) == LAYERS
    counts = Counter()
    for layer in layers:
        # Before the block: a recomputation stops as soon as it has what the backward pass needs.
        layer.mlp.register_forward_pre_hook(lambda *_: counts.update(["mlp"]))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = run(model, make_batch(name), want_logits=False)
    assert counts["mlp"] == 2 * LAYERS
    assert all(torch.equal(found[key], expected[key]) for key in found)


@each_kind
def test_the_attention_function_gets_what_it_got(name, monkeypatch):
    """What sdpa ignores counts for other functions: windows, dropout, scaling."""
    seen = []

    def spy(module, query, key, value, attention_mask, **settings):
        seen.append(settings)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "spy", spy)
    model = make(
        name, attention_dropout=0.25, sliding_window=5, use_sliding_window=True, max_window_layers=1
    )
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = "spy"
    batch = like_model(make_batch(name), model)
    model(**batch)
    plain = seen.copy()
    seen.clear()
    trainkit.patch(model)
    model(**batch)
    assert len(seen) == len(plain) >= LAYERS
    for new, old in zip(seen, plain, strict=True):
        assert new.keys() == old.keys()
        tensors = {key for key in old if isinstance(old[key], torch.Tensor)}
        assert all(torch.equal(new[key], old[key]) for key in tensors)
        assert all(new[key] == old[key] for key in old.keys() - tensors)
    overridden = name != "qwen2_vl"  # its configuration is its own
    windowed = name in WINDOWED
    assert any(settings.get("sliding_window") == 5 for settings in plain) == windowed
    assert any(settings["dropout"] == 0.25 for settings in plain) == overridden


def with_lora(model):
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.02)
    return adapted


@each_kind
def test_patch_before_and_after_peft(name):
    plain = run(with_lora(make(name)), make_batch(name))
    truth = run(exact(with_lora(make(name))), make_batch(name))
    assert any("lora_A" in key for key in plain)

    after = with_lora(make(name))
    trainkit.patch(after)
    before = make(name)
    trainkit.patch(before)
    before = with_lora(before)
    # Adapters that are there when the model is patched take the fused backward pass as well.
    for adapted in (after, before):
        assert not excess_errors(plain, run(adapted, make_batch(name)), truth)


@each_kind
def test_norms_trained_through_peft(name):
    """``modules_to_save`` copies norms and wraps them: the copies count, and revert finds them."""

    def adapt(model):
        config = LoraConfig(
            r=2, target_modules=["o_proj"], modules_to_save=["post_attention_layernorm"]
        )
        adapted = get_peft_model(model, config)
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if "modules_to_save" in key:
                    parameter.mul_(1.5)
        return adapted

    plain = run(adapt(make(name)), make_batch(name))
    truth = run(exact(adapt(make(name))), make_batch(name))
    model = make(name)
    report = trainkit.patch(model)
    adapted = adapt(model)
    assert not excess_errors(plain, run(adapted, make_batch(name)), truth)
    report.revert()
    again = run(adapted, make_batch(name))
    assert all(torch.equal(again[key], plain[key]) for key in plain)


@each_kind
def test_revert_leaves_the_plain_model(name):
    model = make(name)
    plain = run(model, make_batch(name))
    classes = [type(module) for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    report = trainkit.patch(model)
    assert [type(module) for module in model.modules()] != classes
    assert [type(module).__name__ for module in model.modules()] == [c.__name__ for c in classes]
    report.revert()
    report.revert()
    assert not report.active
    assert [type(module) for module in model.modules()] == classes
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    again = run(model, make_batch(name))
    assert all(torch.equal(again[key], plain[key]) for key in plain)


@each_kind
def test_generation_with_a_cache_is_unchanged(name, calls):
    model = make(name).eval()
    batch = like_model(make_batch(name), model)
    del batch["labels"]
    batch["attention_mask"].fill_(1)
    batch["attention_mask"][-1, 0] = 0  # left padding, as generation wants it
    settings = {
        "max_new_tokens": 6,
        "do_sample": False,
        "use_cache": True,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    plain = model.generate(**batch, **settings)
    patched = copy.deepcopy(model)
    trainkit.patch(patched)
    calls.clear()
    found = patched.generate(**batch, **settings)
    assert torch.equal(found.sequences, plain.sequences)
    prompt = Counter(calls)
    assert prompt.keys() == calls.keys() > set()
    patched(**batch, use_cache=False)  # the prompt alone makes as many calls: decoding makes none
    assert calls == {key: 2 * count for key, count in prompt.items()}
    for new, old in zip(found.logits, plain.logits, strict=True):
        # fp32, two layers: prompts differ in their last bits, the steps after only through them.
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)


@each_kind
def test_accumulation_is_invariant_to_how_a_batch_is_cut(name):
    """Eight ragged samples at once, and one by one: the same loss and gradients.

    The model is fp64, but Hugging Face's loss is taken in fp32: a few of its roundings remain. The
    mean of the eight means, what accumulation computes without the count, is far off.
    """
    lengths = [3, 12, 5, 9, 4, 11, 7, 6]
    torch.manual_seed(5)
    ids = torch.randint(3, 119, (8, max(lengths)))
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(~mask, -100)
    count = int((labels[:, 1:] != -100).sum())
    model = make(name, dtype=torch.float64)
    trainkit.patch(model)
    ids, mask, labels = ids.to(DEVICE), mask.to(DEVICE), labels.to(DEVICE)
    whole = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
    at_once = run(model, whole, num_items_in_batch=count)
    model.zero_grad(set_to_none=True)
    losses, means = [], []
    for row, length in enumerate(lengths):
        one = {"input_ids": ids[row : row + 1, :length], "labels": labels[row : row + 1, :length]}
        loss = model(**one, num_items_in_batch=count).loss
        loss.backward()
        losses.append(loss.item())
        means.append(model(**one).loss.item())
    assert sum(losses) == pytest.approx(at_once["loss"].item(), rel=1e-6)
    assert sum(means) / 8 != pytest.approx(at_once["loss"].item(), rel=1e-4)
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = at_once[key].abs().max().item()
            torch.testing.assert_close(parameter.grad, at_once[key], rtol=0, atol=1e-6 * scale)


@pytest.mark.sample("zero3-kinds", "fsdp2-kinds")
@pytest.mark.parametrize("names", [KINDS, FAMILIES.keys() - KINDS], ids=["kinds", "others"])
@pytest.mark.parametrize("case", [{"stage": 2}, {"stage": 3}, {}], ids=["zero2", "zero3", "fsdp2"])
def test_two_sharding_ranks_equal_one_process(case, names):
    """fp32, two SGD steps of every family: another order of sums, a few roundings of a weight."""
    name = "zero" if case else "fsdp2"
    first, second = run_ranks(f"families.family_cases:{name}", names=sorted(names), **case)
    assert first == second
    assert first.keys() == set(names)
    assert max(first.values()) < 2e-6, first
