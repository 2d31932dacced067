"""The run directory: where everything a run reads, does and leaves behind can be found.

``train_model/<name>-<UTC stamp>/`` is made once and never overwritten. Every file in it is written
complete or not at all (``trainkit.run.files``) and goes through ``trainkit.redact``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from trainkit.errors import ResumeRefusedError, RunDirectoryError, StoppedError, TrainkitError
from trainkit.places import checkpoints_in, refuse_file, regular, regular_files, step_of
from trainkit.processes import Process
from trainkit.redact import redact, redact_text
from trainkit.run.files import RunGoneError, explain_os_errors, write_json_atomic, write_text_atomic
from trainkit.run.metrics import MetricsWriter
from trainkit.run.status import (
    Status,
    exit_reason,
    read_status,
    say_if_changed,
    this_process,
)

State = Literal["running", "done", "failed", "interrupted"]

# Between two status writes that only carry a newer step. A reader learns of a hang by the age of
# ``updated``, so this stays well under any sensible timeout.
_HEARTBEAT_SECONDS = 10.0


class RunDirectory:
    """One run's directory with typed paths. Make one with ``create``, ``create_at`` or ``open``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._last_heartbeat = 0.0
        self._step: int | None = None
        self._held: int | None = None
        self._hashed: dict[Path, tuple[int, Any]] | None = None
        self.name = root.name
        self.recipe = root / "recipe.yaml"
        self.resolved = root / "resolved.yaml"
        """Every recipe value in force and where it came from."""
        self.command = root / "command.sh"
        self.environment = root / "environment.json"
        self.data = root / "data.json"
        """What became of every data file: rows, kept, dropped, truncated, tokens."""
        self.dropped = root / "dropped.jsonl"
        """One line for each row that could not be used, with file, line and reason."""
        self.changed = root / "changed.jsonl"
        """One line for each row that was cut or repaired."""
        self.changes = root / "changes.jsonl"
        """One line for each start of the run: overrides, and what they changed."""
        self.kernels = root / "kernels.json"
        self.memory = root / "memory.json"
        """Memory and time: what was estimated, and what was measured."""
        self.metrics = root / "metrics.jsonl"
        self.log_history = root / "log_history.json"
        self.generation_eval = root / "generation_eval.json"
        """The answers generated on held-out conversations, and how many are exact."""
        self.logs = root / "logs"
        self.plots = root / "plots"
        self.report = root / "report.html"
        self.final = root / "final"
        self.model_card = root / "README.md"
        self.status_file = root / "status.json"

    # -- making and opening -------------------------------------------------------------------

    @classmethod
    def create(
        cls, parent: Path | str = "train_model", name: str = "run", *, now: datetime | None = None
    ) -> RunDirectory:
        """Make ``parent/<name>-<UTC stamp>``; a number is appended if that exists already.

        Characters of the name that do not belong in a file name become ``-``.
        """
        stamp = (now or datetime.now(timezone.utc)).strftime("%Y%m%dT%H%M%SZ")
        base = f"{file_name(name)}-{stamp}"
        parent = Path(parent).expanduser()
        with explain_os_errors(parent):
            parent.mkdir(parents=True, exist_ok=True)
            for attempt in range(1, 1000):
                root = parent / (base if attempt == 1 else f"{base}-{attempt}")
                # mkdir is the lock: of two runs started in one second, one gets the next number.
                with contextlib.suppress(FileExistsError):
                    root.mkdir()
                    return cls(root.resolve())._begun()
        raise RunDirectoryError(f"a thousand runs named {base} exist", where=str(parent))

    @staticmethod
    def check_free(path: Path | str) -> None:
        """See that a run can be made here: nothing is there, or an empty directory."""
        root = Path(path).expanduser()
        with explain_os_errors(root):
            if root.exists() and not root.is_dir():
                raise RunDirectoryError(
                    "the output directory is a file",
                    where=str(path),
                    fix="give another --output-dir",
                )
            if root.is_dir() and not is_unfinished(root):
                raise RunDirectoryError(
                    "the output directory exists and is not empty; a run is never overwritten",
                    where=str(path),
                    fix="give another --output-dir, leave it out for a new stamped directory, "
                    "or continue that run with --resume",
                )

    @classmethod
    def create_at(cls, path: Path | str) -> RunDirectory:
        """Make the directory the user asked for by name; an empty one may exist already."""
        cls.check_free(path)
        root = Path(path).expanduser()
        with explain_os_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        return cls(root.resolve())._begun()

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        root = Path(path).expanduser()
        refuse_file(root, RunDirectoryError)
        if not (root / "status.json").is_file():
            raise RunDirectoryError(
                "there is no run in this directory (no status.json)"
                if root.is_dir()
                else "there is no such run directory",
                where=str(path),
                fix="give the directory that `trainkit sft` printed as its last line",
            )
        run = cls(regular_files(root.resolve(), RunDirectoryError))
        for each in (run.final, run.plots, run.logs):
            if each.exists() and not each.is_dir():
                raise RunDirectoryError(
                    "a file, or a pipe, is where a directory of the run belongs",
                    where=str(each),
                    fix="move it away",
                )
        return run

    @classmethod
    def adopt(cls, path: Path | str) -> RunDirectory:
        """Begin a run in a directory that exists and that the caller knows to be one."""
        return cls(Path(path).expanduser().resolve())._begun(is_new=False)

    def _begun(self, *, is_new: bool = True) -> RunDirectory:
        """Begin; where that fails, a new directory must not be in the way of the next try."""
        try:
            with explain_os_errors(self.root):
                self.logs.mkdir(exist_ok=True)
                self.plots.mkdir(exist_ok=True)
            self.write_status("running")
        except BaseException:
            if is_new:
                shutil.rmtree(self.root, ignore_errors=True)
            raise
        return self

    @property
    def bases(self) -> list[Path]:
        """The recipes that the recipe builds on, as they were given, the deepest first."""
        return sorted(self.root.glob("recipe.base*.yaml"))

    def base(self, place: int) -> Path:
        return self.root / f"recipe.base{place:02d}.yaml"

    def rank_log(self, dist_rank: int) -> Path:
        return self.logs / f"rank{dist_rank}.log"

    def checkpoint(self, step: int) -> Path:
        return self.root / f"checkpoint-{step}"

    # -- writing ------------------------------------------------------------------------------

    def write_text(self, path: Path, text: str) -> None:
        write_text_atomic(path, redact_text(text))

    def write_json(self, path: Path, value: Any) -> None:
        write_json_atomic(path, redact(value))

    def open_metrics(self, *, resume_step: int | None = None) -> MetricsWriter:
        """Open ``metrics.jsonl`` for appending; ``resume_step`` marks a resumed run.

        Args:
            resume_step: the step of the checkpoint that the run continues from; rows after it are
                set aside, and the curves mark the point.
        """
        status = self.status()
        if resume_step:
            resumed = [step for step in status.resumed_at_steps if step <= resume_step]
            status = status.updated_with(resumed_at_steps=[*resumed, resume_step])
        self._write(status.updated_with(proofs={}))  # rows are about to be set aside
        writer, self._hashed = MetricsWriter(self.metrics, resume_step=resume_step), {}
        self.write_status("running")
        return writer

    # -- status -------------------------------------------------------------------------------

    def status(self) -> Status:
        return read_status(self.status_file)

    def write_status(
        self,
        state: State,
        *,
        reason: str | None = None,
        step: int | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Replace ``status.json``.

        Without ``step`` or ``total_steps`` the recorded one stays.
        """
        before = self.status()
        now = before.updated_with(
            state=state,
            reason=None if reason is None else redact_text(reason),
            last_step=before.last_step if step is None else step,
            total_steps=before.total_steps if total_steps is None else total_steps,
            **this_process(),
        )
        if state != "running":  # said by a thread besides, maybe, and of the whole files
            now = now.updated_with(proofs=self._proofs({}))
        elif self._hashed is not None:
            now = now.updated_with(proofs=self._proofs(self._hashed))
        self._write(now)

    def _proofs(self, hashed: dict[Path, tuple[int, Any]]) -> dict[str, tuple[int, str]]:
        """Lengths and digests of the records; what ``hashed`` has of them is not read again."""
        for path in (self.metrics, self.changes):
            size, digest = hashed.get(path) or (0, hashlib.sha256())
            if path.exists():
                with regular(path, RunDirectoryError).open("rb") as stream:
                    stream.seek(size)
                    while block := stream.read(1 << 20):
                        digest.update(block)
                        size += len(block)
            hashed[path] = size, digest
        return {path.name: (size, digest.hexdigest()) for path, (size, digest) in hashed.items()}

    def _write(self, status: Status) -> None:
        if self._held is not None:
            self.refuse_gone()
        write_json_atomic(self.status_file, asdict(status))

    def heartbeat(self, step: int) -> None:
        """Record the last finished step, at most every ten seconds: cheap to call each step."""
        self._step = step
        self.refuse_gone()
        now = time.monotonic()
        if now - self._last_heartbeat >= _HEARTBEAT_SECONDS:
            self._last_heartbeat = now
            self.write_status("running", step=step)

    def refuse_gone(self) -> None:
        """See that the directory is still there; from the first call on, that it is the same."""
        with contextlib.suppress(OSError):
            if self._held is None:
                self._held = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
            if os.path.samestat(self.root.stat(), os.fstat(self._held)):
                self.status_file.stat()
                return
        place = None
        if self._held is not None:
            with contextlib.suppress(OSError):  # not Linux
                place = Path(os.readlink(f"/proc/self/fd/{self._held}"))  # noqa: PTH115 - no file
        if place is None or not place.is_dir():
            raise RunGoneError(
                "the run directory was deleted while the run went on, and its checkpoints with it",
                where=str(self.root),
                fix="start a new run",
            )
        whole = (each for each in checkpoints_in(place) if (each / "manifest.json").is_file())
        last = max(whole, key=step_of, default=None)
        is_run = (place / "status.json").is_file()
        raise RunGoneError(
            (f"the run directory was moved to {place}" if is_run else "status.json was deleted")
            + " while the run went on; "
            + (f"its last checkpoint is {last}" if last else "there is no checkpoint"),
            where=str(self.root),
            fix=f"go on there: {shlex.join(['trainkit', 'sft', '--resume', str(place)])}"
            if is_run
            else "start a new run",
        )

    @contextlib.contextmanager
    def recording_status(self) -> Iterator[None]:
        """Run a body under a truthful status: running, then done, failed or interrupted.

        An exception is recorded with its reason (and its traceback, unless it is one of
        trainkit's own errors, whose sentence is enough) and goes on its way.
        """
        before = self.status()
        for path in (self.metrics, self.changes):
            say_if_changed(path)
        self.refuse_gone()
        self.write_status("running")
        try:
            yield
        except ResumeRefusedError:
            write_json_atomic(self.status_file, asdict(before))  # the run is what it was
            raise
        except BaseException as error:
            # A full disk may refuse this write too; the error itself must still come through.
            with contextlib.suppress(OSError, TrainkitError):
                self._record_end(error)
            if isinstance(error, OSError | RunGoneError):
                self.refuse_gone()
            raise
        self.write_status("done", step=self._step)

    def _record_end(self, error: BaseException) -> None:
        own = isinstance(error, TrainkitError)
        state: State = "failed"
        reason: str | None = str(error) if own else f"{type(error).__name__}: {error}"
        if isinstance(error, KeyboardInterrupt | StoppedError):
            state, reason = "interrupted", str(error) or "interrupted by Ctrl-C"
        elif isinstance(error, SystemExit):
            # The body may have said more (a preemption that saved): its status is kept.
            if self.status().state != "running":
                return
            state, reason = "done", None
            if error.code not in (0, None):
                reason = exit_reason(error.code)
                state = "interrupted" if "signal" in reason else "failed"
        self.write_status(state, reason=reason, step=self._step)
        if not own and not isinstance(error, KeyboardInterrupt | SystemExit):
            trace = "".join(traceback.format_exception(error))
            self.write_text(self.logs / "traceback.txt", trace)


def is_unfinished(path: Path) -> bool:
    """Whether a directory is empty, or a start was killed in it before there was a run."""
    if not path.is_dir() or (path / "status.json").exists():
        return False
    own = re.compile(r"logs|plots|\.lock|\.status\.json\..*")
    return all(
        own.fullmatch(child.name) and not (child.is_dir() and any(child.iterdir()))
        for child in path.iterdir()
    )


def file_name(name: str) -> str:
    """``name`` as one path component: word characters (of any script), dots and dashes."""
    safe = re.sub(r"[^\w.\-]+", "-", name).strip("-.")
    # 255 bytes is the usual limit of a component; the stamp and a number need 22.
    while len(safe.encode()) > 200:
        safe = safe[:-1]
    return safe or "run"


_NAME = ".lock"
_HALF_WRITTEN = re.compile(r"\..+\.[a-z0-9_]{8}")
"""What ``write_bytes_atomic`` names a file until it is complete."""


@contextlib.contextmanager
def locked(run: RunDirectory) -> Iterator[None]:
    """Keep other starts of the run out while the body runs; sweep what a killed one left."""
    path = regular(run.root / _NAME, RunDirectoryError)
    with explain_os_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with explain_os_errors(path), os.fdopen(descriptor, "r+", encoding="utf-8") as stream:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # two starts look at the file one after the other
        owner = None
        with contextlib.suppress(ValueError, TypeError, RecursionError):  # empty, or a kill tore it
            owner = Process(**json.loads(stream.read()))
        if owner is not None and owner != Process.this() and not owner.is_gone:
            where = "" if owner.is_here else f" on {owner.host}"
            raise RunDirectoryError(
                f"process {owner.pid}{where} is training in this run",
                where=str(path.parent),
                fix=f"wait for it, or stop it (kill {owner.pid})"
                if owner.is_here
                else f"stop it there; if that machine is gone: rm {path}",
            )
        stream.seek(0)
        stream.truncate()
        stream.write(json.dumps(asdict(Process.this())))
    for left in (*run.root.glob(".*"), *run.plots.glob(".*")):
        if left.is_file() and left.name != _NAME and _HALF_WRITTEN.fullmatch(left.name):
            left.unlink(missing_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
