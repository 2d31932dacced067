"""SIGKILL at a moment that is given by what a process does to its files, and what is left of a run.

A start counts the files that it opens, makes, renames and removes, by phase: its first moment, the
data, loading, steps, saves. A plan in the environment says at which of them it, its launcher or all
ranks are killed. Only the standard library: `arm` is called before anything is imported.
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PLAN = "TRAINKIT_KILL_PLAN"
"""The variable with the plan."""


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        phase: ``start``, ``data``, ``load``, ``train``, ``save`` (files of a checkpoint that is
            being written) or ``kept`` (files of one that is there, and of the final model).
        at: the how-manieth file that is opened, renamed, made or removed in it.
        delay: seconds after that.
        rank: whose files are counted.
        victim: ``rank``, ``launcher`` or ``group``.
    """

    phase: str
    at: int
    delay: float
    rank: int
    victim: str


def plan_of(run: Path, report: Path, kill: Kill | None, *, is_launched: bool) -> str:
    """The value of `PLAN`.

    Args:
        run: the run directory.
        report: is written when the kill comes; without one, what rank R counts goes to REPORT.R.
        kill: None lets the start be.
        is_launched: by torchrun, which itself is not meant.
    """
    known = {"run": str(run), "report": str(report), "launched": is_launched}
    return json.dumps({**known, "kill": None if kill is None else asdict(kill)})


class Counting:
    """Counts what this process does to files, by phase, and kills at the planned moment."""

    def __init__(self, run: str, kill: Kill | None, report: Path) -> None:
        self._run, self._kill, self._report = run, kill, report
        self._counts: Counter[str] = Counter()
        self._phase, self._began = "start", time.monotonic()
        self._lock = threading.Lock()
        self.is_counting = kill is None

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """For `sys.addaudithook`."""
        if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            return
        path = arguments[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        with self._lock:
            phase = self._phase_of(os.fspath(os.fsdecode(path)))
            if phase is None:
                return
            self._counts[phase] += 1
            kill = self._kill
            if kill is not None and kill.phase == phase and self._counts[phase] == kill.at:
                self._kill = None
                threading.Timer(kill.delay, strike, [kill.victim]).start()

    def _phase_of(self, path: str) -> str | None:
        """The phase that a file belongs to; it also tells when the next one has begun."""
        if "/cache" in path or path.endswith(("d.jsonl", "/prepared")):
            return "data"
        if not path.startswith(self._run) and "/m/" not in path:
            return "start" if self._phase == "start" else None
        if "staging" in path:
            return "save"
        if "checkpoint-" in path or "/final" in path:
            return "kept"
        if "logs/ranks" in path:
            self._phase = "train"
            return "train"
        if self._phase == "start":
            self._phase = "load"
        return "load" if self._phase == "load" else None

    def leave(self) -> None:
        """What a run that nobody kills does in each phase."""
        if self.is_counting:
            partial = self._report.with_name(f"{self._report.name}.partial")
            partial.write_text(json.dumps(self._counts))
            partial.replace(self._report)  # the process may end at any moment


def strike(victim: str) -> None:
    """SIGKILL to this process, to what has started it, or to all of them."""
    me, parent = os.getpid(), os.getppid()
    Path(json.loads(os.environ[PLAN])["report"]).write_text("struck")
    if victim == "rank" or "TORCHELASTIC_RUN_ID" not in os.environ:
        os.kill(me, signal.SIGKILL)
    elif victim == "launcher":
        os.kill(parent, signal.SIGKILL)
    else:
        for pid in [parent, *(each for each in children(parent) if each != me), me]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children(parent: int) -> list[int]:
    """The processes that one has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(status.parent.name))
    return found


def arm() -> None:
    """Carry out the plan of the environment in this process, if it is meant."""
    plan = json.loads(os.environ.get(PLAN) or "null")
    rank = int(os.environ.get("RANK") or 0)
    if plan is None or (plan["launched"] and "RANK" not in os.environ):
        return
    kill = None if plan["kill"] is None else Kill(**plan["kill"])
    if kill is not None and kill.rank != rank:
        return
    counting = Counting(plan["run"], kill, Path(plan["report"] + f".{rank}"))
    sys.addaudithook(counting.hook)
    threading.Thread(target=_report, args=[counting], daemon=True).start()


def _report(counting: Counting) -> None:
    """Forked processes leave without `atexit`."""
    while counting.is_counting:
        time.sleep(0.2)
        with contextlib.suppress(RuntimeError):
            counting.leave()


def digest_of(run: Path) -> dict[str, str]:
    """Every file that must be the same, and the names of all the others.

    Of the checkpoints the last one and their number: ranks whose launcher was killed save where
    they are, and an earlier one may be of another step.
    """
    steps = sorted(int(path.name.partition("-")[2]) for path in run.glob("checkpoint-*"))
    found = {"checkpoints": str(len(steps))}
    earlier = tuple(f"checkpoint-{step}/" for step in steps[:-1])
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = path.relative_to(run).as_posix()
        if name.startswith(earlier):
            continue
        exact = path.suffix in (".safetensors", ".pt", ".pth", ".bin")
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if exact else "a file"
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for key in ("loss", "grad_norm", "learning_rate", "num_tokens", "num_trained_tokens"):
            if key in row:
                found[f"{key} of step {row['step']}"] = repr(row[key])
    return found


MAY_DIFFER = ("metrics.superseded.jsonl", "logs/traceback.txt", "logs/stacks-")
"""Files that only a broken run has."""


def differences(whole: dict[str, str], broken: dict[str, str]) -> list[str]:
    """What is not as in the run that nobody killed."""
    names = [name for name in {**whole, **broken} if whole.get(name) != broken.get(name)]
    return [name for name in sorted(names) if not name.startswith(MAY_DIFFER)]
