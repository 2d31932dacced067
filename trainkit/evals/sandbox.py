"""Programs that a model wrote, run apart: own process, limits, no network where the system allows.

This guards against accidents (endless loops, gigabytes, stray files, calls home), not against an
attacker: the program runs as the same user, and reads what the user can read. HumanEval's programs
run here, many at a time: the harness's own runner needs the hub when it is imported, and runs what
a model wrote in its own process.
"""

import contextlib
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LIMITER = Path(__file__).with_name("limits.py")


def run_program(
    program: str,
    *,
    seconds: float = 10.0,
    memory_gib: float = 4.0,
    file_mib: int = 16,
    processes: int = 64,
) -> str | None:
    """Run a Python program to its end.

    It passes only if its last line is reached: ``exit(0)`` before that is a failure. It has a
    working directory of its own, which is removed, and none of this process's environment.

    Processor time is limited to ``seconds`` as well.

    Returns:
        None where it passed; else ``timed out``, or the last line of its errors.
    """
    mark = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="trainkit-program-") as folder:
        path = Path(folder, "program.py")
        last = f"\nimport os as _os\n_os.write(1, b'\\n{mark}\\n')\n"
        path.write_text(program + last, encoding="utf-8", errors="surrogatepass")
        command = [sys.executable, "-I", "-B", str(LIMITER), str(path)]
        command += map(str, (seconds, memory_gib, file_mib, processes))
        with Path(folder, "out").open("wb+") as out, Path(folder, "err").open("wb+") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder},
                start_new_session=True,
            )
            try:
                process.wait(seconds + 2)
                timed_out = False
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:  # the program and what it has started, which are one session
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            passed = mark in _tail(out).split("\n")
            lines = _tail(err).strip().split("\n")
    if timed_out or process.returncode in (-signal.SIGXCPU, -signal.SIGKILL, 137, 152):
        return "timed out, or out of memory"
    if passed and process.returncode == 0:
        return None
    return lines[-1][:300] or "it did not run to its end"


def _tail(stream: object, size: int = 4096) -> str:
    handle: int = stream.fileno()  # type: ignore[attr-defined]
    length = os.fstat(handle).st_size
    return os.pread(handle, size, max(length - size, 0)).decode("utf-8", "replace")


_FENCE = "```"


class Programs:
    """Makes programs of answers, runs them, and knows how each ended."""

    def __init__(self, *, fenced: bool) -> None:
        """Begin.

        Args:
            fenced: the answers are chat answers, and code ends where a fence does.
        """
        self._fenced = fenced
        self._failures: dict[str, str | None] = {}

    def build(
        self, answers: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]
    ) -> list[list[str]]:
        """Each answer behind its prompt, as the harness asks for; all of them run now."""
        programs = [
            [doc["prompt"] + (each.partition(_FENCE)[0] if self._fenced else each) for each in own]
            for own, doc in zip(answers, docs, strict=True)
        ]
        self._run(
            f"{program}\n{doc['test']}\ncheck({doc['entry_point']})"
            for own, doc in zip(programs, docs, strict=True)
            for program in own
        )
        return programs

    def pass_at_k(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
    ) -> dict[str, float]:
        """The share of k tries of which one passes, estimated without bias from all tries."""
        (tests,), (programs,) = references, predictions
        tested = [f"{each}\n{tests}" for each in programs]
        self._run(tested)
        num_failed = sum(self._failures[each] is not None for each in tested)
        # 1 - C(n - c, k) / C(n, k); of fewer failures than k there is no choice without a pass.
        counts = {size: math.comb(num_failed, size) / math.comb(len(tested), size) for size in k}
        return {f"pass@{size}": 1.0 - failing for size, failing in counts.items()}

    def _run(self, programs: Iterable[str]) -> None:
        fresh = [each for each in dict.fromkeys(programs) if each not in self._failures]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            self._failures.update(zip(fresh, pool.map(run_program, fresh), strict=True))

    def __deepcopy__(self, memo: Any) -> "Programs":
        return self


def with_sandbox(config: Mapping[str, Any]) -> dict[str, Any]:
    """A task of HumanEval with programs run here."""
    programs = Programs(fenced="instruct" in str(config["task"]))
    metrics = [
        {**metric, "metric": programs.pass_at_k, "aggregation": "mean", "higher_is_better": True}
        for metric in config["metric_list"]
    ]
    filters = [
        {"name": "create_test", "filter": [{"function": "custom", "filter_fn": programs.build}]}
    ]
    return {**config, "metric_list": metrics, "filter_list": filters}


def is_sandboxed(task: Any) -> bool:
    """Whether a task's programs run here."""
    metrics = task.get_config("metric_list") or ()
    owners = (getattr(each.get("metric"), "__self__", None) for each in metrics)
    return any(isinstance(owner, Programs) for owner in owners)
