"""Runs of ``trainkit`` beside one another, each on ranks of its own, forked from one process."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


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
        deadline: ``time.monotonic()`` at which all of them end, and no other begins.

    Attributes:
        went: whether a run that has ended went well, by its name.
    """

    def __init__(
        self, root: Path, at_once: int, timeout: float, deadline: float = math.inf
    ) -> None:
        self.root, self._at_once, self._timeout = root, at_once, timeout
        self._deadline = deadline
        self.went: dict[str, bool] = {}
        self._count = 0
        self._forks = _can_fork()

    def all(self, wanted: Iterable[tuple[str, list[str], int]]) -> Iterator[str]:
        """Run each (name, words, ranks), and tell the names as they end.

        What has not begun at the deadline is not run, and has no entry in `went`.
        """
        waiting, going = deque(wanted), list[Started]()
        while waiting or going:
            if time.monotonic() > self._deadline:
                waiting.clear()
            while waiting and len(going) < self._at_once:
                going.append(self._start(*waiting.popleft()))
            for each in list(going):
                if self._has_ended(each):
                    going.remove(each)
                    self.went[each.name] = each.went_well
                    yield each.name
            time.sleep(0.05)

    def said(self, name: str) -> str:
        """What a run's log says."""
        return errors_of(self.root / f"{name}.log")

    def _start(self, name: str, words: list[str], ranks: int) -> Started:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._count += 1
        pids = {self._fork(name, words, rank, ranks, port) for rank in range(ranks)}
        return Started(name, pids, min(time.monotonic() + self._timeout, self._deadline))

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
            visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or visible_gpus()).split(",")
            os.environ["CUDA_VISIBLE_DEVICES"] = visible[self._count % len(visible)]
            return
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in places.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def errors_of(log: Path) -> str:
    """What a log says of an error, and its end; a launcher's own summary hides the cause."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [each.strip() for each in lines if re.search(r"(?i)\berror\b|Error:", each)]
    told = [*dict.fromkeys(errors)][:4]
    return " ".join(" ".join([*told, *lines[-12:]]).split())[:1500]


def visible_gpus() -> str:
    """The GPUs of this host, with commas; empty without any."""
    from trainkit.parallel.launch import count_local_gpus

    return ",".join(map(str, range(count_local_gpus())))


def _can_fork() -> bool:
    """Whether a fork of this process, with its imports, can use a GPU; if not, runs start anew."""
    if not visible_gpus():
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
