"""What ``attn_implementation: auto`` does with one class for each feature of transformers' models.

The proof at start decides; here it is held against logits and gradients of eager attention.
"""

import math
from dataclasses import replace

import pytest
import torch
from tiny import SINCE_5_18
from tiny_classes import classes, make_tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma4TextConfig, MambaConfig

from trainkit.errors import ModelError
from trainkit.models.attention import Attention, attention_heads, forward, proof, resolve_attention
from trainkit.models.attention.packable import refuse_recurrent
from trainkit.models.attention.pattern import make_mask
from trainkit.models.attention.proof import small_batches
from trainkit.models.leak_test import leak_test, packed_inputs

OURS, SDPA, EAGER = "trainkit", "sdpa", "eager"

SERVED = {
    "plain": ("gpt_neox", OURS),
    "grouped heads": ("llama", OURS),
    "sliding window": ("mistral", OURS),
    "window in some layers": ("gemma3_text", OURS),
    "window by mask alone": ("phimoe", OURS),
    "sinks": ("gpt_oss", OURS),
    "sinks and windows": ("mimo_v2_flash", OURS),
    "chunks": ("llama4_text", OURS),
    "soft caps": ("gemma2", OURS),
    "another size of values": ("deepseek_v3", OURS),
    "several parts": ("gemma3", OURS),
    "mask made in the layer": ("doge", OURS if SINCE_5_18 else SDPA),
    "experts": ("qwen3_moe", OURS),
    "indices": ("deepseek_v32", SDPA),
    "indices and sinks": ("hy_v4", EAGER),
    "attention of its own": ("gptj", EAGER),
}
"""Feature -> class, and what runs on padded and packed rows alike."""

PADDED_ONLY = {
    "linear attention": ("qwen3_next", "recurrence", OURS),
    "linear attention, text part": ("qwen3_5_text", "recurrence", OURS),
    "linear attention with experts": ("qwen3_5_moe_text", "recurrence", OURS),
    "state space": ("mamba", "recurrence", OURS),
    "state space and attention": ("bamba", "recurrence", OURS),
    "lightning attention": ("minimax", "recurrence", OURS),
    "convolution": ("lfm2", "convolution", OURS),
    "extended long memory": ("xlstm", "recurrent", OURS),
    "alibi": ("bloom", "each document alone", EAGER),
    "learned positions": ("bart", "each document alone", OURS),
}
"""Feature -> class, what the refusal to pack says, and what runs on padded rows."""


def tiny(model_type):
    found = classes()
    if model_type not in found:
        pytest.skip(f"this transformers has no {model_type}")
    return make_tiny(*found[model_type])


def settled(model, *, packed, wanted=None, is_auto=True):
    wanted = wanted or resolve_attention(packed=packed, device="cpu", dtype=torch.float32)
    return proof.settle(model, wanted, packed=packed, is_auto=is_auto)


@pytest.mark.parametrize("feature", SERVED)
def test_served_features_give_eagers_logits_and_gradients(feature):
    model_type, chosen = SERVED[feature]
    model = tiny(model_type)
    found = settled(model, packed=True)
    assert found.name == chosen, found.reason
    accepted = [row for row in found.checks if row["status"] == "ok"]
    assert {row["batch"] for row in accepted} == {"padded", "packed"}
    assert chosen == OURS or "refused" in found.reason or "its own attention" in found.reason
    assert leak_test(model, attention=chosen, vocab_size=100) > 0
    if "indices" in feature:
        return  # scores of zero tie, and which key of them is taken depends on its place in the row
    with proof._narrowed(model):
        ours = logits_and_gradients(model, "inputs", "places")
        model.set_attn_implementation("eager")
        eager = logits_and_gradients(model, "eager_inputs", "eager_places")
    for name, truth in eager.items():
        # fp32 through four layers: sums in another order, relative to the size of the tensor.
        assert (ours[name] - truth).norm() <= 2e-4 * truth.norm() + 1e-6, name


def logits_and_gradients(model, inputs, places):
    found = {}
    for name, batch in small_batches(model, packed=True).items():
        model.zero_grad()
        logits = model(**getattr(batch, inputs), use_cache=False).logits[getattr(batch, places)]
        logits.square().mean().backward()
        found[name] = logits.detach()
        for parameter_name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{name} {parameter_name}"] = parameter.grad.clone()
    return found


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_named(packed, number):
    """Not the attention that they spoil."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = number
    with pytest.raises(ModelError, match=r"the weight model\.layers\.1\.mlp\.up_proj\.weight"):
        settled(model, packed=packed)


def test_a_setting_without_a_number_is_no_fault_of_the_attention():
    model = tiny("llama")
    model.model.norm.variance_epsilon = math.nan
    with pytest.raises(ModelError, match="with any attention its logits hold NaN"):
        settled(model, packed=True)


@pytest.mark.parametrize(
    ("model_type", "reason", "padded"), PADDED_ONLY.values(), ids=PADDED_ONLY.keys()
)
def test_what_cannot_be_packed_says_why(model_type, reason, padded):
    model = tiny(model_type)
    with pytest.raises(ModelError, match=reason) as failure:
        settled(model, packed=True)
    assert "data.packing" in str(failure.value)
    assert settled(model, packed=False).name == padded
    if reason != "each document alone":  # then it is known before any weight is read
        with pytest.raises(ModelError, match="carries state from one document into the next"):
            refuse_recurrent(model.config, apart=False)


def test_models_that_pack_are_not_refused_by_their_layers():
    for model_type in ("llama", "gemma3", "gpt_oss", "deepseek_v3"):
        refuse_recurrent(tiny(model_type).config)


# -- the proof must be able to fail -------------------------------------------------------------


def lose(monkeypatch, what):
    """Drop one thing from the attention, as a careless hook would."""
    original = forward.spelled_out
    if what == "window":
        monkeypatch.delitem(proof._NARROWED, "attention_chunk_size")
        monkeypatch.setattr("trainkit.models.attention.pattern._causal_or_window", no_window)
        return
    monkeypatch.setattr(forward, "spelled_out", lambda *a, **k: original(*a, **{**k, what: None}))


def no_window(function):
    return True, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "what", "extra"),
    [
        ("gpt_oss", "sinks", {}),
        ("gemma2", "softcap", {"attn_logit_softcapping": 1.0}),
        ("mistral", "window", {}),
        ("llama4_text", "window", {}),
    ],
)
def test_what_is_dropped_is_seen(model_type, what, extra, dtype, monkeypatch):
    model = make_tiny(*classes()[model_type], **extra).to(dtype)
    lose(monkeypatch, what)
    found = settled(model, packed=False)
    assert found.name in (SDPA, EAGER)
    assert "rounding explains" in found.reason
    assert next(row["status"] for row in found.checks) == "refused"


def test_a_model_whose_documents_only_our_attention_keeps_apart():
    """transformers' own eager attention lets packed documents of gpt_oss see one another."""
    model = tiny("gpt_oss")
    found = settled(model, packed=True, wanted=Attention("eager", "named"), is_auto=False)
    if any(row["status"] == "failed" for row in found.checks):
        with pytest.raises(proof.AttentionProofError, match="each document alone"):
            proof.require_proof(found)


def test_an_implementation_that_the_recipe_names_stops_the_run(monkeypatch):
    model = tiny("gpt_oss")
    lose(monkeypatch, "sinks")
    wanted = replace(resolve_attention(packed=False, device="cpu"), reason="named in the recipe")
    found = settled(model, packed=False, wanted=wanted, is_auto=False)
    with pytest.raises(proof.AttentionProofError, match="attention trainkit does not compute"):
        proof.require_proof(found)
    named = settled(model, packed=False, wanted=Attention("eager", "named"), is_auto=False)
    proof.require_proof(named)


def test_unknown_keys_and_masks_of_another_size_are_refused():
    model = tiny("mistral")
    forward_of = forward.attention_forward
    layer = model.model.layers[0].self_attn
    states = torch.zeros(1, 4, 3, 16)
    mask = make_mask(1, 5, 5)
    with pytest.raises(ModelError, match="the mask is of 5 tokens"):
        forward_of(layer, states, states, states, mask)


def test_no_mask_of_a_row_squared_is_made():
    """Rows of 16k tokens, documents of 5k, a chunk: no tensor may have 16k * 16k elements."""

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                Watch.largest = max(Watch.largest, result.numel())
            return result

    length = 16384
    ids = torch.zeros(1, length, dtype=torch.long)
    batch = {"input_ids": ids, **packed_inputs(((5000, 6000),), length)}
    found = classes()
    for model_type in ("qwen2", "mistral"):
        model = make_tiny(*found[model_type], num_hidden_layers=1, max_position_embeddings=length)
        attention = resolve_attention(packed=True, device="cpu")
        proof._apply(model, attention)
        with torch.no_grad(), Watch():
            model.model(**batch, use_cache=False)
    assert Watch.largest <= forward.BLOCK * 6000


def test_the_heads_of_each_class_are_known():
    """In some they differ between layers, and some have none; both stopped a run."""
    others = ("blt", "gemma4_text", "mamba", "rwkv", "xlstm")
    for name in (*(name for name, _ in SERVED.values()), *others):
        config = classes()[name][0]().get_text_config(decoder=True)
        heads = attention_heads(config)
        assert len(heads) in (0, getattr(config, "num_hidden_layers", 1)), name
        assert all(map(all, heads)), name


def test_heads_that_differ_between_layers_are_each_counted():
    config = Gemma4TextConfig(num_hidden_layers=6, head_dim=16, global_head_dim=32)
    sizes = [size for _, size in attention_heads(config)]
    assert sizes == [32 if kind == "full_attention" else 16 for kind in config.layer_types]
    assert attention_heads(MambaConfig(num_hidden_layers=2)) == []
