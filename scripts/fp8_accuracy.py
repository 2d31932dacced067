#!/usr/bin/env python3
"""What fp8 costs a trained model: runs of `trainkit sft` side by side on a GPU, policy by policy.

usage: fp8_accuracy.py MODEL OUTPUT [--cases NAME;...] [--workers 4] [--seconds 460] [--tiny]

MODEL is a directory in Hugging Face's format, or a .gguf file; SmolLM2-135M is the hardest case
there is a number for. The text is Python's standard library: the model goes on with pieces of its
files, and names the parameters of its functions, which has one right answer. Every twelfth file is
held out. All cases see the same rows in the same order; `noise` begins from weights that are moved
by less than bf16 resolves.

The riskiest cases come first. None begins that would not end in --seconds, and one whose rows are
in OUTPUT already is not run again. OUTPUT gets a JSON line for each figure, OUTPUT.policies.json
which products each case had in fp8. On a model as narrow as this one fp8 saves no time, and would
choose nothing: milliseconds are modelled as those of wide products.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8_text import TINY, Size, make_starts, of_text

ROOT = Path(__file__).resolve().parents[1]
LORA = {"r": 16, "alpha": 32}
FULL_RATE, LORA_RATE = 1e-4, 1e-3


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        fp8: ``model.fp8``.
        lora: adapters over a base quantised so; empty for a bf16 base, None for no adapters.
        start: the weights it begins from: the model's, moved a little, or random ones.
        times: of the usual steps.
        rate: of the usual learning rate.
    """

    fp8: Any = False
    lora: str | None = None
    start: str = "model"
    times: float = 1.0
    rate: float = 1.0


CASES = {
    "full: default budget": Case(fp8=True),
    "full: all, 1000 steps": Case(fp8="all", times=10 / 3),
    "lora: fp8 base, default budget": Case(lora="fp8"),
    "full: bf16": Case(),
    "lora: bf16": Case(lora=""),
    "full: all": Case(fp8="all"),
    "full: bf16, noise 1": Case(start="noise1"),
    "lora: fp8 base, all": Case(fp8="all", lora="fp8"),
    "lora: nf4 base": Case(lora="nf4"),
    "full: bf16, noise 2": Case(start="noise2"),
    "full: default budget, ten times the rate": Case(fp8=True, rate=10),
    "full: bf16, ten times the rate": Case(rate=10),
    "lora: bf16, noise 1": Case(lora="", start="noise1"),
    "scratch: all": Case(fp8="all", start="scratch", rate=10),
    "scratch: bf16": Case(start="scratch", rate=10),
    "full: budget 0.008": Case(fp8={"loss_budget": 0.008}),
    "lora: fp8 base, budget 0.008": Case(fp8={"loss_budget": 0.008}, lora="fp8"),
    "full: budget 0.005": Case(fp8={"loss_budget": 0.005}),
    "lora: fp8 base, budget 0.005": Case(fp8={"loss_budget": 0.005}, lora="fp8"),
    "full: budget 0.002": Case(fp8={"loss_budget": 0.002}),
    "lora: fp8 base, budget 0.002": Case(fp8={"loss_budget": 0.002}, lora="fp8"),
    "lora: fp8 base, default budget, ten times the rate": Case(lora="fp8", rate=10),
    "full: bf16, 1000 steps": Case(times=10 / 3),
    "scratch: all, noise": Case(fp8="all", start="scratch2", rate=10),
    "scratch: bf16, noise": Case(start="scratch2", rate=10),
}


def recipe_of(case: Case, folder: Path, size: Size) -> dict[str, Any]:
    """What `trainkit sft` gets."""
    steps = round(size.steps * case.times)
    rate = (FULL_RATE if case.lora is None else LORA_RATE) * case.rate
    recipe: dict[str, Any] = {
        "model": {"name_or_path": str(folder / case.start), "fp8": case.fp8},
        "data": {
            "train": [str(folder / "train.jsonl")],
            "eval": [str(folder / "held_out.jsonl")],
            "max_length": size.length,
            "packing": True,
            "cache_dir": str(folder / "cache"),
        },
        "generation_eval": {
            "data": [str(folder / "questions.jsonl")],
            "max_new_tokens": 48,
            "batch_size": 100,
        },
        "kernels": True,
        "training": {
            "learning_rate": rate,
            "lr_scheduler_type": "linear",
            "warmup_steps": min(20, steps // 2),
            "max_grad_norm": 1.0,
            "max_steps": steps,
            "per_device_train_batch_size": size.batch,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": steps,
            "eval_on_start": True,
            "save_strategy": "no",
        },
    }
    if case.lora is not None:
        recipe["lora"] = {**LORA, **({"quantize": case.lora} if case.lora else {})}
    return recipe


def as_trainkit(arguments: list[str]) -> int:
    """`trainkit ARGUMENTS` with fp8's milliseconds as those of wide products."""
    import torch

    from trainkit.cli.app import main as trainkit
    from trainkit.models.fp8 import decide
    from trainkit.models.fp8.savings import measure_savings

    def modelled(layers: Any, tokens: int, _: Any, **given: Any) -> Any:
        return measure_savings(layers, tokens, torch.device("cpu"), **given)

    decide.measure_savings = modelled
    sys.argv[1:] = arguments
    return trainkit() or 0


def read_run(run: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A run's figures, and its choice of products."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    held_out = [row["eval_loss"] for row in rows if "eval_loss" in row]
    figures: dict[str, Any] = {
        "held_out_loss": held_out[-1],
        "held_out_before": held_out[0],
        "first_loss": losses[0],
        "last_50_loss": sum(losses[-50:]) / len(losses[-50:]),
        "losses": [round(loss, 4) for loss in losses],
    }
    answers = run / "generation_eval.json"
    if answers.exists():
        figures["exact_answers"] = json.loads(answers.read_text())["accuracy"]
    kernels = json.loads((run / "kernels.json").read_text())
    choice = next((each for each in choices_in(kernels) if each.get("groups")), None)
    if choice is not None:
        figures["saved_share"] = choice["saved_ms"] / choice["most_ms"]
        if choice["loss_increase"] is not None:
            figures["cost_before_training"] = choice["loss_increase"]
    return figures, choice


def choices_in(value: Any) -> Iterator[dict[str, Any]]:
    """Every choice of products in a record."""
    if isinstance(value, dict):
        if {"groups", "policy", "saved_ms"} <= set(value):
            yield value
        for each in value.values():
            yield from choices_in(each)


def directions_of(choice: Mapping[str, Any]) -> dict[str, list[bool]]:
    """By layer, whether its forward and its backward products are in fp8."""
    sys.path.insert(0, str(ROOT))
    from trainkit.models.fp8.choice import Fp8Choice

    found = Fp8Choice.of(choice)
    names = [name for group in found.groups for name in group.layers]
    return {name: list(found.directions.get(name, (False, False))) for name in names}


class Runs:
    """The cases that run now, and the file that gets their figures."""

    def __init__(self, args: argparse.Namespace, folder: Path, size: Size) -> None:
        self.args, self.folder, self.size = args, folder, size
        self.begin = time.perf_counter()
        self.now: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self.slowest = 30.0
        self.turn = 0
        self.policies = args.output.with_name(args.output.name + ".policies.json")

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.begin

    def start(self, name: str) -> None:
        """Start a case."""
        place = self.folder / "runs" / name.replace(" ", "_").replace(":", "").replace(",", "")
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(exist_ok=True)
        recipe = place.parent / f"{place.name}.yaml"  # a budget in it is no suffix
        recipe.write_text(json.dumps(recipe_of(CASES[name], self.folder, self.size)))
        command = [sys.executable, __file__, "--as-trainkit", "sft", "--config", str(recipe)]
        command += ["--output-dir", str(place), "--force"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        threads = str(max(1, (os.cpu_count() or 4) // self.args.workers))
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": threads}
        if self.args.gpus:
            self.turn = (self.turn + 1) % self.args.gpus
            env["CUDA_VISIBLE_DEVICES"] = str(self.turn)
        log = (place.parent / f"{place.name}.log").open("wb")
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        self.now[name] = process, self.seconds

    def collect(self) -> None:
        """Take the figures of the cases that have ended."""
        for name, (process, started) in list(self.now.items()):
            if process.poll() is None:
                continue
            del self.now[name]
            took = self.seconds - started
            place = Path(str(process.args[process.args.index("--output-dir") + 1]))  # type: ignore[union-attr]
            if process.returncode:
                log = (place.parent / f"{place.name}.log").read_text(errors="replace")
                print(name, "FAILED", log[-1500:], flush=True)
                continue
            self.slowest = max(self.slowest, took / CASES[name].times)
            figures, choice = read_run(place)
            self.record(name, {**figures, "seconds": took}, choice)
            shutil.rmtree(place / "final", ignore_errors=True)

    def record(self, name: str, figures: Mapping[str, Any], choice: Any) -> None:
        """Write the rows of a case."""
        units = {"losses": "nats", "seconds": "s"}
        base = {"bench": "fp8_accuracy", "case": name, "provider": "trainkit"}
        about = {"steps": len(figures["losses"]), "model": self.args.name, **versions()}
        if self.args.commit:
            about["commit"] = self.args.commit
        with self.args.output.open("a") as file:
            for metric, value in figures.items():
                in_nats = any(word in metric for word in ("loss", "held_out", "cost"))
                unit = units.get(metric, "nats" if in_nats else "share")
                row = {**base, "metric": metric, "value": value, "unit": unit, **about}
                file.write(json.dumps(row) + "\n")
        if choice is not None:
            known = json.loads(self.policies.read_text()) if self.policies.exists() else {}
            known[name] = directions_of(choice)
            self.policies.write_text(json.dumps(known))
        shown = {k: round(v, 5) for k, v in figures.items() if k != "losses"}
        print(f"{name:40s} {shown} at {self.seconds:.0f} s", flush=True)

    def run(self, cases: list[str]) -> None:
        """Run cases until they are done or the time is over."""
        waiting = list(cases)
        while waiting or self.now:
            self.collect()
            if self.seconds > self.args.seconds:
                for name, (process, _) in self.now.items():
                    process.kill()
                    print("stopped:", name, flush=True)
                break
            if waiting and len(self.now) < self.args.workers:
                name = waiting.pop(0)
                if self.seconds + self.slowest * CASES[name].times > self.args.seconds:
                    print("no time left for", name, flush=True)
                    continue
                self.start(name)
                if not self.seconds > 5:
                    time.sleep(2)  # the first one begins to prepare the data
                continue
            time.sleep(0.5)


def versions() -> dict[str, Any]:
    """What ran it."""
    from importlib.metadata import version

    import torch

    names = ("torch", "transformers", "peft")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"gpu": gpu, "versions": {name: version(name) for name in names}}


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--cases", default=";".join(CASES), help="names, with ; between them")
    parser.add_argument("--workers", type=int, default=4, help="runs at a time")
    parser.add_argument("--gpus", type=int, default=0, help="to spread them over; 0: as they come")
    parser.add_argument("--seconds", type=float, default=460, help="when to stop")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/fp8_accuracy"))
    parser.add_argument("--name", default="SmolLM2-135M-Instruct (from Q4_1)")
    parser.add_argument("--commit", default="")
    parser.add_argument("--tiny", action="store_true", help="check the script on a CPU")
    args = parser.parse_args()
    size = TINY if args.tiny else Size()
    cases = [each.strip() for each in args.cases.split(";")]
    if args.output.exists():
        rows = [json.loads(line) for line in args.output.read_text().splitlines()]
        done = {row["case"] for row in rows}
        cases = [name for name in cases if name not in done]
    args.folder.mkdir(parents=True, exist_ok=True)
    runs = Runs(args, args.folder, size)
    make_starts(args.model, args.folder, size, {CASES[name].start for name in cases})
    of_text(args.folder, CASES[cases[0]].start, size)
    print(f"weights and text at {runs.seconds:.0f} s", flush=True)
    runs.run(cases)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-trainkit"]:
        sys.path.insert(0, str(ROOT))
        sys.exit(as_trainkit(sys.argv[2:]))
    main()
