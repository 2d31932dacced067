"""Experts in 4 and 8 bits: what is computed, what is kept, and a run over them from end to end."""

import json

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from commands import trainkit
from lora.test_lora_experts import make
from peft import PeftModel
from project import make_project
from train.router_cases import make_moe
from transformers import AutoModelForCausalLM

from trainkit.infer.locate import run_settings
from trainkit.lora import LoraOptions, attach, quantization_config
from trainkit.lora.report import describe_adapters
from trainkit.models.linears import expert_parameters, num_weights
from trainkit.models.packed_experts import pack_experts, quantize_with_experts, states_of
from trainkit.patching import patch

FAMILIES = ("qwen3_moe", "gpt_oss", "llama4_text", "glm4_moe")
IDS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))


def as_read(packed, plain):
    """A plain model with the weights that the codes of a packed one stand for."""
    with torch.no_grad():
        for name, module in packed.named_modules():
            other = plain.get_submodule(name)
            for key, state in states_of(module).items():
                codes = getattr(module, key)
                if not hasattr(state, "scales"):
                    getattr(other, key).copy_(dequantize_4bit(codes, state))
                    continue
                codes = codes.view(torch.float8_e4m3fn) if state.kind == "fp8" else codes
                getattr(other, key).copy_((codes.float() * state.scales).view(state.shape))
            if type(module).__name__ == "Linear4bit":
                other.weight.copy_(dequantize_4bit(module.weight, module.weight.quant_state))
            if type(module).__name__ == "Linear8bitLt":
                codes, scales = module.weight.CB, module.weight.SCB
                other.weight.copy_(codes.float() * (scales[:, None] / 127))
    return plain


def pack_nf4(model):
    quantize_with_experts(model, torch.device("cpu"), LoraOptions(quantize="nf4"))


def pack_int8(model):  # the experts alone: linear layers round what they multiply, too
    pack_experts(model, "int8", torch.device("cpu"))


def pack_fp8(model):
    assert "gate" in pack_experts(model, "fp8", torch.device("cpu"))


def pair(family, pack=pack_nf4, **options):
    packed = make(family)
    pack(packed)
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


@pytest.mark.sample("*-pack_nf4-True", "qwen3_moe-*-False", "gpt_oss-*8-*", "l*pack_fp8-True")
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("pack", [pack_nf4, pack_int8, pack_fp8])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_the_weights_that_the_codes_stand_for(family, pack, kernels):
    packed, plain = pair(family, pack)
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
    model = make("qwen3_moe").bfloat16()
    weights = sum(p.numel() for p in expert_parameters(model).values())
    pack_nf4(model)
    kept = expert_parameters(model).values()
    assert sum(map(num_weights, kept)) == weights
    assert sum(p.numel() * p.element_size() for p in kept) == weights // 2
    total = describe_adapters(attach(model, LoraOptions(r=4)))["storage"]["nf4"]
    assert total["weights"] > weights


@pytest.mark.parametrize(("pack", "largest"), [(pack_int8, 127), (pack_fp8, 448)])
def test_eight_bits_are_what_is_kept(pack, largest):
    """A byte a weight and a scale a row; of fp8 each within a sixteenth; a stack that trains stays.

    Of int8 the numbers are those that bitsandbytes reads from its own codes of each row.
    """
    plain, model = make("qwen3_moe"), make("qwen3_moe")
    pack(model)
    read = as_read(model, make("qwen3_moe"))
    for name, codes in expert_parameters(model).items():
        weight, numbers = plain.get_parameter(name), read.get_parameter(name)
        size = weight.numel()
        assert (codes.element_size(), codes.numel(), num_weights(codes)) == (1, size, size)
        kind = codes.quant_state.kind
        assert codes.quant_state.scales.shape == (weight.shape[0] * weight.shape[1], 1)
        if kind == "int8":
            rows = bitsandbytes.functional.int8_vectorwise_quant(weight.flatten(0, 1).half())
            theirs = bitsandbytes.functional.int8_vectorwise_dequant(*rows[:2])
            torch.testing.assert_close(numbers, theirs.view(weight.shape), rtol=1e-6, atol=0.0)
        room = weight.abs() / 16 * (kind == "fp8") + weight.abs().max() / largest
        assert bool(((numbers - weight).abs() <= room).all())
    total = describe_adapters(attach(model, LoraOptions(r=4)))["storage"][kind]
    assert total["weights"] == sum(map(num_weights, expert_parameters(model).values()))
    kept = make("qwen3_moe")
    pack_experts(kept, kind, torch.device("cpu"), ("experts",))
    assert not any(map(states_of, kept.modules()))


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


IN_PART = ["lora.quantize_skip=[layers.0]", "lora.quantize_head=true"]


@pytest.mark.sample("nf4-more2", "int8-more6", "fp8-*")
@pytest.mark.parametrize(
    ("quantize", "more"),
    [
        ("nf4", []),
        ("nf4", ["lora.quantize_experts=false"]),
        ("nf4", IN_PART),
        ("int8", []),
        ("int8", ["lora.quantize_experts=false"]),
        ("nf4", ["lora.experts=false"]),
        ("int8", ["lora.experts=false"]),
        ("fp8", []),
    ],
)
def test_a_run_over_them_goes_on_and_is_merged(quantize, more, tmp_path, tiny_tokenizer):
    make_moe(len(tiny_tokenizer)).save_pretrained(tmp_path / "moe")
    tiny_tokenizer.save_pretrained(tmp_path / "moe")
    (tmp_path / "project").mkdir()
    project = make_project(tmp_path / "project", tmp_path / "moe")
    words = ["--config", "r.yaml", f"lora.quantize={quantize}", "training.max_steps=4"]
    words += ["model.dtype=bfloat16", *more]
    assert project.sft(*words, "--output-dir", "whole").code == 0
    assert project.sft(*words, "--output-dir", "parts", stop_at=2).code == 130
    assert project.sft("--resume", "parts").code == 0
    files = [project.root / run / "final/adapter_model.safetensors" for run in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    record = json.loads((project.root / "whole" / "kernels.json").read_text())
    lora = run_settings(project.root / "whole").lora
    packs, stacks = lora.quantize_experts, 2 * 8 * 3 * 32 * 16
    packed = record["adapters"]["storage"][quantize]["weights"]
    assert (packed >= stacks) == (packs and more != IN_PART)
    if more == IN_PART:  # a layer's experts and attention, and the head
        assert packed == stacks // 2 + 32 * (32 + 2 * 16 + 32) + 32 * len(tiny_tokenizer)
    assert trainkit(project.root, "merge", "whole/final", "--output", "merged").code == 0
    if quantize == "int8" or more == IN_PART:
        (project.root / "asked.txt").write_text("why\n")
        asked = ("--prompts", "asked.txt", "-o", "said.jsonl", "--max-new-tokens", "4")
        said = trainkit(project.root, "generate", "whole", *asked)
        assert said.code == 0, said.err
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    if quantize != "fp8":  # what training saw; over fp8 an adapter is used on the plain base
        given = {} if packs else {"quantization_config": quantization_config(quantize)}
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.bfloat16, **given)
        if packs:
            quantize_with_experts(base, torch.device("cpu"), lora)
        plain = as_read(base, plain)
    wanted = PeftModel.from_pretrained(plain, project.root / "whole/final").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(project.root / "merged", dtype=torch.float32)
    for name, parameter in wanted.named_parameters():
        found = dict(merged.named_parameters())[name]
        torch.testing.assert_close(found, parameter, rtol=2**-7, atol=1e-5, msg=name)
