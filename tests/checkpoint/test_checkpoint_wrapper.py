"""Text trained within a vision model's files: nothing of them is lost, in full and by adapters."""

import json

import pytest
import torch
from commands import trainkit
from safetensors.torch import load_file, save_file
from tiny import DELTA_NET, chat_lines, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from trainkit.checkpoint.weights.wrapper import restore_wrapper

TEXT = {**DELTA_NET, "bos_token_id": None}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
}
MARKS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Qwen3.5 as it is published: a tower, a text model, and a draft head that no class has."""
    folder = tmp_path_factory.mktemp("wrapper")
    tokenizer = make_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {**TEXT, "vocab_size": len(tokenizer), **ends}
    marks = {name: number + 5 for number, name in enumerate(MARKS)}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=VISION, **marks)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["mtp.fc.weight"] = torch.randn(32, 64).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_what_text_does_not_reach_stays_byte_for_byte(adapters, base, tmp_path):
    rows = [(f"say {n}", "word " * (n % 5 + 1)) for n in range(8)]
    (tmp_path / "rows.jsonl").write_text(chat_lines(rows))
    recipe = {
        "model": {"name_or_path": str(base)},
        "data": {"train": [str(tmp_path / "rows.jsonl")], "packing": True, "max_length": 128},
        "kernels": True,
        "training": {"max_steps": 1, "learning_rate": 1e-2, "use_cpu": True},
    }
    if adapters:
        recipe["lora"] = {"r": 4}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    trainkit(tmp_path, "sft", "recipe.yaml", "--output-dir", "run").well()
    result = tmp_path / "run" / "final"
    if adapters:
        result = tmp_path / "merged"
        trainkit(tmp_path, "merge", "run", "merged").well()
    files = load_file(base / "model.safetensors")
    found = {}
    for path in result.glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == files.keys()
    moved = {name for name in files if not torch.equal(found[name], files[name])}
    assert moved
    assert all("language_model" in name or name == "lm_head.weight" for name in moved)
    ids = torch.arange(10, 30)[None]
    logits = []
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        model, info = kind.from_pretrained(result, output_loading_info=True)
        assert not info["missing_keys"]
        logits.append(model(ids).logits)
    assert torch.equal(*logits)


def test_other_names_are_said_and_nothing_is_changed(base, tmp_path):
    config = AutoConfig.for_model("qwen3_5_text", **TEXT, vocab_size=40)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["another"] = torch.zeros(1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    before = (tmp_path / "config.json").read_bytes()
    assert "another is not in the base's files" in restore_wrapper(tmp_path, base)
    assert (tmp_path / "config.json").read_bytes() == before
    assert restore_wrapper(tmp_path, tmp_path) is None
