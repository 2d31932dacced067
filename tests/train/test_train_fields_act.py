"""Fields of TrainingArguments that the table says act change what a run does."""

import pytest

CHANGES = [
    {"learning_rate": 5e-3},
    {"lr_scheduler_type": "constant"},
    {"warmup_steps": 3},
    {"optim": "sgd"},
    {"adam_beta1": 0.5},
    {"adam_beta2": 0.5},
    {"adam_epsilon": 1.0},
    {"weight_decay": 5.0},
    {"max_grad_norm": 1e-3},
    {"neftune_noise_alpha": 50.0},
    {"train_sampling_strategy": "group_by_length"},
    {"dataloader_drop_last": True, "max_steps": 11},
    {"seed": 2},
    {"logging_steps": 2},
    {"logging_strategy": "no"},
    {"include_num_input_tokens_seen": "all"},
]
TIMED = {"grad_norm", "loss", "learning_rate", "epoch", "num_input_tokens_seen", "step"}


def history(lab, **training):
    trainer = lab.trainer("run", **{"max_steps": 4, "save_strategy": "no", **training})
    trainer.train()
    rows = trainer.state.log_history
    return [{key: row[key] for key in TIMED & set(row)} for row in rows]


def test_one_recipe_gives_one_history(lab):
    assert history(lab) == history(lab)


@pytest.mark.parametrize("training", CHANGES, ids=str)
def test_a_field_that_acts_changes_the_run(lab, training):
    plain = {"max_steps": training["max_steps"]} if "max_steps" in training else {}
    assert history(lab, **training) != history(lab, **plain)


def test_saving_the_model_only_leaves_the_optimizer_out(lab):
    for name, only in (("with", False), ("without", True)):
        lab.trainer(name, max_steps=1, save_steps=1, save_only_model=only).train()
    assert (lab.root / "with/checkpoint-1/optimizer.pt").exists()
    assert not (lab.root / "without/checkpoint-1/optimizer.pt").exists()
