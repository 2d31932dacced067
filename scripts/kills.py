#!/usr/bin/env python3
"""Kill runs at random moments, type the same command again, and compare the bytes at the end.

A cell is one kind of training under one way to spread it: `lora-bf16/zero2`. Its rounds train the
same run again and again; in each a few starts are killed (SIGKILL to a rank, to the launcher, or to
all of them) in their first moment, while data is prepared, while the model loads, in a step or in a
save, and a last one is left alone. It has to end with the bytes of the run that nobody killed: the
final model, the last checkpoint with optimizer and random numbers, the metrics; and with no file
besides.

    python scripts/kills.py --kills 100 --json docs/benchmarks/kills.jsonl
    python scripts/kills.py --cells 'lora-bf16/*' --deadline-seconds 600
    python scripts/kills.py --table            # of the rows that are there

Starts are forked behind the imports; `--real` starts programs as a user does (`trainkit sft`,
`trainkit launch`, `train.sh` in turn), which takes ten times as long. One row a cell, with what it
has seen so far: the same command goes on where it was stopped. The exit status is 0 when every run
ended with the right bytes and nobody had to help.
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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from forks import give_forks_their_own_threads  # noqa: E402
from moments import PLAN, Kill, arm, children, differences, digest_of, plan_of  # noqa: E402

KINDS = {
    "full-fp32": "model: {name_or_path: m, dtype: float32}\n",
    "full-bf16": "model: {name_or_path: m, dtype: bfloat16}\n",
    "lora-bf16": "model: {name_or_path: m, dtype: bfloat16}\nlora: {r: 4, dropout: 0.1}\n",
    "streaming": "model: {name_or_path: m, dtype: bfloat16}\nlora: {r: 4, dropout: 0.1}\n",
    "qlora": "model: {name_or_path: m, dtype: bfloat16}\nlora: {r: 4, quantize: nf4}\n",
}
"""What is trained; qlora wants a GPU."""

SPREADS = {
    "one": (1, "none"),
    "ddp": (2, "none"),
    "zero1": (2, "zero1"),
    "zero2": (2, "zero2"),
    "zero3": (2, "zero3"),
    "fsdp2": (2, "fsdp2"),
}
"""Processes, and ``parallel.shard``."""

DATA = "data: {{train: [d.jsonl], max_length: 64, packing: false, cache_dir: {cache}{stream}}}\n"
TRAINING = (
    "training: {learning_rate: 1e-2, per_device_train_batch_size: 2, max_steps: 10, save_steps: 2,"
    " save_total_limit: 2, gradient_accumulation_steps: 2}\nfaults: {step_timeout: 60}\n"
)
PHASES = {"save": 40, "train": 20, "load": 15, "data": 15, "start": 10}
"""Where the kill comes, and how often of a hundred."""

KILLS_A_ROUND = 4
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


# -- a start, from outside ---------------------------------------------------------------------


class Starts:
    """Starts commands in a folder, one at a time, and waits for everything they leave."""

    def __init__(self, folder: Path, *, real: bool) -> None:
        self.folder, self.real = folder, real
        self._number = 0
        # What a killed launcher leaves comes to this process, which waits for it.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        if real:
            site = folder / "site"
            site.mkdir(exist_ok=True)
            (site / "sitecustomize.py").write_text(
                f"import os, sys\nif os.environ.get({PLAN!r}):\n"
                f"    sys.path.append({str(ROOT / 'tests')!r})\n"
                "    import moments\n    moments.arm()\n"
            )

    def start(self, arguments: list[str], run: Path, num_ranks: int, kill: Kill | None) -> int:
        """The exit code; -9 where it was killed.

        Raises:
            TimeoutError: it hangs.
        """
        self._number += 1
        plan = plan_of(run, self.folder / "files", kill, is_launched=num_ranks > 1)
        environment = {**os.environ, PLAN: plan, "NPROC_PER_NODE": str(num_ranks)}
        with (self.folder / "said.log").open("ab") as log:
            log.write(f"--- {self._number}: {kill}\n".encode())
            log.flush()
            if self.real:
                first = self._program(arguments, num_ranks, environment, log)
            else:
                first = self._fork(arguments, num_ranks, environment, log)
        return self._wait(first)

    def _program(self, arguments: list[str], num_ranks: int, environment: Any, log: Any) -> int:
        path = [str(self.folder / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        own = {"TRAINKIT_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, "-m", "trainkit", "launch", *arguments]
        if num_ranks == 1:
            own["CUDA_VISIBLE_DEVICES"] = "0"  # else a process for each GPU
        elif self._number % 2:
            command = ["bash", str(ROOT / "train.sh"), *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env={**environment, **own}, stdout=log, stderr=log
        ).pid

    def _fork(self, arguments: list[str], num_ranks: int, environment: Any, log: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        with contextlib.suppress(BaseException):
            os.environ.update(environment)
            os.chdir(self.folder)
            os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            if num_ranks > 1:
                from launches import launch

                os._exit(launch(arguments, num_ranks, in_rank=arm))
            from trainkit.cli.app import main

            arm()
            os._exit(main(["sft", *arguments]))
        os._exit(99)

    def _wait(self, first: int) -> int:
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
        return code


# -- rounds --------------------------------------------------------------------------------------


class Cell:
    """One kind of training under one way to spread it."""

    def __init__(self, name: str, starts: Starts, overrides: Sequence[str] = ()) -> None:
        self.name, self._starts, self._overrides = name, starts, overrides
        self.kind, _, spread = name.partition("/")
        self.num_ranks, shard = SPREADS[spread]
        stream = ", streaming: true" if self.kind == "streaming" else ""
        self._text = KINDS[self.kind] + TRAINING + f"parallel: {{shard: {shard}}}\n"
        self._data = {"stream": stream}

    def _run(self, number: str, kill: Kill | None) -> tuple[int, Path]:
        """The command of one round: the same every time."""
        folder = self._starts.folder
        recipe, run = folder / f"recipe{number}.yaml", folder / f"run{number}"
        recipe.write_text(self._text + DATA.format(cache=f"cache{number}", **self._data))
        arguments = ["--config", recipe.name, "--output-dir", run.name, "--resume"]
        given = [*arguments, *self._overrides]
        code = self._starts.start(given, run, self.num_ranks, kill)
        return code, run

    def whole(self) -> tuple[dict[str, str], list[Counter[str]]]:
        """The run that nobody kills: its bytes, and what each rank does to files in each phase."""
        code, run = self._run(f"-{self.name.replace('/', '-')}-whole", None)
        if code:
            raise RuntimeError(f"{self.name}: the whole run ended with {code}")
        reports = [self._starts.folder / f"files.{rank}" for rank in range(self.num_ranks)]
        counts = [Counter(json.loads(path.read_text())) for path in reports]
        digest = digest_of(run)
        self._clear("-whole")
        return digest, counts

    def round(self, row: Row, whole: dict[str, str], counts: list[Counter[str]]) -> None:
        """Kill some starts of a run, let the last one be, and compare."""
        chance = random.Random(f"{self.name}/{row.starts}/{row.rounds}")
        number = f"-{self.name.replace('/', '-')}-{row.rounds}"
        row.rounds += 1
        events = []
        try:
            for _ in range(KILLS_A_ROUND):
                kill = self._draw(chance, counts)
                events.append(f"{kill.victim} {kill.phase} {kill.at} +{kill.delay:.3f}")
                code, run = self._run(number, kill)
                events[-1] += f" -> {code}"
                struck = self._starts.folder / "files"
                if not struck.exists():
                    if code:
                        raise ValueError(f"a start that nobody killed ended with {code}")
                    continue  # it was done before
                ended = time.time() - struck.stat().st_mtime
                row.slowest_end_seconds = max(row.slowest_end_seconds, round(ended, 1))
                struck.unlink()
                row.kills += 1
                row.phases[kill.phase] = row.phases.get(kill.phase, 0) + 1
                row.victims[kill.victim] = row.victims.get(kill.victim, 0) + 1
                row.inside_saves += any(run.glob(".*staging*"))
            code, run = self._run(number, None)
            wrong = differences(whole, digest_of(run)) if code == 0 else [f"exit code {code}"]
        except (TimeoutError, OSError, ValueError) as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            row.failures.append(f"round {row.rounds - 1}: {'; '.join(wrong[:6])} after {events}")
        else:
            row.exact += 1
            self._clear(number)

    def _draw(self, chance: random.Random, counts: list[Counter[str]]) -> Kill:
        phase = chance.choices(list(PHASES), list(PHASES.values()))[0]
        rank = chance.randrange(self.num_ranks)
        most = max(counts[rank].get(phase, 0), 1)
        delay = {"train": 1.5, "start": 0.3, "load": 0.3}.get(phase, 0.03)
        victim = chance.choice(("rank", "launcher", "group")) if self.num_ranks > 1 else "rank"
        at = 1 if phase == "train" else chance.randint(1, most)
        return Kill(phase, at, chance.uniform(0, delay) * chance.random(), rank, victim)

    def _clear(self, number: str) -> None:
        for path in self._starts.folder.glob(f"*{number}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def prepare(folder: Path, *, real: bool) -> None:
    """A tiny model and some conversations; and the imports, for forked starts."""
    if not real:
        import deepspeed
        import torch

        import trainkit.cli.commands.training.sft
        import trainkit.run.redraw
        import trainkit.run.report
        import trainkit.train.build
        import trainkit.train.session

        torch.set_num_threads(1)
        give_forks_their_own_threads()
        gc.freeze()  # what is imported stays: no start walks over it, or copies it, again
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute
        trainkit.train.session.draw_plots = trainkit.run.report.svg_plots = lambda run: []
        trainkit.run.redraw.CurveRefresher.refresh = lambda self: False
    if (folder / "d.jsonl").exists():
        return
    maker = os.fork()  # threads of torch's must not be there when a start is forked
    if maker == 0:
        with contextlib.suppress(BaseException):
            make(folder)
        os._exit(0)
    os.waitpid(maker, 0)


def make(folder: Path) -> None:
    """The model and the conversations."""
    from tiny import make_qwen2, make_tokenizer

    tokenizer = make_tokenizer()
    make_qwen2(len(tokenizer)).save_pretrained(folder / "m")
    tokenizer.save_pretrained(folder / "m")
    rows = (
        [
            {"role": "user", "content": f"Say {number}."},
            {"role": "assistant", "content": f"It is {number}{'!' * (number % 7)}"},
        ]
        for number in range(48)
    )
    (folder / "d.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def table(rows: dict[str, Row]) -> str:
    """What all cells have seen."""
    lines = [
        "| cell | starts | kills | of them inside a save | runs ended with the same bytes |"
        " slowest end of a killed start |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows.values():
        lines.append(
            f"| {row.cell} | {row.starts} | {row.kills} | {row.inside_saves} | {row.exact} of "
            f"{row.rounds} | {row.slowest_end_seconds:.1f} s |"
        )
    kills = sum(row.kills for row in rows.values())
    exact, rounds = (
        sum(getattr(row, name) for row in rows.values()) for name in ("exact", "rounds")
    )
    saves = sum(row.inside_saves for row in rows.values())
    lines.append(f"| all | | {kills} | {saves} | {exact} of {rounds} | |")
    return "\n".join(lines)


def read_rows(path: Path) -> dict[str, Row]:
    """The rows so far, by cell."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return {f"{row.cell} {row.starts}": row for row in rows}


def write_rows(path: Path, rows: dict[str, Row]) -> None:
    """All of them, in one step."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows.values()))
    partial.replace(path)


def main() -> int:
    """Go through the cells in turn, a round each, until all have enough or the time is up."""
    arguments = parser().parse_args()
    rows = read_rows(arguments.json)
    if arguments.table:
        print(table(rows))
        return 0
    deadline = time.monotonic() + arguments.deadline_seconds
    patterns = arguments.cells.split(",")
    kinds = [kind for kind in KINDS if kind != "qlora" or shutil.which("nvidia-smi")]
    names = [f"{kind}/{spread}" for kind in kinds for spread in SPREADS]
    names = [name for name in names if any(fnmatch.fnmatch(name, each) for each in patterns)]
    words = ["real" if arguments.real else "forked", arguments.where, *arguments.set]
    kind_of_start = ", ".join(word for word in words if word)
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        folder = Path(arguments.work or scratch)
        folder.mkdir(exist_ok=True)
        prepare(folder, real=arguments.real)
        starts = Starts(folder, real=arguments.real)
        known: dict[str, Any] = {}
        while names and time.monotonic() < deadline:
            for name in list(names):
                if time.monotonic() > deadline:
                    break
                row = rows.setdefault(f"{name} {kind_of_start}", Row(name, kind_of_start))
                if row.kills >= arguments.kills:
                    names.remove(name)
                    continue
                cell = Cell(name, starts, arguments.set)
                if name not in known:
                    known[name] = cell.whole()
                cell.round(row, *known[name])
                write_rows(arguments.json, rows)
                print(f"{name}: {row.kills} kills, {row.exact} of {row.rounds} exact", flush=True)
    print(table(rows))
    for row in rows.values():
        for failure in row.failures:
            print(f"{row.cell}: {failure}")
    return int(any(row.failures for row in rows.values()))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--cells", default="*", help="patterns, with commas: lora-bf16/*,*/zero2")
    made.add_argument("--kills", type=int, default=100, help="of each cell")
    made.add_argument("--json", type=Path, default=Path("kills.jsonl"), help="the rows")
    made.add_argument("--work", type=Path, help="a folder to work in, and to keep what fails in")
    made.add_argument("--deadline-seconds", type=float, default=float("inf"))
    made.add_argument("--real", action="store_true", help="start programs, as a user does")
    made.add_argument("--set", action="append", default=[], help="KEY=VALUE of the recipe; again")
    made.add_argument("--where", default="", help="a word for the rows: two GPUs")
    made.add_argument("--table", action="store_true", help="print the rows' table, and no more")
    return made


if __name__ == "__main__":
    sys.exit(main())
