"""What the record of a run says of figures that are none."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from trainkit.run.starts import Stages
from trainkit.train.callbacks import RunRecorder


class Listener:
    """A console that takes down what it is told."""

    def __init__(self):
        self.warned, self.rows, self.notes = [], [], []

    def warn(self, text):
        self.warned.append(text)

    def note(self, text):
        self.notes.append(text)

    def log(self, row):
        self.rows.append(row)


def run_of(console, directory=None, step=None):
    """A run that goes on from a step, or begins."""
    point = None if step is None else SimpleNamespace(step=step)
    options = SimpleNamespace(resume=None)
    return SimpleNamespace(
        console=console, directory=directory, point=point, options=options, stages=Stages()
    )


def at(step):
    return SimpleNamespace(state=SimpleNamespace(global_step=step))


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr(
        "trainkit.train.callbacks.CurveRefresher",
        lambda run: SimpleNamespace(refresh=lambda **_: None),
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.5])
def test_an_evaluation_loss_that_is_no_number_is_told(value):
    console = Listener()
    recorder = RunRecorder(run_of(console))
    recorder.on_log(at(4), {"eval_loss": value})
    assert console.rows
    assert bool(console.warned) == (value != 1.5)
    if console.warned:
        assert f"eval_loss is {value} at step 4" in console.warned[0]


@pytest.mark.parametrize(
    ("resume_step", "told"), [(None, ["step 3 ", "step 5 "]), (10, ["step 5 "])]
)
def test_each_pass_over_streamed_data_is_told_once(resume_step, told):
    """The mean over the shards; a run that goes on knows of the passes before it."""
    console = Listener()
    recorder = RunRecorder(run_of(console, step=resume_step))
    passes = [0.0, 0.0, 0.25, 1.0, 1.5, 2.0]
    for step, number in list(enumerate(passes, 1))[2 if resume_step else 0 :]:
        row = {"loss": 1.0, "num_passes": number}
        recorder.on_log(at(step), row)
    assert len(console.notes) == len(told)
    assert all(text in note for text, note in zip(told, console.notes, strict=True))


class Record:
    """The little of a run's directory that a start writes to."""

    metrics = Path("none")

    def open_metrics(self, resume_step):
        return None

    def write_status(self, status, total_steps, step=None):
        self.total_steps = total_steps

    def heartbeat(self, step):
        pass


@pytest.mark.parametrize(
    ("asked", "steps", "told"), [(-1, 2, True), (-1, 9, True), (-1, 10, False), (2, 2, False)]
)
def test_few_steps_that_nobody_asked_for_are_told(asked, steps, told, monkeypatch):
    """A small file under a large batch ends 'done' and has trained nothing."""
    monkeypatch.setattr("trainkit.train.callbacks.read_metrics", lambda path: [])
    console, run = Listener(), Record()
    console.start = lambda total, first_step: None
    monkeypatch.setattr("trainkit.train.callbacks.write_start", lambda run: None)
    recorder = RunRecorder(run_of(console, run))
    arguments = {"max_steps": asked, "eval_strategy": "no", "save_strategy": "no"}
    state = {"max_steps": steps, "global_step": 0, "num_train_epochs": 1}
    state |= {"eval_steps": 0, "save_steps": 0}
    args, state = SimpleNamespace(**arguments), SimpleNamespace(**state)
    recorder.begin(SimpleNamespace(args=args, state=state, run=None), None)
    assert run.total_steps == steps
    assert [f"make {steps} optimizer steps" in text for text in console.warned] == [True] * told
