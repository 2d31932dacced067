#!/usr/bin/env python3
"""Speed on 8, 64 and 512 GPUs: what was measured on one host, and on paper what hosts add to it.

    python scripts/projection.py          # draws docs/images/projection.svg and prints the table

A micro-batch computes for c seconds, as measured on one host, and each GPU moves b bytes for it
over a link of B bytes a second to other hosts. Where transfers hide behind computing it takes
max(c, b / B); what is moved once a step, behind the last micro-batch, adds b / B.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "docs/benchmarks/multi_gpu.jsonl"
PICTURE = ROOT / "docs/images/projection.svg"
LINK = 50e9
"""Bytes a second that each GPU has to other hosts: 400 Gbit/s."""
WEIGHTS, ADAPTERS = 7.6e9, 40e6
TOKENS = 8192
"""Of a measured micro-batch: 4 rows of 2048."""
GPUS = (8, 64, 512)


@dataclass(frozen=True)
class Way:
    """A line of the picture.

    Attributes:
        title: what it is called.
        case: how the cases of its rows begin.
        colour: of the line.
        tokens: of a micro-batch on a GPU.
        weights: whose bytes are moved.
        micro_batches: of a step, where bytes are moved once for all of them, behind the last; 0
            where each moves them and computes meanwhile.
    """

    title: str
    case: str
    colour: str
    tokens: int
    weights: float
    micro_batches: int = 0

    def on_paper(self, measured: float, gpus: int) -> float:
        """Tokens a second and GPU, from those of one host."""
        seconds = self.tokens / measured
        moving = 8 * self.weights * (gpus - 1) / gpus / LINK
        if self.micro_batches:
            step = self.micro_batches * seconds
            return self.micro_batches * self.tokens / (step + moving)
        return self.tokens / max(seconds, moving)


FSDP2 = "Qwen2-7B shape, 2048 tokens a row, FSDP2,"
WAYS = (
    Way("LoRA r = 16, DDP", "Qwen2-7B shape, LoRA r16, 2048", "#2f6fde", TOKENS, ADAPTERS, 2),
    Way("all weights, FSDP2, 16 384 tokens", FSDP2, "#1f9d6b", 2 * TOKENS, WEIGHTS),
    Way("all weights, FSDP2, 8192 tokens", FSDP2, "#e8a33d", TOKENS, WEIGHTS),
)


def measured(way: Way) -> dict[int, float]:
    """GPUs to tokens a second and GPU; the first row of each."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    found: dict[int, float] = {}
    for row in rows:
        is_ours = row["provider"].startswith("trainkit") and "tokens_per_second" in row["metric"]
        if is_ours and row["case"].startswith(way.case) and " base" not in row["case"]:
            found.setdefault(row["num_gpus"], row["value"])
    return found


def table() -> Iterator[str]:
    """Lines of Markdown."""
    yield "| tokens/s per GPU | 8 (measured) | 64 | 512 |"
    yield "|---|---|---|---|"
    for way in sorted(WAYS, key=lambda way: (way.weights, way.tokens)):
        base = measured(way)[8]
        first = _spaced(base) if way.tokens == TOKENS else ""
        paper = [_spaced(round(way.on_paper(base, gpus), -2)) for gpus in GPUS[1:]]
        yield f"| {' | '.join([way.title, first, *paper])} |".replace("|  |", "| |")


def _spaced(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")


def picture() -> str:
    """The figure as SVG: points were measured, dashes are paper."""
    width, height, left, top, right, bottom = 720, 360, 70, 30, 690, 300
    most = 20_000
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="18">Qwen2-7B shape, tokens/s per GPU: measured on one host (points), '
        "on paper beyond (dashes)</text>",
    ]

    def x(gpus: float) -> float:
        return left + (right - left) * math.log2(gpus) / 9

    def y(speed: float) -> float:
        return bottom - (bottom - top) * speed / most

    for speed in range(0, most + 1, 5000):
        parts.append(
            f'<path d="M{left} {y(speed):.1f}H{right}" stroke="#ddd"/>'
            f'<text x="{left - 8}" y="{y(speed) + 4:.1f}" text-anchor="end">{speed}</text>'
        )
    parts += [
        f'<text x="{x(2**power):.1f}" y="{bottom + 18}" text-anchor="middle">{2**power}</text>'
        for power in range(10)
    ]
    parts.append(f'<text x="{right}" y="{bottom + 36}" text-anchor="end">GPUs</text>')
    for place, way in enumerate(WAYS):
        known = measured(way)
        paper = [(8.0, known[8]) if way.tokens == TOKENS else (16.0, way.on_paper(known[8], 16))]
        paper += [(2.0**power, way.on_paper(known[8], 2**power)) for power in range(4, 10)]
        line = "L".join(f"{x(gpus):.1f} {y(speed):.1f}" for gpus, speed in paper)
        parts.append(
            f'<path d="M{line}" fill="none" stroke="{way.colour}" stroke-width="2" '
            'stroke-dasharray="6 4"/>'
        )
        if way.tokens == TOKENS:
            parts += [
                f'<circle cx="{x(gpus):.1f}" cy="{y(speed):.1f}" r="4" fill="{way.colour}"/>'
                for gpus, speed in sorted(known.items())
            ]
        parts.append(
            f'<text x="{left + place * 205}" y="{height - 10}" fill="{way.colour}">'
            f"{way.title}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    sys.stdout.write("\n".join(table()) + "\n")
