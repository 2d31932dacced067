"""The command that goes on with a run, as it can be pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from trainkit.errors import TrainkitError
from trainkit.run.status import Status, read_status


def resume_command(run: Path, *overrides: str) -> str:
    """``trainkit sft --resume RUN``, or ``launch`` with as many processes as the run has.

    Args:
        run: its directory.
        overrides: ``section.key=value`` to add.
    """
    try:
        status = read_status(run / "status.json")
    except TrainkitError:
        status = Status()
    words = ["trainkit", *_starter(status), "--resume", str(run), *overrides]
    return shlex.join(words)


def _starter(status: Status) -> list[str]:
    """On a machine with other GPUs, or none, ``sft`` alone would start another number."""
    num_ranks, num_hosts = status.num_ranks or 1, status.num_hosts or 1
    if num_ranks == 1:
        return ["sft"]
    hosts = ["--nnodes", str(num_hosts)] if num_hosts > 1 else []
    return ["launch", *hosts, "--nproc-per-node", str(num_ranks // num_hosts)]
