#!/usr/bin/env python3
"""Walks the ways of spreading a run, and holds each against one process that spreads nothing.

    python scripts/parity.py --ranks 2 --output rows.jsonl [--only fsdp2] [--bf16] [--resume]

Every cell is ``trainkit sft`` on a tiny model: rows of uneven length with uneven masks, several
micro-batches a step, clipping. In fp32 the first gradient norm may differ by 1e-6 of itself and
each loss by 1e-5. With ``--bf16`` runs of one process differ, too, that should not: with rows
taken one, two or four at a time, with kernels and without. Twice their largest difference is what
a cell may differ by. Cells that the table of refusals names are recorded with their reason.
One JSON row a cell, a table last; the exit status is 1 if a cell is off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parity_cells import STEPS, SWITCHES, Cell, cells, prepare, recipe, refused
from runs_at_once import Runs, visible_gpus


def numbers(folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def differences(wanted: Path, found: Path) -> dict[str, float]:
    """Largest of the losses, of the first gradient norm, and of all norms."""
    pairs = list(zip(numbers(wanted), numbers(found), strict=True))
    norms = [abs(a[1] - b[1]) / a[1] for a, b in pairs]
    return {
        "loss_difference": max(abs(a[0] - b[0]) for a, b in pairs),
        "first_norm_difference": norms[0],
        "norm_difference": max(norms),
    }


def limits(cell: Cell, runs: Runs, *, bf16: bool) -> dict[str, float]:
    """What a cell may differ by."""
    if not bf16:
        return {"loss_limit": 1e-5, "first_norm_limit": 1e-6}
    alike = [cell.reference, *cell.likes]
    folders = [runs.root / each.name for each in alike if runs.went[each.name]]
    if len(folders) < len(alike):
        names = [each.name for each in alike if not runs.went[each.name]]
        raise RuntimeError(f"{names[0]}: {runs.said(names[0])}")
    noise = [differences(a, b) for a, b in itertools.combinations(folders, 2)]
    return {
        "loss_limit": 2 * max(each["loss_difference"] for each in noise),
        "first_norm_limit": 2 * max(each["first_norm_difference"] for each in noise),
    }


def judged(cell: Cell, runs: Runs, *, bf16: bool) -> dict[str, Any]:
    """A cell that has run against its reference."""
    for each in (cell.reference, cell):
        if not runs.went[each.name]:
            return {"failed": runs.said(each.name)}
    try:
        found = numbers(runs.root / cell.name)
        row = differences(runs.root / cell.reference.name, runs.root / cell.name)
        row |= limits(cell, runs, bf16=bf16)
    except (RuntimeError, ValueError, LookupError, OSError, ArithmeticError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    is_near = all(
        row[f"{what}_difference"] <= row[f"{what}_limit"] for what in ("loss", "first_norm")
    )
    return {**row, "loss": [found[0][0], found[-1][0]], "ok": is_near}


def measure(chosen: argparse.Namespace, runs: Runs) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Every cell with what came of it; each run begins after those that it is held against."""
    bf16, wanted = chosen.bf16, list[Cell]()
    for cell in cells(chosen.ranks, chosen.only, SWITCHES[chosen.switches]):
        if reason := refused(cell, bf16=bf16):
            yield cell, {"refused": reason}
        else:
            wanted.append(cell)
    needs = {cell: (cell.reference, *(cell.likes if bf16 else ()), cell) for cell in wanted}

    def begin(cell: Cell) -> tuple[str, list[str], int]:
        path = runs.root / f"{cell.name}.json"
        path.write_text(json.dumps(recipe(cell, bf16=bf16)), encoding="utf-8")
        words = ["sft", "--config", path.name, "--output-dir", cell.name]
        return cell.name, words, cell.ranks

    queue = dict.fromkeys(each for cell in wanted for each in needs[cell])
    for _ in runs.all(map(begin, queue)):
        for cell in [c for c in needs if all(each.name in runs.went for each in needs[c])]:
            del needs[cell]
            row = judged(cell, runs, bf16=bf16)
            if chosen.resume and runs.went[cell.name]:
                row |= _resumed(cell, runs)
                row["ok"] = row.get("ok", False) and row["resumed_exactly"]
            yield cell, row
    for cell in needs:
        yield cell, {"not_run": "the time was over"}


def _resumed(cell: Cell, runs: Runs) -> dict[str, Any]:
    """A copy of a run that went on from its middle."""
    again = f"{cell.name}-again"
    shutil.copytree(runs.root / cell.name, runs.root / again)
    words = ["sft", "--resume", f"{again}/checkpoint-{STEPS // 2}"]
    for _ in runs.all([(again, words, cell.ranks)]):
        pass
    if not runs.went[again]:
        return {"resumed_exactly": False, "failed": runs.said(again)}
    return {"resumed_exactly": numbers(runs.root / again) == numbers(runs.root / cell.name)}


def state(found: dict[str, Any]) -> str:
    """Of a cell, in a word."""
    for word in ("refused", "not_run", "failed"):
        if word in found:
            return word
    return "ok" if found["ok"] else "OFF"


def table(outcomes: dict[str, dict[str, Any]]) -> str:
    """A line for each cell that ran, and how many came to what."""
    lines, count = ["", "cell: loss off by / limit; first norm off by / limit"], Counter[str]()
    for name, found in outcomes.items():
        count[state(found)] += 1
        figures = (
            f"{found[f'{what}_difference']:.1e} / {found[f'{what}_limit']:.1e}"
            for what in ("loss", "first_norm")
            if f"{what}_limit" in found
        )
        told = found.get("failed", "")[:200]
        if state(found) != "refused":
            lines.append(f"{state(found):8}{name}: {'; '.join(figures)}{told}")
    counted = ", ".join(f"{number} {word}" for word, number in count.items())
    return "\n".join([*lines, counted]) + "\n"


def main() -> None:
    """Walk the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are added here")
    parser.add_argument("--only", default="", help="parts of names, with commas, in this order")
    parser.add_argument("--switches", choices=SWITCHES, default="all")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on from the middle, too")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--timeout-seconds", type=float, default=1200.0, help="of each run")
    parser.add_argument("--deadline-seconds", type=float, default=math.inf, help="of all")
    chosen = parser.parse_args()
    deadline = time.monotonic() + chosen.deadline_seconds
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking CUDA would forbid to fork
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    import trainkit.cli.commands.training.sft
    import trainkit.train.build  # noqa: F401

    outcomes: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        runs = Runs(Path(scratch), chosen.jobs, chosen.timeout_seconds, deadline)
        about = {"dtype": "bfloat16" if chosen.bf16 else "float32"}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        for cell, found in measure(chosen, runs):
            told = {name: value for name, value in vars(cell).items() if name != "rows"}
            row = {**told, **about, **found, **versions, "on_gpus": bool(visible_gpus())}
            with chosen.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            outcomes[cell.name] = found
            sys.stdout.write(f"{cell.name} {json.dumps(found)}\n")
            sys.stdout.flush()
    sys.stdout.write(table(outcomes))
    sys.exit(any(state(found) not in ("ok", "refused") for found in outcomes.values()))


if __name__ == "__main__":
    main()
