"""A rank that is killed, fails or hangs: the others find out, say who it was, and end."""

import contextlib
import json
import signal
import time

import pytest
from ranks import RankFailure

TWO = {"num_ranks": 2, "on_rank": 1, "timeout": 100}
BATCH = "training.per_device_train_batch_size=2"


def status(project):
    return json.loads((project.root / "run" / "status.json").read_text())


@pytest.mark.sample("none")
@pytest.mark.parametrize("shard", ["none", "zero2"])
def test_a_killed_rank_is_named_and_the_run_can_go_on(project, shard):
    given = ("r.yaml", "--output-dir", "run", BATCH, f"parallel.shard={shard}")
    started = time.monotonic()
    project.sft(*given, kill_at=5, **TWO)
    told = status(project)
    assert told["state"] == "failed"
    assert "rank 1 (process " in told["reason"]
    assert "was killed" in told["reason"]
    assert "this is a bug" not in told["reason"]
    assert time.monotonic() - started < 90, "the start took most of it"
    assert project.sft("--resume", "run", num_ranks=2).code == 0
    assert not (project.root / "run/logs/ranks").exists()
    assert not list((project.root / "run/logs").glob("stacks-*"))


def test_a_rank_killed_while_the_model_loads_is_started_again(project):
    """Those that the launcher then stops end as if they had been asked to."""
    given = ("--config", "r.yaml", "--output-dir", "run", BATCH)
    project.launch(*given, kill_at=0, on_rank=1, max_restarts=1).well()
    assert status(project)["state"] == "done"


def test_a_rank_killed_without_restarts_is_named_by_the_launcher(project):
    given = ("--config", "r.yaml", "--output-dir", "run", BATCH)
    said = project.launch(*given, kill_at=0, on_rank=1)
    assert said.code == 1
    assert "rank 1 (process " in said.err
    assert "was ended by SIGKILL" in said.err


def test_a_stopped_rank_is_found_and_all_stacks_are_written(project):
    with contextlib.suppress(RankFailure):
        project.sft(
            *("r.yaml", "--output-dir", "run", BATCH, "faults.step_timeout=6"),
            stop_at=5,
            number=signal.SIGSTOP,
            **TWO,
        )
    told = status(project)
    assert told["state"] == "failed"
    assert "no progress for" in told["reason"]
    assert "rank 1 is behind" in told["reason"]
    assert "stopped by a signal" in told["reason"]
    for rank in (0, 1):
        stacks = (project.root / f"run/logs/stacks-rank{rank}.txt").read_text()
        # "Current thread" is missing where the signal met a thread of C++; the stack of a thread
        # that runs meanwhile may end before its outermost frames.
        assert "(most recent call first)" in stacks
        assert "trainkit/train/" in stacks
