"""One process per measurement, all imported before the first one gets the GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def run_in_processes(
    module: str,
    payloads: Sequence[Mapping[str, Any]],
    *,
    environments: Sequence[Mapping[str, str]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Give each payload to its own ``python -m module``, one after another.

    Every process imports what it needs at once and waits for its line on stdin, so that the GPU
    is not idle while Python starts.

    Args:
        module: reads one JSON line from stdin and writes one to stdout, its last.
        payloads: the lines.
        environments: what each process has in its environment beside ours.

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
        for payload, process in zip(payloads, processes, strict=True):
            output, errors = process.communicate(json.dumps(payload) + "\n")
            if process.returncode:
                yield {"error": errors.strip()[-2000:]}
            else:
                yield json.loads(output.strip().splitlines()[-1])
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
