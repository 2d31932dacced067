#!/usr/bin/env python3
"""What surviving costs on GPUs: the stall of a save, the watching of every step, equal bytes.

    python scripts/survival_gpu.py --output rows.jsonl [--parts stall,lora,watching,determinism]

- ``stall``: 0.5B, ZeRO-2 on all GPUs: how long training stands still for a checkpoint, and how much
  slower its steps are while the checkpoint is written.
- ``lora``: a 7B model's adapter on one GPU: the stall, beside that of a save that is waited for.
- ``watching``: 0.5B on one GPU, in one run: twenty steps with all that watches for faults (bad
  numbers, other ranks, signals, the heartbeat), twenty without, in turn.
- ``determinism``: 0.5B on one GPU: three runs with ``training.full_determinism``, their bytes, and
  what a step costs beside a run without it.

Parts on one GPU run side by side. One JSON row a part; it is written as soon as the part is done.
"""

import argparse
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multi_gpu import LENGTH, Cell, free_port, prepare

RANK, SETTINGS = "--rank", "TRAINKIT_SURVIVAL"
BLOCK = 20
"""Steps with the watching on, and then off."""

Run = tuple[Path, subprocess.Popen[bytes]]


# -- inside a rank -------------------------------------------------------------------------------


def train() -> None:
    """``trainkit sft``, with a clock in it."""
    import torch

    from trainkit.cli.app import main as trainkit
    from trainkit.train.checkpoints import CheckpointWriter
    from trainkit.train.trainer import ObjectiveTrainer

    settings = json.loads(os.environ[SETTINGS])
    found: dict[str, dict[int, float]] = {"begun": {}, "saved": {}, "written": {}}
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    plain_begin, plain_save = ObjectiveTrainer.get_batch_samples, ObjectiveTrainer._save_checkpoint
    plain_finish = CheckpointWriter._finish
    block = settings["block"]
    switch = turn_off_watching() if block else None

    def begin(self: Any, *arguments: Any) -> Any:
        step = self.state.global_step
        if switch is None or step % block == 0:
            synchronize()
            found["begun"][step] = time.perf_counter()
        if switch is not None:
            switch(step // block % 2 == 1)
        return plain_begin(self, *arguments)

    def save(self: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        plain_save(self, *arguments)
        if settings["waits"]:
            self.checkpoints.wait()
        found["saved"][self.state.global_step] = time.perf_counter() - began

    def finish(self: Any, save: Any, target: Path, *arguments: Any) -> None:
        began = time.perf_counter()
        plain_finish(self, save, target, *arguments)
        found["written"][int(target.name.partition("-")[2])] = time.perf_counter() - began

    ObjectiveTrainer.get_batch_samples = begin
    ObjectiveTrainer._save_checkpoint = save
    CheckpointWriter._finish = finish
    code = trainkit(sys.argv[2:])
    if int(os.environ.get("RANK") or 0) == 0:
        Path(settings["clock"]).write_text(json.dumps(found))
    sys.exit(code)


def turn_off_watching() -> Callable[[bool], None]:
    """A switch for everything that a step does about faults: True turns it off."""
    import torch

    from trainkit.run.directory import RunDirectory
    from trainkit.train.callbacks import StopOnRequest
    from trainkit.train.faults.watch import Watch
    from trainkit.train.optimizer import watched
    from trainkit.train.optimizer.finite import NumberGuard

    is_off = [False]
    nothing: list[torch.Tensor] = []

    def close(self: Any, *_: Any, **__: Any) -> torch.Tensor:
        self.flush()
        if not nothing:
            nothing.append(torch.zeros((), device=self._accelerator.device))
        return nothing[0]

    def without(owner: Any, name: str, other: Callable[..., Any]) -> None:
        plain = getattr(owner, name)

        def either(*arguments: Any, **keywords: Any) -> Any:
            return (other if is_off[0] else plain)(*arguments, **keywords)

        setattr(owner, name, either)

    without(NumberGuard, "begin", lambda *_, **__: None)
    without(NumberGuard, "add_loss", lambda *_, **__: None)
    without(NumberGuard, "close", close)
    without(watched, "hold_back", lambda *_, **__: None)
    without(Watch, "mark", lambda *_, **__: None)
    without(Watch, "_write", lambda *_, **__: None)
    without(Watch, "_lost", lambda *_, **__: None)
    without(StopOnRequest, "on_step_end", lambda *_, **__: None)
    without(RunDirectory, "heartbeat", lambda *_, **__: None)

    def switch(off: bool) -> None:
        is_off[0] = off

    return switch


# -- outside -------------------------------------------------------------------------------------


def start(
    name: str,
    cell: Cell,
    folder: Path,
    gpus: list[int],
    steps: int,
    *,
    device: bool,
    **settings: Any,
) -> Run:
    """A run on some GPUs."""
    run = folder / name
    recipe = {
        "model": {"name_or_path": str(folder / cell.model), "dtype": "bfloat16"},
        "data": {"train": [str(folder / "rows.jsonl")], "max_length": LENGTH, "packing": False},
        "kernels": device,
        "parallel": {"shard": cell.shard},
        "global_batch_size": cell.global_batch,
        "training": {
            "per_device_train_batch_size": cell.micro_batch,
            "learning_rate": 1e-5,
            "max_steps": steps,
            "save_strategy": "no",
        },
    }
    path = run.with_suffix(".json")
    path.write_text(json.dumps(recipe), encoding="utf-8")
    overrides = [f"{key}={json.dumps(value)}" for key, value in cell.overrides.items()]
    words = [str(Path(__file__).resolve()), RANK, "sft", "--config", str(path)]
    words += ["--output-dir", str(run), *overrides]
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(len(gpus))]
    launch = [*launch, "--master_port", str(free_port())] if len(gpus) > 1 else []
    settings = {"block": 0, "waits": False, "clock": str(run) + ".clock", **settings}
    environment = {**os.environ, SETTINGS: json.dumps(settings)}
    if device:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    log = run.with_suffix(".log").open("wb")
    process = subprocess.Popen(
        [sys.executable, *launch, *words], env=environment, stdout=log, stderr=log
    )
    return run, process


def clock_of(run: Run) -> dict[str, dict[str, float]]:
    """What its clock says, when it has ended.

    Raises:
        RuntimeError: it failed.
    """
    folder, process = run
    if process.wait() != 0:
        said = folder.with_suffix(".log").read_text(errors="replace").split()
        raise RuntimeError(f"{folder.name} ended with {process.returncode}: {' '.join(said[-80:])}")
    clock: dict[str, dict[str, float]] = json.loads(Path(f"{folder}.clock").read_text())
    return clock


def seconds_of_steps(clock: dict[str, dict[str, float]]) -> dict[int, float]:
    """From the begin of each step to that of the next, whatever comes between, by step."""
    begun = sorted((int(step), at) for step, at in clock["begun"].items())
    return {step + 1: later - at for (step, at), (_, later) in itertools.pairwise(begun)}


def figures_of_saves(clock: dict[str, dict[str, float]]) -> dict[str, Any]:
    """By save: how long training stood still, and what its next steps lost while it was written."""
    seconds = seconds_of_steps(clock)
    saved = sorted(int(step) for step in clock["saved"] if int(step) in seconds)
    usual = statistics.median(seconds[step] for step in seconds if 3 < step < saved[0])
    ends = [*saved[1:], max(seconds) + 1]
    slowed = [
        sum(seconds[step] - usual for step in range(save + 1, end))
        for save, end in zip(saved, ends, strict=True)
    ]
    return {
        "step_seconds": round(usual, 4),
        "stall_seconds": [round(seconds[step] - usual, 3) for step in saved],
        "in_save_seconds": [round(clock["saved"][str(step)], 3) for step in saved],
        "written_after_seconds": [round(clock["written"][str(step)], 2) for step in saved],
        "lost_while_written_seconds": [round(each, 3) for each in slowed],
    }


def stall(tools: "Tools") -> dict[str, Any]:
    """0.5B, ZeRO-2."""
    each = tools.batch
    saves = {"training.save_strategy": "steps", "training.save_steps": tools.steps // 3}
    limit = {"training.save_total_limit": 1}
    cell = Cell(
        tools.small, "trainkit", 0, "zero2", each * len(tools.gpus), each, {**saves, **limit}
    )
    steps = tools.steps + tools.steps // 6
    run = tools.start("stall", cell, tools.gpus, steps)
    return {"model": cell.model, "shard": "zero2", **figures_of_saves(clock_of(run))}


def lora(tools: "Tools", gpu: int) -> Callable[[], dict[str, Any]]:
    """A 7B model's adapter: saved in the background, and waited for."""
    saves = {"training.save_strategy": "steps", "training.save_steps": tools.steps // 12}
    more = {"lora.r": 16, "lora.alpha": 32, "training.save_total_limit": 1, **saves}
    cell = Cell(tools.large, "trainkit", 1, "none", 2, 2, more)
    steps = tools.steps // 3

    def done() -> dict[str, Any]:
        row: dict[str, Any] = {"model": f"{cell.model} LoRA"}
        for name, waits in (("background", False), ("waited_for", True)):
            run = tools.start(f"lora-{name}", cell, [gpu], steps, waits=waits)
            row[name] = figures_of_saves(clock_of(run))
        own, other = (
            statistics.median(row[name]["stall_seconds"]) for name in ("background", "waited_for")
        )
        return {**row, "share_of_a_save_that_is_waited_for": round(own / other, 4)}

    return done


def watching(tools: "Tools", gpu: int) -> Callable[[], dict[str, Any]]:
    """With and without, twenty steps each."""
    cell = Cell(tools.small, "trainkit", 1, "none", tools.batch, tools.batch)
    run = tools.start("watching", cell, [gpu], 10 * BLOCK + 1, block=BLOCK)

    def done() -> dict[str, Any]:
        begun = sorted((int(step), at) for step, at in clock_of(run)["begun"].items())
        blocks = [(later - at) / BLOCK for (_, at), (_, later) in itertools.pairwise(begun)]
        on, off = blocks[2::2], blocks[3::2]  # the first two compile
        return {
            "model": cell.model,
            "step_seconds_watched": [round(each, 5) for each in on],
            "step_seconds_unwatched": [round(each, 5) for each in off],
            "overhead": round(statistics.median(on) / statistics.median(off) - 1, 5),
        }

    return done


def determinism(tools: "Tools") -> dict[str, Any]:
    """Three runs, and one without."""
    digests, seconds = [], {}
    left = ["plain", "1", "2", "3"]
    while left:
        running = []
        for gpu in tools.gpus:
            name = left.pop(0) if left else None
            if name:
                is_on = {} if name == "plain" else {"training.full_determinism": True}
                cell = Cell(tools.small, "trainkit", 1, "none", tools.batch, tools.batch, is_on)
                running.append((name, tools.start(f"same-{name}", cell, [gpu], 14)))
        for name, run in running:
            steps = list(seconds_of_steps(clock_of(run)).values())[4:]
            seconds["plain" if name == "plain" else "deterministic"] = statistics.median(steps)
            if name != "plain":
                weights = (run[0] / "final/model.safetensors").read_bytes()
                digests.append(hashlib.sha256(weights).hexdigest())
    return {
        "model": tools.small,
        "runs": len(digests),
        "equal_bytes": len(set(digests)) == 1,
        "step_seconds": round(seconds["deterministic"], 4),
        "step_seconds_without": round(seconds["plain"], 4),
        "cost": round(seconds["deterministic"] / seconds["plain"] - 1, 4),
    }


class Tools:
    """What all parts share.

    Args:
        folder: for models, rows and runs.
        gpus: numbers; on a CPU of the processes.
        steps: of the stall's run.
        device: whether there are GPUs.
    """

    def __init__(self, folder: Path, gpus: list[int], steps: int, *, device: bool) -> None:
        self.folder, self.gpus, self.steps, self.device = folder, gpus, steps, device
        self.small, self.large, self.batch = "qwen2-0.5b", "qwen2-7b", 8

    def start(self, name: str, cell: Cell, gpus: list[int], steps: int, **settings: Any) -> Run:
        """A run."""
        return start(name, cell, self.folder, gpus, steps, device=self.device, **settings)


def main() -> None:
    """Run the chosen parts."""
    if sys.argv[1:2] == [RANK]:
        train()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are added here")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/survival_gpu"))
    parser.add_argument("--parts", default="stall,lora,watching,determinism")
    parser.add_argument("--steps", type=int, default=150, help="of the stall's run")
    parser.add_argument("--commit", default=None, help="of the code that runs")
    chosen = parser.parse_args()

    import torch

    from trainkit.bench.measure.record import environment

    device = torch.cuda.is_available()
    gpus = list(range(torch.cuda.device_count() if device else 2))
    chosen.folder.mkdir(parents=True, exist_ok=True)
    tools = Tools(chosen.folder, gpus, chosen.steps, device=device)
    parts = chosen.parts.split(",")
    common = {"bench": "survival", "num_gpus": len(gpus), **environment(chosen.commit)}

    def note(part: str, measure: Callable[[], dict[str, Any]]) -> None:
        try:
            row = {"part": part, **measure()}
        except (RuntimeError, OSError, ValueError, LookupError) as error:
            row = {"part": part, "error": f"{type(error).__name__}: {error}"[-2000:]}
        with chosen.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **common}) + "\n")
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()

    models = [tools.small, *([tools.large] if "lora" in parts else [])]
    needed = [Cell(model, "trainkit", 1, "none", 1, 1) for model in models]
    prepare(chosen.folder, needed, 2048)
    torch.cuda.empty_cache()
    if "stall" in parts:
        note("stall", lambda: stall(tools))
    beside = watching(tools, gpus[-1]) if "watching" in parts else None
    if "lora" in parts:
        note("lora", lora(tools, gpus[0]))
    if beside is not None:
        note("watching", beside)
    if "determinism" in parts:
        note("determinism", lambda: determinism(tools))


if __name__ == "__main__":
    main()
