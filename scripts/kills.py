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
import fcntl
import fnmatch
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kill_starts import ROOT, Starts, prepare

sys.path.append(str(ROOT / "tests"))
from moments import Kill, differences, digest_of

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
PHASES = {"save": 45, "kept": 10, "train": 15, "load": 10, "data": 10, "start": 10}
"""Where the kill comes, and how often of a hundred."""


STEPS = 10
KILLS_A_ROUND = 8
"""At most: a round is over when a start was done before its kill came."""


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

    def share(self, kills: int, in_saves: int) -> float:
        """How near it is to so many kills, so many of them inside a save; from 1 on it is there."""
        done = self.kills / kills
        return min(done, self.inside_saves / in_saves) if in_saves else done


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

    def round(
        self,
        row: Row,
        whole: dict[str, str],
        counts: list[Counter[str]],
        *,
        kills: int,
        until: float,
    ) -> None:
        """Kill some starts of a run, let the last one be, and compare.

        Args:
            row: is told what came of it.
            whole: the bytes of the run that nobody killed.
            counts: what each rank of it does to files.
            kills: at most so many.
            until: none later, by `time.monotonic`.
        """
        chance = random.Random(f"{self.name}/{row.starts}/{row.rounds}/{KILLS_A_ROUND}")
        number = f"-{self.name.replace('/', '-')}-{row.rounds}"
        run = self._starts.folder / f"run{number}"
        row.rounds += 1
        events: list[str] = []
        try:
            while len(events) < min(kills, KILLS_A_ROUND) and time.monotonic() < until:
                kill = self._draw(chance, counts, row, run)
                events.append(f"{kill.victim} {kill.phase} {kill.at} +{kill.delay:.3f}")
                code, _ = self._run(number, kill)
                events[-1] += f" -> {code}"
                if not self._count(row, kill, run):
                    break  # it was done before
            else:
                code, _ = self._run(number, None)
            wrong = differences(whole, digest_of(run)) if code == 0 else [f"exit code {code}"]
        except (TimeoutError, OSError, ValueError) as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            row.failures.append(f"round {row.rounds - 1}: {'; '.join(wrong[:6])} after {events}")
        else:
            row.exact += 1
            self._clear(number)

    def _count(self, row: Row, kill: Kill, run: Path) -> bool:
        """Whether the kill came; notes it."""
        struck = self._starts.folder / "files"
        if not struck.exists():
            return False
        ended = time.time() - struck.stat().st_mtime
        row.slowest_end_seconds = max(row.slowest_end_seconds, round(ended, 1))
        struck.unlink()
        row.kills += 1
        row.phases[kill.phase] = row.phases.get(kill.phase, 0) + 1
        row.victims[kill.victim] = row.victims.get(kill.victim, 0) + 1
        row.inside_saves += any(run.glob(".*staging*"))
        return True

    def _draw(self, chance: random.Random, counts: list[Counter[str]], row: Row, run: Path) -> Kill:
        """A moment of what is left of the run, so that most kills come."""
        more = 2 if row.inside_saves < 0.4 * row.kills else 1
        weights = {**PHASES, "save": more * PHASES["save"]}
        phase = chance.choices(list(weights), list(weights.values()))[0]
        rank = chance.randrange(self.num_ranks)
        saved = run.glob("checkpoint-*")
        done = max((int(path.name.partition("-")[2]) for path in saved), default=0)
        share = {"save": 1 - done / STEPS, "start": 0.7, "load": 0.6, "data": 0.7}
        most = max(int(counts[rank].get(phase, 0) * (share.get(phase, 1) if done else 1)), 1)
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
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another one's kills would count here
        prepare(folder, real=arguments.real)
        starts = Starts(folder, real=arguments.real)
        known: dict[str, Any] = {}
        enough = arguments.kills, arguments.in_saves
        while names and time.monotonic() < deadline:
            made = {name: Row(name, kind_of_start) for name in names}
            of = {name: rows.get(f"{name} {kind_of_start}", made[name]) for name in names}
            name = min(names, key=lambda each: of[each].share(*enough))
            row = rows.setdefault(f"{name} {kind_of_start}", of[name])
            if row.share(*enough) >= 1:  # and so have all others
                break
            cell = Cell(name, starts, arguments.set)
            if name not in known:
                known[name] = cell.whole()
            left = arguments.kills - row.kills
            cell.round(row, *known[name], kills=max(left, 1), until=deadline)
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
    made.add_argument("--in-saves", type=int, default=40, help="of them, a save half done")
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
