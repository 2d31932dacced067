"""Epochs of unequal length: each trains exactly the rows that are due, also when continued."""

import dataclasses

import numpy as np
import pytest
import torch
from lab import ShuffledSamples

from trainkit.train.data import EpochPlan

SIZES = (5, 8, 0, 3, 7)
"""Rows due in each epoch; the third has none."""


class Parts(ShuffledSamples):
    """Each epoch shows the next so many samples of a ring."""

    def set_epoch(self, epoch):
        start = sum(SIZES[:epoch])
        self.order = np.arange(start, start + SIZES[epoch % len(SIZES)]) % len(self.samples)


def make(lab, *, batch=2, accumulate=2, **options):
    """A trainer on such epochs, and the list that gets the ids of every micro-batch."""
    for number, sample in enumerate(lab.samples):
        sample["id"] = number
    data = lab.data()
    data = dataclasses.replace(
        data, samples=Parts(lab.samples, None), has_equal_epochs=False, sample_name=str
    )
    lab.data = lambda seed=None: data
    options = {"num_train_epochs": len(SIZES), "max_steps": -1, "save_strategy": "no", **options}
    trainer = lab.trainer("run", batch=batch, accumulate=accumulate, **options)
    steps = []
    begin = trainer.guard.begin

    def watched(samples, batches, *, step):
        steps.append(samples)
        return begin(samples, batches, step=step)

    trainer.guard.begin = watched
    return trainer, steps


@pytest.mark.parametrize(("batch", "accumulate"), [(2, 2), (1, 3), (4, 1), (8, 2)])
def test_every_epoch_trains_the_rows_that_are_due(lab, batch, accumulate):
    trainer, steps = make(lab, batch=batch, accumulate=accumulate)
    trainer.train()
    seen = [sample for step in steps for micro in step for sample in micro]
    assert seen == list(range(sum(SIZES)))
    assert all(micro for step in steps for micro in step)
    per_step = batch * accumulate
    assert trainer.state.global_step == sum(-(-size // per_step) for size in SIZES)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == trainer.state.global_step
    assert all(row["num_trained_tokens"] > 0 and row["loss"] > 0 for row in rows)
    assert rows[-1]["epoch"] == len(SIZES)


def test_a_continued_run_goes_on_at_its_row(lab):
    """Step 4 is the second of the second epoch's, after two of the first."""
    options = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 9, "batch": 1}
    unbroken, _ = make(lab, **options)
    unbroken.train()
    for step in (3, 6, 9):
        continued, steps = make(lab, **options)
        continued.train(resume_from_checkpoint=str(lab.root / "run" / f"checkpoint-{step}"))
        last = [sample for step in steps for micro in step for sample in micro]
        assert last == list(range(sum(SIZES) - len(last), sum(SIZES)))
        for a, b in zip(continued.model.parameters(), unbroken.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_number_of_steps_is_reached_in_unequal_epochs(lab):
    trainer, _ = make(lab, num_train_epochs=1, max_steps=6)
    trainer.train()
    assert trainer.state.global_step == 6


def test_the_plan_counts_parts_of_epochs_as_transformers_does():
    plan = EpochPlan(lambda epoch: SIZES[epoch % len(SIZES)], accumulation=2)
    assert [plan.num_steps(epoch) for epoch in range(5)] == [3, 4, 0, 2, 4]
    assert plan.steps_in(1.5) == 3 + 2
    assert plan.steps_in(1.3) == 3 + 2  # 1.2 steps, rounded up
    assert [plan.place_of(step) for step in (0, 2, 3, 7, 8)] == [
        (0, 0),
        (0, 2),
        (1, 0),
        (3, 0),
        (3, 1),
    ]
