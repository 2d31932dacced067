"""Starts of runs that may be killed: forked behind the imports, or programs, as a user starts."""

import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from forks import give_forks_their_own_threads  # noqa: E402
from moments import PLAN, Kill, arm, children, plan_of  # noqa: E402

PATIENCE = 240.0
"""Seconds after which a start hangs."""


class Starts:
    """Starts commands in a folder, one at a time, and waits for everything they leave."""

    def __init__(self, folder: Path, *, real: bool) -> None:
        self.folder, self.real = folder, real
        self._number = 0
        # What a killed launcher leaves comes to this process, which waits for it.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        if real:
            site = folder / "site"
            site.mkdir(exist_ok=True)
            (site / "sitecustomize.py").write_text(
                f"import os, sys\nif os.environ.get({PLAN!r}):\n"
                f"    sys.path.append({str(ROOT / 'tests')!r})\n"
                "    import moments\n    moments.arm()\n"
            )

    def start(self, arguments: list[str], run: Path, num_ranks: int, kill: Kill | None) -> int:
        """The exit code; -9 where it was killed.

        Raises:
            TimeoutError: it hangs.
        """
        self._number += 1
        plan = plan_of(run, self.folder / "files", kill, is_launched=num_ranks > 1)
        environment = {**os.environ, PLAN: plan, "NPROC_PER_NODE": str(num_ranks)}
        with (self.folder / "said.log").open("ab") as log:
            log.write(f"--- {self._number}: {kill}\n".encode())
            log.flush()
            if self.real:
                first = self._program(arguments, num_ranks, environment, log)
            else:
                first = self._fork(arguments, num_ranks, environment, log)
        return self._wait(first)

    def _program(self, arguments: list[str], num_ranks: int, environment: Any, log: Any) -> int:
        path = [str(self.folder / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        own = {"TRAINKIT_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(path)}
        # As on a user's machine, all but the first find the modules compiled.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment.setdefault("PYTHONPYCACHEPREFIX", str(self.folder.parent / "pycache"))
        command = [sys.executable, "-m", "trainkit", "launch", *arguments]
        if num_ranks == 1:
            own["CUDA_VISIBLE_DEVICES"] = "0"  # else a process for each GPU
        elif self._number % 2:
            command = ["bash", str(ROOT / "train.sh"), *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env={**environment, **own}, stdout=log, stderr=log
        ).pid

    def _fork(self, arguments: list[str], num_ranks: int, environment: Any, log: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        with contextlib.suppress(BaseException):
            os.environ.update(environment)
            os.chdir(self.folder)
            os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
            if num_ranks > 1:
                from launches import launch

                os._exit(launch(arguments, num_ranks, in_rank=arm))
            from trainkit.cli.app import main

            arm()
            os._exit(main(["sft", *arguments]))
        os._exit(99)

    def _wait(self, first: int) -> int:
        deadline, code, hangs = time.monotonic() + PATIENCE, 0, False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == first:
                code = os.waitstatus_to_exitcode(status)
            if not pid:
                time.sleep(0.01)
                if time.monotonic() > deadline:
                    hangs = True
                    for left in children(os.getpid()):
                        os.kill(left, signal.SIGKILL)
        if hangs:
            raise TimeoutError(f"a start did not end in {PATIENCE:.0f} s")
        return code


def prepare(folder: Path, *, real: bool) -> None:
    """A tiny model and some conversations; and the imports, for forked starts."""
    if not real:
        warm_up()
    if (folder / "d.jsonl").exists():
        return
    maker = os.fork()  # threads of torch's must not be there when a start is forked
    if maker == 0:
        with contextlib.suppress(BaseException):
            make(folder)
        os._exit(0)
    os.waitpid(maker, 0)


def warm_up() -> None:
    """Import what starts import, so that they are forked behind it, and make what they cache."""
    from trainkit.parallel.launch.processes import quieten_imports

    quieten_imports()
    import deepspeed
    import launches  # noqa: F401
    import torch.distributed.checkpoint._fsspec_filesystem
    import torch.distributed.run
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import trainkit.cli.app
    import trainkit.cli.commands.training.sft
    import trainkit.parallel.fsdp.engine
    import trainkit.parallel.zero.engine
    import trainkit.parallel.zero.shard_files
    import trainkit.run.report.html
    import trainkit.run.report.redraw
    import trainkit.train.build
    import trainkit.train.session

    with contextlib.suppress(ImportError):
        import peft.tuners.lora.bnb  # noqa: F401
    torch.set_num_threads(1)
    give_forks_their_own_threads()
    get_checkpoint_conversion_mapping("qwen2")  # 400 patterns
    gc.freeze()  # what is imported stays: no start walks over it, or copies it, again
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute
    trainkit.run.report.redraw.draw_plots = trainkit.run.report.html.svg_plots = lambda *_: []
    trainkit.run.report.redraw.CurveRefresher.refresh = lambda self, **_: False


def make(folder: Path) -> None:
    """The model and the conversations."""
    from tiny import make_qwen2, make_tokenizer

    tokenizer = make_tokenizer()
    make_qwen2(len(tokenizer)).save_pretrained(folder / "m")
    tokenizer.save_pretrained(folder / "m")
    rows = (
        [
            {"role": "user", "content": f"Say {number}."},
            {"role": "assistant", "content": f"It is {number}{'!' * (number % 7)}"},
        ]
        for number in range(48)
    )
    (folder / "d.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
