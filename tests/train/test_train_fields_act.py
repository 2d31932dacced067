"""Fields of TrainingArguments that the table says act change what a run does."""

import pytest
from lab import Lab

CHANGES = [
    {"learning_rate": 5e-3},
    {"lr_scheduler_type": "constant"},
    {"warmup_steps": 3},
    {"optim": "sgd"},
    {"adam_beta1": 0},
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


def test_one_recipe_gives_one_history(lab, plain):
    assert history(lab) == plain


@pytest.fixture(scope="module")
def plain(tiny_tokenizer, tmp_path_factory):
    return history(Lab(tiny_tokenizer, tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize("training", CHANGES, ids=str)
def test_a_field_that_acts_changes_the_run(lab, training, plain):
    if "max_steps" in training:
        plain = history(lab, max_steps=training["max_steps"])
    assert history(lab, **training) != plain


def test_saving_the_model_only_leaves_the_optimizer_out(lab):
    for name, only in (("with", False), ("without", True)):
        lab.trainer(name, max_steps=1, save_steps=1, save_only_model=only).train()
    assert (lab.root / "with/checkpoint-1/optimizer.pt").exists()
    assert not (lab.root / "without/checkpoint-1/optimizer.pt").exists()


def dates(trainer):
    return [row["step"] for row in trainer.state.log_history if "eval_loss" in row]


@pytest.mark.parametrize(
    ("training", "steps"),
    [
        ({"eval_on_start": True, "eval_steps": 4}, [0, 4]),
        ({"eval_delay": 3, "eval_steps": 1}, [3, 4]),
        ({"eval_steps": 0.5}, [2, 4]),
    ],
    ids=str,
)
def test_evaluation_comes_when_it_was_asked_for(lab, training, steps):
    trainer = lab.trainer("run", max_steps=4, save_strategy="no", eval_strategy="steps", **training)
    trainer.train()
    assert dates(trainer) == steps


def test_the_best_model_is_kept_and_loaded(lab):
    """The rate grows so high that the first steps are the best ones."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_total_limit": 1}
    trainer = lab.trainer(
        "run", max_steps=4, learning_rate=1.0, load_best_model_at_end=True, **options
    )
    trainer.train()
    losses = {r["step"]: r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r}
    best = min(losses, key=losses.get)
    assert best < 4
    names = {path.name for path in (lab.root / "run").glob("checkpoint-*")}
    assert names == {f"checkpoint-{best}"}
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best], rel=1e-6)


@pytest.mark.parametrize(
    "training",
    [
        {"full_determinism": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"torch_empty_cache_steps": 1},
        {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2},
        {"debug": "underflow_overflow"},
    ],
    ids=str,
)
def test_a_field_that_only_costs_or_saves_changes_no_number(lab, training, plain):
    for row, wanted in zip(history(lab, **training), plain, strict=True):
        assert row == pytest.approx(wanted, rel=1e-5)
