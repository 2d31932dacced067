#!/usr/bin/env python3
"""Speed on all GPUs of a host: trainkit beside Hugging Face's Trainer and Liger in it.

Every cell is a run of its own, started as users start it: ``torchrun ... trainkit sft`` for
trainkit, a plain Trainer script for the peers. All read the same rows of 2048 tokens, start from
the same random weights and take the same global batch, so that their losses must agree. Cells on
fewer GPUs than the host has run side by side. All import at the start, and then take turns.

    python scripts/multi_gpu.py --output rows.jsonl [--cells 'qwen2-0.5b/*'] [--deadline-seconds N]

One JSON row a cell goes to the output as soon as the cell is done, and a table is printed last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multi_gpu_cells import (
    LENGTH,
    Cell,
    batches_of_cells,
    choose,
    estimated,
    recipe_of,
    written,
)
from runs_at_once import errors_of

from trainkit.parallel.launch.hosts import free_port

Row = dict[str, Any]
IMPORT_SECONDS = 120.0
VOCABULARY = 50_000
HERE = Path(__file__).resolve().parent


# ---------------------------------------------------------------------------------- the runs
def prepare(folder: Path, cells: list[Cell], num_rows: int) -> None:
    """Models with random weights, a tokenizer, and rows of random tokens; 0 leaves those there."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from trainkit.bench.memory_points import SHAPES

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in dict.fromkeys(cell.model for cell in cells):
        shape = SHAPES[name]
        torch.manual_seed(0)
        config = AutoConfig.for_model(shape.family, **shape.config, eos_token_id=1, pad_token_id=0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / name)
        del model
        words = {f"<{index}>": index for index in range(VOCABULARY)}
        core = Tokenizer(models.WordLevel(words, unk_token="<0>"))
        PreTrainedTokenizerFast(
            tokenizer_object=core, pad_token="<0>", eos_token="<1>"
        ).save_pretrained(folder / name)
    if not num_rows:
        return
    random = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(num_rows):
            ids = random.integers(2, VOCABULARY, LENGTH).tolist()
            file.write(json.dumps({"input_ids": ids}) + "\n")


def command(cell: Cell, folder: Path, run: Path, steps: int, total: int) -> list[str]:
    """What starts a cell; it waits for its `gate`."""
    num_gpus = cell.gpus(total)
    start = [sys.executable]
    if num_gpus > 1 or cell.provider != "trainkit":
        start += ["-m", "torch.distributed.run", "--nproc_per_node", str(num_gpus)]
        start += ["--master_port", str(free_port())]
    start += [str(HERE / "start_at_file.py"), str(gate(run))]
    if cell.provider != "trainkit":
        settings = {
            "provider": cell.provider,
            "model": str(folder / cell.model),
            "rows": str(folder / "rows.jsonl"),
            "run": str(run),
            "shard": cell.shard,
            "steps": steps,
            "micro_batch": cell.micro_batch,
            "accumulation": cell.global_batch(total) // cell.micro_batch // num_gpus,
            "checkpointing": bool(cell.overrides.get("training.gradient_checkpointing")),
        }
        return [*start, str(HERE / "multi_gpu_peer.py"), json.dumps(settings)]
    model, rows = str(folder / cell.model), str(folder / "rows.jsonl")
    recipe = recipe_of(cell, total, model, rows, steps)
    path = run.with_name(run.name + ".json")
    path.write_text(json.dumps(recipe), encoding="utf-8")
    words = ["trainkit.cli.app", "sft", "--config", str(path), "--output-dir", str(run)]
    return [*start, *words, *written(cell)]


def gate(run: Path) -> Path:
    """The file that lets a run go on from its imports."""
    return run.with_name(run.name + ".go")


def figures(cell: Cell, run: Path, total: int) -> dict[str, Any]:
    """Read a finished run's own log: medians of the second half of its steps."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step_seconds" in row]
    settled = rows[len(rows) // 2 :]
    seconds = statistics.median(row["step_seconds"] for row in settled)
    tokens = cell.global_batch(total) * LENGTH
    found = {
        "step_seconds": seconds,
        "tokens_per_second_per_gpu": tokens / seconds / cell.gpus(total),
        "peak_memory_gib": settled[-1].get("peak_memory_gib"),
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "steps": len(rows),
    }
    if cell.pipeline > 1:
        found["pipeline_bubble"] = statistics.median(row["pipeline_bubble"] for row in settled)
        found["own_bubble"] = cell.own_bubble(total)
    return found


def wait_for_steps(
    process: subprocess.Popen[bytes], metrics: Path, steps: int, deadline: float
) -> None:
    """Wait for the last step's line, then end the run: what it would save is not measured."""
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count('"step_seconds"') >= steps:
            break
        time.sleep(0.5)
    kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a run with all its processes."""
    for pid in (process.pid, *descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and theirs; a launcher's workers outlive it."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = dict(map(int, line.split()) for line in listed.splitlines())
    found = [child for child, parent in parents.items() if parent == pid]
    return found + [each for child in found for each in descendants(child)]


@dataclass
class Started:
    """A cell whose processes import, or run."""

    cell: Cell
    run: Path
    log: Path
    process: subprocess.Popen[bytes]


def start_cells(
    cells: list[Cell], folder: Path, steps: int, devices: list[str], logs: Path
) -> list[Started]:
    """Have cells import, each for GPUs of its own."""
    started, free, total = [], list(devices), len(devices)
    for cell in cells:
        num = cell.gpus(total)
        name = f"{cell.name}-{num}".replace("/", "-")
        run, log = folder / name, logs / f"{name}.log"
        taken, free = free[:num], free[num:]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(taken)}
        with log.open("w") as file:
            process = subprocess.Popen(
                command(cell, folder, run, steps, total),
                stdout=file,
                stderr=file,
                env=environment if taken else None,
                start_new_session=True,
            )
        started.append(Started(cell, run, log, process))
    return started


def wait_for_imports(started: list[Started], total: int) -> None:
    """Until every cell's processes are ready: importing would slow the runs that are measured."""
    patience = time.monotonic() + IMPORT_SECONDS
    for each in started:
        files = f"{gate(each.run).name}.*"
        while len(list(each.run.parent.glob(files))) < each.cell.gpus(total):
            if time.monotonic() > patience or each.process.poll() is not None:
                break
            time.sleep(0.2)


def measure(started: list[Started], steps: int, total: int, deadline: float, gpu: str) -> list[Row]:
    """Let cells go on side by side, and read their figures."""
    found = []
    for each in started:
        gate(each.run).touch()
    for each in started:
        cell = each.cell
        row: Row = {
            "bench": "multi_gpu",
            "case": f"{cell.group}, {LENGTH} tokens a row, global batch {cell.global_batch(total)}",
            "provider": cell.provider,
            "shard": cell.way,
            "num_gpus": cell.gpus(total),
            "micro_batch": cell.micro_batch,
            "checkpointing": bool(cell.overrides.get("training.gradient_checkpointing")),
            "overrides": cell.overrides,
        }
        if cell.provider == "trainkit":
            row |= estimated(cell, total, gpu)
        try:
            wait_for_steps(each.process, each.run / "metrics.jsonl", steps, deadline)
            row |= figures(cell, each.run, total)
        except (OSError, ValueError, IndexError, KeyError, statistics.StatisticsError):
            row["error"] = errors_of(each.log)
        found.append(row)
    return found


# ---------------------------------------------------------------------------------- the table
def table(rows: list[dict[str, Any]]) -> str:
    """A line for each cell."""
    lines = []
    for row in rows:
        case = row["case"].split(",")[0]
        who = f"{case:16} {row['provider']:9} {row['shard']:12} x{row['num_gpus']}"
        if "error" in row:
            lines.append(f"{who}  {row['error'][:300]}")
            continue
        lines.append(
            f"{who}  {row['tokens_per_second_per_gpu']:9.0f} tokens/s/GPU  "
            f"{row['step_seconds']:.3f} s  {row['peak_memory_gib'] or 0:.1f} GiB  "
            f"loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}"
            + (f"  waits {row['pipeline_bubble']:.1%}" if "pipeline_bubble" in row else "")
        )
    return "\n".join(lines)


def main() -> None:
    """Run the chosen cells."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are added here")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/multi_gpu"))
    parser.add_argument("--cells", default="*", help="patterns of names, with commas")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cell-seconds", type=float, default=150.0, help="of one group of cells")
    parser.add_argument("--commit", default=None, help="of the code that runs")
    parser.add_argument("--deadline-seconds", type=float, default=3600.0, help="of measuring")
    parser.add_argument("--wait-for", type=Path, help="a file; until it is there, only import")
    parser.add_argument("--estimate", type=int, metavar="GPUS", help="run nothing, say beforehand")
    chosen = parser.parse_args()

    import torch

    from trainkit.bench.measure.record import environment

    if chosen.estimate:
        with chosen.output.open("a", encoding="utf-8") as file:
            for cell in choose(chosen.cells.split(","), chosen.estimate):
                said = {"case": cell.name, **estimated(cell, chosen.estimate, "NVIDIA H200")}
                file.write(json.dumps(said) + "\n")
        return

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]
    total = len(devices)
    cells = choose(chosen.cells.split(","), total)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    prepare(chosen.folder, cells, max(cell.global_batch(total) for cell in cells) * chosen.steps)
    torch.cuda.empty_cache()
    common = environment(chosen.commit)
    groups = [
        start_cells(group, chosen.folder, chosen.steps, devices, chosen.output.parent)
        for group in batches_of_cells(cells, total)
    ]
    every = [started for group in groups for started in group]
    try:
        wait_for_imports(every, total)
        while chosen.wait_for and not chosen.wait_for.exists():
            time.sleep(0.2)
        deadline = time.monotonic() + chosen.deadline_seconds
        found: list[Row] = []
        for group in groups:
            if time.monotonic() > deadline - 30:
                break
            limit = min(deadline, time.monotonic() + chosen.cell_seconds)
            rows = measure(group, chosen.steps, total, limit, common["gpu"])
            found += rows
            with chosen.output.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({**row, **common}) + "\n" for row in rows)
            sys.stdout.write(table(rows) + f"   ({deadline - time.monotonic():.0f} s left)\n")
            sys.stdout.flush()
    finally:
        for each in every:
            kill(each.process)
    sys.stdout.write(table(found) + "\n")


if __name__ == "__main__":
    main()
