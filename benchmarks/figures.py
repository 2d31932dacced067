"""The benchmarks that print a line a figure; `benchmarks.__main__` starts them."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainkit.bench.cells import Cell, Records, run

Rows = Iterator[tuple[str, dict[str, Any]]]


def ops(options: argparse.Namespace) -> Rows:
    """The ops against their peers: microseconds, and the share of the copy bandwidth reached."""
    from benchmarks import ops as bench
    from trainkit.bench.measure import ceilings

    copy = ceilings(torch.device("cuda"))
    yield "ceiling", {"provider": "torch", **copy}
    drawn: list[dict[str, Any]] = []
    for row in bench.run(options.ops.split(","), bench.PROVIDERS, copy["gb_per_second"]):
        size = row.pop("case")
        case = f"{row['op']} {size} {row.get('pass', '')} {row.get('clock', '')}".strip()
        yield case, {**row, "size": size}
        drawn += Records("ops").of(case, {**row, "size": size}) if options.picture else []
    if options.picture:
        from benchmarks.pictures import draw_ops

        draw_ops(drawn, options.picture)


def loss(options: argparse.Namespace) -> Rows:
    """Linear layer and cross entropy in one: the share of the matmul rate next to it, memory."""
    from benchmarks import loss as bench

    for row in bench.run(bench.CASES, bench.PROVIDERS[:3], torch.device("cuda")):
        yield row.pop("case"), row


def packing(options: argparse.Namespace) -> Rows:
    """Trained tokens per second on conversations of very different lengths, padded and packed."""
    from benchmarks.packing import LAYOUTS

    cells = [
        Cell("benchmarks.packing", options.shape, provider, layout)
        for provider in ("hf_sdpa", "liger", "trainkit")
        for layout in LAYOUTS
        if layout != "packed" or provider == "trainkit"
    ]
    for row in run(cells):
        yield f"{row.pop('model')} {row.pop('mode')}", row


def curve(options: argparse.Namespace) -> Rows:
    """Loss curves of trainkit and of plain runs that differ in their attention kernel."""
    from benchmarks import curve as bench

    settings = {"samples": str(options.samples), "batch_size": 16, "max_length": 192}
    cells = [
        Cell(bench.__name__, options.shape, provider, steps=300, settings=settings)
        for provider in bench.RUNS
    ]
    losses = {}
    for row in run(cells, together=True):
        if "error" in row:
            sys.exit(f"{row['provider']} failed:\n{row['error']}")
        losses[row["provider"]] = row["losses"]
    for provider, row in bench.distances(losses).items():
        case = f"{options.shape}, 300 steps, against {bench.RUNS[0]}"
        yield case, {"provider": provider, **row, "batch_size": 16, "max_length": 192}
    if options.picture:
        from benchmarks.pictures import draw_curves

        draw_curves(losses, options.picture)


def data(options: argparse.Namespace) -> Rows:
    """Preparing conversations (read, render, tokenise, mask, pack), against TRL: s, CPU s, GiB."""
    from benchmarks import data as bench

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "conversations.jsonl"
        bench.write_conversations(file, options.rows)
        size = {"file_mib": round(file.stat().st_size / 2**20, 1), "num_workers": options.workers}
        settings = {"path": str(file), "num_workers": options.workers}
        for provider in bench.PROVIDERS:
            cell = Cell(bench.__name__, options.model, provider, settings=settings)
            (row,) = run([cell])
            yield f"{options.rows} conversations", {**row, "model": "", **size}


BENCHES = {each.__name__: each for each in (ops, loss, packing, curve, data)}


def main(words: list[str], about: str) -> None:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bench", choices=[*BENCHES, "runs", "parity"])
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    parser.add_argument("--picture", type=Path, help="draw a PNG here (ops, curve)")
    parser.add_argument("--shape", default="qwen2-0.5b", help="a model of the table of shapes")
    parser.add_argument("--model", help="data: a directory with a ChatML tokenizer")
    parser.add_argument("--rows", type=int, default=100_000, help="data: conversations to make")
    parser.add_argument("--workers", type=int, default=2, help="data: processes")
    parser.add_argument("--samples", type=Path, help="curve: of `data preview --json`")
    parser.add_argument(
        "--ops", default="rms_norm,add_rms_norm,apply_rope,swiglu,swiglu_packed,cross_entropy"
    )
    options = parser.parse_args(words)
    for bench, needed in (("data", "model"), ("curve", "samples")):
        if options.bench == bench and getattr(options, needed) is None:
            parser.error(f"{bench} needs --{needed}")
    if options.bench != "data" and not torch.cuda.is_available():
        parser.error(f"{options.bench} is measured on a GPU, and there is none here")
    name = "linear_cross_entropy" if options.bench == "loss" else options.bench
    records = Records(name, options.output)
    for case, row in BENCHES[options.bench](options):
        if "error" in row:
            sys.stderr.write(f"{case} {row['provider']} failed:\n{row['error']}\n")
        for record in records.of(case, row):
            sys.stdout.write(json.dumps(record) + "\n")
