"""What the record of a run says of figures that are none."""

from types import SimpleNamespace

import pytest

from trainkit.train.callbacks import RunRecorder


class Listener:
    """A console that takes down what it is told."""

    def __init__(self):
        self.warned, self.rows = [], []

    def warn(self, text):
        self.warned.append(text)

    def log(self, row):
        self.rows.append(row)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.5])
def test_an_evaluation_loss_that_is_no_number_is_told(value, monkeypatch):
    console = Listener()
    monkeypatch.setattr(
        "trainkit.train.callbacks.CurveRefresher", lambda run: SimpleNamespace(refresh=lambda: None)
    )
    recorder = RunRecorder(None, console, resume_step=None, begin=lambda args: None)
    recorder.on_log(None, SimpleNamespace(global_step=4), None, {"eval_loss": value})
    assert console.rows
    assert bool(console.warned) == (value != 1.5)
    if console.warned:
        assert f"eval_loss is {value} at step 4" in console.warned[0]
