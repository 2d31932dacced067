"""A signal to any rank stops all of them at the next step, with a whole checkpoint."""

import json
import signal
import time

import pytest
from ranks import run_ranks
from resume.record import record

from trainkit.checkpoint.whole.atomic import newest_valid
from trainkit.train.faults import signals


def by_name(value):
    """The ids of signals, which are numbers in some versions of Python."""
    return value.name if isinstance(value, signal.Signals) else None


def status(run):
    return json.loads((run / "status.json").read_text())


@pytest.mark.parametrize(
    ("number", "rank"),
    [(signal.SIGINT, None), (signal.SIGTERM, None), (signal.SIGHUP, None), (signal.SIGUSR1, 1)],
    ids=by_name,
)
def test_a_signal_stops_a_run_at_the_next_step(project, number, rank):
    """``logging_steps`` is 5; one rank of two learns at the next step what the other was told."""
    options = ("training.logging_steps=5", "training.per_device_train_batch_size=2")
    given = {"num_ranks": 1 if rank is None else 2, "stop_at": 3, "number": number}
    said = project.sft("r.yaml", "--output-dir", "run", *options, **given, on_rank=rank)
    assert said.code == (130 if number == signal.SIGINT else 75), said
    newest = newest_valid(project.root / "run")
    assert newest.path.name == ("checkpoint-3" if rank is None else "checkpoint-4")
    assert not newest.skipped
    told = status(project.root / "run")
    assert told["state"] == "interrupted"
    assert told["reason"] == f"stopped by {signal.Signals(number).name}"
    assert said.err.count(f"saved {newest.path}") == 1
    assert "continue with: trainkit " in said.err


@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 3), (signal.SIGTERM, 0)], ids=by_name)
def test_a_signal_to_the_launcher_stops_all_ranks(project, number, step):
    """torchrun by itself would end with 1, and die of SIGUSR1."""
    given = ("--config", "r.yaml", "--output-dir", "run")
    said = project.launch(*given, stop_at=step, number=number, to_launcher=True, on_rank=1)
    assert said.code == (130 if number == signal.SIGINT else 75), said
    told = status(project.root / "run")
    when = "" if step else " before the first step"
    assert told["state"] == "interrupted"
    assert told["reason"] == f"stopped by {signal.Signals(number).name}{when}"
    newest = newest_valid(project.root / "run")
    assert not newest.skipped
    assert (newest.path is None) == (step == 0)
    if step:
        assert newest.path.name in ("checkpoint-3", "checkpoint-4")


CASE = "chaos.signal_cases:ranks_that_save"


def test_the_launcher_waits_for_ranks_that_save(tmp_path):
    """Schedulers end a job with its launcher: one that left earlier would take the save along."""
    ((code, seen),) = run_ranks(CASE, world_size=1, root=str(tmp_path), seconds=1.0)
    assert (code, seen) == (75, ["15", "15"])


def test_what_the_next_attempt_would_find_as_well_is_not_started_again(tmp_path):
    """Exit code 2: the recipe, the data or the model is wrong."""
    case = "chaos.signal_cases:ranks_that_cannot_go_on"
    assert run_ranks(case, world_size=1, root=str(tmp_path)) == [[2, 2]]


@pytest.mark.parametrize("ignored", [True, False], ids=["nohup", "plain"])
def test_a_run_under_nohup_outlives_its_terminal(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert (signal.SIGHUP in signals.acted_on()) is not ignored
        with signals.watching_signals():
            assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) is ignored
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_to_the_launcher_aborts_the_ranks(tmp_path):
    given = {"root": str(tmp_path), "seconds": 60.0, "second": int(signal.SIGTERM)}
    ((code, seen),) = run_ranks(CASE, world_size=1, **given)
    assert (code, seen) == (143, ["15 15", "15 15"])


def test_a_second_signal_aborts_at_once(project):
    """The first one would be followed by checkpoint-3."""
    said = project.sft("r.yaml", "-o", "run", stop_at=3, number=signal.SIGUSR1, presses=2)
    assert said.code == 128 + signal.SIGUSR1, said
    told = status(project.root / "run")
    assert told["state"] == "interrupted"
    assert told["reason"] == "aborted by a second signal (SIGUSR1)"
    assert newest_valid(project.root / "run").path.name == "checkpoint-2"


def test_ranks_whose_launcher_is_killed_save_and_stop(project):
    run = project.root / "run"
    given = ("--config", "r.yaml", "--output-dir", "run", "training.max_steps=5000")
    project.launch(*given, kill_at=3, to_launcher=True, on_rank=0)
    deadline = time.monotonic() + 120
    while (run / ".lock").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    told = status(run)
    assert told["state"] == "interrupted"
    assert told["reason"] == "the launcher was killed"
    assert newest_valid(run).path is not None


def test_a_rank_that_hears_of_it_from_another_says_why(monkeypatch):
    """Each looks once a second: whoever writes the status may not have seen it yet."""
    monkeypatch.setattr(signals._watcher, "launcher", -1)
    assert signals.StopRequest(agreed=signal.SIGTERM).why == "the launcher was killed"
    stop = signals.StopRequest(number=signal.SIGINT, agreed=signal.SIGINT)
    assert stop.why == "stopped by SIGINT"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=by_name)
def test_a_signal_while_the_model_loads_ends_the_run_with_a_status(project, number):
    said = project.sft("r.yaml", "--output-dir", "run", stop_at=0, number=number)
    assert said.code == (130 if number == signal.SIGINT else 75)
    told = status(project.root / "run")
    assert told["state"] == "interrupted"
    assert told["reason"] == f"stopped by {signal.Signals(number).name} before the first step"
    if number == signal.SIGTERM:
        assert project.sft("--resume", "run", "training.max_steps=2").code == 0


def test_a_stop_where_an_evaluation_is_due_makes_up_for_it(project):
    """Stopped at step 3, where nothing is saved but for it: the run goes on as if it had not been.

    The evaluation that is due as well comes when it goes on.
    """
    options = ("training.eval_strategy=steps", "training.eval_steps=3")
    project.sft("r.yaml", "--output-dir", "run", *options, stop_at=3, number=signal.SIGINT)
    assert project.sft("--resume", "run").code == 0
    run = record(project.root / "run")
    assert [row["step"] for row in run["metrics"] if "eval_loss" in row] == [3, 6, 8]
    assert project.sft("r.yaml", "--output-dir", "whole", *options).code == 0
    assert run == record(project.root / "whole")
