"""A run over a base that is stored in no plain weights: what it trained is what comes after it."""

import json

import pytest
import torch
from commands import trainkit
from conftest import RECIPE, merging_tokenizer, rows
from peft import LoraConfig, get_peft_model
from ranks import RankFailure, run_ranks
from safetensors.torch import load_file, save_file
from test_export_files import llama_cpp
from tiny import make_qwen2
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from trainkit.checkpoint.weights.plain_files import read_config
from trainkit.models.loading import load_model
from trainkit.options import ModelOptions


@pytest.fixture
def gguf(tmp_path):
    from trainkit.export.llama_cpp import convert

    tokenizer = merging_tokenizer()
    make_qwen2(len(tokenizer), hidden_size=128).save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    (tmp_path / "g").mkdir()
    convert(tmp_path / "plain", tmp_path / "g" / "model.gguf", "q8_0", "tiny")
    return tmp_path / "g" / "model.gguf"


@llama_cpp
def test_all_that_follows_training_works_over_a_gguf(gguf, tmp_path):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (tmp_path / "r.yaml").write_text(RECIPE.replace("base", "g/model.gguf"))
    (tmp_path / "p.txt").write_text("hello\n")
    steps = ["training.max_steps=2", "training.save_steps=1", "training.save_total_limit=2"]
    said = trainkit(tmp_path, "sft", "r.yaml", *steps)
    assert said.code == 0, said.err
    run = str(next(path.parent for path in tmp_path.rglob("status.json")))
    words = ["merge", run, "deep/er/merged"]
    with pytest.raises(RankFailure):
        run_ranks("export.merge_cases:merge_and_die", cwd=str(tmp_path), argv=words, world_size=1)
    assert list(tmp_path.glob("deep/er/.base.staging-*"))
    assert not (tmp_path / "deep" / "er" / "merged").exists()
    assert trainkit(tmp_path, *words).code == 0
    assert [path.name for path in tmp_path.glob("deep/er/*")] == ["merged"]
    asked = ["--prompts", "p.txt", "-o", "out.jsonl", "--max-new-tokens", "2", "--device", "cpu"]
    for words in (
        ["generate", run, *asked], ["merge", f"{run}/checkpoint-1", "merged"],
        ["export", "vllm", f"{run}/checkpoint-1", "served"],
    ):  # fmt: skip
        said = trainkit(tmp_path, *words)
        assert said.code == 0, said.err
    said = trainkit(tmp_path, "export", "vllm", run, "apart", "--as-adapter")
    assert said.code == 2  # the command to serve it would name a copy that is gone by then
    assert "model.gguf has none" in said.err
    assert "unpacking" not in said.err
    record = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert record["base"] == str(gguf)
    assert record["is_base_of_training"] is True
    content = bytearray(gguf.read_bytes())
    content[-1] ^= 1
    gguf.write_bytes(bytes(content))
    said = trainkit(tmp_path, "merge", run, "again")
    assert said.code == 1
    assert "model.gguf was changed" in said.err


def test_experts_in_mxfp4_train_and_merge_as_the_same_plain_weights(tmp_path):
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention"], pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    GptOssForCausalLM(config).bfloat16().save_pretrained(tmp_path / "stored")
    file = tmp_path / "stored" / "model.safetensors"
    weights = load_file(file)
    for name in [each for each in weights if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        size = (experts, outputs, inputs // 32)
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.full(size, 120, dtype=torch.uint8)
    save_file(weights, file, metadata={"format": "pt"})
    settings = json.loads((tmp_path / "stored" / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (tmp_path / "stored" / "config.json").write_text(json.dumps(settings))
    trained = load_model(ModelOptions(str(tmp_path / "stored")), attention=None)
    trained.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in read_config(tmp_path / "plain")
    plain = GptOssForCausalLM.from_pretrained(tmp_path / "plain")
    ids = torch.arange(8)[None]
    assert torch.equal(plain(ids).logits, trained(ids).logits)


def test_biases_without_a_place_are_refused_before_the_model_is_asked(tmp_path):
    tokenizer = merging_tokenizer()
    make_qwen2(len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    wrapped = get_peft_model(base, LoraConfig(r=2, target_modules=["o_proj"], lora_bias=True))
    wrapped.save_pretrained(tmp_path / "adapter")
    (tmp_path / "p.txt").write_text("hello\n")
    words = ["--prompts", "p.txt", "-o", "a.jsonl", "--max-new-tokens", "2", "--device", "cpu"]
    said = trainkit(tmp_path, "generate", "adapter", *words)
    assert said.code == 0, said.err
    assert said.err.count("PeftWarning") == 1  # not one for each layer
    for words in (["vllm"], ["vllm", "--as-adapter"], ["fp8"]):
        said = trainkit(tmp_path, "export", words[0], "adapter", "out", *words[1:])
        assert said.code != 0
        assert "bias" in said.err
        assert "asking" not in said.err
