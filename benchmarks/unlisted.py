"""Training steps of model types that no list names, at their true widths: plain, Liger, trainkit.

python -m benchmarks.unlisted [--output FILE] [--seconds N] [--modes full,lora]

A process builds a few layers of a released shape and times its step, then again with half of them:
the difference is what a layer costs, the rest is what the embedding, the head and the loss cost, so
``ms`` is the whole model's step. One depth alone would give the head too much weight.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.bench import lora, step
from trainkit.bench.cells import Cell, Records, run
from trainkit.bench.measure import peak_gib
from trainkit.bench.providers import Shape


def _sizes(names: str, *numbers: int, **more: Any) -> dict[str, Any]:
    given = dict(zip(names.split(), numbers, strict=True))
    return {**given, "max_position_embeddings": 8192, "tie_word_embeddings": True, **more}


_NAMES = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "vocab_size"
)
_GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.015625}
_GRANITE |= {"residual_multiplier": 0.22, "logits_scaling": 8.0}
_UNTIED = {"tie_word_embeddings": False}
_EXPERTS = {"head_dim": 128, "moe_intermediate_size": 768, **_UNTIED}
_EXPERTS |= {"num_experts": 128, "num_experts_per_tok": 8}

SHAPES: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "gemma-3-1b": ("gemma3_text", 6, _sizes(_NAMES, 1152, 6912, 26, 4, 1, 262144, head_dim=256)),
    "olmo-2-1b": ("olmo2", 3, _sizes(_NAMES, 2048, 8192, 16, 16, 16, 100352, **_UNTIED)),
    "smollm3-3b": ("smollm3", 4, _sizes(_NAMES, 2048, 11008, 36, 16, 4, 128256)),
    "granite-3-2b": ("granite", 3, _sizes(_NAMES, 2048, 8192, 40, 32, 8, 49152, **_GRANITE)),
    "cohere2-7b": ("cohere2", 4, _sizes(_NAMES, 4096, 14336, 32, 32, 8, 256000)),
    "qwen3-30b-a3b": ("qwen3_moe", 2, _sizes(_NAMES, 2048, 6144, 48, 32, 4, 151936, **_EXPERTS)),
}
"""Per released shape: its type, the fewest layers that hold each kind of layer, its sizes."""

PROVIDERS = ("hf_sdpa", "liger", "trainkit")
BENCH = "benchmarks.unlisted"


def measure(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Time a cell's step with twice the layers of a pattern and with once, and what that makes.

    Raises:
        ValueError: Liger has nothing for the type.
    """
    shape, pattern = cell.size, cell.settings["pattern"]
    if cell.provider == "liger":
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        if shape.family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            raise ValueError(f"Liger has nothing for {shape.family}")
    depth = shape.config["num_hidden_layers"]
    small = {**shape.config, "num_hidden_layers": 2 * pattern}
    cell = replace(cell, shape=replace(shape, config=small))
    if cell.mode == "lora":
        provider = "peft" if cell.provider == "hf_sdpa" else cell.provider
        train = lora.training(replace(cell, provider=provider), device)
    else:
        train = step.training(cell, device)
    (layers,) = (
        each
        for name, each in train.model.named_modules()
        if name.endswith("model.layers") and isinstance(each, nn.ModuleList)
    )
    first = train.step().item()
    both, memory = train.milliseconds(), peak_gib(device)
    del layers[pattern:]
    for module in train.model.modules():
        if hasattr(getattr(module, "config", None), "num_hidden_layers"):
            module.config.num_hidden_layers = pattern
    once = train.milliseconds()
    milliseconds = once + (both - once) / pattern * (depth - pattern)
    return {
        "ms": milliseconds,
        "layer_microseconds": 1e3 * (both - once) / pattern,
        "peak_memory_gib": memory,
        "loss": first,
        "layers": f"{2 * pattern} and {pattern} of {depth}",
        "batch_size": shape.batch_size,
        "length": shape.length,
    }


def cells(modes: list[str]) -> list[Cell]:
    """What is measured, the full steps first."""
    found = []
    for mode in modes:
        for name, (family, pattern, sizes) in SHAPES.items():
            settings: dict[str, Any] = {"pattern": pattern}
            if family == "qwen3_moe":
                settings["targets"] = lora.TARGETS[:4]
                settings["kernels"] = {"experts": False}
            found += [
                Cell(BENCH, name, provider, mode, 0.5, 6, settings, Shape(family, sizes))
                for provider in PROVIDERS
            ]
    return found


def main(words: list[str]) -> None:
    """Measure, print a line a cell with what it is to plain, and add the rows to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unlisted", description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--modes", default="full,lora")
    parser.add_argument("--seconds", type=float, default=1e9, help="no cell starts later")
    options = parser.parse_args(words)
    records, start = Records("unlisted", options.output), time.perf_counter()
    plain: dict[str, float] = {}
    wanted = cells(options.modes.split(","))
    sys.stdout.write("type mode provider ms/step us/layer plain/this GiB loss | seconds so far\n")
    for row in run(wanted):
        case = f"{row['model']} {row['mode']}"
        if "error" in row:
            text = f"- {row['error'].splitlines()[-1][:150]}"
        else:
            if row["provider"] == PROVIDERS[0]:
                plain[case] = row["ms"]
            row["speedup"] = plain[case] / row["ms"] if case in plain else None
            row["microseconds"] = row.pop("layer_microseconds")
            records.of(case, row)
            keys = ("ms", "microseconds", "speedup", "peak_memory_gib", "loss")
            text = " ".join(f"{row[key] or 0:.4g}" for key in keys)
        passed = time.perf_counter() - start
        sys.stdout.write(f"{case} {row['provider']} {text} | {passed:.0f}\n")
        if passed > options.seconds:
            break  # the rest is not measured


if __name__ == "__main__":
    main(sys.argv[1:])
