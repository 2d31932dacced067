"""Which checkpoint is the best is read from a file, which may have been altered."""

from types import SimpleNamespace

import pytest
from transformers import TrainerState

from trainkit.train.resume.begin import TakeUp


@pytest.mark.parametrize("step", [None, 0, 4, 6, "4", "../../outside", "4/../../outside"])
def test_the_best_checkpoint_lies_beside_the_one_that_is_resumed(step, tmp_path):
    outside, run_folder = tmp_path / "outside", tmp_path / "run"
    for folder in (outside, run_folder / "checkpoint-4", run_folder / "checkpoint-8"):
        folder.mkdir(parents=True)
    (run_folder / "checkpoint-6").symlink_to(outside)
    state = TrainerState(best_global_step=step, best_model_checkpoint=str(outside))
    args = SimpleNamespace(load_best_model_at_end=True)
    run = SimpleNamespace(console=SimpleNamespace(note=lambda text: None))
    loop = SimpleNamespace(state=state, args=args, run=run)
    TakeUp()._find_best(loop, run_folder / "checkpoint-8")
    assert state.best_model_checkpoint == (str(run_folder / "checkpoint-4") if step == 4 else None)
