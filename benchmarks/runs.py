"""Whole runs on one GPU or all of a host: trainkit beside Hugging Face's Trainer and Liger in it.

Every run is started as users start it: ``torchrun ... trainkit sft`` for trainkit, a plain Trainer
script for the peers. All read the same rows, start from the same random weights and take the same
global batch, so that their losses must agree. The runs of `RUNS` are chosen by name; any other is
described on the command line, with trainkit's own overrides:

    python -m benchmarks runs --output rows.jsonl --only 'qwen2-0.5b/*'
    python -m benchmarks runs --output rows.jsonl --model qwen2-1.5b --gpus 1 --batch 4 \\
        --length 2048 training.optim=adamw_8bit recompute=selective

A row has the speed, the peak of memory and the losses, and what `trainkit estimate` said before.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainkit.bench.providers import MODELS
from trainkit.parallel.launch import free_port

VOCABULARY = 50_000


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        model: a key of `MODELS`.
        provider: ``trainkit``, ``hf`` or ``liger``.
        num_gpus: processes; 0 for all GPUs of the host.
        shard: a preset of trainkit's ``parallel.shard``.
        batch: rows of a step on ``batch_gpus`` GPUs; on another number in proportion.
        micro_batch: rows of a process at once.
        overrides: of trainkit's recipe.
        batch_gpus: 0 for all GPUs of the host.
        length: tokens of a row.
    """

    model: str
    provider: str
    num_gpus: int
    shard: str
    batch: int
    micro_batch: int
    overrides: dict[str, Any] = field(default_factory=dict)
    batch_gpus: int = 0
    length: int = 2048

    def gpus(self, total: int) -> int:
        """Its processes on a host with so many GPUs."""
        return self.num_gpus or total

    def global_batch(self, total: int) -> int:
        """Rows of a step over all its processes."""
        return self.batch * self.gpus(total) // (self.batch_gpus or total)

    @property
    def name(self) -> str:
        """Model, provider, how it is spread, and the GPUs."""
        said = [f"{key.rpartition('.')[2]}={value}" for key, value in self.overrides.items()]
        way = "-".join([self.shard, *said])
        return f"{self.model}/{self.provider}/{way}/{self.num_gpus or 'all'}"

    def recipe(self, total: int, model: str, rows: str, steps: int) -> dict[str, Any]:
        """What trainkit runs, without the overrides."""
        return {
            "name": "runs",
            "model": {"name_or_path": model, "dtype": "bfloat16"},
            "data": {"train": [rows], "max_length": self.length, "packing": False},
            "kernels": True,
            "parallel": {"shard": self.shard},
            "global_batch_size": self.global_batch(total),
            "training": {
                "per_device_train_batch_size": self.micro_batch,
                "learning_rate": 1e-4,
                "lr_scheduler_type": "constant",
                "max_steps": steps,
                "logging_steps": 1,
                "save_strategy": "no",
                "max_grad_norm": 1.0,
            },
        }

    def written(self) -> list[str]:
        """The overrides, as a command has them."""
        return [f"{key}={json.dumps(value)}" for key, value in self.overrides.items()]


LORA = {"lora.r": 16, "lora.alpha": 32}
CHECKPOINTED = {"training.gradient_checkpointing": True}
PIPES = {"parallel.pipeline": 2}

RUNS = (
    *(Run("qwen2-0.5b", peer, 0, "zero2", 256, 16) for peer in ("trainkit", "liger")),
    Run("qwen2-0.5b", "hf", 0, "zero2", 256, 8),
    Run("qwen2-0.5b", "trainkit", 1, "none", 256, 16),
    *(Run("qwen2-0.5b", "trainkit", gpus, "zero2", 256, 16) for gpus in (2, 4)),
    *(Run("qwen2-7b", "trainkit", gpus, "none", 8, 4, LORA, 1) for gpus in (0, 1, 2, 4)),
    Run("qwen2-7b", "trainkit", 0, "zero2", 8, 4, LORA, 1),
    *(
        Run("qwen2-7b", "trainkit", gpus, shard, 32, 4, CHECKPOINTED)
        for shard in ("zero3", "fsdp2")
        for gpus in (0, 2, 4)
    ),
    *(Run("qwen2-7b", "hf", 0, shard, 32, 4, CHECKPOINTED) for shard in ("zero3", "fsdp2")),
    Run("qwen2-0.5b", "trainkit", 0, "fsdp2", 256, 16),
    Run("qwen2-0.5b", "hf", 0, "fsdp2", 256, 8),
    Run("qwen2-7b", "trainkit", 0, "none", 8, 4, {**LORA, "lora.quantize": "fp8"}, 1),
    *(
        Run("qwen2-7b", "trainkit", 2, "none", 16, 1, {**kept, **PIPES, **schedule}, 2)
        for name in ("1f1b", "interleaved", "zbv")
        for schedule in [{"parallel.schedule": name}]
        for kept in (CHECKPOINTED, {})
    ),
)


def prepare(folder: Path, runs: list[Run], num_rows: int) -> None:
    """Models with random weights, a tokenizer, and rows of random tokens."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    for name in dict.fromkeys(run.model for run in runs):
        shape = MODELS[name]
        torch.manual_seed(0)
        config = AutoConfig.for_model(shape.family, **shape.config, eos_token_id=1, pad_token_id=0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / name)
        del model
        words = {f"<{index}>": index for index in range(VOCABULARY)}
        core = Tokenizer(models.WordLevel(words, unk_token="<0>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<0>", eos_token="<1>")
        tokenizer.save_pretrained(folder / name)
    random = np.random.default_rng(0)
    for length in {run.length for run in runs}:
        with (folder / f"rows-{length}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(num_rows):
                ids = random.integers(2, VOCABULARY, length).tolist()
                file.write(json.dumps({"input_ids": ids}) + "\n")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def command(run: Run, folder: Path, output: Path, steps: int, total: int) -> list[str]:
    """What starts a run."""
    gpus, model = run.gpus(total), str(folder / run.model)
    rows = str(folder / f"rows-{run.length}.jsonl")
    start = [sys.executable, "-m"]
    if gpus > 1 or run.provider != "trainkit":
        start += ["torch.distributed.run", "--nproc_per_node", str(gpus)]
        start += ["--master_port", str(free_port()), "-m"]
    if run.provider == "trainkit":
        recipe = output.with_suffix(".json")
        recipe.write_text(json.dumps(run.recipe(total, model, rows, steps)), encoding="utf-8")
        words = ["trainkit.cli.app", "sft", "--config", str(recipe), "--output-dir", str(output)]
        return [*start, *words, *run.written()]
    settings = {
        "provider": run.provider,
        "model": model,
        "rows": rows,
        "run": str(output),
        "shard": run.shard,
        "steps": steps,
        "micro_batch": run.micro_batch,
        "accumulation": run.global_batch(total) // run.micro_batch // gpus,
        "checkpointing": bool(run.overrides.get("training.gradient_checkpointing")),
    }
    return [*start, "benchmarks.peer", json.dumps(settings)]


def measure(run: Run, folder: Path, steps: int, total: int, seconds: float) -> dict[str, Any]:
    """Run until the last step's line is there: medians of the second half of the steps."""
    output = folder / run.name.replace("/", "-")
    metrics, log = output / "metrics.jsonl", output.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(
            command(run, folder, output, steps, total),
            stdout=file,
            stderr=file,
        )
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count('"step_seconds"') >= steps:
            break
        time.sleep(0.5)
    for pid in (process.pid, *descendants(process.pid)):  # what it would save is not measured
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    try:
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        rows = [row for row in rows if "step_seconds" in row]
        settled = rows[len(rows) // 2 :]
        step_seconds = statistics.median(row["step_seconds"] for row in settled)
    except (OSError, ValueError, statistics.StatisticsError):
        return {"error": log.read_text(errors="replace")[-1500:]}
    tokens = run.global_batch(total) * run.length
    found = {
        "step_seconds": step_seconds,
        "tokens_per_second_per_gpu": tokens / step_seconds / run.gpus(total),
        "peak_memory_gib": settled[-1].get("peak_memory_gib"),
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "steps": len(rows),
    }
    if "pipeline_bubble" in settled[-1]:
        found["pipeline_bubble"] = statistics.median(row["pipeline_bubble"] for row in settled)
    return found


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and theirs; a launcher's workers outlive it."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = dict(map(int, line.split()) for line in listed.splitlines())
    children = [child for child, parent in parents.items() if parent == pid]
    return children + [each for child in children for each in descendants(child)]


def estimated(run: Run, total: int, gpu: str) -> dict[str, float]:
    """What `trainkit estimate` says; a GPU that nobody knows counts as an H200."""
    from trainkit.estimate.estimate import estimate
    from trainkit.estimate.gpus import GPUS, gpu_named
    from trainkit.estimate.recipe import plan_of
    from trainkit.recipe import load_recipe

    with TemporaryDirectory() as folder:
        path = Path(folder, "recipe.json")
        path.write_text(json.dumps(run.recipe(total, run.model, "rows.jsonl", 4)))
        recipe = load_recipe(path, run.written()).recipe
    found = estimate(plan_of(recipe, run.gpus(total)), gpu_named(gpu) or GPUS["h200"])
    return {
        "estimated_gib": found.peak.gib,
        "estimated_tokens_per_second_per_gpu": found.tokens_per_second / run.gpus(total),
    }


def main(words: list[str]) -> None:
    """Run what is chosen; a row a run goes to the output as soon as it is done."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are added here")
    parser.add_argument("--only", default="*", help="pattern of names in the table")
    parser.add_argument("--model", choices=MODELS, help="a run that is not in the table")
    parser.add_argument("--provider", default="trainkit", choices=("trainkit", "hf", "liger"))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--shard", default="none")
    parser.add_argument("--batch", type=int, default=4, help="rows of a step, all GPUs together")
    parser.add_argument("--micro-batch", type=int, help="rows at once; default: all of a GPU's")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0, help="at most, of a run")
    parser.add_argument("--estimate", type=int, metavar="GPUS", help="run nothing, say beforehand")
    chosen = parser.parse_args(words)

    import torch

    from trainkit.bench.cells import append, environment

    total = chosen.estimate or max(torch.cuda.device_count(), 1)
    if chosen.model:
        per_gpu = max(chosen.batch // chosen.gpus, 1)
        given = dict(word.split("=", 1) for word in chosen.overrides)
        runs = [
            Run(
                chosen.model,
                chosen.provider,
                chosen.gpus,
                chosen.shard,
                chosen.batch,
                chosen.micro_batch or per_gpu,
                {key: _read(value) for key, value in given.items()},
                chosen.gpus,
                chosen.length,
            )
        ]
    else:
        runs = [r for r in RUNS if fnmatch.fnmatch(r.name, chosen.only) and r.num_gpus <= total]
    with TemporaryDirectory() as scratch:
        folder, common = Path(scratch), environment()
        if not chosen.estimate:
            most = max((run.global_batch(total) for run in runs), default=0)
            prepare(folder, runs, most * chosen.steps)
        for run in runs:
            row: dict[str, Any] = {
                "bench": "runs",
                "case": f"{run.name}, {run.length} tokens, batch {run.global_batch(total)}",
                "provider": run.provider,
                "shard": run.shard,
                "num_gpus": run.gpus(total),
                "micro_batch": run.micro_batch,
                "overrides": run.overrides,
            }
            if run.provider == "trainkit":
                row |= estimated(run, total, common["gpu"])
            if not chosen.estimate:
                row |= measure(run, folder, chosen.steps, total, chosen.seconds)
            append(chosen.output, [{**row, **common}])
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
