"""What a memory budget makes of a step: is the peak kept to, and what does it cost?

Each point trains some steps of the real Trainer in a process of its own: everything kept, all
layers recomputed, selectively, and under budgets between the first two peaks. A budget's row says
where its peak lies (``share``, of the budget) and its time over that of a mixture of none and full
with the same peak (``over_mixture``; at most 1 is the aim).

    python -m trainkit.bench.recompute [--model NAME] [--mode full|lora] [--batch N] [--output FILE]
        [--seconds N]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainkit.bench.measure.processes import Fresh
from trainkit.bench.measure.record import append, environment
from trainkit.bench.memory import imports, model_of
from trainkit.bench.memory_points import SHAPES, Point
from trainkit.bench.through_trainer import Cell, make_trainer
from trainkit.options.recompute import RecomputeOptions
from trainkit.train.faults.shortage import num_tokens
from trainkit.train.recompute.budget import GIB, RECORD
from trainkit.train.recompute.callback import BudgetSetup, KeepToBudget, RecomputeLayers, Wanted

STEPS, SETTLED = 24, 14
"""Steps of a point, and how many pass before they are timed: a budget searches in the first."""

SHARES = (0.25, 0.5, 0.75)
"""Of the way from full to none, that budgets allow."""


def measure(point: Point, said: str | float) -> dict[str, Any]:
    """Train a point's steps; ``said`` is a word of ``recompute`` or a budget in GiB."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = replace(SHAPES[point.model], batch_size=point.batch_size, length=point.length)
    model = model_of(point, shape, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    more: dict[str, Any] = {} if point.mode == "full" else {"bf16": True}
    if said != "none":
        more |= {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        }
    with tempfile.TemporaryDirectory() as directory:
        cell = Cell(point.model, steps=STEPS, num_workers=0, shape=shape)
        trainer = make_trainer(cell, shape, model, device, Path(directory), **more)
        record = Path(directory) / RECORD
        if isinstance(said, str):
            trainer.add_callback(RecomputeLayers(model, Wanted(RecomputeOptions.of(said), False)))
        else:
            setup = BudgetSetup(
                said,
                offload=False,
                largest_batch=shape.batch_size * shape.length,
                this_batch=lambda: num_tokens(trainer.latest_batch),
                num_ranks=1,
                say=print,
                warn=print,
                record=record,
            )
            trainer.add_callback(KeepToBudget(model, setup))
        trainer.train()
        chosen = json.loads(record.read_text()) if record.exists() else {}
    steps = [row for row in trainer.state.log_history if "step_seconds" in row][SETTLED:]
    return {
        "step_seconds": sorted(row["step_seconds"] for row in steps)[len(steps) // 2],
        "peak_memory_gib": torch.cuda.max_memory_allocated() / GIB,
        "loss": steps[-1].get("loss"),
        "recomputed": chosen.get("recomputed"),
        "num_measured": len(chosen.get("measured", ())),
    }


def rows(point: Point, deadline: float) -> Iterator[dict[str, Any]]:
    """Each way's row as soon as it is measured.

    Args:
        point: the model and its batch.
        deadline: of ``time.monotonic``, after which nothing is begun.
    """
    found: dict[str | float, dict[str, Any]] = {}
    ways: list[str | float] = ["none", "full"]
    with Fresh(3 + len(SHARES), imports) as processes:
        while ways and time.monotonic() < deadline:
            said = ways.pop(0)
            values = processes.call(measure, point, said, seconds=deadline - time.monotonic())
            found[said] = values
            low, high = (found.get(way, {}).get("peak_memory_gib") for way in ("full", "none"))
            if said == "full" and low is not None and high is not None:
                # The aim first: what a budget makes of the step; what is known of old comes last.
                ways = [*(round(low + share * (high - low), 2) for share in SHARES), "selective"]
            if isinstance(said, float) and "error" not in values:
                values |= _against_mixture(said, values, found["none"], found["full"])
            yield {"bench": "recompute", "recompute": said, "case": point.name, **values}


def _against_mixture(
    said: float, values: Mapping[str, Any], none: Mapping[str, Any], full: Mapping[str, Any]
) -> dict[str, float]:
    """How much of its budget a step takes, and its time over that of a mixture."""
    low, high = full["peak_memory_gib"], none["peak_memory_gib"]
    part = (high - values["peak_memory_gib"]) / max(high - low, 1e-9)
    mixture = none["step_seconds"] + part * (full["step_seconds"] - none["step_seconds"])
    return {
        "share": values["peak_memory_gib"] / said,
        "over_mixture": values["step_seconds"] / mixture,
    }


def main() -> None:
    """Measure and print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="qwen2-1.5b", choices=SHAPES)
    parser.add_argument("--mode", default="full", choices=("full", "lora", "qlora"))
    parser.add_argument("--batch", type=int, default=8, help="rows of 2048 tokens")
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing after these")
    options = parser.parse_args()
    point = Point(options.model, options.mode, options.batch)
    for row in rows(point, time.monotonic() + options.seconds):
        line = {**row, **environment()}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        if options.output is not None:
            append(options.output, [line])


if __name__ == "__main__":
    main()
