import contextlib
import math

import pytest

from trainkit.run import RunDirectory


def rows_of_a_run(num_steps=60, *, speed=1000.0):
    """Rows such as training writes: warm-up, a falling loss, an evaluation every twenty steps."""
    rows = []
    for step in range(1, num_steps + 1):
        rate = 1e-3 * min(step / 10, 1.0)
        rows.append(
            {
                "step": step,
                "epoch": step / num_steps,
                "loss": 0.5 + 4 * math.exp(-step / 20),
                "grad_norm": 1.0,
                "learning_rate": rate,
                "num_tokens": 512,
                "num_trained_tokens": 128,
                "step_seconds": 512 / speed,
                "tokens_per_second": speed,
                "peak_memory_gib": 1.5,
            }
        )
        if step % 20 == 0:
            rows.append({"step": step, "eval_loss": 0.6, "eval_runtime": 0.1})
    return rows


@pytest.fixture
def run(tmp_path):
    """A fresh run directory."""
    return RunDirectory.create(tmp_path / "train_model", "test")


@pytest.fixture
def trained_run(run):
    """A run with sixty logged steps."""
    with contextlib.closing(run.open_metrics()) as metrics:
        for row in rows_of_a_run():
            metrics.append(row)
    run.heartbeat(60)
    return run
