"""What `patch` refuses, what its report says, and that a refusal leaves the model alone."""

import json
from types import MethodType

import pytest
import torch
from families.family_models import DEVICE, make
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

import trainkit
from trainkit.errors import PatchError
from trainkit.models.swap import plain_class
from trainkit.options.model import OPS


@pytest.fixture
def llama():
    return make("llama")


def classes(model):
    return [type(module) for module in model.modules()]


def refused(model, match, kernels=True):
    before = classes(model)
    with pytest.raises(PatchError, match=match):
        trainkit.patch(model, kernels)
    assert classes(model) == before


def test_the_report_names_every_op_and_survives_json(llama):
    report = trainkit.patch(llama, {"rope": False})
    assert [row.op for row in report.rows] == list(OPS)
    assert report.row("rope").reason == "switched off"
    assert report.row("swiglu").num_modules == 2
    assert json.loads(json.dumps(report.to_dict()))["family"] == "llama"
    lines = str(report).splitlines()
    assert lines[1].split()[:6] == ["rms_norm", "on", "rms_norm", "in", "5", "modules;"]
    assert ["rope", "off", "switched", "off"] in [line.split() for line in lines]
    assert max(map(len, lines)) <= 80


def test_false_patches_nothing(llama):
    before = classes(llama)
    report = trainkit.patch(llama, False)
    assert classes(llama) == before
    assert not report.active
    assert {row.status for row in report.rows} == {"off"}


def test_a_report_does_not_keep_a_model_alive():
    report = trainkit.patch(make("llama"))
    with pytest.raises(PatchError, match="no longer exists"):
        report.revert()


def test_a_second_patch_is_refused_until_the_first_is_reverted(llama):
    report = trainkit.patch(llama)
    refused(llama, "already patched")
    report.revert()
    assert trainkit.patch(llama).active


def test_revert_refuses_when_something_was_swapped_on_top(llama):
    report = trainkit.patch(llama)
    mlp = llama.model.layers[0].mlp
    mlp.__class__ = type("Later", (type(mlp),), {})
    before = classes(llama)
    with pytest.raises(PatchError, match="Later has another class swapped on top"):
        report.revert()
    assert classes(llama) == before


def test_an_unknown_op_names_the_nearest(llama):
    refused(llama, "did you mean 'rms_norm'", {"rmsnorm": True})


def test_any_model_takes_what_is_proved_and_says_why_the_rest_is_off():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    report = trainkit.patch(model)
    assert report.row("linear_cross_entropy").status == "on"
    off = {row.op: row.reason for row in report.rows if row.status == "off"}
    assert report.row("layer_norm").num_modules == 3
    assert "the model has no RMSNorm" in off["rms_norm"]
    assert "no function turns its queries" in off["rope"]
    assert "no gated feed-forward" in off["swiglu"]
    report.revert()
    refused(model, "rope cannot be switched on for gpt2: no function", {"rope": True})
    refused(nn.Linear(2, 2), "holds no Hugging Face model")


def test_modules_that_are_not_those_proved_stay_plain(llama):
    """Settings that somebody changed after loading are not those of the configuration."""
    llama.model.norm.variance_epsilon = 0.1
    llama.model.layers[0].mlp.act_fn = nn.GELU()
    report = trainkit.patch(llama)
    assert (report.row("rms_norm").num_modules, report.row("swiglu").num_modules) == (4, 1)
    assert "settings are not those proved" in report.row("rms_norm").reason
    assert plain_class(llama.model.norm) is type(llama.model.norm)
    assert plain_class(llama.model.layers[0].mlp) is type(llama.model.layers[0].mlp)


def test_a_model_without_the_modules_has_the_op_off():
    model = make("llama")
    model.model.layers = nn.ModuleList()
    assert trainkit.patch(model).row("add_rms_norm").status == "off"


def test_a_forward_that_does_more_than_a_gate_is_refused(llama, monkeypatch):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.scale

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "scale", 1.001, raising=False)
    refused(llama, "swiglu cannot be switched on.*LlamaMLP: no variant fits", {"swiglu": True})
    assert trainkit.patch(llama).row("swiglu").status == "off"


def test_what_another_library_replaced_is_refused(llama, monkeypatch):
    class Foreign(modeling_llama.LlamaRMSNorm):
        pass

    Foreign.__module__ = "liger_kernel.transformers.rms_norm"
    with monkeypatch.context() as patched:
        patched.setattr(modeling_llama, "LlamaRMSNorm", Foreign)
        refused(llama, "replaced by liger_kernel")

    def liger_rotary_pos_emb():
        pass

    liger_rotary_pos_emb.__module__ = "liger_kernel.transformers.rope"
    with monkeypatch.context() as patched:
        patched.setattr(modeling_llama, "apply_rotary_pos_emb", liger_rotary_pos_emb)
        refused(llama, "Liger has already replaced .*apply_rotary_pos_emb")
    llama.model.norm.forward = MethodType(lambda self, x: x, llama.model.norm)
    refused(llama, "LlamaRMSNorm has its own `forward`")


def test_another_activation_is_off_with_the_reason_and_an_error_when_asked_for():
    model = make("qwen2", hidden_act="relu")
    row = trainkit.patch(model).row("swiglu")
    assert (row.status, row.num_modules) == ("off", 0)
    assert "relu(gate) * up, split: trainkit has no kernel" in row.reason
    refused(make("qwen2", hidden_act="relu"), "relu.gate", {"swiglu": True})


def test_an_op_that_does_not_apply_is_off_with_the_reason():
    refused(
        make("olmo2"), "add_rms_norm cannot be switched on.*no addition", {"add_rms_norm": True}
    )
    row = trainkit.patch(make("olmo2")).row("add_rms_norm")
    assert (row.status, row.reason) == ("off", "no addition is followed by a norm")


def test_the_unfused_layer_runs_when_its_norm_is_another_class(llama):
    """peft or a user may put another module in the norm's place after patching."""
    trainkit.patch(llama)
    for layer in llama.model.layers:
        layer.post_attention_layernorm = nn.Identity()
    expected = make("llama")
    for layer in expected.model.layers:
        layer.post_attention_layernorm = nn.Identity()
    ids = torch.arange(3, 12, device=DEVICE)[None]
    torch.testing.assert_close(llama(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-6)


def test_phi3_dropout_still_drops():
    model = make("phi3", resid_pdrop=0.5)
    trainkit.patch(model)
    ids = torch.arange(3, 12, device=DEVICE)[None]
    torch.manual_seed(0)
    first = model(ids).logits
    torch.manual_seed(1)
    assert not torch.equal(first, model(ids).logits)
    torch.manual_seed(0)
    plain = make("phi3", resid_pdrop=0.5)
    torch.manual_seed(0)
    torch.testing.assert_close(first, plain(ids).logits, rtol=1e-5, atol=1e-6)


def test_saving_a_patched_model_writes_the_plain_one(tmp_path):
    model = make("qwen2")
    trainkit.patch(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "Qwen2ForCausalLM"
    ]
    loaded = modeling_qwen2.Qwen2ForCausalLM.from_pretrained(tmp_path)
    assert classes(loaded) == classes(make("qwen2"))
    state = loaded.state_dict()
    assert all(torch.equal(value.cpu(), state[key]) for key, value in model.state_dict().items())
