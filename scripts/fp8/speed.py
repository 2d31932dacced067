#!/usr/bin/env python3
"""How fast fp8 trains, next to bf16 and to other tools: one GPU, random weights, part by part.

usage: speed.py OUTPUT [--costs FILE] [--parts NAME;...] [--seconds 460] [--peers SITE]

Policies: bf16; all, every product that gains time; the same and the output layer; budget B, what
the default budget takes by the milliseconds measured here and the costs of a trained model, by role
and share of the depth: FILE is the `kernels.json` of such a run. Full fine-tuning is timed forward
and backward, adapters with AdamW. Peers: Unsloth (which needs packages of its own, SITE), Liger,
and torchao's float8 in compiled layers with Liger's loss. Each part is a process, and the next one
imports meanwhile. A JSON line for each figure goes to OUTPUT, the GPU's time by kernel to
OUTPUT.kernels.json, and a table is printed last.
`--tiny` checks the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from speed_parts import PARTS, run_part

ROOT = Path(__file__).resolve().parents[2]


def child(name: str, costs_file: str, tiny: bool) -> None:
    """A part's process: imports, waits for a line, and writes figures."""
    if PARTS[name][2] == "unsloth":
        import unsloth  # noqa: F401  (it must come before transformers and peft)
    import peft  # noqa: F401
    import transformers  # noqa: F401

    import trainkit  # noqa: F401

    sys.stdin.readline()
    costs = json.loads(Path(costs_file).read_text())["fp8"] if costs_file else {}
    for row in run_part(name, costs, tiny):
        sys.stdout.write("ROW " + json.dumps(row) + "\n")
        sys.stdout.flush()


def log_of(name: str) -> Path:
    """Where a part's errors go."""
    return Path(tempfile.gettempdir()) / f"fp8_speed_{name.replace(' ', '_')}.log"


def start(name: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    """The process of a part, which imports and waits."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if PARTS[name][2] == "unsloth" and args.peers:
        paths.insert(0, args.peers)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "UNSLOTH_DISABLE_STATISTICS": "1"}
    command = [sys.executable, __file__, "-", "--child", name, "--costs", args.costs]
    log = log_of(name).open("w")
    return subprocess.Popen(
        [*command, *(["--tiny"] if args.tiny else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=env,
    )


def lines_of(process: subprocess.Popen[str], until: float) -> Iterator[str]:
    """What a process writes, until it ends or its time does."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write("go\n")
        process.stdin.flush()
    except BrokenPipeError:
        return
    while time.monotonic() < until:
        if select.select([process.stdout], [], [], 1.0)[0]:
            line = process.stdout.readline()
            if not line:
                break
            yield line
    process.kill()


def write(
    args: argparse.Namespace, name: str, row: dict[str, Any], about: Mapping[str, Any]
) -> None:
    """Add a row's figures to the files."""
    from trainkit.bench.measure.record import UNITS

    shape, work, who = PARTS[name]
    policy, kernels = row.pop("policy"), row.pop("kernels", None)
    base = {"bench": "fp8", "case": f"{shape} {work}: {policy}"}
    base["provider"] = "torchao" if who in ("tensorwise", "rowwise", "compiled") else who
    with args.output.open("a") as file:
        for metric, value in row.items():
            if isinstance(value, int | float):
                unit = UNITS.get(metric, "ms" if metric.endswith("_ms") else "share")
                line = {**base, "metric": metric, "value": value, "unit": unit, **about}
                file.write(json.dumps(line) + "\n")
    if kernels:
        place = args.output.with_name(args.output.stem + ".kernels.json")
        known = json.loads(place.read_text()) if place.exists() else {}
        place.write_text(json.dumps({**known, base["case"]: kernels}, indent=1))
    shown = {key: round(value, 3) for key, value in row.items() if isinstance(value, float)}
    print(f"{base['case']:44s} {base['provider']:9s} {shown}", flush=True)
    known = args.table.setdefault((shape, work), {})
    known.setdefault((base["provider"], policy), {}).update(row)


def table(found: Mapping[tuple[str, str], Mapping[tuple[str, str], Mapping[str, Any]]]) -> str:
    """A line for each policy and tool: milliseconds, times trainkit's bf16, peak, quantising."""
    lines = [f"{'':58s} {'ms':>8s} {'x bf16':>7s} {'GiB':>6s} {'quantise':>9s} {'gates':>7s}"]
    for (shape, work), rows in found.items():
        own = rows.get(("trainkit", "bf16"), {}).get("ms")
        for (provider, policy), row in rows.items():
            name = f"{shape} {work}: {provider} {policy}"
            times = f"{own / row['ms']:7.3f}" if own and row.get("ms") else " " * 7
            quantising, gates = (
                f"{row[key]:.1f}" if key in row else ""
                for key in ("quantise_and_transpose_ms", "norms_and_gates_ms")
            )
            lines.append(
                f"{name:58s} {row.get('ms', 0):8.1f} {times} {row.get('peak_memory_gib', 0):6.1f} "
                f"{quantising:>9s} {gates:>7s}"
            )
    return "\n".join(lines)


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--costs", default="", help="a kernels.json with what groups cost")
    parser.add_argument("--parts", default=";".join(PARTS), help="names, with ; between them")
    parser.add_argument("--seconds", type=float, default=460)
    parser.add_argument("--part-seconds", type=float, default=100)
    parser.add_argument("--peers", default="", help="where Unsloth's packages are")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", default="")
    args = parser.parse_args()
    if args.child:
        child(args.child, args.costs, args.tiny)
        return
    from trainkit.bench.measure.record import environment

    until = time.monotonic() + args.seconds
    about = environment(args.commit)
    names = [each.strip() for each in args.parts.split(";")]
    args.table = {}
    coming = start(names[0], args)
    for number, name in enumerate(names):
        running = coming
        if number + 1 < len(names):
            coming = start(names[number + 1], args)
        if time.monotonic() > until - 15:
            print("no time left for", name, flush=True)
            running.kill()
            continue
        for line in lines_of(running, min(until, time.monotonic() + args.part_seconds)):
            if line.startswith("ROW "):
                write(args, name, json.loads(line[4:]), about)
        if running.wait():
            said = log_of(name).read_text(errors="replace")[-1200:]
            print(name, "FAILED or stopped", said, flush=True)
    print(table(args.table), flush=True)


if __name__ == "__main__":
    main()
