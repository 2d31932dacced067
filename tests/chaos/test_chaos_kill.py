"""SIGKILL at any moment costs at most the steps since the last checkpoint, and nothing else."""

from dataclasses import replace

import pytest
from moments import Kill, differences, digest_of, plan_of
from ranks import RankFailure, run_ranks

CASE = "chaos.kill_cases:train"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    root = tmp_path_factory.mktemp("unbroken")
    return run_ranks(CASE, world_size=1, root=str(root))[0]["digest"]


@pytest.mark.sample("9", "23")
@pytest.mark.parametrize("call", [1, 5, 9, 13, 17, 23])
def test_a_kill_inside_a_save_changes_nothing(call, unbroken, tmp_path):
    """fsync is called for every file, for the manifest and for the folders before the rename."""
    with pytest.raises(RankFailure, match="killed"):
        run_ranks(CASE, world_size=1, root=str(tmp_path), kill_at_write=call)
    result = run_ranks(CASE, world_size=1, root=str(tmp_path))[0]
    assert result["digest"] == unbroken
    assert not list((tmp_path / "run").glob(".*staging*"))


SPREADS = {"one": (1, ()), "zero2": (2, ("parallel.shard=zero2",))}
KILLS = [
    Kill("data", 2, 0.0, 0, "rank"),
    Kill("load", 5, 0.05, 0, "group"),
    Kill("train", 1, 0.1, -1, "rank"),  # a step takes as long, there are eight
    Kill("save", 20, 0.0, 0, "group"),
]
"""The last one in a save of rank 0's, of which each has more files; before it on the last rank."""


@pytest.mark.parametrize("spread", SPREADS)
def test_kills_in_every_phase_change_nothing(project, spread):
    """The same command again each time; in the end the bytes and the files of an unbroken run.

    scripts/kills.py does the same at random moments, for every way to train and to spread it.
    """
    num_ranks, given = SPREADS[spread]
    batch = f"training.per_device_train_batch_size={4 // num_ranks}"
    command = ("--config", "r.yaml", batch, "training.save_total_limit=2", *given, "--resume")
    start = project.sft if num_ranks == 1 else project.launch
    report = project.root / "struck"
    assert start(*command, "--output-dir", "whole", num_ranks=num_ranks).code == 0
    for path in (project.root / "cache").iterdir():
        path.rename(project.root / path.name)  # the data is prepared once more
    run = project.root / "run"
    for kill in KILLS if num_ranks == 1 else KILLS[2:]:
        kill = replace(kill, rank=kill.rank % num_ranks)
        plan = plan_of(run, report, kill, is_launched=num_ranks > 1)
        start(*command, "--output-dir", "run", num_ranks=num_ranks, plan=plan)
        assert report.exists(), f"it was over before {kill}"
        report.unlink()
    start(*command, "--output-dir", "run", num_ranks=num_ranks).well()
    assert not differences(digest_of(project.root / "whole"), digest_of(run))
