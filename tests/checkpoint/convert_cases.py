"""Checkpoints of GLM that differ in one thing, and processes that convert one."""

import json
import threading
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


def memory_of(small, source, target):
    """Bytes of its own, without mapped files, by which a process has grown at most.

    It has converted a small model before.
    """
    from trainkit.checkpoint.convert.convert import ConvertOptions, convert_model

    options = ConvertOptions(max_shard_bytes=20_000_000, verify=False)
    convert_model(Path(small), Path(f"{target}-small"), "qwen2", options)
    found, done = [_own_bytes()], threading.Event()

    def watch():
        while not done.wait(0.002):
            found.append(_own_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    convert_model(Path(source), Path(target), "qwen2", options)
    done.set(), thread.join()
    return max(found) - found[0]


def _own_bytes():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024
