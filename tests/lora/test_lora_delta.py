"""Gated delta rules under all-linear: what only makes their decays and their beta stays frozen."""

import copy

import pytest
import torch
from peft import PeftModel
from tiny import DELTA_NET
from transformers import AutoConfig, AutoModelForCausalLM

from trainkit.lora import LoraOptions, attach
from trainkit.lora.report import describe_adapters
from trainkit.models.attention.packable import skeleton_of
from trainkit.models.linears import count_parameters
from trainkit.patching import patch

GATES = {
    "qwen3_5_text": {"in_proj_a", "in_proj_b"},
    "qwen3_5_moe_text": {"in_proj_a", "in_proj_b"},
    "qwen3_next": {"in_proj_ba"},
    "olmo_hybrid": {"a_proj", "b_proj"},
}
OTHERS = {
    "qwen3_5_text": {"in_proj_qkv", "in_proj_z", "out_proj"},
    "qwen3_5_moe_text": {"in_proj_qkv", "in_proj_z", "out_proj"},
    "qwen3_next": {"in_proj_qkvz", "out_proj"},
    "olmo_hybrid": {"q_proj", "k_proj", "v_proj", "g_proj", "o_proj"},
}
"""Of a layer with a delta rule, all that is linear besides."""


def config(kind, layers=2):
    sizes = {
        **DELTA_NET,
        "vocab_size": 90,
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention", "full_attention"] * (layers // 2),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        **dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id")),
    }
    return AutoConfig.for_model(kind, **sizes)


def make(kind, layers=2):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(kind, layers))


def adapted(model, layer="linear_attn"):
    names = (name for name, _ in model.named_parameters() if ".lora_A." in name)
    return {name.split(".")[-4] for name in names if f".{layer}." in name}


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
@pytest.mark.parametrize("kind", GATES)
def test_all_linear_leaves_the_projections_of_decay_and_beta(kind, patched):
    base = make(kind)
    if patched:
        patch(base, {"gated_delta_rule": True})
    options = LoraOptions(r=4)
    model = attach(base, options)
    assert adapted(model) == OTHERS[kind]
    frozen = {f"linear_attn.{name}" for name in GATES[kind]}
    assert frozen <= describe_adapters(model)["not_adapted"].keys()
    empty = attach(skeleton_of(config(kind)), options)  # what the estimate runs
    assert count_parameters(empty) == count_parameters(model)


@pytest.mark.parametrize("kind", GATES)
def test_projections_of_decay_and_beta_that_are_named_are_adapted(kind):
    model = attach(make(kind), LoraOptions(r=1, target_modules=sorted(GATES[kind])))
    assert adapted(model) == GATES[kind]


@pytest.mark.parametrize("kind", GATES)
def test_a_saved_adapter_names_what_it_adapts(kind, tmp_path):
    """Servers match ends of names; peft writes the shortest that tell the layers apart."""
    base = make(kind, layers=8)
    plain = copy.deepcopy(base)
    model = attach(base, LoraOptions(r=4, init_lora_weights=False)).eval()
    wanted = model.peft_config["default"].target_modules
    assert wanted >= OTHERS[kind]
    assert not any(name.rpartition(".")[2] in GATES[kind] for name in wanted)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(plain, tmp_path).eval()
    assert adapted(again) == OTHERS[kind]
    ids = torch.randint(0, 90, (1, 9))
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)
