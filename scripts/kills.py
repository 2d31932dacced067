#!/usr/bin/env python3
"""Kill runs at random moments, type the same command again, and compare the bytes at the end.

A cell is one kind of training under one way to spread it: `lora-bf16/zero2`. Its rounds train the
same run again and again; in each a few starts are killed (SIGKILL to a rank, to the launcher, or to
all of them) in their first moment, while data is prepared, while the model loads, in a step or in a
save, and a last one is left alone. It has to end with the bytes of the run that nobody killed: the
final model, the last checkpoint with optimizer and random numbers, the metrics; and with no file
besides.

    python scripts/kills.py --cells 'lora-bf16/*' --kills 100 --json kills.jsonl

Starts are forked behind the imports. One row a cell, with what it has seen so far: the same command
goes on where it was stopped; ``--table`` prints them. The exit status is 0 when every run ended
with the right bytes and nobody had to help.
"""

import argparse
import contextlib
import ctypes
import fnmatch
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from forks import give_forks_their_own_threads  # noqa: E402
from moments import PLAN, Kill, arm, children, differences, digest_of, plan_of  # noqa: E402

MODEL = "model: {name_or_path: m, dtype: bfloat16}\n"
LORA = MODEL + "lora: {r: 4, dropout: 0.1}\n"
MOE = MODEL.replace("path: m", "path: moe")
KINDS = {
    "full-fp32": MODEL.replace("bfloat16", "float32"),
    "full-bf16": MODEL,
    "lora-bf16": LORA,
    "streaming": LORA,
    "moe-full": MOE,
    "moe-lora": MOE + "lora: {r: 4, rank_pattern: {experts.down_proj: 8}}\n",
    "moe-fp8": MOE + "lora: {r: 4, quantize: fp8}\n",
    "moe-qlora": MOE + "lora: {r: 4, quantize: nf4}\n",
    "qlora": MODEL + "lora: {r: 4, quantize: nf4}\n",
}
"""What is trained; qlora wants a GPU. Of moe, every expert with the rest."""
SPREADS = {"one": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "fsdp2": 2}
"""Processes."""
DATA = "data: {{train: [d.jsonl], max_length: 64, packing: false, cache_dir: {cache}{stream}}}\n"
TRAINING = (
    "training: {learning_rate: 1e-2, per_device_train_batch_size: 2, max_steps: 10, save_steps: 2,"
    " save_total_limit: 2, gradient_accumulation_steps: 2}\nfaults: {step_timeout: 60}\n"
)
STEPS, KILLS_A_ROUND = 10, 8
PHASES = {"save": 45, "kept": 10, "train": 15, "load": 10, "data": 10, "start": 10}
"""Where the kill comes, and how often of a hundred."""
PATIENCE = 240.0
"""Seconds after which a start hangs."""


@dataclass
class Row:
    """What a cell has seen so far."""

    cell: str
    starts: str = "forked"
    kills: int = 0
    rounds: int = 0
    exact: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    victims: dict[str, int] = field(default_factory=dict)
    inside_saves: int = 0
    slowest_end_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class Cell:
    """One kind of training under one way to spread it, in a folder of its own."""

    def __init__(self, row: Row, folder: Path, overrides: list[str]) -> None:
        self.row, self._folder, self._overrides = row, folder, overrides
        kind, _, spread = row.cell.partition("/")
        self._ranks = SPREADS[spread]
        shard = "none" if spread in ("one", "ddp") else spread
        self._stream = ", streaming: true" if kind == "streaming" else ""
        self._recipe = KINDS[kind] + TRAINING + f"parallel: {{shard: {shard}}}\n"
        code, run = self._start("-whole", None)
        if code:
            raise RuntimeError(f"{row.cell}: the whole run ended with {code}")
        self._whole = digest_of(run)
        reports = [folder / f"files.{rank}" for rank in range(self._ranks)]
        self._counts = [Counter(json.loads(path.read_text())) for path in reports]
        self._clear("-whole")

    def round(self, kills: int, until: float) -> None:
        """Kill some starts of a run, let the last one be, and compare."""
        row, number, events = self.row, f"-{self.row.rounds}", list[str]()
        chance = random.Random(f"{row.cell}/{row.starts}/{row.rounds}/{KILLS_A_ROUND}")
        row.rounds += 1
        try:
            while row.kills < kills and len(events) < KILLS_A_ROUND and time.monotonic() < until:
                kill = self._draw(chance, self._folder / f"run{number}")
                code, run = self._start(number, kill)
                events.append(f"{kill.victim} {kill.phase} {kill.at} +{kill.delay:.3f} -> {code}")
                if not self._count(kill, run):
                    break  # this start had ended before its kill came
            else:
                code, run = self._start(number, None)
            wrong = differences(self._whole, digest_of(run)) if code == 0 else [f"exit code {code}"]
        except (TimeoutError, OSError, ValueError) as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            row.failures.append(f"round {row.rounds - 1}: {'; '.join(wrong[:6])} after {events}")
        else:
            row.exact += 1
            self._clear(number)

    def _draw(self, chance: random.Random, run: Path) -> Kill:
        """A moment of what is left of the run, so that most kills come."""
        more = 2 if self.row.inside_saves < 0.4 * self.row.kills else 1
        weights = {**PHASES, "save": more * PHASES["save"]}
        phase = chance.choices(list(weights), list(weights.values()))[0]
        rank = chance.randrange(self._ranks)
        saved = run.glob("checkpoint-*")
        done = max((int(path.name.partition("-")[2]) for path in saved), default=0)
        share = {"save": 1 - done / STEPS, "start": 0.7, "load": 0.6, "data": 0.7}
        most = max(int(self._counts[rank][phase] * (share.get(phase, 1) if done else 1)), 1)
        delay = {"train": 1.5, "start": 0.3, "load": 0.3}.get(phase, 0.03)
        victim = chance.choice(("rank", "launcher", "group")) if self._ranks > 1 else "rank"
        at = 1 if phase == "train" else chance.randint(1, most)
        return Kill(phase, at, chance.uniform(0, delay) * chance.random(), rank, victim)

    def _count(self, kill: Kill, run: Path) -> bool:
        """Whether the kill came; notes it."""
        row, struck = self.row, self._folder / "files"
        if not struck.exists():
            return False
        ended = round(time.time() - struck.stat().st_mtime, 1)
        struck.unlink()
        row.slowest_end_seconds = max(row.slowest_end_seconds, ended)
        row.kills += 1
        row.phases[kill.phase] = row.phases.get(kill.phase, 0) + 1
        row.victims[kill.victim] = row.victims.get(kill.victim, 0) + 1
        row.inside_saves += any(run.glob(".*staging*"))
        return True

    def _start(self, number: str, kill: Kill | None) -> tuple[int, Path]:
        """The command of a round, the same every time: its exit code, -9 where it was killed."""
        recipe, run = self._folder / f"recipe{number}.yaml", self._folder / f"run{number}"
        recipe.write_text(self._recipe + DATA.format(cache=f"cache{number}", stream=self._stream))
        words = ["--config", recipe.name, "--output-dir", run.name, "--resume", *self._overrides]
        first = os.fork()
        if not first:
            with contextlib.suppress(BaseException):
                self._become(words, run, kill)
            os._exit(99)
        deadline, code, hangs = time.monotonic() + PATIENCE, 0, False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == first:
                code = os.waitstatus_to_exitcode(status)
            if not pid:
                time.sleep(0.01)
                if time.monotonic() > deadline:
                    hangs = True
                    for left in children(os.getpid()):
                        os.kill(left, signal.SIGKILL)
        if hangs:
            raise TimeoutError(f"a start did not end in {PATIENCE:.0f} s")
        return code, run

    def _become(self, words: list[str], run: Path, kill: Kill | None) -> None:
        """In a fork: the start itself."""
        os.environ[PLAN] = plan_of(run, self._folder / "files", kill, is_launched=self._ranks > 1)
        os.chdir(self._folder)
        log = os.open("said.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        if self._ranks > 1:
            from launches import launch

            os._exit(launch(words, self._ranks, in_rank=arm))
        from trainkit.cli.app import main

        arm()
        os._exit(main(["sft", *words]))

    def _clear(self, number: str) -> None:
        for path in self._folder.glob(f"*{number}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def prepare(folder: Path) -> None:
    """The imports that starts are forked behind, a tiny model and some conversations."""
    from trainkit.parallel.launch import quieten_imports

    quieten_imports()
    import deepspeed
    import launches  # noqa: F401
    import torch
    import torch.distributed.run
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import trainkit.cli.commands.sft
    import trainkit.run.report
    import trainkit.train.build

    torch.set_num_threads(1)
    give_forks_their_own_threads()
    get_checkpoint_conversion_mapping("qwen2")  # 400 patterns
    gc.freeze()  # what is imported stays: no start walks over it, or copies it, again
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute
    trainkit.run.report.draw_plots = trainkit.run.report.svg_plots = lambda *_: []
    trainkit.run.report.CurveRefresher.refresh = lambda self, **_: False
    maker = os.fork()  # threads of torch's must not be there when a start is forked
    if maker == 0:
        from tiny import make_qwen2, make_tokenizer
        from train.router_cases import make_moe

        tokenizer = make_tokenizer()
        for name, make in (("m", make_qwen2), ("moe", make_moe)):
            make(len(tokenizer)).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
        os._exit(0)
    os.waitpid(maker, 0)
    with (folder / "d.jsonl").open("w") as file:
        for number in range(48):
            answer = f"It is {number}{'!' * (number % 7)}"
            texts = {"user": f"Say {number}.", "assistant": answer}
            messages = [{"role": role, "content": text} for role, text in texts.items()]
            file.write(json.dumps({"messages": messages}) + "\n")


def table(rows: list[Row]) -> str:
    """What all cells have seen."""
    lines = [
        "| cell | kills | of them inside a save | runs ended with the same bytes |"
        " slowest end of a killed start |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.cell} {row.starts} | {row.kills} | {row.inside_saves} | "
            f"{row.exact} of {row.rounds} | {row.slowest_end_seconds:.1f} s |"
        )
    sums = [sum(vars(row)[name] for row in rows) for name in ("kills", "inside_saves")]
    exact, rounds = (sum(vars(row)[name] for row in rows) for name in ("exact", "rounds"))
    return "\n".join([*lines, f"| all | {sums[0]} | {sums[1]} | {exact} of {rounds} | |"])


def main() -> int:
    """Go through the cells until each has enough kills or the time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="*", help="patterns, with commas: lora-bf16/*,*/zero2")
    parser.add_argument("--kills", type=int, default=100, help="of each cell")
    parser.add_argument("--json", type=Path, default=Path("kills.jsonl"), help="the rows")
    parser.add_argument("--deadline-seconds", type=float, default=float("inf"))
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the recipe; again")
    parser.add_argument("--table", action="store_true", help="print the rows' table, and no more")
    options = parser.parse_args()
    lines = options.json.read_text().splitlines() if options.json.exists() else []
    rows = {(r["cell"], r["starts"]): Row(**r) for r in map(json.loads, lines)}
    if options.table:
        print(table(list(rows.values())))
        return 0
    from trainkit.parallel.launch import count_local_gpus

    # What a killed launcher leaves comes to this process, which waits for it.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    until = time.monotonic() + options.deadline_seconds
    starts = ", ".join(["forked", *options.set])
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        prepare(Path(scratch))
        for name in (f"{kind}/{spread}" for kind in KINDS for spread in SPREADS):
            is_chosen = any(fnmatch.fnmatch(name, each) for each in options.cells.split(","))
            if not is_chosen or (name.startswith("qlora") and not count_local_gpus()):
                continue
            folder = Path(scratch, name.replace("/", "-"))
            folder.mkdir()
            for source in ("m", "moe", "d.jsonl"):
                (folder / source).symlink_to(f"../{source}")
            row = rows.setdefault((name, starts), Row(name, starts))
            cell = Cell(row, folder, options.set)
            while row.kills < options.kills and time.monotonic() < until:
                before = len(row.failures)
                cell.round(options.kills, until)
                if len(row.failures) > before:
                    said = (folder / "said.log").read_text(errors="replace").splitlines()
                    print(f"{row.failures[-1]}; it said last:", *said[-60:], sep="\n")
                partial = options.json.with_suffix(".partial")
                partial.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows.values()))
                partial.replace(options.json)
                print(f"{name}: {row.kills} kills, {row.exact} of {row.rounds} exact", flush=True)
    print(table(list(rows.values())))
    return int(any(row.failures for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
