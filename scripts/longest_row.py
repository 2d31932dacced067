#!/usr/bin/env python3
"""The longest row that trains: on one GPU, and shared by several (``parallel.sequence``).

    python scripts/longest_row.py --output rows.jsonl [--cases lora,full] [--gpus 1,2]

A case is one ``trainkit sft`` for each number of GPUs, on rows of random tokens, one a step, each
longer than the one before it by a part, until one does not fit. The last one that trained is the
answer. The weights are random; layers are checkpointed, kernels are on. So that steps take seconds
and not minutes, the allocator may use a part of the GPU only (``--memory-gib``, by case). What a
row takes grows linearly with its length: a line through all but the short rows says how long
a row would be that fills the GPU (``by_line``); what does not depend on the row weighs less there.
Two short rows come first, in case the range begins too high. Runs on fewer GPUs than there are go
side by side, and with ``--together`` all runs share the GPUs, each within its part of the memory:
they take longer steps, and no more memory. One JSON row for each run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from multi_gpu import VOCABULARY, wait_for_steps
from runs_at_once import errors_of

from trainkit.parallel.launch.hosts import free_port

UNIT = 512
SHORT = 2
"""Rows that come first, far below the range."""
RESERVE = 0.985
"""Of the GPU's memory: what allocated tensors get before the allocator has no block left."""
QWEN2_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}


@dataclass(frozen=True)
class Case:
    """A model and how it trains.

    Attributes:
        family: transformers' ``model_type``.
        shape: of its configuration.
        memory_gib: that a GPU may use.
        shortest: tokens of the first row, for each GPU.
        longest: of the last one, likewise.
        part: that a row is longer by.
        recipe: what it trains with, besides rows and model.
        alone: what ``model`` says of a run on one GPU.
        shard: what ``parallel.shard`` says of a run on several.
    """

    family: str
    shape: dict[str, Any]
    memory_gib: float
    shortest: int
    longest: int
    part: float = 0.02
    recipe: dict[str, Any] = field(default_factory=dict)
    alone: dict[str, Any] = field(default_factory=dict)
    shard: str = "none"


CASES = {
    "lora": Case("qwen2", QWEN2_7B, 24, 38 * 1024, 43 * 1024, 0.027, {"lora": {"r": 16}}),
    # One GPU has no room for fp32 masters of an 8B beside gradients and states; two share them.
    "full": Case(
        "llama",
        LLAMA_8B,
        108,
        24 * 1024,
        34 * 1024,
        0.08,
        alone={"master_weights": False},
        shard="fsdp2",
    ),
}


def prepare(folder: Path, case: Case, lengths: list[int]) -> None:
    """The model's configuration, a tokenizer and the rows."""
    import numpy as np
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, PreTrainedTokenizerFast

    longest = {**case.shape, "max_position_embeddings": lengths[-1]}
    config = AutoConfig.for_model(case.family, **longest, eos_token_id=1, pad_token_id=0)
    config.save_pretrained(folder / "model")
    words = {f"<{index}>": index for index in range(min(VOCABULARY, config.vocab_size))}
    core = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<0>", eos_token="<1>")
    tokenizer.save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for length in lengths:
            ids = random.integers(2, len(words), length).tolist()
            file.write(json.dumps({"input_ids": ids}) + "\n")


def start(
    folder: Path, case: Case, lengths: list[int], gpus: list[int], log: Path, *, on_cpu: bool
) -> subprocess.Popen[bytes]:
    """One run over rows of these lengths, on these GPUs."""
    prepare(folder, case, lengths)
    recipe = {
        "data": {"train": [str(folder / "rows.jsonl")], "max_length": lengths[-1]},
        "kernels": True,
        "parallel": {"sequence": len(gpus), "shard": case.shard if len(gpus) > 1 else "none"},
        "global_batch_size": 1,
        **case.recipe,
    }
    recipe["data"]["packing"] = False
    recipe["model"] = {"name_or_path": str(folder / "model"), "init": "random"}
    recipe["model"] |= {"dtype": "bfloat16", **(case.alone if len(gpus) == 1 else {})}
    recipe["training"] = {
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": True,
        "train_sampling_strategy": "sequential",
        "max_steps": len(lengths),
        "logging_steps": 1,
        "save_strategy": "no",
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    environment = dict(os.environ)
    if not on_cpu:
        part = min(case.memory_gib / whole_gib(), 1)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        environment["PYTORCH_CUDA_ALLOC_CONF"] = (
            f"expandable_segments:True,per_process_memory_fraction:{part:.4f}"
        )
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(len(gpus))]
    launch += ["--master_port", str(free_port()), "-m", "trainkit.cli.app", "sft", "--force"]
    words = [sys.executable, *launch, "--config", str(path), "--output-dir", str(folder / "run")]
    with log.open("w", encoding="utf-8") as file:
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)


def whole_gib() -> float:
    """Memory of a GPU."""
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory / 2**30)


@dataclass
class Started:
    """A run that goes on."""

    name: str
    gpus: list[int]
    case: Case
    lengths: list[int]
    folder: Path
    log: Path
    process: subprocess.Popen[bytes]

    def row(self, deadline: float) -> dict[str, Any]:
        """Wait for its end and read what it has come to."""
        wait_for_steps(
            self.process, self.folder / "run" / "metrics.jsonl", len(self.lengths), deadline
        )
        about = {"case": self.name, "gpus": len(self.gpus), "memory_gib": self.case.memory_gib}
        return {"bench": "longest_row", **about, **figures(self.folder, self.lengths, self.log)}


def figures(folder: Path, lengths: list[int], log: Path) -> dict[str, Any]:
    """The longest row that trained, and what a token takes, of what the run has logged."""
    metrics = folder / "run" / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    logged = [row for row in map(json.loads, text.splitlines()) if "step_seconds" in row]
    said = log.read_text(errors="replace")
    found: dict[str, Any] = {
        "longest": lengths[len(logged) - 1] if logged else None,
        "next_failed": lengths[len(logged)] if 0 < len(logged) < len(lengths) else None,
        "ended_for_memory": "out of memory" in said.lower(),
    }
    if len(logged) < len(lengths):
        found["said"] = errors_of(log)
    if logged:
        last = logged[-1]
        kept = ("loss", "grad_norm", "step_seconds", "tokens_per_second", "peak_memory_gib")
        found |= {key: last.get(key) for key in kept}
    peaks = [row["peak_memory_gib"] for row in logged if row.get("peak_memory_gib")]
    if len(peaks) > SHORT + 1:  # short rows' peaks may be the optimizer's step, or the loss
        slope, fixed = statistics.linear_regression(lengths[SHORT : len(peaks)], peaks[SHORT:])
        found |= {"kib_per_token": slope * 2**20, "fixed_gib": fixed}
    return found


def by_line(row: dict[str, Any], gpu_gib: float) -> int | None:
    """Tokens of the row that would fill a GPU, by the line through the rows that trained."""
    if not row.get("kib_per_token"):
        return None
    return int((gpu_gib * RESERVE - row["fixed_gib"]) * 2**20 / row["kib_per_token"])


def growing(first: int, last: int, part: float, unit: int) -> list[int]:
    """Lengths from one to another, each longer by a part of itself and a multiple of a unit.

    Before them come `SHORT` short ones: a third and two thirds of the first.
    """
    lengths = [first // unit * unit]
    while lengths[-1] < last:
        lengths.append(max(int(lengths[-1] * (1 + part)) // unit, lengths[-1] // unit + 1) * unit)
    parts = range(1, SHORT + 1)
    return [max(first * part // (SHORT + 1) // unit, 1) * unit for part in parts] + lengths


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each run, and the ratio to one GPU."""
    alone = {row["case"]: row["longest"] for row in rows if row["gpus"] == 1}
    lines = [""]
    for row in rows:
        longest, base = row["longest"] or 0, alone.get(row["case"]) or 0
        at_least = "" if row["ended_for_memory"] else "at least "
        ratio = f"  {longest / base:.2f}x one GPU" if base and row["gpus"] > 1 else ""
        lines.append(
            f"{row['case']:5} x{row['gpus']} under {row['memory_gib']} GiB: {at_least}{longest} "
            f"tokens{ratio}, {row.get('kib_per_token', 0):.0f} KiB a token, by the line "
            f"{row['by_line']} in the whole GPU  {row.get('said', '')}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """All cases, each on every number of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are added here")
    parser.add_argument("--cases", default="lora,full")
    parser.add_argument("--gpus", default="1,2", help="numbers of them")
    parser.add_argument("--part", type=float, help="that a row is longer by, instead")
    parser.add_argument("--memory-gib", type=float, help="instead of the case's own")
    parser.add_argument("--shortest", type=int, help="instead of the case's own")
    parser.add_argument("--longest", type=int, help="instead of the case's own")
    parser.add_argument("--shape", type=json.loads, default={}, help="of the model, instead")
    parser.add_argument("--together", action="store_true", help="all runs share the GPUs")
    parser.add_argument("--deadline-seconds", type=float, default=560.0)
    chosen = parser.parse_args()
    import torch

    on_cpu, total = not torch.cuda.is_available(), torch.cuda.device_count() or 8
    deadline = time.monotonic() + chosen.deadline_seconds
    waiting = [(name, int(n)) for n in chosen.gpus.split(",") for name in chosen.cases.split(",")]
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        while waiting and time.monotonic() < deadline:
            going, free = list[Started](), list(range(total))
            while waiting and waiting[0][1] <= len(free):
                name, number = waiting.pop(0)
                gpus, free = free[:number], free if chosen.together else free[number:]
                given = {
                    key: value
                    for key in ("memory_gib", "shortest", "longest", "part")
                    if (value := getattr(chosen, key))
                }
                case = replace(CASES[name], **given)
                case = replace(case, shape={**case.shape, **chosen.shape})
                first, last = case.shortest * number, case.longest * number
                lengths = growing(first, last, case.part, UNIT * number)
                folder = Path(scratch, f"{name}-{number}")
                folder.mkdir()
                log = chosen.output.parent / f"longest-{name}-{number}.log"
                process = start(folder, case, lengths, gpus, log, on_cpu=on_cpu)
                going.append(Started(name, gpus, case, lengths, folder, log, process))
            for run in going:
                row = run.row(deadline)
                row["gpu"] = None if on_cpu else torch.cuda.get_device_name(0)
                row["gpu_gib"] = None if on_cpu else whole_gib()
                row["by_line"] = None if on_cpu else by_line(row, row["gpu_gib"])
                rows.append(row)
                with chosen.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
    sys.stdout.write(table(rows))


if __name__ == "__main__":
    main()
