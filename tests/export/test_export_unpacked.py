"""A run over a base that is stored in no plain weights: what it trained is what comes after it."""

import json

import pytest
import torch
from commands import trainkit
from exported import RECIPE, merging_tokenizer, rows
from peft import LoraConfig, get_peft_model
from ranks import RankFailure, run_ranks
from safetensors.torch import load_file, save_file
from test_export_files import llama_cpp
from tiny import make_qwen2
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3MoeConfig,
)

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
        ["generate", run, *asked], ["generate", "g/model.gguf", *asked[:3], "base", *asked[4:]],
        ["merge", f"{run}/checkpoint-1", "merged"],
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


@pytest.mark.parametrize("quantize", ["null", "nf4"])
def test_adapters_of_layers_that_are_stored_transposed_answer_and_merge(quantize, tmp_path):
    tokenizer = merging_tokenizer()
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(vocab_size=len(tokenizer), **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "p.txt").write_text("hello\n")
    changes = ["data.packing=false", f"lora.quantize={quantize}", "training.max_steps=2"]
    asked = ["--prompts", "p.txt", "-o", "a.jsonl", "--max-new-tokens", "2", "--device", "cpu"]
    for words in (
        ["sft", "r.yaml", "--output-dir", "run", *changes], ["generate", "run", *asked],
        ["merge", "run", "merged"],  # holds it against base and adapter
    ):  # fmt: skip
        said = trainkit(tmp_path, *words)
        assert said.code == 0, said.err


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


AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight neighbours AutoAWQ puts at each place of a word; AutoGPTQ keeps their order."""


def words(numbers, places):
    """(rows, n) of 4 bits as (rows, n / 8) words, as the tools pack them."""
    packed = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int32)
    for place, which in enumerate(places):
        packed |= numbers[:, which::8].int() << 4 * place
    return packed


def store_in_codes(kind, config, folder):
    """A model's files in codes; the weights that they stand for, in float16."""
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    plain = dict(stored)
    for name in [each for each in stored if each.endswith("proj.weight")]:
        outputs, inputs = stored.pop(name).shape
        stem = name.removesuffix("weight")
        if kind == "aqlm":  # two books of 256 rows of eight numbers
            codes = torch.randint(-128, 128, (outputs, inputs // 8, 2), dtype=torch.int8)
            books = torch.randn(2, 256, 1, 8).half() * 0.02
            scales = torch.rand(outputs, 1, 1, 1).half() + 0.5
            rows_of = [books[n, codes[..., n].long() % 256, 0] for n in range(2)]
            plain[name] = ((rows_of[0] + rows_of[1]) * scales[:, 0]).reshape(outputs, inputs)
            stored |= {stem + "codes": codes, stem + "codebooks": books, stem + "scales": scales}
            continue
        group = torch.arange(inputs) // 32
        group = group[torch.randperm(inputs)] if kind == "gptq" else group
        numbers = torch.randint(0, 16, (inputs, outputs))
        zeros = torch.randint(1, 16, (inputs // 32, outputs))
        scales = (torch.rand(zeros.shape) * 0.02 + 0.01).half()
        plain[name] = ((numbers - zeros[group]) * scales[group]).T.contiguous()
        if kind == "awq":
            parts = {"qweight": words(numbers, AWQ_PLACES), "qzeros": words(zeros, AWQ_PLACES)}
        else:
            parts = {"qweight": words(numbers.T, range(8)).T, "qzeros": words(zeros - 1, range(8))}
            parts["g_idx"] = group.int()
        for part, tensor in {**parts, "scales": scales}.items():
            stored[stem + part] = tensor.contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": kind, "bits": 4, "group_size": 32}
    if kind == "aqlm":
        sizes = {"num_codebooks": 2, "nbits_per_codebook": 8}
        settings["quantization_config"] = {"quant_method": kind, **sizes}
    (folder / "config.json").write_text(json.dumps(settings))
    return plain


SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("config", [Qwen3Config(**SMALL), Qwen3MoeConfig(**SMALL, **EXPERTS)])
@pytest.mark.parametrize("kind", ["awq", "gptq", "aqlm"])
def test_codes_are_read_as_the_weights_that_they_stand_for(kind, config, dtype, tmp_path):
    torch.manual_seed(0)
    plain = store_in_codes(kind, config, tmp_path / "codes")
    model = load_model(ModelOptions(str(tmp_path / "codes"), dtype=dtype), attention=None)
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in read_config(tmp_path / "plain")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == plain.keys()
    for name, weight in plain.items():
        assert torch.equal(found[name], weight.to(model.dtype)), name


def test_codes_train_and_what_cannot_be_read_of_them_is_refused(tmp_path):
    tokenizer = merging_tokenizer()
    config = Qwen3Config(**SMALL | {"vocab_size": len(tokenizer)})
    store_in_codes("awq", config, tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (tmp_path / "r.yaml").write_text(RECIPE)
    said = trainkit(tmp_path, "sft", "r.yaml", "--output-dir", "run", "training.max_steps=2")
    assert said.code == 0, said.err
    assert trainkit(tmp_path, "merge", "run", "merged").code == 0
    assert "quantization_config" not in read_config(tmp_path / "merged")
    said = trainkit(tmp_path, "sft", "r.yaml", "lora.quantize=nf4")
    assert "not packed again" in said.err
    settings = json.loads((tmp_path / "base" / "config.json").read_text())
    settings["quantization_config"]["version"] = "gemv"
    (tmp_path / "base" / "config.json").write_text(json.dumps(settings))
    said = trainkit(tmp_path, "sft", "r.yaml")
    assert "layout gemv" in said.err


def test_adapters_of_another_kind_over_a_packed_base_merge_and_are_not_served_as_they_are(tmp_path):
    tokenizer = merging_tokenizer()
    make_qwen2(len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    lora = "lora: {peft: {peft_type: oft, oft_block_size: 16}, quantize: nf4}"
    (tmp_path / "r.yaml").write_text(RECIPE.replace("lora: {r: 4, alpha: 32}", lora))
    said = trainkit(tmp_path, "sft", "r.yaml", "--output-dir", "run", "training.max_steps=4")
    assert said.code == 0, said.err
    said = trainkit(tmp_path, "merge", "run", "merged")  # holds it against base and adapter
    assert said.code == 0, said.err
    said = trainkit(tmp_path, "export", "vllm", "run", "out", "--as-adapter")
    assert "no adapters of the kind OFT" in said.err
    said = trainkit(tmp_path, "sft", "r.yaml", "parallel.shard=zero2")
    assert "held against one process alone" in said.err
