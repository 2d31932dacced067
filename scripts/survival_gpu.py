#!/usr/bin/env python3
"""What surviving costs on GPUs: the stall of a save, the watching of every step, equal bytes.

    python scripts/survival_gpu.py --output rows.jsonl [--parts stall,lora,...] [--seconds N]

- ``stall``: 0.5B, ZeRO-2 on all GPUs: how long training stands still for a checkpoint, and how much
  slower its steps are while the checkpoint is written.
- ``pinning``: how long a GiB of pinned memory takes, by the ways that torch has to make it.
- ``lora``: a 7B model's adapter on one GPU: the stall of every other save, and between them those
  that are waited for.
- ``watching``: 0.5B on one GPU, in one run: twenty steps with all that watches for faults (bad
  numbers, other ranks, signals, the heartbeat), twenty without, in turn.
- ``determinism``: 0.5B on one GPU: three runs with ``training.full_determinism``, their bytes, and
  what a step costs beside a run without it.

A run imports while the part before it measures; parts on one GPU run side by side. One JSON row a
part; it is written as soon as the part is done. A part that outlasts its share of the seconds is
killed, and its row has what was measured until then.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multi_gpu import LENGTH, Cell, kill, prepare

from trainkit.parallel.launch.hosts import free_port

RANK, SETTINGS = Path(__file__).with_name("survival_rank.py"), "TRAINKIT_SURVIVAL"
BLOCK = 20
"""Steps with the watching on, and then off."""


@dataclass(frozen=True)
class Trained:
    """What a run trains: so many rows a step over all its GPUs, ``micro_batch`` at once on each."""

    model: str
    shard: str
    batch: int
    micro_batch: int
    overrides: dict[str, Any] = field(default_factory=dict)


Run = tuple[Path, subprocess.Popen[bytes]]
Measure = Callable[[float], dict[str, Any]]
"""Lets a part's runs go on from their imports, and measures; takes its `time.monotonic` end."""

SHARES = {"stall": 0.4, "watching": 0.33, "lora": 0.33, "determinism": 0.27, "pinning": 0.05}
"""Of the seconds; watching and lora run side by side."""


def start(
    name: str,
    what: Trained,
    folder: Path,
    gpus: list[int],
    steps: int,
    *,
    device: bool,
    **settings: Any,
) -> Run:
    """A run on some GPUs; it imports, and waits for its gate."""
    run = folder / name
    recipe = {
        "model": {"name_or_path": str(folder / what.model), "dtype": "bfloat16"},
        "data": {"train": [str(folder / "rows.jsonl")], "max_length": LENGTH, "packing": False},
        "kernels": device,
        "parallel": {"shard": what.shard},
        "global_batch_size": what.batch,
        "training": {
            "per_device_train_batch_size": what.micro_batch,
            "learning_rate": 1e-5,
            "max_steps": steps,
            "save_strategy": "no",
        },
    }
    path = run.with_suffix(".json")
    path.write_text(json.dumps(recipe), encoding="utf-8")
    overrides = [f"{key}={json.dumps(value)}" for key, value in what.overrides.items()]
    words = [str(RANK), "sft", "--config", str(path)]
    words += ["--output-dir", str(run), *overrides]
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(len(gpus))]
    launch = [*launch, "--master_port", str(free_port())] if len(gpus) > 1 else []
    settings = {"block": 0, "waits": False, "looked_into": 0, **settings}
    settings |= {"profile": f"{run}.profile", "clock": f"{run}.clock", "gate": str(gate_of(run))}
    environment = {**os.environ, SETTINGS: json.dumps(settings)}
    # As on a user's machine, all but the first find the modules compiled.
    environment["PYTHONPYCACHEPREFIX"] = str(folder.resolve() / "pycache")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if device:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    log = run.with_suffix(".log").open("wb")
    process = subprocess.Popen(
        [sys.executable, *launch, *words], env=environment, stdout=log, stderr=log
    )
    return run, process


def gate_of(run: Path) -> Path:
    """The file that lets a run go on from its imports."""
    return run.with_name(f"{run.name}.go")


def go(*runs: Run) -> None:
    """It is their turn."""
    for run, _ in runs:
        gate_of(run).touch()


def clock_of(run: Run, deadline: float) -> dict[str, dict[str, float]]:
    """What its clock says, when it has ended or the time is up.

    Raises:
        RuntimeError: it failed, or had measured nothing in time.
    """
    folder, process = run
    clock = Path(f"{folder}.clock")
    try:
        process.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        kill(process)
        print(f"{folder.name} was cut short by the time", flush=True)
    else:
        if process.returncode != 0:
            raise RuntimeError(f"{folder.name} ended with {process.returncode}: {last_words(run)}")
    if not clock.exists():
        raise RuntimeError(f"{folder.name} had no time to measure anything: {last_words(run)}")
    read: dict[str, dict[str, float]] = json.loads(clock.read_text())
    return read


def last_words(run: Run) -> str:
    """What it printed last."""
    return " ".join(run[0].with_suffix(".log").read_text(errors="replace").split()[-99:])


def profile_of(run: Run) -> list[str]:
    """The functions in which one more save spent most; the profiler slows it."""
    path = Path(f"{run[0]}.profile")
    return path.read_text().splitlines() if path.exists() else []


def seconds_of_steps(clock: dict[str, dict[str, float]]) -> dict[int, float]:
    """From the begin of each step to that of the next, whatever comes between, by step."""
    begun = sorted((int(step), at) for step, at in clock["begun"].items())
    return {step + 1: later - at for (step, at), (_, later) in itertools.pairwise(begun)}


def figures_of_saves(clock: dict[str, dict[str, float]]) -> dict[str, Any]:
    """By save: how long training stood still, and what its next steps lost while it was written."""
    seconds = seconds_of_steps(clock)
    saved = sorted(int(step) for step in clock["saved"] if int(step) in seconds)
    if not saved:
        raise RuntimeError(f"no save in the {len(seconds)} steps that there was time for")
    usual = statistics.median(seconds[step] for step in seconds if 3 < step < saved[0])
    ends = [*saved[1:], max(seconds) + 1]
    slowed = [
        sum(seconds[step] - usual for step in range(save + 1, end))
        for save, end in zip(saved, ends, strict=True)
    ]
    return {
        "step_seconds": round(usual, 4),
        "first_steps_seconds": [round(seconds[step], 3) for step in sorted(seconds)[:12]],
        "steps_after_saves_seconds": [
            [round(seconds[step], 3) for step in range(save + 1, save + 9) if step in seconds]
            for save in saved
        ],
        "stall_seconds": [round(seconds[step] - usual, 3) for step in saved],
        "in_save_seconds": [round(clock["saved"][str(step)], 3) for step in saved],
        "written_after_seconds": [
            round(clock["written"][str(step)], 2) for step in saved if str(step) in clock["written"]
        ],
        "lost_while_written_seconds": [round(each, 3) for each in slowed],
    }


def stall(tools: "Tools") -> Measure:
    """0.5B, ZeRO-2: saves, so far apart that the first is written before the second begins."""
    each, every = tools.batch, tools.steps // tools.saves
    saves = {"training.save_strategy": "steps", "training.save_steps": every}
    limit = {"training.save_total_limit": 1}
    what = Trained(tools.small, "zero2", each * len(tools.gpus), each, {**saves, **limit})
    run = tools.start("stall", what, tools.gpus, tools.saves * every + every // 3)

    def measure(deadline: float) -> dict[str, Any]:
        go(run)
        clock = clock_of(run, deadline)
        figures = {"pinned_after_seconds": clock["pinned"].get("0"), **figures_of_saves(clock)}
        return {"model": what.model, "shard": "zero2", **figures}

    return measure


def pinning(tools: "Tools", deadline: float) -> dict[str, Any]:
    """Memory that is pinned for the first time, for each setting of torch's allocator."""
    code = (
        "import time, torch\n"
        "torch.ones(1, device='cuda').item()\n"
        "for each in range(3):\n"
        "    began = time.perf_counter()\n"
        "    kept = torch.empty((each + 1) << 30, dtype=torch.uint8, pin_memory=True)\n"
        "    print((time.perf_counter() - began) / (each + 1))\n"
        "    kept = None\n"
    )
    found = {}
    registered = "pinned_use_cuda_host_register:True"
    settings = ("", registered, f"{registered},pinned_num_register_threads:8")
    for setting in settings if tools.device else ():
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(deadline - time.monotonic(), 1.0),
            check=False,
        )
        found[setting or "default"] = done.stdout.split() or done.stderr[-300:]
    return {"seconds_per_gib": found}


def lora(tools: "Tools", gpu: int) -> Measure:
    """A 7B model's adapter: saved in the background, and waited for, in turn."""
    saves = {"training.save_strategy": "steps", "training.save_steps": 6}
    more = {"lora.r": 16, "lora.alpha": 32, "training.save_total_limit": 1, **saves}
    what = Trained(tools.large, "none", 2, 2, more)
    run = tools.start("lora", what, [gpu], 46, waits=True, looked_into=7)

    def measure(deadline: float) -> dict[str, Any]:
        go(run)
        figures = figures_of_saves(clock_of(run, deadline))
        # The first save of each kind makes what all later ones use.
        own, other = (figures["stall_seconds"][first:6:2][1:] for first in (0, 1))
        return {
            "model": f"{what.model} LoRA",
            "stall_seconds": own,
            "stall_seconds_waited_for": other,
            "share_of_a_save_that_is_waited_for": round(statistics.median(own) / min(other), 4),
            "in_turn": figures,
            "in_one_save": profile_of(run),
        }

    return measure


def watching(tools: "Tools", gpu: int) -> Measure:
    """With and without, twenty steps each."""
    what = Trained(tools.small, "none", tools.batch, tools.batch)
    run = tools.start("watching", what, [gpu], 10 * BLOCK + 1, block=BLOCK)

    def measure(deadline: float) -> dict[str, Any]:
        go(run)
        begun = sorted((int(step), at) for step, at in clock_of(run, deadline)["begun"].items())
        blocks = [(later - at) / BLOCK for (_, at), (_, later) in itertools.pairwise(begun)]
        on, off = blocks[2::2], blocks[3::2]  # the first two compile
        return {
            "model": what.model,
            "step_seconds_watched": [round(each, 5) for each in on],
            "step_seconds_unwatched": [round(each, 5) for each in off],
            "overhead": round(statistics.median(on) / statistics.median(off) - 1, 5),
        }

    return measure


def determinism(tools: "Tools") -> Measure:
    """Three runs, and one without; one on each GPU at a time."""
    runs = {}
    for number, name in enumerate(("plain", "1", "2", "3")):
        is_on = {} if name == "plain" else {"training.full_determinism": True}
        what = Trained(tools.small, "none", tools.batch, tools.batch, is_on)
        gpu = tools.gpus[number % len(tools.gpus)]
        runs[name] = tools.start(f"same-{name}", what, [gpu], 14)

    def measure(deadline: float) -> dict[str, Any]:
        digests, seconds = [], {}
        left = list(runs)
        while left:
            names, left = left[: len(tools.gpus)], left[len(tools.gpus) :]
            go(*(runs[name] for name in names))
            for name in names:
                steps = list(seconds_of_steps(clock_of(runs[name], deadline)).values())[4:]
                seconds["plain" if name == "plain" else "deterministic"] = statistics.median(steps)
                if name != "plain":
                    weights = (runs[name][0] / "final/model.safetensors").read_bytes()
                    digests.append(hashlib.sha256(weights).hexdigest())
        return {
            "model": tools.small,
            "runs": len(digests),
            "equal_bytes": len(set(digests)) == 1,
            "step_seconds": round(seconds["deterministic"], 4),
            "step_seconds_without": round(seconds["plain"], 4),
            "cost": round(seconds["deterministic"] / seconds["plain"] - 1, 4),
        }

    return measure


class Tools:
    """What all parts share: a folder, GPUs (on a CPU numbers of processes), sizes."""

    def __init__(self, folder: Path, gpus: list[int], steps: int, *, device: bool) -> None:
        self.folder, self.gpus, self.steps, self.device = folder, gpus, steps, device
        self.runs: list[Run] = []
        self.saves = 2
        self.small, self.large, self.batch = "qwen2-0.5b", "qwen2-7b", 8

    def start(self, name: str, what: Trained, gpus: list[int], steps: int, **settings: Any) -> Run:
        """A run; it imports, and waits."""
        run = start(name, what, self.folder, gpus, steps, device=self.device, **settings)
        self.runs.append(run)
        return run


def main() -> None:
    """Run the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are added here")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/survival_gpu"))
    parser.add_argument("--parts", default="stall,watching,lora,determinism,pinning")
    parser.add_argument("--steps", type=int, default=260, help="of the stall's run")
    parser.add_argument("--saves", type=int, default=2, help="of the stall's run")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of it")
    parser.add_argument("--commit", default=None, help="of the code that runs")
    chosen = parser.parse_args()

    import torch

    from trainkit.bench.measure.record import environment

    began = time.monotonic()
    device = torch.cuda.is_available()
    gpus = list(range(torch.cuda.device_count() if device else 2))
    chosen.folder.mkdir(parents=True, exist_ok=True)
    tools = Tools(chosen.folder, gpus, chosen.steps, device=device)
    tools.saves = chosen.saves
    parts = chosen.parts.split(",")
    common = {"bench": "survival", "num_gpus": len(gpus), **environment(chosen.commit)}
    starts: dict[str, Callable[[], Measure]] = {
        "stall": lambda: stall(tools),
        "watching": lambda: watching(tools, gpus[-1]),
        "lora": lambda: lora(tools, gpus[0]),
        "determinism": lambda: determinism(tools),
        "pinning": lambda: functools.partial(pinning, tools),
    }
    turns = [["stall"], ["watching", "lora"], ["determinism"], ["pinning"]]
    turns = [[name for name in turn if name in parts] for turn in turns]
    turns = [turn for turn in turns if turn]
    measures = {name: starts[name]() for name in turns[0]}
    shares = [max(SHARES[name] for name in turn) for turn in turns]

    def note(name: str, deadline: float) -> None:
        try:
            row = {"part": name, **measures[name](deadline)}
        except Exception as error:  # the other parts go on
            row = {"part": name, "error": f"{type(error).__name__}: {error}"[-2000:]}
        with chosen.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **common}) + "\n")
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()

    def make(model: str, num_rows: int) -> None:
        prepare(chosen.folder, [Cell(model, "trainkit", 1, "none", 1, 1)], num_rows)
        if device:
            torch.cuda.empty_cache()

    make(tools.small, 2048)
    for number, turn in enumerate(turns):
        for name in turns[number + 1] if turn is not turns[-1] else ():
            measures[name] = starts[name]()  # imports while this turn measures
        if "lora" in turn:
            make(tools.large, 0)  # at its own time's cost, not that of the turns before it
        deadline = began + chosen.seconds * sum(shares[: number + 1]) / sum(shares)
        with ThreadPoolExecutor(len(turn)) as pool:
            list(pool.map(note, turn, [deadline] * len(turn)))
    for _, process in tools.runs:
        if process.poll() is None:  # its part failed before its turn came
            kill(process)


if __name__ == "__main__":
    main()
