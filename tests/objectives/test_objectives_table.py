"""An objective is a file, a format and a row: shown with one that compares pairs of answers."""

import json

import numpy as np
import pytest
import torch
from objectives.preference import PREFERENCE
from objectives.preference_cases import (
    make_data,
    make_trainer,
    mean_loss,
    pair,
    register,
    train,
    write,
)
from ranks import run_ranks

from trainkit.data.formats import FORMATS
from trainkit.data.sources import formats_taken
from trainkit.errors import DataError, RecipeError
from trainkit.objectives.objective import Step
from trainkit.objectives.sft import SFT
from trainkit.objectives.table import OBJECTIVES, objective_of
from trainkit.options.data import ROW_FORMATS


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register(monkeypatch.setitem)


def reference(trainer, pairs):
    """The mean loss of pairs on the plain model in fp64, with gradients."""
    from tiny import make_qwen2
    from transformers import set_seed

    set_seed(1)
    model = make_qwen2(len(trainer.tokenizer)).double()
    loss = mean_loss(model, pairs)
    loss.backward()
    return loss.item(), dict(model.named_parameters())


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
def test_a_step_is_autograds_on_full_logits(patched, tmp_path):
    """One step of plain SGD with a rate of 1: the weights move by the gradient."""
    trainer, data = make_trainer(
        tmp_path, patched=patched, batch=2, accumulate=2, max_steps=1,
        optim="sgd", learning_rate=1.0, lr_scheduler_type="constant",
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    evaluated = trainer.evaluate()
    everyone = [data.eval.samples[place] for place in range(len(data.eval.samples))]
    wanted, _ = reference(trainer, everyone)
    # fp32 against fp64: sums of some thirty log-probabilities near 6, to about 1e-7 of each.
    assert evaluated["eval_loss"] == pytest.approx(wanted, rel=1e-4)
    assert 0 <= evaluated["eval_pair_accuracy"] <= 1
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    data.train.samples.set_epoch(0)
    wanted, parameters = reference(trainer, [data.train.samples[place] for place in range(4)])
    assert row["loss"] == pytest.approx(wanted, rel=1e-4)
    assert {"margin", "pair_accuracy"} <= set(row)
    squares = sum(p.grad.square().sum() for p in parameters.values())
    assert row["grad_norm"] == pytest.approx(squares.sqrt().item(), rel=1e-4)
    for name, p in trainer.model.named_parameters():
        moved, gradient = before[name] - p.detach(), parameters[name].grad
        # Weights of order one are rounded to 1e-7 when they move; gradients are near 0.01 to 1.
        assert torch.allclose(moved.double(), gradient, rtol=1e-3, atol=1e-5), name


def test_the_cut_into_micro_batches_and_ranks_changes_nothing(tmp_path):
    runs = []
    for name, cut in {"wide": (4, 1), "deep": (1, 4)}.items():
        (tmp_path / name).mkdir()
        runs.append(train(str(tmp_path / name), batch=cut[0], accumulate=cut[1], max_steps=4))
    wide, deep = runs
    (tmp_path / "ranks").mkdir()
    ranks = run_ranks(
        "objectives.preference_cases:train", root=str(tmp_path / "ranks"), batch=2, max_steps=4,
        patched=True,
    )  # fmt: skip
    for other in (deep, *ranks):
        # The weights of later steps have seen other orders of fp32 sums.
        for mine, theirs in zip(wide, other, strict=True):
            assert theirs == pytest.approx(mine, rel=2e-3)
        assert other[0] == pytest.approx(wide[0], rel=1e-4)


def test_a_class_that_returns_means_is_cut_alike(tmp_path):
    """Trainer divides its losses by the number of micro-batches; what is returned takes that in."""
    (tmp_path / "wide").mkdir(), (tmp_path / "ranks").mkdir()
    wide = train(str(tmp_path / "wide"), batch=4, max_steps=3)
    case = "objectives.preference_cases:train"
    options = {"batch": 1, "accumulate": 2, "max_steps": 3, "means": True}
    for rank in run_ranks(case, root=str(tmp_path / "ranks"), **options):
        assert rank[0] == pytest.approx(wide[0], rel=1e-4)
        for mine, theirs in zip(wide, rank, strict=True):
            assert theirs == pytest.approx(mine, rel=2e-3)


def test_zero_3_gathers_the_head_for_token_losses(tmp_path):
    roots = [tmp_path / name for name in ("plain", "ranks")]
    for root in roots:
        root.mkdir()
    plain = train(str(roots[0]), batch=4, max_steps=2)
    ranks = run_ranks(
        "objectives.preference_cases:train", root=str(roots[1]), stage=3, batch=2, max_steps=2,
        patched=True,
    )  # fmt: skip
    for rank in ranks:
        assert rank[0] == pytest.approx(plain[0], rel=1e-4)
        assert rank[-1] == pytest.approx(plain[-1], rel=2e-3)


def test_a_last_step_with_fewer_pairs_fills_up_with_none(tmp_path):
    """12 pairs in steps of 8: the second has 4, and weighs them as 4."""
    trainer, data = make_trainer(
        tmp_path, batch=4, accumulate=2, max_steps=2, optim="sgd", learning_rate=0.0
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    data.train.samples.set_epoch(0)
    pairs = [data.train.samples[place] for place in range(8, 12)]
    assert rows[1]["loss"] == pytest.approx(reference(trainer, pairs)[0], rel=1e-4)


def test_a_step_without_items_has_no_loss_and_zero_gradients():
    weight = torch.ones(2, requires_grad=True)
    step = Step(torch.tensor(0), 2, 2, True, None)
    loss = step.share(0 * weight.sum())
    loss.backward()
    assert loss.item() == 0
    assert weight.grad.tolist() == [0, 0]


def test_a_comparison_is_kept_whole_or_not_at_all(tmp_path):
    """An answer that does not fit takes the other one with it; the ledger has the row."""
    rows = [pair(1), pair(2, rejected="far too long " * 40), pair(3)]
    data = make_data(tmp_path, rows, max_length=128, truncation="drop", max_dropped=1.0)
    assert len(data.train.samples) == 2
    (file,) = data.summary["train"]["files"]
    assert (file["samples"], file["kept"], file["dropped"]) == (4, 2, 1)
    lines = [json.loads(line) for line in data.ledger.read_text().splitlines()]
    assert {(line["line"], line["action"]) for line in lines} == {(2, "dropped")}
    texts = ["".join(map(str, sample["input_ids"])) for sample in data.train.samples[0]]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"packing": True}, "data.packing"),
        ({"stream_buffer": 8}, "data.streaming"),
        ({"source_format": "messages"}, "data.format"),
        ({"source_format": "pairs", "objective": SFT}, "data.format"),
    ],
    ids=["packing", "streaming", "other rows", "pairs for sft"],
)
def test_what_an_objective_cannot_take_is_refused_by_key(options, where, tmp_path):
    with pytest.raises(RecipeError) as caught:
        make_data(tmp_path, [pair(1)], **options)
    assert caught.value.where.startswith(where)
    assert caught.value.fix


RECIPE = """\
objective: preference
model: {name_or_path: MODEL, dtype: float32}
data: {train: [pairs.jsonl], packing: false, max_length: 256, cache_dir: cache}
training: {per_device_train_batch_size: 4, max_steps: 2, save_steps: 1}
"""


def test_a_recipe_names_its_objective(tmp_path, tiny_qwen2):
    """From the command line: it trains, is written down, and a resumed run keeps to it."""
    (tmp_path / "r.yaml").write_text(RECIPE.replace("MODEL", str(tiny_qwen2)))
    write(tmp_path / "pairs.jsonl", [pair(number) for number in range(12)])

    def typed(*argv):
        (said,) = run_ranks(
            "objectives.preference_cases:command", world_size=1, cwd=str(tmp_path), argv=argv
        )
        return said

    code, _, err = typed("sft", "r.yaml", "--output-dir", "run")
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [0 <= row["pair_accuracy"] <= 1 for row in rows if "loss" in row] == [True, True]
    assert "objective: preference" in (tmp_path / "run/resolved.yaml").read_text()
    code, _, err = typed("sft", "--resume", "run", "training.max_steps=3")
    assert code == 0, err
    assert "pair_accuracy" in (tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1]
    code, out, err = typed("data", "preview", "r.yaml")
    assert code == 0, err
    assert "Count to 1." in out


def test_sft_does_not_guess_at_pairs(tmp_path):
    with pytest.raises(DataError, match="compares two answers"):
        make_data(tmp_path, [pair(1)], objective=SFT)


def test_every_format_has_an_objective_that_takes_it():
    rows = (*map(objective_of, OBJECTIVES), objective_of("distill"))
    taken = set[str]().union(*(formats_taken(objective.format) for objective in rows))
    assert taken == set(FORMATS) == set(ROW_FORMATS)
    assert "pairs" not in formats_taken(SFT.format)
    assert formats_taken(PREFERENCE.format) == {"pairs"}


def test_the_rows_of_the_table_have_their_names():
    assert all(objective_of(name).name == name for name in OBJECTIVES)


def test_the_batch_of_a_packed_row_and_of_a_pair_can_be_filled_up_with():
    from trainkit.objectives.objective import count_tokens, without_training

    sample = {"input_ids": np.arange(3), "loss_mask": np.ones(3, dtype=np.uint8)}
    for item in (sample, [sample, sample]):
        empty = without_training(item)
        flat = empty if isinstance(empty, list) else [empty]
        assert all(not each["loss_mask"].any() for each in flat)
    assert sample["loss_mask"].all()
    assert count_tokens([sample, [sample, sample]]) == 9
