"""Which checkpoint is the best is read from a file, which may have been altered."""

from types import SimpleNamespace

import pytest
from transformers import TrainerState

from trainkit.train.resume.take_up import TakeUp


@pytest.mark.parametrize("step", [None, 0, 4, 6, "4", "../../outside", "4/../../outside"])
def test_the_best_checkpoint_lies_beside_the_one_that_is_resumed(step, tmp_path):
    outside, run = tmp_path / "outside", tmp_path / "run"
    for folder in (outside, run / "checkpoint-4", run / "checkpoint-8"):
        folder.mkdir(parents=True)
    (run / "checkpoint-6").symlink_to(outside)
    state = TrainerState(best_global_step=step, best_model_checkpoint=str(outside))
    taken = TakeUp(None, None, run / "checkpoint-8")
    taken._find_best(SimpleNamespace(load_best_model_at_end=True), state)
    assert state.best_model_checkpoint == (str(run / "checkpoint-4") if step == 4 else None)
