"""One process per measurement, all imported before the first one gets the GPU."""

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def run_in_processes(
    module: str,
    payloads: Sequence[Mapping[str, Any]],
    *,
    environments: Sequence[Mapping[str, str]] | None = None,
    together: bool = False,
) -> Iterator[dict[str, Any]]:
    """Give each payload to its own ``python -m module``, one after another.

    Every process imports what it needs at once and waits for its line on stdin, so that the GPU
    is not idle while Python starts.

    Args:
        module: reads one JSON line from stdin and writes one to stdout, its last.
        payloads: the lines.
        environments: what each process has in its environment besides ours.
        together: start the work of all at once, where nothing is timed.

    Yields:
        What each process wrote, or ``{"error": the end of its stderr}``.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **extra},
        )
        for extra in environments or [{}] * len(payloads)
    ]
    try:
        if together:
            for payload, process in zip(payloads, processes, strict=True):
                _send(payload, process)
        for payload, process in zip(payloads, processes, strict=True):
            if not together:
                _send(payload, process)
            output, errors = process.communicate()
            if process.returncode:
                yield {"error": errors.strip()[-2000:]}
            else:
                yield json.loads(output.strip().split("\n")[-1])
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


def _send(payload: Mapping[str, Any], process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(BrokenPipeError):  # it died: its stderr says why
        if process.stdin is not None:
            process.stdin.write(json.dumps(payload) + "\n")
            process.stdin.flush()


MOST = 32
"""Processes that wait at a time; each takes about a GiB of the host."""

TO_IMPORT = 180.0
"""Seconds in which a process has imported what it needs."""


class Fresh:
    """Calls, each in a process of its own; all have imported before the first one's turn comes.

    A process ends with all its memory, of which a longer one keeps a part. Nothing is imported
    while another one measures: where the host launches slower than the GPU computes, it shows.

    Args:
        count: calls that will be made.
        imports: what a process does before it waits.
    """

    def __init__(self, count: int, imports: Callable[[], None]) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._imports = imports
        self._left = count
        self._waiting: deque[tuple[Any, Any]] = deque()
        self._ready: set[Any] = set()

    def __enter__(self) -> "Fresh":
        self._fill()
        return self

    def __exit__(self, *_: object) -> None:
        for process, _ in self._waiting:
            process.kill()

    def _fill(self) -> None:
        while self._left and len(self._waiting) < MOST:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_answer, args=(theirs, self._imports))
            process.start()
            theirs.close()
            self._waiting.append((process, ours))
            self._left -= 1

    def _are_ready(self) -> None:
        """Wait until all that were started have imported."""
        end = time.monotonic() + TO_IMPORT
        for process, pipe in self._waiting:
            if process not in self._ready and pipe.poll(max(end - time.monotonic(), 0.0)):
                with contextlib.suppress(EOFError):
                    pipe.recv()
                self._ready.add(process)

    def call(
        self, function: Callable[..., dict[str, Any]], *args: Any, seconds: float
    ) -> dict[str, Any]:
        """What a function returns, or ``{"error": why it has not}``.

        Args:
            function: of a module, so that another process finds it.
            args: its arguments.
            seconds: after which the process is ended; they begin when it has imported.
        """
        if not self._waiting:
            self._left = max(self._left, 1)
            self._fill()
        self._are_ready()
        process, pipe = self._waiting.popleft()
        try:
            pipe.send((function, args))
            if not pipe.poll(max(seconds, 0.0)):
                process.kill()
                return {"error": f"not done after {seconds:.0f} s"}
            found: dict[str, Any] = pipe.recv()
        except (EOFError, BrokenPipeError):
            process.join(5)
            return {"error": f"the process died (exit code {process.exitcode})"}
        finally:
            if process.exitcode is None:
                process.join(5)
            if process.exitcode is None:
                process.kill()
                process.join()
        return found


def _answer(pipe: Any, imports: Callable[[], None]) -> None:
    """A process: import, wait, call, send what came out."""
    imports()
    pipe.send("ready")
    try:
        function, args = pipe.recv()
    except EOFError:
        return
    try:
        found = function(*args)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:800]}
    pipe.send(found)
