"""However seldom a run logs, its record says the same steps, seconds and tokens."""

import contextlib
import random
from dataclasses import replace

import pytest

from trainkit.compare.runs import group_by_recipe, one_of_each, read_run
from trainkit.compare.verdicts import verdicts
from trainkit.run import RunDirectory
from trainkit.run.listing import summarize
from trainkit.run.plot import MEASURED, History, by_minutes, read_rows
from trainkit.run.report import headline_figures, model_card

NUM_STEPS = 757


def logged(parent, every, *, seed=0, steps=NUM_STEPS, name="run"):
    """A run as it logs every so many steps, and its last one."""
    run, clock, window = RunDirectory.create(parent, name), random.Random(seed), []
    with contextlib.closing(run.open_metrics()) as metrics:
        for step in range(1, steps + 1):
            window.append(1.0 + clock.random())
            if step % every and step < steps:
                continue
            count, seconds = len(window), sum(window)
            row = {"step": step, "num_tokens": 512 * count, "data_seconds": 0.1}
            row |= dict.fromkeys(("loss", "step_seconds"), seconds / count)
            row |= {"tokens_per_second": 512 * count / seconds}
            metrics.append(row)
            window = []
    run.heartbeat(steps)
    run.write_status("done")
    return run


@pytest.mark.parametrize("every", [10, 100, 1000])
def test_every_reader_says_the_same(every, tmp_path):
    said = []
    for interval in (1, every):
        run = logged(tmp_path, interval)
        figures = dict(headline_figures(run, History.read(run.metrics), None))
        card = model_card(run, base_model="m", adapter=False)
        read = read_run(run.root, {})
        said.append(
            [
                *(figures[key] for key in ("steps", "tokens", "time in steps")),
                f"| steps | {NUM_STEPS} |" in card,
                summarize(run.root).step,
                read.steps,
                pytest.approx(read.step_seconds, rel=1e-12),  # the order of a sum
                pytest.approx(by_minutes(read_rows(run.root))[-1]["step"], rel=1e-12),
            ]
        )
    assert said[0][:6] == ["757", "388k", said[0][2], True, NUM_STEPS, NUM_STEPS]
    assert said[0] == said[1]


@pytest.mark.parametrize("every", [3, 10, 100, 1000])
def test_how_often_a_run_logs_is_no_difference_of_its_curve(every, tmp_path):
    one, other = (read_run(logged(tmp_path, each).root, {}) for each in (1, every))
    (verdict,) = verdicts([[one], [other]])
    assert verdict.interval.difference == pytest.approx(0.0, abs=1e-12)


def test_a_run_that_logs_nothing_says_its_steps(tmp_path):
    run = RunDirectory.create(tmp_path)
    run.write_status("done", step=7)
    assert headline_figures(run, History([]), None) == [("steps", "7")]


def test_a_run_that_was_stopped_between_two_rows_has_come_as_far_as_it_has(tmp_path):
    run = logged(tmp_path, 100, steps=200)
    run.heartbeat(257)
    run.write_status("interrupted", step=257)
    assert dict(headline_figures(run, History.read(run.metrics), None))["steps"] == "257"
    assert "| steps | 257 |" in model_card(run, base_model="m", adapter=False)
    assert read_run(run.root, {}).steps == summarize(run.root).step == 257


def test_seeds_belong_together_whatever_is_logged_and_saved(tmp_path):
    values = {"training.learning_rate": 1e-4, "training.seed": 1, "training.save_steps": 5}
    others = {"training.seed": 2, "training.save_steps": 9, "training.logging_steps": 10}
    others |= {"training.output_dir": "x", "faults.step_timeout": 3}
    runs = [logged(tmp_path, 1, seed=0), logged(tmp_path, 10, seed=1), logged(tmp_path, 1, seed=2)]
    read = [read_run(run.root, values) for run in runs[:1]]
    read.append(read_run(runs[1].root, {**values, **others}))
    read.append(read_run(runs[2].root, {**values, "training.learning_rate": 2e-4}))
    assert [len(group) for group in group_by_recipe(read)] == [2, 1]


def test_a_run_and_its_continued_copy_are_one(tmp_path):
    short = read_run(logged(tmp_path, 1, steps=20).root, {})
    long = read_run(logged(tmp_path, 1, steps=60).root, {})
    other = read_run(logged(tmp_path, 1, seed=5, steps=60).root, {})
    assert one_of_each([long, other]) == ([long, other], [])
    kept, notes = one_of_each([short, other, long])
    assert kept == [other, long]
    assert notes == [f"{short.path} is the run {long.path} up to step 20: one run, and not two"]
    assert len(one_of_each([long, long])[0]) == 1


def test_two_that_went_on_otherwise_from_one_beginning_are_two(tmp_path):
    """One run resumed with another rate, and its copy without: the longer hid the other."""
    long = read_run(logged(tmp_path, 1, steps=60).root, {})
    other = {step: loss + (step > 20) for step, loss in long.losses.items() if step <= 40}
    fork = replace(long, path=tmp_path / "fork", losses=other, steps=40)
    early = replace(fork, path=tmp_path / "early", steps=10, losses={1: long.losses[1]})
    kept, notes = one_of_each([fork, early, long])
    assert kept == [fork, long]
    assert notes == [f"{early.path} is the run {long.path} up to step 10: one run, and not two"]


def test_counts_of_tokens_are_no_curve():
    rows = [
        {"step": step, "eval_num_trained_tokens/en": 5, "eval_boolq/acc": step} for step in (1, 2)
    ]
    assert History(rows).lines(MEASURED) == ["eval_boolq/acc"]
