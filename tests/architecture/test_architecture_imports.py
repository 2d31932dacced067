"""What loads when: help, recipe errors and the record of a run never wait for torch."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "triton", "transformers", "datasets", "deepspeed", "peft", "accelerate")


def loaded_by(code):
    """The heavy modules in sys.modules after running ``code`` in a fresh interpreter."""
    probe = f"{code}\nimport sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "module", ["trainkit", "trainkit.recipe", "trainkit.run", "trainkit.errors", "trainkit.cli.app"]
)
def test_light_modules_stay_light(module):
    assert loaded_by(f"import {module}") == "[]"


def test_kernels_bring_torch_and_triton_only():
    assert set(eval(loaded_by("import trainkit.kernels"))) <= {"torch", "triton"}
