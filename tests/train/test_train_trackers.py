"""A continued run goes on in its trackers' own runs, or says that it does not."""

import contextlib
import json
import os
import sys
from types import SimpleNamespace

import pytest

from trainkit.run import RunDirectory
from trainkit.train.quiet import trackers_ended
from trainkit.train.trackers import FILE, TRACKERS, RememberTrackers, go_on_with

FAKES = {
    "wandb": SimpleNamespace(run=SimpleNamespace(id="w1")),
    "mlflow": SimpleNamespace(
        active_run=lambda: SimpleNamespace(info=SimpleNamespace(run_id="m1"))
    ),
    "swanlab": SimpleNamespace(get_run=lambda: SimpleNamespace(id="s1")),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    for name, tracker in TRACKERS.items():
        monkeypatch.setitem(sys.modules, tracker.package, FAKES[name])
        for variable in tracker.variables:
            monkeypatch.setenv(variable, "")
            monkeypatch.delenv(variable)
    return RunDirectory.create_at(tmp_path / "run")


def remember(run, names):
    loop = SimpleNamespace(
        run=SimpleNamespace(directory=run), args=SimpleNamespace(report_to=names)
    )
    RememberTrackers().begin(loop, None)


def test_every_tracker_is_gone_on_with(run):
    remember(run, list(TRACKERS))
    assert json.loads((run.root / FILE).read_text()) == {
        "wandb": "w1",
        "mlflow": "m1",
        "swanlab": "s1",
    }
    args = SimpleNamespace(report_to=[*TRACKERS, "comet_ml", "tensorboard"], run_name="n")
    notes = go_on_with(run, args, goes_on=True)
    assert os.environ["WANDB_RUN_ID"] == "w1"
    assert os.environ["WANDB_RESUME"] == "allow"
    assert os.environ["MLFLOW_RUN_ID"] == "m1"
    assert os.environ["SWANLAB_RUN_ID"] == "s1"
    assert notes[:3] == [f"{name} goes on with its run {name[0]}1" for name in TRACKERS]
    assert notes[3:] == ["comet_ml begins another run: it does not say how to go on with one"]


def test_what_the_environment_says_wins(run, monkeypatch):
    run.write_json(run.root / FILE, {"wandb": "w1"})
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    go_on_with(run, SimpleNamespace(report_to=["wandb"], run_name="n"), goes_on=True)
    assert os.environ["WANDB_RUN_ID"] == "mine"


def test_trackers_that_are_not_asked_for_are_left_alone(run):
    remember(run, ["tensorboard"])
    assert not (run.root / FILE).exists()


@pytest.mark.parametrize("fails", [False, True])
def test_a_tracker_ends_with_the_run_and_not_at_the_exit(fails, monkeypatch):
    """At the exit of the process its words were on standard output, behind the run's JSON."""
    codes = []
    fake = SimpleNamespace(run=object(), finish=lambda exit_code: codes.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with contextlib.suppress(RuntimeError), trackers_ended():
        if fails:
            raise RuntimeError
    assert codes == [int(fails)]


def test_swanlab_is_begun_where_it_refuses_to_say_that_it_is_not(run, monkeypatch):
    """From 0.10 on; transformers' own callback ends with an error there."""
    begun = []

    def get_run():
        raise RuntimeError("No active Run. Call swanlab.init() first.")

    fake = SimpleNamespace(get_run=get_run, init=lambda **given: begun.append(given))
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    args = SimpleNamespace(report_to=["swanlab"], run_name="mine")
    assert go_on_with(run, args, goes_on=False) == []
    assert begun == [{"mode": "offline", "experiment_name": "mine"}]
