"""Experts in 4 bits: what is computed, what is kept, and a run over them from end to end."""

import json

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from commands import trainkit
from lora.test_lora_experts import make
from peft import PeftModel
from project import make_project
from train.router_cases import make_moe
from transformers import AutoModelForCausalLM

from trainkit.lora import LoraOptions, attach
from trainkit.lora.report import describe_adapters
from trainkit.models.linears import expert_parameters, num_weights
from trainkit.models.packed_experts import quantize_to_nf4, states_of
from trainkit.patching import patch

FAMILIES = ("qwen3_moe", "gpt_oss", "llama4_text", "glm4_moe")
IDS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))


def as_read(packed, plain):
    """A plain model with the weights that the codes of a packed one stand for."""
    with torch.no_grad():
        for name, module in packed.named_modules():
            other = plain.get_submodule(name)
            for key, state in states_of(module).items():
                getattr(other, key).copy_(dequantize_4bit(getattr(module, key), state))
            if type(module).__name__ == "Linear4bit":
                other.weight.copy_(dequantize_4bit(module.weight, module.weight.quant_state))
    return plain


def pair(family, **options):
    packed = make(family)
    quantize_to_nf4(packed, torch.device("cpu"), torch.float32)
    plain = as_read(packed, make(family))
    models = []
    for model in (packed, plain):
        torch.manual_seed(1)
        model = attach(model, LoraOptions(r=4, alpha=12, **options)).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    generator = torch.Generator().manual_seed(len(name))
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        models.append(model)
    return models


def step(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad} | {"": loss}


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_the_weights_that_the_codes_stand_for(family, kernels):
    packed, plain = pair(family)
    wanted = step(plain)
    if kernels:
        report = patch(packed)
        assert report.row("lora_experts").status == "on", report.row("lora_experts")
    found = step(packed)
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        size = each.abs().max().item()
        torch.testing.assert_close(found[name], each, rtol=1e-3, atol=2e-5 * size + 1e-9, msg=name)
    with torch.no_grad():  # few tokens, as generation has them; and without adapters
        logits = [m.eval()(input_ids=IDS[:, :3]).logits for m in (packed, plain)]
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)
        with packed.disable_adapter(), plain.disable_adapter():
            logits = [m(input_ids=IDS).logits for m in (packed, plain)]
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("experts", ["auto", False])
def test_experts_without_adapters_are_read_too(experts):
    packed, plain = pair("qwen3_moe", experts=experts)
    report = describe_adapters(packed)
    named = {row["kind"] for row in report["adapted"]} | report["not_adapted"].keys()
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= named
    wanted, found = step(plain), step(packed)
    assert found[""].item() == pytest.approx(wanted[""].item(), rel=1e-5)


def test_four_bits_are_what_is_kept():
    model = make("qwen3_moe")
    weights = sum(p.numel() for p in expert_parameters(model).values())
    quantize_to_nf4(model, torch.device("cpu"), torch.bfloat16)
    kept = expert_parameters(model).values()
    assert sum(map(num_weights, kept)) == weights
    assert sum(p.numel() * p.element_size() for p in kept) == weights // 2
    total = describe_adapters(attach(model, LoraOptions(r=4)))["storage"]["nf4"]
    assert total["weights"] > weights


@pytest.mark.parametrize("kernels", [False, True])
def test_no_weight_in_full_lives_between_forward_and_backward(kernels):
    packed, _ = pair("qwen3_moe")
    if kernels:
        patch(packed)
    whole = max(p.quant_state.shape.numel() for p in expert_parameters(packed).values())
    kept = []

    def keep(tensor):
        kept.append(tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed(input_ids=IDS[:, :3], labels=IDS[:, :3])
    assert kept
    assert max(kept) < whole


def test_a_run_over_them_goes_on_and_is_merged(tmp_path, tiny_tokenizer):
    make_moe(len(tiny_tokenizer)).save_pretrained(tmp_path / "moe")
    tiny_tokenizer.save_pretrained(tmp_path / "moe")
    (tmp_path / "project").mkdir()
    project = make_project(tmp_path / "project", tmp_path / "moe")
    words = ["--config", "r.yaml", "lora.quantize=nf4", "training.max_steps=4"]
    assert project.sft(*words, "--output-dir", "whole").code == 0
    assert project.sft(*words, "--output-dir", "parts", stop_at=2).code == 130
    assert project.sft("--resume", "parts").code == 0
    files = [project.root / run / "final/adapter_model.safetensors" for run in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    record = json.loads((project.root / "whole" / "kernels.json").read_text())
    assert record["adapters"]["storage"]["nf4"]["weights"] > 2 * 8 * 3 * 32 * 16
    assert trainkit(project.root, "merge", "whole/final", "--output", "merged").code == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.bfloat16)
    quantize_to_nf4(base, torch.device("cpu"), torch.bfloat16)
    plain = as_read(base, AutoModelForCausalLM.from_pretrained(tmp_path / "moe")).float()
    wanted = PeftModel.from_pretrained(plain, project.root / "whole/final").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(project.root / "merged", dtype=torch.float32)
    for name, parameter in wanted.named_parameters():
        found = dict(merged.named_parameters())[name]
        torch.testing.assert_close(found, parameter, rtol=2**-7, atol=1e-5, msg=name)
