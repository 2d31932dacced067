"""Early stopping at the literal length: 3000 steps, an evaluation every 300, stopped anywhere.

The hook, the log and the state are the run's own; what trains is left out, so that all of the steps
are taken in milliseconds.
"""

from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from trainkit.train.evaluations import StopEarly
from trainkit.train.hooks import LoopState

STEPS, EVERY, PATIENCE, END = 3000, 300, 8, 2700


class Loop:
    """A row a step, an evaluation every 300 of them, a checkpoint behind any step."""

    log = LoopState.log

    def __init__(self, state, patience=PATIENCE):
        self.state, self.control, self.said = state, TrainerControl(), []
        self.args = SimpleNamespace(
            metric_for_best_model="loss",
            greater_is_better=False,
            include_num_input_tokens_seen="no",
        )
        self.run = SimpleNamespace(console=SimpleNamespace(note=self.said.append))
        self.early = StopEarly(patience, 0.0)
        self.early.begin(self, None)

    def event(self, name, row):
        if name == "on_evaluate":
            self.early.on_evaluate(self, row)

    def train(self, until=STEPS):
        while not self.control.should_training_stop and self.state.global_step < until:
            self.state.global_step += 1
            step = self.state.global_step
            self.log({"loss": 1.0})
            if step % EVERY == 0:
                row = {"eval_loss": 1.0 if step == EVERY else 1.0 + step / STEPS}
                self.log(dict(row))
                self.event("on_evaluate", row)
        return self.state.global_step


AROUND = [step + off for step in range(EVERY, END + 1, EVERY) for off in (-1, 0, 1)]
STOPS = [[step] for step in (1, 1450, *AROUND[:-1])]


@pytest.mark.parametrize("stops", [*STOPS, [1500, 1501, 2699], [*range(100, END, 100)]], ids=str)
def test_a_run_that_is_stopped_anywhere_ends_where_the_unbroken_one_ends(stops, tmp_path):
    assert Loop(TrainerState()).train() == END
    state, file = TrainerState(), str(tmp_path / "trainer_state.json")
    for stop in stops:
        assert Loop(state).train(stop) == stop
        state.save_to_json(file)  # the checkpoint of that step, behind its evaluation
        state = TrainerState.load_from_json(file)
    assert Loop(state).train() == END


def test_more_patience_lets_a_run_go_on_that_was_out_of_it(tmp_path):
    state = TrainerState()
    assert Loop(state).train() == END
    assert Loop(state, patience=PATIENCE + 1).train() == END + EVERY
