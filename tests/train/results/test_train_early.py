"""When a run ends because its figure gets no better: broken off or not, and whatever it logs."""

import math

import pytest
from lab import Lab
from transformers import TrainerCallback

from trainkit.train import hooks
from trainkit.train.evaluations import StopEarly

PATIENCE, EVERY = 8, 3


def early(tiny_tokenizer, root, name, *, losses=None, patience=PATIENCE, **training):
    """A trainer that is evaluated every three steps; its evaluations may be given."""
    values = {"eval_strategy": "steps", "eval_steps": EVERY, "max_steps": 60, "save_steps": 5}
    trainer = Lab(tiny_tokenizer, root, 4).trainer(
        name, batch=1, layers=1, learning_rate=0.0, given={"hooks": [StopEarly(patience, 0.0)]},
        **{**values, **training},
    )  # fmt: skip
    trainer.said = []
    trainer.run.console.note = trainer.said.append
    if losses is not None:
        given = iter(losses)
        plain = trainer.evaluations._loss
        trainer.evaluations._loss = lambda *asked: {**plain(*asked), "eval_loss": next(given)}
    return trainer


class BreakOff(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            raise RuntimeError("broken off")


@pytest.mark.parametrize("stopped_at", [5, 25])
def test_a_run_that_was_broken_off_ends_where_the_unbroken_one_does(
    stopped_at, tiny_tokenizer, tmp_path, monkeypatch
):
    """The log keeps the last rows only: here of 5 steps, as 1000 of a run of thousands."""
    monkeypatch.setattr(hooks, "KEPT_ROWS", 5)
    whole = early(tiny_tokenizer, tmp_path, "whole")
    whole.train()
    assert whole.state.global_step == (1 + PATIENCE) * EVERY
    broken = early(tiny_tokenizer, tmp_path, "broken")
    broken.add_callback(BreakOff(stopped_at))
    with pytest.raises(RuntimeError, match="broken off"):
        broken.train()
    again = early(tiny_tokenizer, tmp_path, "broken")
    again.train(str(tmp_path / "broken" / f"checkpoint-{stopped_at}"))
    assert again.state.global_step == whole.state.global_step
    assert again.said == whole.said


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("losses", "ends_at", "best"),
    [
        ([NAN, 3.0, 2.0, 1.5, 1.4], None, 1.4),
        ([-INF, 3.0, 2.0, 1.5, 1.4], None, 1.4),
        ([2.0, NAN, INF, 1.0, 0.5], 9, 2.0),
        ([NAN, NAN, 1.0], 6, None),
    ],
)
def test_what_is_no_number_is_never_the_best_and_never_better(
    losses, ends_at, best, tiny_tokenizer, tmp_path
):
    trainer = early(
        tiny_tokenizer, tmp_path, "run", losses=losses, patience=2, max_steps=15, save_steps=3,
        metric_for_best_model="loss", greater_is_better=False,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == (ends_at or 15)
    assert trainer.state.best_metric == best
    if best is None:
        assert trainer.said == ["stopped at step 6: loss was not a number in 2 evaluations"]


def test_the_last_step_is_logged_whatever_the_interval(tiny_tokenizer, tmp_path):
    for patience, logged in ((99, [7, 14, 15]), (2, [7, 9])):
        trainer = early(
            tiny_tokenizer, tmp_path, "run", patience=patience, max_steps=15, logging_steps=7
        )
        trainer.train()
        assert [row["step"] for row in trainer.state.log_history if "loss" in row] == logged
