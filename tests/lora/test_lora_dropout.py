"""Dropout on the adapters of experts: peft's of linear layers, by the same random numbers."""

import pytest
import torch
from lora.test_lora_experts import adapted, make
from lora.test_lora_experts import step as step_of
from lora.test_lora_packed_experts import as_read, pack_nf4
from lora.test_lora_packed_experts import step as plain_step
from lora.test_lora_split import FAMILIES, apart, equal, of_layers, split, trained
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from project import make_project
from train.router_cases import make_moe

from trainkit.errors import RecipeError
from trainkit.lora import LoraOptions, attach, load_adapter
from trainkit.lora.fused import refuse_undropped
from trainkit.patching import patch


@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_as_linear_layers_with_dropout_do(family):
    """Losses and gradients in fp64, recomputed or not; of gate and up each has its own."""
    ours, plain = split(family, dropout=0.4), apart(family, r=4, lora_alpha=12, lora_dropout=0.4)
    with torch.no_grad():
        for name, parameter in of_layers(trained(ours)).items():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
            plain.get_parameter(name).copy_(parameter)
    assert patch(ours).row("lora_experts").status == "on"
    refuse_undropped(ours, sharded=False)
    loss, wanted = step_of(plain.train())
    found, grads = step_of(ours.train())
    assert found == pytest.approx(loss, rel=1e-11)
    equal(of_layers(grads.items()), wanted, rtol=1e-8, atol=1e-10)
    left = [step_of(model.eval())[0] for model in (plain, ours)]
    assert left[0] == pytest.approx(left[1], rel=1e-11) != pytest.approx(loss, rel=1e-6)
    ours.float().train().enable_input_require_grads()
    twice = []
    for _ in range(2):  # as it is, and with activations that are computed again
        torch.manual_seed(3)
        twice.append(plain_step(ours))
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    equal(*twice, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "qwen3_moe", "deepseek_v3"])
def test_every_form_of_experts_has_it(family, monkeypatch):
    """With a dropout that doubles, adapters of twice the scale: in one op, and in peft's path."""
    wanted, gradients = step_of(adapted(family, rank_pattern={"experts.down_proj": 2}))
    model = adapted(family, rank_pattern={"experts.down_proj": 2}, dropout=0.5)
    for each in model.modules():
        if isinstance(each, LoraLayer):
            each.scaling["default"] /= 2
    patch(model)
    doubled = []

    def double(x, p, *_, **__):
        doubled.append(p)
        return 2 * x if p else x

    monkeypatch.setattr(torch.nn.functional, "dropout", double)
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: 2 * x)
    found, ours = step_of(model)
    assert 0.5 in doubled
    assert found == pytest.approx(wanted, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_packed_experts_have_it():
    packed = make("qwen3_moe")
    pack_nf4(packed)
    found = []
    for base in (packed, as_read(packed, make("qwen3_moe"))):
        torch.manual_seed(1)
        model = attach(base, LoraOptions(r=4, dropout=0.4)).train()
        for name, parameter in trained(model):
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, 0, 0.1)
        patch(model)
        torch.manual_seed(2)
        found.append(plain_step(model))
    for name, each in found[1].items():
        size = each.abs().max().item()
        torch.testing.assert_close(found[0][name], each, rtol=1e-3, atol=2e-5 * size + 1e-9)


def test_theirs_can_be_left_out_and_what_is_saved_loads_in_peft(tmp_path):
    named = ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
    options = LoraOptions(r=4, dropout=0.3, experts=False, target_parameters=named)
    model = attach(make("qwen3_moe"), options)
    rates = {
        isinstance(each, ParamWrapper): getattr(each.lora_dropout["default"], "p", 0.0)
        for each in model.modules()
        if isinstance(each, LoraLayer)
    }
    assert rates == {True: 0.0, False: 0.3}
    refuse_undropped(model, sharded=True)
    for experts in ("auto", False, "split"):
        options = LoraOptions(r=4, dropout=0.3, experts=experts)
        model = attach(make("glm4_moe"), options)
        model.save_pretrained(tmp_path)
        for load in (PeftModel.from_pretrained, load_adapter):
            load(make("glm4_moe"), tmp_path)


def test_what_has_none_is_refused():
    model = attach(make("qwen3_moe"), LoraOptions(r=4, dropout=0.3))
    report = patch(model)
    with pytest.raises(RecipeError, match="in shards") as error:
        refuse_undropped(model, sharded=True)
    assert error.value.where == "lora.dropout"
    report.revert()
    with pytest.raises(RecipeError, match="the kernel of experts is off"):
        refuse_undropped(model, sharded=False)


def test_a_run_goes_on_to_the_same_bytes(tmp_path, tiny_tokenizer):
    """Also where activations are recomputed; without kernels it is refused before it begins."""
    model = tmp_path / "experts"
    make_moe(len(tiny_tokenizer)).save_pretrained(model)
    tiny_tokenizer.save_pretrained(model)
    (tmp_path / "project").mkdir()
    project = make_project(tmp_path / "project", model)
    words = ["--config", "r.yaml", "lora.dropout=0.3", "lora.experts=split", "model.dtype=float32"]
    words += ["kernels=true"]
    words += ["training.max_steps=4", "lora.r=4", "training.learning_rate=0.01"]
    again = "training.gradient_checkpointing=true"
    assert project.sft(*words, "--output-dir", "whole").code == 0
    assert project.sft(*words, again, "--output-dir", "parts", stop_at=2).code == 130
    assert project.sft("--resume", "parts").code == 0
    ends = [
        (project.root / run / "final/adapter_model.safetensors").read_bytes()
        for run in ("whole", "parts")
    ]
    assert ends[0] == ends[1]
    without = project.sft(*words, "lora.dropout=0", "--output-dir", "without")
    assert without.code == 0
    other = project.root / "without/final/adapter_model.safetensors"
    assert other.read_bytes() != ends[0]
    refused = project.sft(*words, "kernels=false", "--output-dir", "none")
    assert refused.code == 2
