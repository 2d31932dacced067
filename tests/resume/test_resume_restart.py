"""A process of a launch is killed; ``--max-restarts`` brings it back."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from resume.record import record

TRAIN_SH = Path(__file__).parents[2] / "train.sh"
VARIABLES = {
    "TRAINKIT_PYTHON": sys.executable,
    "PYTHONPATH": os.environ.get("PYTHONPATH") or str(TRAIN_SH.parent),
    "NPROC_PER_NODE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}


def test_all_ranks_start_again_and_the_run_goes_on_exactly(project):
    arguments = ["--config", "r.yaml", "lora=null"]
    project.sft(*arguments, "--output-dir", "whole", num_ranks=2).well()
    given = (*arguments, "--output-dir", "run")
    project.launch(*given, kill_at=5, on_rank=1, max_restarts=1).well()
    _, second = project.starts("run")
    assert second["step"] >= 4
    assert record(project.root / "run") == record(project.root / "whole")


def test_train_sh_starts_a_killed_process_again(project):
    """Every process is an interpreter of its own here; the first is killed in its imports."""
    arguments = ["--config", "r.yaml", "lora=null"]
    project.sft(*arguments, "--output-dir", "whole").well()
    command = ["bash", TRAIN_SH, "--max-restarts", "1", *arguments, "--output-dir", "run"]
    with (project.root / "launch.log").open("wb") as log:
        launch = subprocess.Popen(
            command, cwd=project.root, env=os.environ | VARIABLES, stdout=log, stderr=log
        )
        killed = _kill_the_first_of(launch)
        assert launch.wait(240) == 0, (project.root / "launch.log").read_text()
    assert killed, "the run was over before a process was killed"
    assert record(project.root / "run") == record(project.root / "whole")


def _kill_the_first_of(launch):
    """Kill the process of rank 0 of the first attempt; train.sh became torchrun itself."""
    while launch.poll() is None:
        time.sleep(0.02)
        for pid in _children(launch.pid):
            with contextlib.suppress(OSError):
                if b"\0RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    return True
    return False


def _children(parent):
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                yield int(status.parent.name)
