"""LoRA adapters follow their model from GLM to Qwen2 and back."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny import make_adapter
from tiny_glm import write_chatglm
from transformers import AutoModelForCausalLM

from trainkit.checkpoint.convert.convert import ConvertOptions, convert_model
from trainkit.checkpoint.convert.convert_adapter import convert_adapter
from trainkit.checkpoint.merge.merge import MergeOptions, merge_adapter
from trainkit.checkpoint.weights.adapter import read_adapter
from trainkit.errors import CheckpointError, ModelError
from trainkit.infer.locate import find_model

# Float32 sums in another order, logits of about 10.
TOLERANCE = 5e-5
GLM_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]
QWEN2_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def logits(base: Path, adapter: Path | None):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    positions = torch.tensor([[*range(40), 8191, 100_000]])
    tokens = torch.arange(positions.shape[1])[None]
    with torch.inference_mode():
        return model.eval()(input_ids=tokens, position_ids=positions).logits


@pytest.fixture(scope="module")
def qwen2(glm_directory, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("qwen2") / "model"
    convert_model(glm_directory, target, "qwen2", ConvertOptions(verify=False))
    return target


KINDS = {
    "all": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2, "down_proj": 6}, "alpha_pattern": {"v_proj": 3}},
    "whole": {"modules_to_save": ["norm", "lm_head"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_glm_adapter_on_qwen2(glm_directory, qwen2, tmp_path, kind):
    adapter = make_adapter(glm_directory, tmp_path / "a", GLM_TARGETS, **KINDS[kind])
    convert_adapter(adapter, tmp_path / "b", glm_directory, "qwen2")
    theirs = logits(glm_directory, adapter)
    assert (logits(qwen2, tmp_path / "b") - theirs).abs().max() <= TOLERANCE
    assert (logits(glm_directory, None) - theirs).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_qwen2_adapter_on_glm(glm_directory, qwen2, tmp_path, kind):
    """gate_proj and up_proj have an A each, so they become one module of twice the rank."""
    adapter = make_adapter(qwen2, tmp_path / "a", QWEN2_TARGETS, **KINDS[kind])
    convert_adapter(adapter, tmp_path / "b", qwen2, "glm")
    theirs = logits(qwen2, adapter)
    assert (logits(glm_directory, tmp_path / "b") - theirs).abs().max() <= TOLERANCE
    part = read_adapter(tmp_path / "b").modules["model.layers.0.mlp.gate_up_proj"]
    assert part.down.shape[0] == 8


def test_part_of_a_joined_module(glm_directory, qwen2, tmp_path):
    adapter = make_adapter(qwen2, tmp_path / "a", ["gate_proj", "q_proj"])
    convert_adapter(adapter, tmp_path / "b", qwen2, "glm")
    theirs = logits(qwen2, adapter)
    assert (logits(glm_directory, tmp_path / "b") - theirs).abs().max() <= TOLERANCE


def test_converted_adapter_is_not_put_over_the_old_model(glm_directory, qwen2, tmp_path):
    """Both layouts have a q_proj of one shape, in another order: it would load without a word."""
    adapter = make_adapter(glm_directory, tmp_path / "a", ["q_proj", "k_proj"])
    convert_adapter(adapter, tmp_path / "b", glm_directory, "qwen2")
    assert find_model(str(adapter)).model == str(glm_directory)
    with pytest.raises(ModelError, match="does not name its base"):
        find_model(str(tmp_path / "b"))
    assert find_model(str(tmp_path / "b"), base_model=str(qwen2)).model == str(qwen2)


@pytest.mark.parametrize("targets", [GLM_TARGETS, ["embed_tokens", "q_proj"]])
def test_round_trip_gives_back_the_bits(glm_directory, qwen2, tmp_path, targets):
    adapter = make_adapter(glm_directory, tmp_path / "a", targets)
    convert_adapter(adapter, tmp_path / "b", glm_directory, "qwen2")
    convert_adapter(tmp_path / "b", tmp_path / "c", qwen2, "glm")
    ours = load_file(tmp_path / "c" / "adapter_model.safetensors")
    theirs = load_file(adapter / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_chatglm_layout_both_ways(glm, qwen2, tmp_path):
    """Fused q, k, v; the remote-code model cannot be run here, so the merged weights speak."""
    chatglm = write_chatglm(glm, tmp_path / "chatglm")
    adapter = make_adapter(qwen2, tmp_path / "a", QWEN2_TARGETS)
    convert_adapter(adapter, tmp_path / "b", qwen2, "chatglm")
    fused = "transformer.encoder.layers.0.self_attention.query_key_value"
    assert read_adapter(tmp_path / "b").modules[fused].down.shape[0] == 12
    options = MergeOptions(verify=False)
    merge_adapter(read_adapter(tmp_path / "b"), chatglm, tmp_path / "merged", options)
    convert_model(tmp_path / "merged", tmp_path / "again", "qwen2", ConvertOptions(verify=False))
    difference = logits(tmp_path / "again", None) - logits(qwen2, adapter)
    assert difference.abs().max() <= TOLERANCE
    convert_adapter(tmp_path / "b", tmp_path / "c", chatglm, "qwen2")
    difference = logits(qwen2, tmp_path / "c") - logits(qwen2, adapter)
    assert difference.abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("targets", "options", "word"),
    [
        (["gate_proj"], {"use_dora": True}, "only a part"),
        (["gate_proj"], {"lora_bias": True, "target_modules": ["q_proj"]}, "lora_bias"),
    ],
)
def test_what_cannot_be_converted_is_refused(qwen2, tmp_path, targets, options, word):
    adapter = make_adapter(qwen2, tmp_path / "a", targets, **options)
    with pytest.raises(CheckpointError, match=word):
        convert_adapter(adapter, tmp_path / "b", qwen2, "glm")
    assert not (tmp_path / "b").exists()


def test_adapter_of_another_model(tiny_qwen2, glm_directory, tmp_path):
    adapter = make_adapter(tiny_qwen2, tmp_path / "a", ["gate_proj"])
    with pytest.raises(CheckpointError, match=r"gate_proj.*does not have"):
        convert_adapter(adapter, tmp_path / "b", glm_directory, "qwen2")
