"""Checkpoints written while the training goes on: of their own step, and whole."""

import errno
from collections import Counter

import pytest
from ranks import run_ranks

from trainkit.checkpoint.whole.atomic import newest_valid


@pytest.mark.sample("0-*options1", "3-*")
@pytest.mark.parametrize(
    ("stage", "world_size", "options"),
    [
        (0, 1, {}),
        (0, 1, {"dtype": "bfloat16", "accumulate": 2}),
        (2, 2, {"dtype": "bfloat16"}),
        (3, 2, {}),
    ],
)
def test_what_is_written_late_is_of_its_own_step(stage, world_size, options, tmp_path):
    """A second later the weights are others; the files are those of a run that writes at once."""
    given = {"world_size": world_size, "root": str(tmp_path), "stage": stage, **options}
    at_once = run_ranks("chaos.save_cases:slow", name="quick", seconds=0.0, **given)[0]
    late = run_ranks("chaos.save_cases:slow", name="late", seconds=0.2, **given)[0]
    assert len(late["files"]) >= 3 * 3
    assert late["files"] == at_once["files"]
    assert late["steps"][0] > 2, "training waited for checkpoint-2"


@pytest.mark.parametrize(
    ("stage", "world_size", "number"),
    [(2, 2, errno.ENOSPC), (3, 2, errno.ESTALE), (0, 1, errno.EIO)],
)
def test_a_rank_that_cannot_write_stops_all_with_its_own_message(
    stage, world_size, number, tmp_path
):
    given = {"world_size": world_size, "root": str(tmp_path), "stage": stage, "number": number}
    said = run_ranks("chaos.save_cases:full", **given)
    who = "rank 1: " if world_size > 1 else ""
    for each in said:
        assert f"checkpoint-4 could not be written: {who}OSError: [Errno {number}]" in each["said"]
        assert each["step"] < 12, "the ranks went on as if nothing had happened"
    newest = newest_valid(tmp_path / "full")
    assert newest.path.name == "checkpoint-2"
    assert not list((tmp_path / "full").glob(".*staging*"))


@pytest.mark.sample("0-1-*", "3-2-*")
@pytest.mark.parametrize(
    ("stage", "world_size", "options"),
    [
        (0, 1, {}),
        (0, 2, {"dtype": "bfloat16"}),
        (1, 2, {}),
        (2, 2, {"dtype": "bfloat16"}),
        (3, 2, {}),
    ],
)
def test_the_memory_of_the_first_save_is_made_before_it(stage, world_size, options, tmp_path):
    """Pinned memory takes most of a second for a GiB, which the first save would have to wait for.

    Blocks under a KiB are left out: thousands of them take no time.
    """
    given = {"world_size": world_size, "root": str(tmp_path), "name": "run", "stage": stage}
    for rank in run_ranks("chaos.save_cases:copied", **given, **options):
        made, needed = (Counter(size for size in rank[key] if size >= 1024) for key in rank)
        assert not needed - made
        assert made.total() <= 1.2 * needed.total(), "more than is needed"
