"""SIGKILL at any moment costs at most the steps since the last checkpoint, and nothing else."""

import contextlib
import random

import pytest
from ranks import RankFailure, run_ranks

CASE = "chaos.kill_cases:train"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    root = tmp_path_factory.mktemp("unbroken")
    return run_ranks(CASE, world_size=1, root=str(root))[0]["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_kills_change_nothing(seed, unbroken, tmp_path):
    """Three kills at random moments, then a run to the end: the same weights, bit for bit."""
    moments = random.Random(seed)
    for _ in range(3):
        with contextlib.suppress(RankFailure):  # it may also finish first
            run_ranks(CASE, world_size=1, root=str(tmp_path), kill_after=moments.uniform(0.2, 1.5))
    assert run_ranks(CASE, world_size=1, root=str(tmp_path))[0]["digest"] == unbroken


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2, 5, 9, 13, 17, 23])
def test_a_kill_inside_a_save_changes_nothing(call, unbroken, tmp_path):
    """fsync is called for every file, for the manifest and for the folders before the rename."""
    with pytest.raises(RankFailure, match="killed"):
        run_ranks(CASE, world_size=1, root=str(tmp_path), kill_at_write=call)
    result = run_ranks(CASE, world_size=1, root=str(tmp_path))[0]
    assert result["digest"] == unbroken
    assert not list((tmp_path / "run").glob(".*staging*"))
