"""No command answers from weights that are not finite: the file and the tensor are named."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_adapter

from trainkit.cli.app import main


@pytest.fixture(scope="module")
def adapter(tiny_qwen2, tiny_tokenizer, tmp_path_factory):
    """An adapter over a base of its own, both of which a test may damage in a copy."""
    directory = tmp_path_factory.mktemp("lora")
    shutil.copytree(tiny_qwen2, directory / "base")
    make_adapter(directory / "base", directory / "adapter", ["q_proj"], r=2)
    tiny_tokenizer.save_pretrained(directory / "adapter")
    (directory / "ask.txt").write_text("Who are you?\n")
    return directory


def spoil_tensor(path, name, value):
    tensors = load_file(path)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, path, {"format": "pt"})


def spoil_alpha(path, value):
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "lora_alpha": value}))


LORA = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
DAMAGES = {
    "adapter": lambda at: spoil_tensor(at / "adapter/adapter_model.safetensors", LORA, torch.nan),
    "alpha": lambda at: spoil_alpha(at / "adapter/adapter_config.json", float("inf")),
    "no alpha": lambda at: spoil_alpha(at / "adapter/adapter_config.json", float("nan")),
    "alpha of 0": lambda at: spoil_alpha(at / "adapter/adapter_config.json", 0),
    "base": lambda at: spoil_tensor(at / "base/model.safetensors", "model.norm.weight", -torch.inf),
}
NAMED = {
    "adapter": ("adapter_model.safetensors", LORA),
    "alpha": ("adapter_config.json", "inf"),
    "no alpha": ("adapter_config.json", "nan"),
    "alpha of 0": ("adapter_config.json", "lora_alpha is 0"),
    "base": ("model.safetensors", "model.norm.weight"),
}
COMMANDS = {
    "generate": ["generate", "adapter", "--prompts", "ask.txt", "-o", "out.jsonl", "--greedy"],
    "nf4": ["generate", "adapter", "--prompts", "ask.txt", "-o", "out.jsonl", "--quantize", "nf4"],
    "merge": ["merge", "adapter", "merged"],
    "export": ["export", "vllm", "adapter", "exported"],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_by_file_and_tensor(
    damage, command, adapter, tmp_path, monkeypatch, capsys
):
    shutil.copytree(adapter, tmp_path / "at")
    monkeypatch.chdir(tmp_path / "at")
    DAMAGES[damage](tmp_path / "at")
    assert main([*COMMANDS[command], "--base-model", "base"]) == 1
    said = capsys.readouterr().err
    assert all(word.lower() in said.lower() for word in NAMED[damage]), said
    assert not (tmp_path / "at" / COMMANDS[command][-1]).exists()
    assert not (tmp_path / "at/out.jsonl").exists()


def test_a_plain_model_is_refused_too(adapter, tmp_path, monkeypatch, capsys):
    shutil.copytree(adapter / "base", tmp_path / "base")
    DAMAGES["base"](tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ask.txt").write_text("Who are you?\n")
    commands = [
        ["generate", "base", "--prompts", "ask.txt", "-o", "out.jsonl"],
        ["export", "vllm", "base", "exported"],
    ]
    for command in commands:
        assert main(command) == 1
        assert "model.norm.weight" in capsys.readouterr().err


def test_settings_that_overflow_are_refused_while_answering(
    tiny_qwen2, tmp_path, monkeypatch, capsys
):
    shutil.copytree(tiny_qwen2, tmp_path / "base")
    spoil_tensor(tmp_path / "base/model.safetensors", "model.norm.weight", 3e38)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ask.txt").write_text("Who are you?\n")
    assert main(["generate", "base", "--prompts", "ask.txt", "-o", "o.jsonl", "--greedy"]) == 2
    assert "numbers that are not finite" in capsys.readouterr().err
