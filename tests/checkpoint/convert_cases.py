"""Checkpoints of GLM that differ in one thing."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def written_twice(directory, names):
    """Store the output matrix of a tied model as well, as other trainers do."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors[names[0]] = tensors[names[1]].clone()
    save_file(tensors, file, metadata={"format": "pt"})


def without_bias(directory, layout):
    file = directory / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if not n.endswith(".bias")}
    save_file(tensors, file, metadata={"format": "pt"})
    key = {"glm": "attention_bias", "chatglm": "add_qkv_bias"}[layout]
    change_config(directory, {key: False})


def in_fp64(directory):
    file = directory / "model.safetensors"
    tensors = {name: tensor.double() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(directory, change):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
