"""Every kernel compiles for A100 and H100, on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.kernels import launch

SCRIPT = Path(__file__).with_name("aot_kernels.py")


@pytest.mark.skipif(launch.INTERPRETING, reason="compiles in the run without TRITON_INTERPRET")
@pytest.mark.skipif(not launch.HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile_ahead_of_time(arch):
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(arch)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    assert {"_rope", "cross_entropy_rows", "_sum_partials", "_packed_backward"} <= names
