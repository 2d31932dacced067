#!/usr/bin/env python3
"""Walks the ways of spreading a run, and holds each against one process that spreads nothing.

    python scripts/parity.py --ranks 2 --output rows.jsonl [--only fsdp2] [--bf16] [--resume]

Every cell is ``trainkit sft`` on a tiny model: rows of uneven length with uneven masks, several
micro-batches a step, clipping. In fp32 the first gradient norm may differ by 1e-6 of itself and
each loss by 1e-5. With ``--bf16`` runs of one process differ, too, that should not: with rows
taken one, two or four at a time, with kernels and without. Twice their largest difference is what
a cell may differ by. Cells that the table of refusals names are recorded with their reason.
One JSON row a cell; the exit status is 1 if a cell is off.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chatml_tokenizer import chatml_tokenizer

WAYS: dict[str, dict[str, Any]] = {
    **{shard: {"shard": shard} for shard in ("none", "zero1", "zero2", "zero3", "fsdp2")},
    **{
        f"{shard}_sequence": {"shard": shard, "sequence": 2}
        for shard in ("none", "zero1", "zero2", "zero3", "fsdp2")
    },
    "pipeline": {"pipeline": 2},
    "pipeline_interleaved": {"pipeline": 2, "schedule": "interleaved"},
    "pipeline_zbv": {"pipeline": 2, "schedule": "zbv"},
    "fsdp2_pipeline": {"shard": "fsdp2", "pipeline": 2},
    "fsdp2_pipeline_interleaved": {"shard": "fsdp2", "pipeline": 2, "schedule": "interleaved"},
    "zero1_tensor": {"shard": "zero1", "tensor": 2},
    "zero1_tensor_sequence": {"shard": "zero1", "tensor": 2, "sequence": 2},
}
"""What ``parallel`` says, by name."""

KINDS = {"full": {}, "lora": {"r": 4}, "nf4": {"r": 4, "quantize": "nf4"}}
STEPS = 20


@dataclass(frozen=True)
class Cell:
    """One run."""

    way: str
    kind: str
    kernels: bool
    packed: bool
    checkpointed: bool
    ranks: int
    rows: int = 1

    @property
    def name(self) -> str:
        """Of its folder."""
        marks = [f"k{int(self.kernels)}", f"p{int(self.packed)}", f"c{int(self.checkpointed)}"]
        rows = [] if self.rows == 1 else [f"b{self.rows}"]
        return "-".join([self.way, self.kind, *marks, f"x{self.ranks}", *rows])

    @property
    def reference(self) -> Cell:
        """The run it must equal: one process, the plain model, nothing recomputed."""
        return Cell(
            "none", self.kind, kernels=False, packed=self.packed, checkpointed=False, ranks=1
        )

    @property
    def likes(self) -> tuple[Cell, ...]:
        """Runs of one process that equal the reference but for rounding."""
        ways = [(False, 2), (False, 4), (True, 1), (True, 4)]
        return tuple(replace(self.reference, kernels=on, rows=rows) for on, rows in ways)


SWITCHES = {
    "once": [(True, True, True)],
    "quick": [(True, True, True), (False, False, False)],
    "all": list(itertools.product((True, False), repeat=3)),
}
"""Kernels, packed, checkpointed; by name."""


def cells(ranks: int, only: str, switches: list[tuple[bool, bool, bool]]) -> Iterator[Cell]:
    """The table: every strategy with every kind, and with the switches."""
    for way, kind, (kernels, packed, checkpointed) in itertools.product(WAYS, KINDS, switches):
        if ranks % math.prod(n for n in WAYS[way].values() if isinstance(n, int)):
            continue
        cell = Cell(way, kind, kernels, packed, checkpointed, ranks)
        if any(part in cell.name for part in only.split(",")):
            yield cell


def prepare(root: Path) -> None:
    """A model of three layers with a tied head, and rows that nothing is alike in."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = chatml_tokenizer({c: i for i, c in enumerate(alphabet)}, [])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    chance = random.Random(0)
    with (root / "rows.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(400):
            texts = ["".join(chance.choices("abcdefgh ", k=chance.randint(1, 60))) for _ in "qa"]
            roles = ("user", "assistant")
            messages = [{"role": r, "content": f"x{t}"} for r, t in zip(roles, texts, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")


def recipe(cell: Cell, *, bf16: bool) -> dict[str, Any]:
    """What a user would write."""
    return {
        "model": {"name_or_path": "model", "dtype": "bfloat16" if bf16 else "float32"},
        "data": {
            "train": ["rows.jsonl"],
            "max_length": 192,
            "packing": cell.packed,
            "cache_dir": "cache",
            "num_workers": 1,
        },
        "lora": KINDS[cell.kind] or None,
        "kernels": cell.kernels,
        "parallel": WAYS[cell.way],
        "global_batch_size": 8,
        "training": {
            "per_device_train_batch_size": cell.rows,
            "learning_rate": 1e-3,
            "max_steps": STEPS,
            "logging_steps": 1,
            "save_steps": STEPS // 2,
            "save_total_limit": 5,
            "max_grad_norm": 0.5,
            "gradient_checkpointing": cell.checkpointed,
            "seed": 1,
        },
    }


@dataclass
class Started:
    """A run that goes on."""

    name: str
    pids: set[int]
    deadline: float
    went_well: bool = True


class Runs:
    """``trainkit`` runs under one folder, several at a time, each on ranks of its own.

    Args:
        root: what their words are relative to; each has a log there by its name.
        at_once: how many.
        timeout: seconds of each.
    """

    def __init__(self, root: Path, at_once: int, timeout: float) -> None:
        self.root, self._at_once, self._timeout = root, at_once, timeout
        self.went: dict[str, bool] = {}
        self._count = 0
        self._forks = _can_fork()

    def all(self, wanted: Iterable[tuple[str, list[str], int]]) -> Iterator[str]:
        """Run each (name, words, ranks), and tell the names as they end."""
        waiting, going = list(wanted), list[Started]()
        while waiting or going:
            while waiting and len(going) < self._at_once:
                going.append(self._start(*waiting.pop(0)))
            for each in list(going):
                if self._has_ended(each):
                    going.remove(each)
                    self.went[each.name] = each.went_well
                    yield each.name
            time.sleep(0.05)

    def said(self, name: str) -> str:
        """The end of a run's log."""
        log = self.root / f"{name}.log"
        return " ".join(log.read_text(errors="replace").split()[-60:]) if log.exists() else ""

    def _start(self, name: str, words: list[str], ranks: int) -> Started:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._count += 1
        pids = {self._fork(name, words, rank, ranks, port) for rank in range(ranks)}
        return Started(name, pids, time.monotonic() + self._timeout)

    def _has_ended(self, run: Started) -> bool:
        for pid in list(run.pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                run.pids.discard(pid)
            if done and status:  # the others may wait for it for ever
                run.went_well = False
                run.deadline = min(run.deadline, time.monotonic() + 20)
        if run.pids and time.monotonic() > run.deadline:
            run.went_well = False
            for pid in run.pids:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            run.pids.clear()
        return not run.pids

    def _fork(self, name: str, words: list[str], rank: int, ranks: int, port: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.chdir(self.root)
            file = os.open(f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(file, 1), os.dup2(file, 2)
            self._describe(rank, ranks, port)
            if not self._forks:
                command = [sys.executable, "-m", "trainkit.cli.app", *words]
                os.execv(command[0], command)
            from trainkit.cli.app import main as trainkit

            code = int(trainkit(words) or 0)
            sys.stdout.flush(), sys.stderr.flush()
        finally:
            with contextlib.suppress(Exception):
                import torch

                torch.distributed.destroy_process_group()
            os._exit(code)

    def _describe(self, rank: int, ranks: int, port: int) -> None:
        """What torchrun says to a process; one alone gets one GPU, else it would take all."""
        if ranks == 1:
            visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or _gpus()).split(",")
            os.environ["CUDA_VISIBLE_DEVICES"] = visible[self._count % len(visible)]
            return
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in places.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _gpus() -> str:
    from trainkit.parallel.launch import count_local_gpus

    return ",".join(map(str, range(count_local_gpus())))


def _can_fork() -> bool:
    """Whether a fork of this process, with its imports, can use a GPU; if not, runs start anew."""
    if not _gpus():
        return True
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            import torch

            torch.zeros(1, device="cuda").item()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def numbers(folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def refused(cell: Cell, *, bf16: bool) -> str | None:
    """Why the table refuses a cell."""
    from trainkit.errors import RecipeError
    from trainkit.recipe import Recipe

    try:
        Recipe(**recipe(cell, bf16=bf16))
    except RecipeError as error:
        return error.what
    return None


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
    row = differences(runs.root / cell.reference.name, runs.root / cell.name)
    try:
        row |= limits(cell, runs, bf16=bf16)
    except RuntimeError as error:
        return {**row, "failed": str(error)}
    found = numbers(runs.root / cell.name)
    is_near = all(
        row[f"{what}_difference"] <= row[f"{what}_limit"] for what in ("loss", "first_norm")
    )
    return {**row, "loss": [found[0][0], found[-1][0]], "ok": is_near}


def measure(chosen: argparse.Namespace, runs: Runs) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Every cell with what came of it."""
    bf16, wanted, references = chosen.bf16, list[Cell](), dict[Cell, None]()
    for cell in cells(chosen.ranks, chosen.only, SWITCHES[chosen.switches]):
        if reason := refused(cell, bf16=bf16):
            yield cell, {"refused": reason}
            continue
        wanted.append(cell)
        references |= dict.fromkeys((cell.reference, *(cell.likes if bf16 else ())))

    def begin(cell: Cell) -> tuple[str, list[str], int]:
        path = runs.root / f"{cell.name}.json"
        path.write_text(json.dumps(recipe(cell, bf16=bf16)), encoding="utf-8")
        words = ["sft", "--config", path.name, "--output-dir", cell.name]
        return cell.name, words, cell.ranks

    by_name = {cell.name: cell for cell in wanted}
    for _ in runs.all(map(begin, references)):
        pass
    for name in runs.all(map(begin, wanted)):
        row = judged(by_name[name], runs, bf16=bf16)
        if chosen.resume and runs.went[name]:
            row |= _resumed(by_name[name], runs)
            row["ok"] = row.get("ok", False) and row["resumed_exactly"]
        yield by_name[name], row


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


def main() -> None:
    """Walk the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are added here")
    parser.add_argument("--only", default="", help="parts of the cells' names, with commas")
    parser.add_argument("--switches", choices=SWITCHES, default="all")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on from the middle, too")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--timeout-seconds", type=float, default=1200.0, help="of each run")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking CUDA would forbid to fork
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    import trainkit.cli.commands.training.sft
    import trainkit.train.build  # noqa: F401

    good = True
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        runs = Runs(Path(scratch), chosen.jobs, chosen.timeout_seconds)
        about = {"dtype": "bfloat16" if chosen.bf16 else "float32"}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        for cell, found in measure(chosen, runs):
            told = {name: value for name, value in vars(cell).items() if name != "rows"}
            row = {**told, **about, **found, **versions, "on_gpus": bool(_gpus())}
            with chosen.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            good = good and (found.get("ok", False) or "refused" in found)
            sys.stdout.write(f"{cell.name} {json.dumps(found)}\n")
            sys.stdout.flush()
    sys.exit(not good)


if __name__ == "__main__":
    main()
