"""Programs that a model wrote, run apart: own process, limits, no network where the system allows.

This guards against accidents (endless loops, gigabytes, stray files, calls
home), not against an attacker: the program runs as the same user, and reads what the user can read.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

LIMITER = Path(__file__).with_name("limits.py")


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: until it is killed; processor time is limited to the same.
        memory_gib: of its address space.
        file_mib: the largest file it may write.
        processes: it may start.
    """

    seconds: float = 10.0
    memory_gib: float = 4.0
    file_mib: int = 16
    processes: int = 64


@dataclass(frozen=True)
class Verdict:
    """How a program ended.

    Attributes:
        passed: it ran to its end.
        reason: empty, ``timed out``, or the last line of its errors.
    """

    passed: bool
    reason: str = ""


def run_program(program: str, limits: Limits | None = None) -> Verdict:
    """Run a Python program to its end.

    It passes only if its last line is reached: ``exit(0)`` before that is a failure. It has a
    working directory of its own, which is removed, and none of this process's environment.

    Args:
        program: the source.
        limits: the defaults otherwise.
    """
    limits = limits or Limits()
    mark = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="trainkit-program-") as folder:
        path = Path(folder, "program.py")
        last = f"\nimport os as _os\n_os.write(1, b'\\n{mark}\\n')\n"
        path.write_text(program + last, encoding="utf-8", errors="surrogatepass")
        command = [sys.executable, "-I", "-B", str(LIMITER), str(path)]
        command += [str(limits.seconds), str(limits.memory_gib)]
        command += [str(limits.file_mib), str(limits.processes)]
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
                process.wait(limits.seconds + 2)
                timed_out = False
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                _kill_all(process)
            passed = mark in _tail(out).split("\n")
            lines = _tail(err).strip().split("\n")
    if timed_out or process.returncode in (-signal.SIGXCPU, -signal.SIGKILL, 137, 152):
        return Verdict(False, "timed out, or out of memory")
    if passed and process.returncode == 0:
        return Verdict(True)
    return Verdict(False, lines[-1][:300] if lines[-1] else "it did not run to its end")


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """The program and what it has started, which are one session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(stream: object, size: int = 4096) -> str:
    handle: int = stream.fileno()  # type: ignore[attr-defined]
    length = os.fstat(handle).st_size
    return os.pread(handle, size, max(length - size, 0)).decode("utf-8", "replace")
