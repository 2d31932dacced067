"""The proof at start looks at each layer by itself: small faults show in bf16 at real shapes."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import sliding_window_causal_mask_function

from trainkit.models.attention import choice, forward, pattern, proof, resolve_attention

SMALL = {
    "num_hidden_layers": 1,
    "vocab_size": 500,
    "intermediate_size": 128,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
SHAPES = {
    "qwen2-7b": ("qwen2", {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
                           "head_dim": 128}),
    "mistral-7b": ("mistral", {"hidden_size": 1024, "num_attention_heads": 8,
                               "num_key_value_heads": 2, "head_dim": 128, "sliding_window": 4096}),
    "gemma2-27b": ("gemma2", {"hidden_size": 1152, "num_attention_heads": 8,
                              "num_key_value_heads": 4, "head_dim": 128,
                              "query_pre_attn_scalar": 144, "attn_logit_softcapping": 50.0,
                              "sliding_window": 4096}),
    "gpt-oss-20b": ("gpt_oss", {"hidden_size": 720, "num_attention_heads": 16,
                                "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 128,
                                "num_local_experts": 4}),
}  # fmt: skip
"""Heads and windows as wide as published, fewer heads; the rest is small."""

ALLOWED = 0.02
"""Of the size of a layer's result: what may pass unseen. Eager's own bf16 result is 0.3% off."""


@pytest.fixture(scope="module")
def model_of():
    models = {}

    def make(name):
        if name not in models:
            model_type, sizes = SHAPES[name]
            config = AutoConfig.for_model(model_type, **{**SMALL, **sizes})
            with torch.random.fork_rng():
                torch.manual_seed(0)
                models[name] = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return models[name]

    return make


def checks_of(model, *, packed):
    wanted = resolve_attention(packed=packed, device="cpu", dtype=torch.bfloat16)
    return proof.settle(model, wanted, packed=packed, is_auto=False).checks


@pytest.mark.parametrize("name", SHAPES)
def test_the_right_attention_passes_with_room(name, model_of):
    rows = checks_of(model_of(name), packed=True)
    layers = [row for row in rows if row["compared"].startswith("layers")]
    assert [row["batch"] for row in layers] == ["padded", "packed"]
    assert {row["compared"] for row in layers} == {"layers: 1"}
    for row in layers:
        assert row["error"] < row["allowed"] / 2, row
        assert row["allowed"] < ALLOWED


def shifted_window(by):
    def mutate(monkeypatch):
        original = pattern.Pattern.__init__

        def shifted(self, function, *args, **options):
            _, window = pattern._causal_or_window(function)
            if window is not None:
                function = sliding_window_causal_mask_function(window + by)
            original(self, function, *args, **options)

        monkeypatch.setattr(pattern.Pattern, "__init__", shifted)

    return mutate


def without(option):
    def mutate(monkeypatch):
        original = forward.spelled_out
        dropped = {option: None}
        monkeypatch.setattr(
            forward, "spelled_out", lambda *a, **options: original(*a, **{**options, **dropped})
        )

    return mutate


def scaled(factor):
    """None: the layer's own scale is dropped for the usual one."""

    def mutate(monkeypatch):
        original = forward._by_pattern

        def other(module, query, key, value, found, options):
            scaling = None if factor is None else factor * query.shape[-1] ** -0.5
            return original(module, query, key, value, found, {**options, "scaling": scaling})

        monkeypatch.setattr(forward, "_by_pattern", other)

    return mutate


def heads_in_another_order(monkeypatch):
    """Groups dealt in turn in place of one after the other."""
    original = forward._by_pattern

    def other(module, query, key, value, found, options):
        repeats = query.shape[1] // key.shape[1]
        key, value = (states.repeat(1, repeats, 1, 1) for states in (key, value))
        groups, module.num_key_value_groups = module.num_key_value_groups, 1
        try:
            return original(module, query, key, value, found, options)
        finally:
            module.num_key_value_groups = groups

    monkeypatch.setattr(forward, "_by_pattern", other)


def one_head_reads_anothers_sink(monkeypatch):
    original = forward.spelled_out

    def other(*states, sinks, **options):
        moved = sinks.clone()
        moved[0] = -20.0
        return original(*states, sinks=moved, **options)

    monkeypatch.setattr(forward, "spelled_out", other)


def shifted_bound(monkeypatch):
    documents = choice.Documents

    def shifted(bounds, longest, shared):
        moved = torch.cat((bounds[:1], bounds[1:2] + 1, bounds[2:]))
        return documents(moved, longest, shared)

    monkeypatch.setattr(choice, "Documents", shifted)


FAULTS = {
    "a window one too long": ("mistral-7b", shifted_window(1)),
    "a window one too short": ("mistral-7b", shifted_window(-1)),
    "a soft cap dropped": ("gemma2-27b", without("softcap")),
    "the layer's scale dropped, 6% off": ("gemma2-27b", scaled(None)),
    "a scale 5% off": ("qwen2-7b", scaled(1.05)),
    "sinks dropped": ("gpt-oss-20b", without("sinks")),
    "one head's sink dropped": ("gpt-oss-20b", one_head_reads_anothers_sink),
    "heads grouped in another order": ("qwen2-7b", heads_in_another_order),
    "a document's end one late": ("qwen2-7b", shifted_bound),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_small_faults_are_seen_in_bf16(fault, model_of, monkeypatch):
    name, mutate = FAULTS[fault]
    mutate(monkeypatch)
    failed = [row for row in checks_of(model_of(name), packed=True) if row["status"] == "failed"]
    layers = [row for row in failed if row["compared"].startswith("layers")]
    assert layers, failed
    assert "on the same" in layers[0]["detail"]
