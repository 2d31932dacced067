"""LoRA as each tool trains it from its own command: ms a step, the way to the first step, memory.

The same random weights, rows and settings, one tool after another. A tool is watched from outside,
by the lines that it writes for each step, and by the memory that the GPU has given away.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from trainkit.bench.lora import LORA_ALPHA, LORA_RANK, TARGETS
from trainkit.bench.providers import Shape
from trainkit.bench.rows import MODES, PACKED, PAIRS, base_of, folder_of, mean_tokens
from trainkit.processes import module_command

_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""As peft is told to adapt them; Unsloth by their last words."""

_LOSS = re.compile(r"\bloss'?:?\s+'?(\d[\d.e+-]*)")
_STEP_OF_TRAINER = re.compile(r"^\{.*'loss':")
_STEP_OF_TRAINKIT = re.compile(r"^step +\d+/(?P<steps>\d+)")


@dataclass(frozen=True)
class Work:
    """What all tools do.

    Attributes:
        folder: what `prepare` has written.
        mode: one of `MODES`.
        steps: optimizer steps; the second half of them counts.
    """

    folder: Path
    shape: Shape
    mode: str
    steps: int

    @property
    def rows(self) -> Path:
        """The folder of the rows."""
        return self.folder / folder_of(self.mode)

    @property
    def base(self) -> Path:
        """The folder of the base."""
        return self.folder / base_of(self.mode)

    @property
    def has_experts(self) -> bool:
        """Whether adapters go to experts, too."""
        return "num_experts" in self.shape.config

    @property
    def targets(self) -> list[str]:
        """The linear layers with adapters."""
        return [name for name in TARGETS if not self.has_experts or name[0] in "qkvo"]

    @property
    def packed(self) -> bool:
        """Whether trainkit packs: a step has other rows then, and all train for one epoch."""
        return self.mode in PACKED and PAIRS.get(self.mode, ()) is not None

    @property
    def settings(self) -> dict[str, Any]:
        workers = {"dataloader_num_workers": 8} if self.mode == "images" else {}
        once = {"num_train_epochs": 1} if self.packed else {"max_steps": self.steps}
        return {
            "per_device_train_batch_size": self.shape.batch_size,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            **once,
            **workers,
            "logging_steps": 1,
            "save_strategy": "no",
            "seed": 1,
            "gradient_checkpointing": self.mode == "qlora",
        }


@dataclass(frozen=True)
class Tool:
    """A tool that can be watched."""

    package: str
    command: Callable[[Work, Path], list[str]]
    step: re.Pattern[str] = _STEP_OF_TRAINER
    modes: Collection[str] = MODES


def _trainkit(
    work: Work, output: Path, quantize: str | None = None, *, shared: bool = False
) -> list[str]:
    base = "nf4" if work.mode == "qlora" else quantize
    recipe: dict[str, Any] = {
        "model": {"name_or_path": str(work.base), "dtype": "bfloat16"},
        "data": {"train": [str(work.rows / "rows.jsonl")], "packing": work.packed}
        | {"max_length": work.shape.length},
        "lora": {
            "r": LORA_RANK,
            "alpha": LORA_ALPHA,
            "target_modules": work.targets,
            "quantize": base,
        }
        | ({"experts": True} if work.has_experts else {}),
        "kernels": True,
        "training": work.settings,
    }
    if work.mode in PAIRS:
        recipe |= {"objective": "dpo", "preference": {"share_prompts": shared}}
    if work.packed:  # rows that hold about as much as another tool's step has
        a_row = work.shape.length * (2 if work.mode in PAIRS else 1)
        rows = round(mean_tokens(work.rows, work.mode) * work.shape.batch_size / a_row)
        recipe["training"] |= {"per_device_train_batch_size": max(1, rows)}
    else:
        recipe |= {"global_batch_size": work.shape.batch_size}
    path = output.with_suffix(".json")
    path.write_text(json.dumps(recipe), encoding="utf-8")
    words = ("sft", "--config", str(path), "--output-dir", str(output))
    return module_command("trainkit.cli.app", *words)


def _of_trainer(work: Work, output: Path) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    return {
        **work.settings,
        "gradient_accumulation_steps": 1,  # Unsloth's own default is another
        "output_dir": str(output),
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "disable_tqdm": True,
        "report_to": "none",
    }


def _trl(work: Work, output: Path, more: Sequence[str] = ()) -> list[str]:
    settings = _of_trainer(work, output) | {
        "model_name_or_path": work.base,
        "dataset_name": work.rows,
        "max_length": work.shape.length,
        "dtype": "bfloat16",
        "lora_r": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    words += ["--use_peft", "--lora_target_modules", *work.targets, *more]
    words += ["--lora_target_parameters", *_EXPERTS] if work.has_experts else []
    words += ["--load_in_4bit"] if work.mode == "qlora" else []
    return module_command(f"trl.scripts.{'dpo' if work.mode in PAIRS else 'sft'}", *words)


def _unsloth(work: Work, output: Path) -> list[str]:
    experts = _EXPERTS if work.has_experts else ()
    about = {
        "base": str(work.base),
        "rows": str(work.rows / "rows.jsonl"),
        "max_length": work.shape.length,
        "in_4bit": work.mode == "qlora",
        "lora": {
            "r": LORA_RANK,
            "lora_alpha": LORA_ALPHA,
            "target_modules": [*work.targets, *(each.rpartition(".")[2] for each in experts)],
        },
        # It recomputes by itself where it is told to.
        "settings": _of_trainer(work, output) | {"gradient_checkpointing": False},
    }
    script = str(Path(__file__).with_name("unsloth_script.py"))
    return [sys.executable, "-P", script, json.dumps(about)]


TOOLS: Mapping[str, Tool] = {
    "trainkit": Tool("trainkit", _trainkit, _STEP_OF_TRAINKIT),
    "trainkit-fp8": Tool(
        "trainkit", partial(_trainkit, quantize="fp8"), _STEP_OF_TRAINKIT, {*MODES} - {"qlora"}
    ),
    "trainkit-shared": Tool("trainkit", partial(_trainkit, shared=True), _STEP_OF_TRAINKIT, PAIRS),
    "trl": Tool("trl", _trl),
    "trl-liger": Tool("liger_kernel", partial(_trl, more=["--use_liger_kernel"])),
    "unsloth": Tool("unsloth", _unsloth, modes=["lora", "qlora"]),
}


def installed(peer_path: str) -> list[str]:
    """The tools that are here, or in ``peer_path``."""
    found = {each.name for each in Path(peer_path).iterdir()} if peer_path else set()
    there = [t for t in TOOLS.values() if t.package in found or importlib.util.find_spec(t.package)]
    return [name for name, tool in TOOLS.items() if tool in there]


def measure(name: str, work: Work, *, peer_path: str = "", seconds: float = 900) -> dict[str, Any]:
    """Run a tool and watch it; ``error`` has the end of what it said where it took no step."""
    tool = TOOLS[name]
    row: dict[str, Any] = {"provider": name, "mode": work.mode, "steps": work.steps}
    row |= {"batch_size": work.shape.batch_size, "length": work.shape.length}
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"UNSLOTH_DISABLE_STATISTICS": "1"}
    if peer_path and tool.package != "trainkit":
        paths = [peer_path, os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with _memory() as memory:
        began = time.perf_counter()
        process = subprocess.Popen(
            tool.command(work, work.folder / f"{name}-{work.mode}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        # Its workers, too: they hold the GPU's memory.
        end = partial(os.killpg, process.pid, signal.SIGKILL)
        stop = threading.Timer(seconds, end)
        stop.start()
        at, losses, said, steps = [], [], [], work.steps
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said.append(line)
                if (step := tool.step.search(line)) and (loss := _LOSS.search(line)):
                    at.append(time.perf_counter() - began)
                    losses.append(float(loss[1]))
                    steps = int(step.groupdict().get("steps", steps))
                    if len(at) == steps:
                        break
        finally:
            stop.cancel()
            end()  # what it would save is not measured
            process.wait()
    if len(at) < 4:
        return {**row, "error": "".join(said)[-2000:]}
    milliseconds = 1e3 * statistics.median(b - a for a, b in list(pairwise(at))[len(at) // 2 :])
    rows = work.steps * work.shape.batch_size / steps * 1e3 / milliseconds
    if work.mode in PACKED:
        name = "images_per_second" if work.mode == "images" else "pairs_per_second"
        row |= {name: rows, "steps": steps}
    else:
        row |= {"tokens_per_second": rows * work.shape.length}
    return {
        **row,
        "ms": milliseconds,
        "first_step_seconds": at[0],
        "gpu_memory_gib": memory[0] if torch.cuda.is_available() else None,
        "loss": losses[0],
        "last_loss": losses[-1],
    }


@contextmanager
def _memory() -> Iterator[list[float]]:
    """Within, the GiB that the GPU has given away, at most, beyond what it had before."""
    peak, ended = [0.0], threading.Event()
    if not torch.cuda.is_available():
        yield peak
        return
    before, _ = torch.cuda.mem_get_info()

    def watch() -> None:
        while not ended.wait(0.05):
            peak[0] = max(peak[0], (before - torch.cuda.mem_get_info()[0]) / 2**30)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
