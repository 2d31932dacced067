"""Work in the background of training: one piece at a time; an error is raised at the next one."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from torch.distributed import TCPStore

from trainkit.checkpoint.whole.atomic import record_files
from trainkit.parallel.snapshot import snapshot

_POLL_SECONDS = 0.05


class Background:
    """A thread that does one piece of work at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin; the piece before must have been waited for."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="save", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it is done.

        Raises:
            Exception: what the work raised; once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Wait, and leave out its error: another one is on its way."""
        with contextlib.suppress(Exception):
            self.wait()


@dataclass
class Save:
    """What is to be written of one checkpoint, by this rank.

    Attributes:
        directory: where.
        at_once: nothing is put off.
        problem: what could not be written so far.
    """

    directory: Path
    at_once: bool = False
    problem: Exception | None = None
    _jobs: list[tuple[Path | None, Callable[[], None]]] = field(default_factory=list)

    def copied(self, state: Any) -> Any:
        """A state that training cannot change while it is written."""
        return state if self.at_once else snapshot(state)

    def defer(self, path: Path | str | None, job: Callable[[], None]) -> None:
        """Write later, in the background: nothing that ``job`` reads may change meanwhile.

        Args:
            path: the file that it writes; None where it writes several.
            job: writes it.
        """
        if self.at_once:
            self.attempt(job)
        else:
            self._jobs.append((None if path is None else Path(path), job))

    def attempt(self, job: Callable[[], object]) -> None:
        """Write a small file now. An error must not keep this rank from what all do together."""
        try:
            job()
        except Exception as error:
            self.problem = self.problem or error

    def finish(self, *, records: bool) -> list[dict[str, Any]]:
        """Write what was deferred.

        Args:
            records: also force the files to the disk and hash them.

        Returns:
            The recorded files, as plain JSON.

        Raises:
            Exception: the first that failed.
        """
        for path, job in self._jobs:
            if self.problem is None:
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                self.attempt(job)
        if self.problem is not None:
            raise self.problem
        paths = [path.relative_to(self.directory).as_posix() for path, _ in self._jobs if path]
        return [vars(entry) for entry in record_files(self.directory, paths)] if records else []


class Notes:
    """What threads of different ranks tell one another, without a collective.

    Collectives belong to the training, which goes on meanwhile; and a file could not be written
    where the disk is full.

    The store is rank 0's own: the one that the ranks met at ends with their launcher, and they have
    to save when that was killed.

    Args:
        dist_rank: this rank.
        world_size: of how many; all of them make it together.
    """

    def __init__(self, dist_rank: int, world_size: int) -> None:
        self._rank, self._world_size = dist_rank, world_size
        self._own: dict[str, str] = {}
        self._store: Any = None
        if world_size > 1:
            host, port = os.environ["MASTER_ADDR"], [0]
            if dist_rank == 0:
                self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
                port = [self._store.port]
            broadcast_object_list(port)
            if dist_rank != 0:
                self._store = TCPStore(host, port[0], is_master=False)

    def put(self, topic: str, value: Mapping[str, Any]) -> None:
        """Tell all ranks."""
        key, text = f"trainkit/{topic}/{self._rank}", json.dumps(value)
        if self._store is None:
            self._own[key] = text
        else:
            self._store.set(key, text)

    def of(self, topic: str, dist_rank: int) -> dict[str, Any]:
        """Wait for the note of a rank."""
        key = f"trainkit/{topic}/{dist_rank}"
        if self._store is None:
            text = self._own.pop(key)
        else:
            while not self._store.check([key]):
                time.sleep(_POLL_SECONDS)
            text = self._store.get(key)
        note: dict[str, Any] = json.loads(text)
        return note

    def of_all(self, topic: str) -> list[dict[str, Any]]:
        """Wait for the notes of all ranks."""
        return [self.of(topic, rank) for rank in range(self._world_size)]
