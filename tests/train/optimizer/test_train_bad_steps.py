"""A step with bad numbers that is skipped, or gone back behind: as if it had never been tried."""

import math

import pytest
import torch
from number_cases import left_out
from ranks import run_ranks

from trainkit.errors import RunDirectoryError
from trainkit.train.faults.numbers import (
    BadBatch,
    NumberPolicy,
    read_batches,
    steps_kept,
    write_batch,
)


def check(result):
    """Nothing of the two steps is left: weights, rates and rows are those of a run without them."""
    assert result["digests"][0] == result["digests"][1]
    first, second = result["rows"]
    assert first == second
    assert [row[0] for row in first] == list(range(1, 9))
    rates = [row[2] for row in first]
    assert rates == pytest.approx([1e-2 * (1 - step / 8) for step in range(8)])  # by the plan
    for step, loss, _, norm, num_skipped in first:
        is_skipped = step in (5, 6)
        assert (loss is None, norm is None, num_skipped) == (
            (True, True, 1) if is_skipped else (False, False, None)
        )


def test_one_process_goes_on_without_bad_steps(tmp_path):
    result = left_out(str(tmp_path))
    check(result)
    spike, nan = result["said"]
    for words in ("loss spikes to", "at step 5 (the median of the last 3 steps is", "train.jsonl:"):
        assert words in spike
    assert "loss is nan at step 6" in nan
    assert steps_kept(tmp_path / "run0") == [5, 6]
    (kept,) = read_batches(tmp_path / "run0/bad_batches/step-6")
    assert (kept.kind, len(kept.batches)) == ("loss", 2)
    assert math.isnan(kept.losses[0])
    assert kept.rows[0][0] in nan
    assert kept.batches[0]["input_ids"].shape == kept.batches[0]["labels"].shape


@pytest.mark.parametrize(("optim", "dtype"), [("sgd", None), ("flat_adamw", "bfloat16")])
def test_any_optimizer_leaves_the_step_out(optim, dtype, tmp_path):
    """One whose gradients are taken away, and one that asks the device; see `hold_back`."""
    check(left_out(str(tmp_path), dtype=dtype, optim=optim, weight_decay=0.1))


ENGINES = [(0, "bfloat16"), (2, "bfloat16"), (3, None), ("fsdp2", None)]
"""DDP with fp32 masters, and engines that hold a step back by themselves or place the weights."""


@pytest.mark.sample("0-*", "2-*")
@pytest.mark.parametrize(("stage", "dtype"), ENGINES)
def test_all_ranks_go_on_without_a_step_that_is_bad_on_one(stage, dtype, tmp_path):
    options = {"shard": stage} if stage == "fsdp2" else {"stage": stage}
    results = run_ranks(
        "train.optimizer.number_cases:left_out",
        root=str(tmp_path),
        dtype=dtype,
        poisoned_rank=1,
        **options,
    )
    for result in results:
        check(result)
    assert len(results[0]["said"]) == 2


def test_a_limit_needs_a_window_and_moves_with_the_losses():
    policy = NumberPolicy(spike=4.0, window=4)
    for loss in (2.0, 2.2, 1.8):
        policy.take(loss)
        assert policy.limit == float("inf")
    policy.take(2.4)
    assert policy.limit == pytest.approx(2.1 + 4 * 0.2)  # median 2.1, distances 0.1 0.1 0.3 0.3
    for _ in range(4):
        policy.take(1.0)
    assert policy.limit == pytest.approx(1.0 + 4 * 0.01)  # no distance: 1% of the median


def test_what_a_policy_remembers_travels_with_a_checkpoint(tmp_path):
    policy = NumberPolicy("skip", spike=3.0, window=3)
    for loss in (0.1, 1 / 3, 0.7, 1e-7):
        policy.take(loss)
    policy.leave_out(is_new=True)
    policy.save(tmp_path)
    again = NumberPolicy("skip", spike=3.0, window=3)
    again.load(tmp_path)
    assert again == policy
    assert again.limit == policy.limit


def test_a_damaged_batch_is_refused(tmp_path):
    bad = BadBatch(
        3, 0, "loss", "loss is nan", [1.0], 2.0, math.inf, [["d:1"]], [{"x": torch.ones(2)}]
    )
    folder = write_batch(tmp_path, bad)
    (read,) = read_batches(folder)
    assert read.says == bad.says
    assert torch.equal(read.batches[0]["x"], torch.ones(2))
    (folder / "rank0.safetensors").write_bytes(b"\x80\x04hostile")
    with pytest.raises(RunDirectoryError, match=r"rank0\.safetensors"):
        read_batches(folder)
