"""Where the kernel tests run: on a GPU if there is one, else on the CPU.

On a CPU the ops run their references; with TRITON_INTERPRET=1 they run their kernels.
"""

import pytest
import torch

from trainkit.kernels import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS_KERNELS = DEVICE == "cuda" or launch.INTERPRETING


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def kernels_run() -> None:
    """Skip where only references would run."""
    if not RUNS_KERNELS:
        pytest.skip("references only: set TRITON_INTERPRET=1 or use a GPU")
