"""What `multi_gpu.py` measures: the runs, and which of them run side by side."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        model: a key of `trainkit.bench.memory_points.SHAPES`.
        provider: ``trainkit``, ``hf`` or ``liger``.
        num_gpus: processes; 0 for all GPUs of the host.
        shard: a preset of trainkit's ``parallel.shard``.
        batch: rows of a step on ``batch_gpus`` GPUs; on another number in proportion.
        micro_batch: rows of a process at once.
        overrides: of trainkit's recipe.
        batch_gpus: 0 for all GPUs of the host.
    """

    model: str
    provider: str
    num_gpus: int
    shard: str
    batch: int
    micro_batch: int
    overrides: dict[str, Any] = field(default_factory=dict)
    batch_gpus: int = 0

    def gpus(self, total: int) -> int:
        """Its processes on a host with so many GPUs."""
        return self.num_gpus or total

    def global_batch(self, total: int) -> int:
        """Rows of a step over all its processes, on a host with so many GPUs."""
        return self.batch * self.gpus(total) // (self.batch_gpus or total)

    @property
    def group(self) -> str:
        """What is trained: cells of one group and one batch are compared with one another."""
        adapters = "-lora" if "lora.r" in self.overrides else ""
        base = self.overrides.get("lora.quantize")
        return f"{self.model}{adapters}{f'-{base}' if base else ''}"

    @property
    def name(self) -> str:
        """What ``--cells`` chooses by."""
        return f"{self.group}/{self.provider}/{self.way}/{self.num_gpus or 'all'}"

    @property
    def way(self) -> str:
        """How it is spread: a strategy, or the schedule of a pipeline."""
        if "parallel.pipeline" not in self.overrides:
            shared = [
                f"{kind}{self.overrides[f'parallel.{kind}']}"
                for kind in ("tensor", "sequence")
                if f"parallel.{kind}" in self.overrides
            ]
            return "-".join([self.shard, *shared])
        kept = "" if "training.gradient_checkpointing" in self.overrides else "-kept"
        return f"pipeline{self.pipeline}-{self.schedule}{kept}"

    @property
    def pipeline(self) -> int:
        """Stages' ranks."""
        return int(self.overrides.get("parallel.pipeline", 1))

    @property
    def schedule(self) -> str:
        """Of a pipeline."""
        return str(self.overrides.get("parallel.schedule", "1f1b"))

    def own_bubble(self, total: int) -> float | None:
        """The share of a step that the schedule itself has every rank wait."""
        if self.pipeline == 1:
            return None
        per_rank = {"1f1b": 1, "interleaved": 2}.get(self.schedule, 0)
        replicas = self.gpus(total) // self.pipeline
        turns = self.global_batch(total) // self.micro_batch // replicas * per_rank
        return (self.pipeline - 1) / (turns + self.pipeline - 1) if per_rank else 0.0


LORA = {"lora.r": 16, "lora.alpha": 32}
FP8 = {**LORA, "lora.quantize": "fp8"}
CHECKPOINTED = {"training.gradient_checkpointing": True}


def pipeline(ranks: int, schedule: str, *, kept: bool = False) -> dict[str, Any]:
    """The overrides of a pipeline, whose activations are recomputed or kept."""
    recomputed = {} if kept else CHECKPOINTED
    return {**recomputed, "parallel.pipeline": ranks, "parallel.schedule": schedule}


CELLS = (
    Cell("qwen2-0.5b", "trainkit", 0, "zero2", 256, 16),
    Cell("qwen2-0.5b", "hf", 0, "zero2", 256, 8),
    Cell("qwen2-0.5b", "liger", 0, "zero2", 256, 16),
    Cell("qwen2-0.5b", "trainkit", 1, "none", 256, 16),
    Cell("qwen2-0.5b", "trainkit", 2, "zero2", 256, 16),
    Cell("qwen2-0.5b", "trainkit", 4, "zero2", 256, 16),
    Cell("qwen2-7b", "trainkit", 0, "none", 8, 4, LORA, 1),
    Cell("qwen2-7b", "trainkit", 1, "none", 8, 4, LORA, 1),
    Cell("qwen2-7b", "trainkit", 2, "none", 8, 4, LORA, 1),
    Cell("qwen2-7b", "trainkit", 4, "none", 8, 4, LORA, 1),
    Cell("qwen2-7b", "trainkit", 0, "zero2", 8, 4, LORA, 1),
    Cell("qwen2-7b", "trainkit", 0, "fsdp2", 32, 4, CHECKPOINTED),
    Cell("qwen2-7b", "trainkit", 0, "zero2", 32, 4, CHECKPOINTED),
    Cell("qwen2-7b", "trainkit", 0, "zero3", 32, 4, CHECKPOINTED),
    Cell("qwen2-7b", "hf", 0, "zero3", 32, 4, CHECKPOINTED),
    Cell("qwen2-7b", "trainkit", 2, "zero3", 32, 4, CHECKPOINTED),
    Cell("qwen2-7b", "trainkit", 4, "zero3", 32, 4, CHECKPOINTED),
    Cell("qwen2-7b", "trainkit", 2, "fsdp2", 32, 4, CHECKPOINTED),
    Cell("qwen2-7b", "trainkit", 4, "fsdp2", 32, 4, CHECKPOINTED),
    Cell("qwen2-7b", "trainkit", 4, "none", 32, 1, pipeline(4, "interleaved"), 4),
    Cell("qwen2-0.5b", "trainkit", 0, "fsdp2", 256, 16),
    Cell("qwen2-0.5b", "hf", 0, "fsdp2", 256, 8),
    Cell("qwen2-7b", "hf", 0, "fsdp2", 32, 4, CHECKPOINTED),
    Cell("qwen2-7b", "trainkit", 0, "none", 8, 4, FP8, 1),
    Cell("qwen2-7b", "trainkit", 2, "none", 16, 1, pipeline(2, "1f1b"), 2),
    Cell("qwen2-7b", "trainkit", 2, "none", 16, 1, pipeline(2, "interleaved"), 2),
    Cell("qwen2-7b", "trainkit", 2, "none", 16, 1, pipeline(2, "zbv"), 2),
    Cell("qwen2-7b", "trainkit", 2, "none", 16, 1, pipeline(2, "zbv", kept=True), 2),
    Cell("qwen2-7b", "trainkit", 2, "none", 16, 1, pipeline(2, "1f1b", kept=True), 2),
    Cell("qwen2-7b", "trainkit", 2, "none", 16, 1, pipeline(2, "interleaved", kept=True), 2),
    # `trainkit estimate` is held against these; nothing in it is fitted to them.
    Cell("llama-3.2-1b", "trainkit", 0, "zero1", 16, 4, {"parallel.tensor": 2}),
    Cell("qwen2-7b", "trainkit", 0, "zero3", 4, 2, {**CHECKPOINTED, "parallel.sequence": 2}),
    Cell("qwen2-1.5b", "trainkit", 2, "none", 16, 2, {"parallel.pipeline": 2}, 2),
    Cell("glm4-9b", "trainkit", 0, "zero3", 8, 2, LORA),
    Cell(
        "qwen2-7b", "trainkit", 0, "fsdp2", 16, 4, {**LORA, **CHECKPOINTED, "lora.quantize": "nf4"}
    ),
    Cell("qwen2-1.5b", "trainkit", 0, "zero2", 16, 4, {"recompute.every": 2}),
    Cell("llama-3.2-1b", "trainkit", 0, "none", 16, 4, {"training.optim": "adamw_8bit"}),
    Cell("glm4-9b", "trainkit", 2, "none", 8, 1, {**LORA, "parallel.pipeline": 2}, 2),
)
"""In the order in which they run; neighbours on fewer GPUs than the host has, side by side."""


LENGTH = 2048
"""Tokens of a row."""


def recipe_of(cell: Cell, total: int, model: str, rows: str, steps: int) -> dict[str, Any]:
    """What trainkit runs for a cell, without its overrides.

    Args:
        cell: of trainkit.
        total: GPUs of the host.
        model: directory or name.
        rows: the file of rows.
        steps: of the run.
    """
    return {
        "name": "multi-gpu",
        "model": {"name_or_path": model, "dtype": "bfloat16"},
        "data": {"train": [rows], "max_length": LENGTH, "packing": False},
        "kernels": True,
        "parallel": {"shard": cell.shard},
        "global_batch_size": cell.global_batch(total),
        "training": {
            "per_device_train_batch_size": cell.micro_batch,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "max_steps": steps,
            "logging_steps": 1,
            "save_strategy": "no",
            "max_grad_norm": 1.0,
        },
    }


def estimated(cell: Cell, total: int, gpu: str) -> dict[str, float]:
    """What `trainkit estimate` says of a cell's run, GiB and tokens per second of a GPU.

    Args:
        cell: of trainkit.
        total: GPUs of the host.
        gpu: as the driver names it; one that nobody knows counts as an H200.
    """
    from tempfile import TemporaryDirectory

    from trainkit.estimate.estimate import estimate
    from trainkit.estimate.gpus import GPUS, gpu_named
    from trainkit.estimate.recipe import plan_of
    from trainkit.recipe import load_recipe

    with TemporaryDirectory() as folder:
        path = Path(folder, "recipe.json")
        path.write_text(json.dumps(recipe_of(cell, total, cell.model, "rows.jsonl", 4)))
        recipe = load_recipe(path, written(cell)).recipe
    found = estimate(plan_of(recipe, cell.gpus(total)), gpu_named(gpu) or GPUS["h200"])
    return {
        "estimated_gib": found.peak.gib,
        "estimated_tokens_per_second_per_gpu": found.tokens_per_second / cell.gpus(total),
    }


def written(cell: Cell) -> list[str]:
    """A cell's overrides, as a command has them."""
    return [f"{key}={json.dumps(value)}" for key, value in cell.overrides.items()]


def choose(patterns: list[str], total: int) -> list[Cell]:
    """The cells whose names match, in the patterns' order, that a host with so many GPUs can run.

    A cell on a stated number of GPUs is left out where that is the whole host: another cell is
    the same run. Pipelines have no such other cell.
    """
    fitting = [
        cell for cell in CELLS if cell.num_gpus < total or total == cell.num_gpus == cell.pipeline
    ]
    names = {cell.name: cell for cell in fitting}
    found = [name for pattern in patterns for name in fnmatch.filter(names, pattern)]
    return [names[name] for name in dict.fromkeys(found)]


def batches_of_cells(cells: list[Cell], total: int) -> list[list[Cell]]:
    """Cells that fit side by side run together."""
    groups: list[list[Cell]] = []
    free = 0
    for cell in cells:
        num = cell.gpus(total)
        if num <= free and num < total:
            groups[-1].append(cell)
            free -= num
        else:
            groups.append([cell])
            free = total - num
    return groups
