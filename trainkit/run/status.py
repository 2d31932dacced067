"""``status.json``: is the run alive, and how did it end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import shlex
import signal
import socket
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainkit.errors import RunDirectoryError, TrainkitError
from trainkit.parallel.launch import OWN_LAUNCH
from trainkit.places import regular
from trainkit.run.files import WAY_OUT, say_once


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclasses.dataclass(frozen=True)
class Status:
    """What is known about a run's life.

    Attributes:
        state: ``running``, ``done``, ``failed`` or ``interrupted``. A killed process leaves
            ``running`` behind: then ``updated`` is old and ``pid`` on ``host`` is gone.
        started: when the run directory was made, ISO 8601, UTC.
        updated: when this file was written, ISO 8601, UTC.
        proofs: lengths and digests of ``metrics.jsonl`` and ``changes.jsonl`` at this moment, by
            their names: a killed run has added rows since, and changed none.
    """

    state: str = "running"
    reason: str | None = None
    last_step: int | None = None
    total_steps: int | None = None
    resumed_at_steps: list[int] = dataclasses.field(default_factory=list)
    started: str = dataclasses.field(default_factory=utc_now)
    updated: str = dataclasses.field(default_factory=utc_now)
    pid: int | None = None
    host: str | None = None
    launch: str | None = None
    num_ranks: int | None = None
    num_hosts: int | None = None
    proofs: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def updated_with(self, **changes: Any) -> Status:
        """A copy with these fields changed and ``updated`` set to now."""
        return dataclasses.replace(self, **{"updated": utc_now(), **changes})


def launch_id() -> str | None:
    """What tells one torchrun from another and outlives its restarts; None without torchrun."""
    variables = os.environ
    run_id = variables.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    if run_id != "none":
        return run_id
    host = variables.get("MASTER_ADDR")
    is_one_host = variables.get("LOCAL_WORLD_SIZE") == variables.get("WORLD_SIZE")
    # The port may be another one after a restart; torchrun itself is the same process.
    return f"{host}/{os.getppid()}" if is_one_host else f"{host}:{variables.get('MASTER_PORT')}"


def this_process() -> dict[str, Any]:
    """What a `Status` says of the processes that run, as torchrun has told this one."""
    num_ranks = int(os.environ.get("WORLD_SIZE") or 1)
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE") or num_ranks)
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "launch": launch_id(),
        "num_ranks": num_ranks,
        "num_hosts": max(num_ranks // per_host, 1),
    }


def is_restarted() -> bool:
    """Whether this launch may have made a run before: it is then to be gone on with.

    torchrun counts the restarts of one host only. A launch of ``trainkit launch`` has a name that
    no other has, so a run of that name is its own, on whichever host and whoever restarted it.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return name.startswith(OWN_LAUNCH) or int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def read_status(path: Path) -> Status:
    try:
        content = regular(path, RunDirectoryError).read_bytes()
    except FileNotFoundError:
        return Status()
    try:
        status = _shape().validate_json(content, strict=True)
        if b'"updated"' in content:
            return status
        # Written again by hand, and no news of a run that goes on.
        written = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
        return status.updated_with(updated=written.isoformat(timespec="seconds"))
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        why = ".".join(map(str, wrong["loc"])) or "it"
        # An empty object still says that there is a run; what it was doing is written again.
        raise RunDirectoryError(
            f"status.json is damaged ({why}: {wrong['msg']})",
            where=str(path),
            fix=f"write it again: echo '{{}}' > {shlex.quote(str(path))}",
        ) from error


@functools.cache
def _shape() -> TypeAdapter[Status]:
    return TypeAdapter(Status)


def say_if_changed(path: Path) -> None:
    """Say so where the rows of a run are not those that it had when it last said how it was."""
    with contextlib.suppress(TrainkitError):  # what is damaged is named by its reader
        status = read_status(path.with_name("status.json"))
        if path.name not in status.proofs:
            return
        size, proof = status.proofs[path.name]
        content = regular(path, RunDirectoryError).read_bytes() if path.exists() else b""
        is_longer = len(content) > size and status.state != "running"
        if is_longer or hashlib.sha256(content[:size]).hexdigest() != proof:
            what = "rows were changed, moved, lost or added"
            say_once(f"{path} is not as the run left it: {what}; {WAY_OUT}")


def exit_reason(code: object) -> str:
    if isinstance(code, int) and code > 128:
        with contextlib.suppress(ValueError):
            return f"stopped by signal {signal.Signals(code - 128).name}"
    return f"exited with {code}"


def resume_command(run: Path, *overrides: str) -> str:
    """``trainkit sft --resume RUN``, or ``launch`` with as many processes as the run has."""
    try:
        status = read_status(run / "status.json")
    except TrainkitError:
        status = Status()
    num_ranks, num_hosts = status.num_ranks or 1, status.num_hosts or 1
    starter = ["sft"]
    if num_ranks > 1:  # on a machine with other GPUs, or none, sft alone would start another number
        hosts = ["--nnodes", str(num_hosts)] if num_hosts > 1 else []
        starter = ["launch", *hosts, "--nproc-per-node", str(num_ranks // num_hosts)]
    return shlex.join(["trainkit", *starter, "--resume", str(run), *overrides])
