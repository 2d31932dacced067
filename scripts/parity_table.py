#!/usr/bin/env python3
"""The table of the guide to several GPUs: which cells of ``parity.py`` have rows that fit.

python scripts/parity_table.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from parity_cells import KINDS, WAYS, Cell, refused

ROWS = Path(__file__).resolve().parents[1] / "docs/benchmarks/parity.jsonl"


def table() -> str:
    """A line for each way; in how many of the eight settings of the three switches it ran."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    assert all(row["ok"] for row in rows), "a cell is off"
    lines = ["| parallel | full | LoRA | nf4 |", "|---|---|---|---|"]
    for way, spread in WAYS.items():
        named = ", ".join(
            str(v) if k in ("shard", "schedule") else f"{k} {v}" for k, v in spread.items()
        )
        cells = []
        for kind in KINDS:
            mine = [row for row in rows if (row["way"], row["kind"]) == (way, kind)]
            if refused(
                Cell(way, kind, kernels=True, packed=True, checkpointed=True, ranks=8), bf16=False
            ):
                cells.append("refused")
                continue
            parts = []
            for ranks in (2, 4):
                of_ranks = [
                    row for row in mine if row["ranks"] == ranks and row["dtype"] == "float32"
                ]
                settings = {
                    (row["kernels"], row["packed"], row["checkpointed"]) for row in of_ranks
                }
                parts += [f"{len(settings)} on {ranks} ranks"] if settings else []
            cells.append(", ".join(parts))
        lines.append(f"| {named} | {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
