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
    python scripts/kills.py --at-once 10       # on a host of twenty processors and more
    python scripts/kills.py --missing          # what is left to do; --table: what was seen

Starts are forked behind the imports; `--real` starts programs as a user does (`trainkit sft`,
`trainkit launch`, `train.sh` in turn), which takes ten times as long. One row a cell, with what it
has seen so far: the same command goes on where it was stopped. The exit status is 0 when every run
ended with the right bytes and nobody had to help.
"""

import argparse
import contextlib
import ctypes
import fcntl
import fnmatch
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from kill_rounds import KINDS, SPREADS, Cell, Row
from kill_starts import Starts, prepare
from moments import children

from trainkit.parallel.launch.processes import count_local_gpus

WORKERS_END_SECONDS = 30.0
"""After the deadline the starts that are under way may end; what has not by then does not count."""


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


def missing(rows: dict[str, Row], names: list[str], starts: str, enough: tuple[int, int]) -> str:
    """Which cells have not seen enough."""
    lines = ["| cell | kills missing | of them inside a save |", "|---|---:|---:|"]
    left = {name: _row(rows, name, starts).missing(*enough) for name in names}
    lines += [f"| {name} | {max(each)} | {each[1]} |" for name, each in left.items() if any(each)]
    lines.append(f"| all | {sum(map(max, left.values()))} | {sum(n for _, n in left.values())} |")
    return "\n".join(lines)


def _row(rows: dict[str, Row], name: str, starts: str) -> Row:
    return rows.get(f"{name} {starts}") or Row(name, starts)


class Suite:
    """Rounds of cells, some at a time, each in a process and a folder of its own."""

    def __init__(self, arguments: argparse.Namespace, names: list[str], folder: Path) -> None:
        self._arguments, self._names, self._folder = arguments, names, folder
        self._enough = arguments.kills, arguments.in_saves
        self._rows = read_rows(arguments.json)
        self._starts = kind_of_start(arguments)
        self._running: dict[int, str] = {}
        self._deadline = time.monotonic() + arguments.deadline_seconds
        # What a worker that is ended leaves comes to this process.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)

    def run(self) -> dict[str, Row]:
        """Until all have enough, or the time is up; returns the rows of all cells."""
        while True:
            now = time.monotonic()
            waiting = self._left() if now < self._deadline else []
            if not waiting and not self._running:
                return self._rows
            if waiting and len(self._running) < self._arguments.at_once:
                self._begin(waiting[0])
                continue
            self._collect()
            if now > self._deadline + WORKERS_END_SECONDS:
                self._end_all()
            time.sleep(0.02)

    def _left(self) -> list[str]:
        """The cells that miss something and are not under way, those that miss most first."""
        missed = {
            name: max(_row(self._rows, name, self._starts).missing(*self._enough))
            for name in self._names
            if name not in self._running.values()
        }
        return sorted((name for name in missed if missed[name]), key=lambda each: -missed[each])

    def _begin(self, name: str) -> None:
        """A round, in a process that is forked behind the imports."""
        folder = self._folder / name.replace("/", "-")
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            self._running[pid] = name
            return
        code = 1
        try:
            self._round(name, folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _round(self, name: str, folder: Path) -> None:
        """In a worker: one round; its row is left in a file."""
        folder.mkdir(exist_ok=True)
        for source in ("m", "d.jsonl"):
            with contextlib.suppress(FileExistsError):
                (folder / source).symlink_to(f"../{source}")
        cell = Cell(name, Starts(folder, real=self._arguments.real), overrides=self._arguments.set)
        known = folder / "whole.json"
        if not known.exists():
            known.write_text(json.dumps(cell.whole()))
        digest, counts = json.loads(known.read_text())
        row = _row(self._rows, name, self._starts)
        left = row.missing(*self._enough)
        num_failures = len(row.failures)
        cell.round(row, digest, counts, missing=left, until=self._deadline)
        if len(row.failures) > num_failures:
            said = (folder / "said.log").read_text(errors="replace").splitlines()
            print(f"{row.failures[-1]}; it said last:", *said[-60:], sep="\n")
        (folder / "row.json").write_text(json.dumps(asdict(row)))

    def _collect(self) -> None:
        """Take over the rows of the rounds that have ended."""
        for pid, name in list(self._running.items()):
            if not os.waitpid(pid, os.WNOHANG)[0]:
                continue
            del self._running[pid]
            said = self._folder / name.replace("/", "-") / "row.json"
            if not said.exists():
                self._names.remove(name)
                print(f"{name}: the round ended without a row; no more of this cell", flush=True)
                continue
            row = Row(**json.loads(said.read_text()))
            said.unlink()
            self._rows[f"{name} {self._starts}"] = row
            write_rows(self._arguments.json, self._rows)
            print(f"{name}: {row.kills} kills, {row.exact} of {row.rounds} exact", flush=True)

    def _end_all(self) -> None:
        """End the starts that are under way, and what they started."""
        for pid, name in self._running.items():
            print(f"{name}: a round was cut short by the deadline", flush=True)
            os.kill(pid, signal.SIGKILL)
        self._running.clear()
        while left := children(os.getpid()):
            for pid in left:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def kind_of_start(arguments: argparse.Namespace) -> str:
    """How the rows call the starts of this command."""
    words = ["real" if arguments.real else "forked", arguments.where, *arguments.set]
    return ", ".join(word for word in words if word)


def main() -> int:
    """Go through the cells, those that miss most first, until all have enough or time is up."""
    arguments = parser().parse_args()
    rows = read_rows(arguments.json)
    if arguments.table:
        print(table(rows))
        return 0
    patterns = arguments.cells.split(",")
    kinds = [kind for kind in KINDS if kind != "qlora" or count_local_gpus()]
    names = [f"{kind}/{spread}" for kind in kinds for spread in SPREADS]
    names = [name for name in names if any(fnmatch.fnmatch(name, each) for each in patterns)]
    if arguments.missing:
        enough = arguments.kills, arguments.in_saves
        print(missing(rows, names, kind_of_start(arguments), enough))
        return 0
    with tempfile.TemporaryDirectory(prefix="kills-") as scratch:
        folder = Path(arguments.work or scratch).resolve()
        folder.mkdir(exist_ok=True)
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another one's kills would count here
        prepare(folder, real=arguments.real)
        rows = Suite(arguments, names, folder).run()
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
    made.add_argument("--at-once", type=int, default=1, help="cells; each takes two processors")
    made.add_argument("--real", action="store_true", help="start programs, as a user does")
    made.add_argument("--set", action="append", default=[], help="KEY=VALUE of the recipe; again")
    made.add_argument("--where", default="", help="a word for the rows: two GPUs")
    made.add_argument("--table", action="store_true", help="print the rows' table, and no more")
    made.add_argument("--missing", action="store_true", help="print what is left to do, likewise")
    return made


if __name__ == "__main__":
    sys.exit(main())
