"""What a run left behind, without what the clock says: equal records are equal runs."""

import hashlib
import json
from pathlib import Path

BY_THE_CLOCK = {"step_seconds", "tokens_per_second", "data_seconds", "mfu", "eval_runtime"}
BY_THE_CLOCK |= {"eval_samples_per_second", "eval_steps_per_second", "peak_memory_gib"}


def digests(directory):
    """sha256 of every file with weights or states in it."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(directory).rglob("*"))
        if path.suffix in (".safetensors", ".pt", ".pth", ".bin")
    }


def metrics(run):
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k not in BY_THE_CLOCK} for row in rows]


def record(run):
    """Weights, optimizer, schedule, random numbers of the last checkpoint and final/; metrics."""
    checkpoints = sorted(Path(run).glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    found = {"final": digests(Path(run, "final")), "metrics": metrics(run)}
    if checkpoints:
        found["last"] = checkpoints[-1].name
        found["checkpoint"] = digests(checkpoints[-1])
    return found
