"""Taking up a run, piece by piece: groups, rates and what was counted since the last row."""

from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from trainkit.objectives.objective import BatchCounts
from trainkit.parallel.engine import Ranks
from trainkit.train.checkpoints import CheckpointWriter, Save
from trainkit.train.evaluations import Evaluations
from trainkit.train.faults.numbers import NumberPolicy
from trainkit.train.faults.signals import StopRequest
from trainkit.train.log import Rows
from trainkit.train.resume.begin import TakeUp
from trainkit.train.resume.changes import Change, Review


def make_trainer(tmp_path, groups=()):
    args = TrainingArguments(output_dir=str(tmp_path), learning_rate=1e-2, report_to="none")
    found = SimpleNamespace(
        args=args,
        model=torch.nn.Linear(2, 2),
        stream=None,
        loss=SimpleNamespace(train_metrics=None),
        layout=SimpleNamespace(counts_rows=True, counts_losses=True),
        group_options=[dict(group) for group in groups],
        checkpoints=CheckpointWriter(tmp_path, {}),
        evaluations=Evaluations(),
        stop=StopRequest(),
        state=TrainerState(global_step=6),
        ranks=Ranks(args),
        rows=Rows(),
        run=SimpleNamespace(
            recipe=SimpleNamespace(lora=None),
            review=Review(),
            numbers=NumberPolicy(),
            console=SimpleNamespace(),
        ),
    )
    found.hook = lambda kind: found.evaluations
    found.model.num_parameters = lambda **_: 6
    found.rows.begin(found, None)
    return found


def test_what_was_counted_since_the_last_row_comes_back(tmp_path):
    before, after = make_trainer(tmp_path), make_trainer(tmp_path)
    before.rows.loss_sum, before.rows.logged_step = torch.tensor(3.7), 5
    for tokens, trained in ((7, 3), (9, 4)):
        before.rows.before_step(before, [], [BatchCounts(tokens, trained, trained)], 0.5)
    before.rows.correct = torch.tensor([5, 7])
    before.rows.save(before, Save(tmp_path))
    after.rows.begin(after, tmp_path)
    assert after.rows.loss_sum.item() == before.rows.loss_sum.item()
    assert after.rows.logged_step == 5
    after.rows.before_step(after, [], [BatchCounts(1, 1, 1)], 0.5)
    rows = []
    after.control = TrainerControl(should_log=True)
    after.guard = SimpleNamespace(flush=lambda until: None, take_skipped=lambda: 0)
    after.engine = SimpleNamespace(figures=dict)
    after.is_over, after.norm, after.rate, after.log = True, 1.0, 0.1, rows.append
    after.rows.due(after)
    (row,) = rows
    assert row["loss"] == pytest.approx(3.7)
    assert (row["num_tokens"], row["num_trained_tokens"]) == (17, 8)
    assert row["data_seconds"] == pytest.approx(0.5)
    assert row["token_accuracy"] == pytest.approx(5 / 7)


def take_up(tmp_path, review=None):
    """A run that had a rate of 1 and a decay of 0.5, and is given 0.01 and 0.25 now."""
    parameter = torch.nn.Parameter(torch.ones(1))
    saved = torch.optim.AdamW([parameter], lr=1.0, weight_decay=0.5, betas=(0.1, 0.2), eps=0.3)
    wanted = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.25, betas=(0.8, 0.9), eps=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(saved, lambda step: 1 / (step + 1))
    saved.step(), schedule.step()
    said = []
    trainer = make_trainer(tmp_path, wanted.param_groups)
    trainer.group_options[0]["initial_lr"] = 1e-2
    trainer.args.save_total_limit = 2
    trainer.args.eval_on_start = True
    trainer.run.review, trainer.run.console.note = review or Review(), said.append
    trainer.state = TrainerState(max_steps=8, global_step=1)
    trainer.optimizer, trainer.scheduler = saved, schedule
    TakeUp().begin(trainer, tmp_path / "checkpoint-6")
    return saved, schedule, said, trainer


def test_every_option_of_the_recipe_wins_over_the_saved_one(tmp_path):
    optimizer, schedule, said, _ = take_up(tmp_path)
    (group,) = optimizer.param_groups
    assert [group[name] for name in ("weight_decay", "eps")] == [0.25, 1e-4]
    assert group["betas"] == (0.8, 0.9)
    assert group["lr"] == schedule.get_last_lr()[0] == pytest.approx(1e-2 / 2)
    assert said == ["the learning rate goes on at 0.005; it was 0.5"]
    optimizer.step(), schedule.step()
    assert group["lr"] == pytest.approx(1e-2 / 3)


def test_what_a_kill_kept_from_being_thinned_out_goes_and_copies_of_the_user_stay(tmp_path):
    kept = ["checkpoint-2-kept", "checkpoint-4", "checkpoint-6", "checkpoint-old"]
    for name in ["checkpoint-2", *kept]:
        (tmp_path / name).mkdir()
    take_up(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == kept


def test_a_factor_is_that_of_the_changed_key_alone():
    review = Review((Change("training.learning_rate", 1e-2, 1e-3), Change("lora.r", None, 4)))
    assert review.factor("training.learning_rate") == pytest.approx(0.1)
    assert review.factor("lora.r") == review.factor("lora.lora_plus_ratio") == 1


def test_a_run_that_goes_on_is_not_evaluated_as_at_its_beginning(tmp_path):
    """It would be one row more, and one more evaluation for early stopping to count."""
    *_, trainer = take_up(tmp_path)
    assert not trainer.evaluations.makes_up


@pytest.mark.parametrize("was_evaluated", [True, False])
def test_a_schedule_that_follows_the_loss_hears_an_evaluation_that_is_made_up_for(
    tmp_path, was_evaluated
):
    """One stopped at a step that was due: without it the next rates would be others."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    trainer = make_trainer(tmp_path, optimizer.param_groups)
    args = trainer.args
    args.eval_strategy, args.eval_delay, args.metric_for_best_model = "steps", 0, "loss"
    rows = [{"step": 2, "eval_loss": 1.0}] if was_evaluated else []
    state = TrainerState(max_steps=8, global_step=2, eval_steps=2, log_history=rows)
    state.compute_steps = lambda *_: None
    trainer.state, trainer.optimizer, trainer.scheduler = state, optimizer, schedule
    TakeUp().begin(trainer, tmp_path / "checkpoint-2")
    assert trainer.evaluations.makes_up is not was_evaluated
    trainer.follows_metric = True
    trainer.evaluations.measure = lambda loop: {"eval_loss": 1.0}
    trainer.evaluations.begin(trainer, tmp_path / "checkpoint-2")
    assert schedule.last_epoch == (0 if was_evaluated else 1)
