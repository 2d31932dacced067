#!/usr/bin/env python3
"""Two launchers as two hosts: one host's processes are killed, and the run must end as if not.

    python scripts/two_hosts.py [--kill worker,host1,host0]

A worker is killed alone; or a host whole, its launcher and all, and its line is typed again, as a
scheduler does. Without host 0, where hosts meet, the other ends, and both lines are typed again.
Losses, gradient norms and final weights are compared to the bit with those of a run that nobody
disturbed. One JSON row for each kind; the exit status is 1 if one differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from multi_gpu import descendants, free_port
from parity_cells import Cell, prepare, recipe

STEPS, SAVED = 12, 3
KINDS = ("worker", "host1", "host0")
PATIENCE = 600.0


def start(root: Path, rank: int, out: str, port: int) -> subprocess.Popen[bytes]:
    """The line that is typed on a host, with one process there."""
    variables = {"NNODES": "2", "NODE_RANK": str(rank), "NPROC_PER_NODE": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TRAINKIT_JOB": out}
    words = ["-m", "trainkit", "launch", "--max-restarts", "3"]
    words += ["--config", "recipe.json", "--output-dir", out]
    with (root / f"{out}-{rank}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=root,
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def kill(pids: list[int]) -> None:
    """End processes without a word."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run(root: Path, out: str, victim: str | None) -> list[int]:
    """A run on two hosts; the exit codes of both."""
    port, deadline = free_port(), time.monotonic() + PATIENCE
    hosts = [start(root, rank, out, port) for rank in (0, 1)]
    try:
        if victim is not None:
            middle = root / out / f"checkpoint-{STEPS // 2}"
            while not middle.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            rank = 0 if victim == "host0" else 1
            workers = descendants(hosts[rank].pid)
            if victim == "worker":
                kill(workers)
            else:
                kill([hosts[rank].pid, *workers])
                hosts[rank].wait()
                if rank == 0:  # it keeps the place where they meet, and the other ends, too
                    hosts[1].wait(PATIENCE)
                    hosts[1] = start(root, 1, out, port)
                hosts[rank] = start(root, rank, out, port)
        return [host.wait(max(deadline - time.monotonic(), 1)) for host in hosts]
    finally:
        for host in hosts:
            kill([*descendants(host.pid), *([host.pid] if host.poll() is None else [])])


def outcome(run: Path) -> dict[str, Any]:
    """What must be equal."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = [[row["step"], row["loss"], row["grad_norm"]] for row in rows if "loss" in row]
    files = sorted((run / "final").glob("*.safetensors"))
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return {"numbers": numbers, "weights": digests}


def main() -> None:
    """Each kind against the run that nobody disturbed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kill", default=",".join(KINDS), help="kinds, with commas")
    chosen = parser.parse_args()
    ok = True
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        prepare(root)
        cell = Cell("none", "full", kernels=False, packed=False, checkpointed=False, ranks=2)
        values = recipe(cell, bf16=False)
        values["training"] |= {"max_steps": STEPS, "save_steps": SAVED}
        (root / "recipe.json").write_text(json.dumps(values), encoding="utf-8")
        run(root, "whole", None)
        whole = outcome(root / "whole")
        for kind in chosen.kill.split(","):
            begin, codes, found = time.monotonic(), [], {}
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                codes = run(root, kind, kind)
                found = outcome(root / kind)
            row = {"killed": kind, "exit_codes": codes, "same_to_the_bit": found == whole}
            row |= {"steps": len(whole["numbers"]), "seconds": round(time.monotonic() - begin)}
            ok &= found == whole and codes == [0, 0]
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    sys.exit(not ok)


if __name__ == "__main__":
    main()
