"""The loss of each source: against the plain model's own rows, however the batches are cut."""

import numpy as np
import pytest
import torch
from ranks import run_ranks
from source_loss_cases import NAMES, documents, logged, make_trainer, rows_of
from torch.nn.functional import cross_entropy

from trainkit.objectives.sft import SourceLosses, distinct_labels

CUTS = {
    "plain": {},
    "packed": {"kernels": True, "packed": True},
    "packed-plain": {"packed": True},
    "accumulated": {"kernels": True, "batch": 2, "accumulate": 4},
    "smoothed": {"label_smoothing_factor": 0.1},
    "smoothed-packed": {"kernels": True, "packed": True, "label_smoothing_factor": 0.1},
}


def truth(model, places, smoothing=0.0):
    """Mean loss and tokens per source of these documents, one by one, from fp64 logits."""
    sums, counts = np.zeros(len(NAMES)), np.zeros(len(NAMES), dtype=int)
    for sample in (documents()[place] for place in places):
        ids = torch.tensor(sample["input_ids"], dtype=torch.long)
        labels = torch.where(torch.tensor(sample["loss_mask"]) > 0, ids, -100)[1:]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        loss = cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        sums[sample["source"]] += loss.item()
        counts[sample["source"]] += int((labels != -100).sum())
    return sums / np.maximum(counts, 1), counts


def check(row, wanted, counts, prefix=""):
    total = 0.0
    for name, loss, count in zip(NAMES, wanted, counts, strict=True):
        assert row.get(f"{prefix}num_trained_tokens/{name}", 0) == count
        assert (f"{prefix}loss/{name}" in row) == (count > 0)
        if count:
            # fp32 against fp64: means of losses near 5.
            assert row[f"{prefix}loss/{name}"] == pytest.approx(loss, rel=1e-5)
            total += row[f"{prefix}loss/{name}"] * count
    # The rows' losses are summed in fp64, the logged loss in fp32.
    assert total / counts.sum() == pytest.approx(row[f"{prefix}loss"], rel=1e-6)


@pytest.mark.parametrize("cut", CUTS)
def test_a_row_of_the_log_says_what_each_source_loses(cut, tmp_path):
    from tiny import make_qwen2, make_tokenizer

    plain = make_qwen2(len(make_tokenizer())).double().eval()
    trainer = make_trainer(tmp_path, learning_rate=0.0, **CUTS[cut])
    trainer.train()
    smoothing = CUTS[cut].get("label_smoothing_factor", 0.0)
    assert len(rows_of(trainer)) == 4
    for step, row in enumerate(rows_of(trainer)):
        check(row, *truth(plain, range(8 * step, 8 * step + 8), smoothing))
    # The same quantity: smoothed where training is.
    check(trainer.evaluate(), *truth(plain, range(len(documents())), smoothing), prefix="eval_")


def test_wide_rows_of_the_log_add_up_the_steps(tmp_path):
    each = rows_of_run(tmp_path / "each", logging_steps=1)
    (wide,) = rows_of_run(tmp_path / "wide", logging_steps=4)
    for name in NAMES:
        loss, count = f"loss/{name}", f"num_trained_tokens/{name}"
        steps = [row for row in each if loss in row]
        total = sum(row[count] for row in steps)
        assert wide[count] == total
        mean = sum(row[loss] * row[count] for row in steps) / total
        assert wide[loss] == pytest.approx(mean, rel=1e-12)


def rows_of_run(root, **training):
    trainer = make_trainer(root, kernels=True, **training)
    trainer.train()
    return rows_of(trainer)


@pytest.mark.sample("kernels")
@pytest.mark.parametrize("kernels", [False, True], ids=["plain", "kernels"])
def test_two_ranks_say_what_one_says(kernels, tmp_path):
    """Training included: only the order of fp32 sums differs."""
    one = logged(tmp_path / "one", kernels=kernels)
    two = run_ranks(
        "train.source_loss_cases:logged", root=str(tmp_path / "two"), kernels=kernels, batch=4
    )
    for rank in two:
        for row, wanted in zip(rank, one, strict=True):
            assert row == pytest.approx(wanted, rel=1e-4)


def test_without_sources_nothing_is_added(tmp_path):
    rows = logged(tmp_path, kernels=True, sources=())
    assert not any("/" in key for row in rows for key in row)


def test_the_training_is_the_same_with_and_without(tmp_path):
    apart = logged(tmp_path / "apart", kernels=True)
    plain = logged(tmp_path / "plain", kernels=True, sources=())
    assert [row.get("loss") for row in apart] == [row.get("loss") for row in plain]


def test_a_loss_that_is_no_number_stays_with_its_source():
    losses = SourceLosses(torch.nn.Linear(1, 1), ("good", "bad"))
    logits = torch.zeros(1, 4, 5)
    logits[0, 2] = float("nan")
    targets = torch.tensor([[1, 2, 3, -100]])
    losses.add(torch.tensor([[0, 0, 1, 0]]), targets, logits)
    row = losses.rows(losses.take(torch.device("cpu")).flatten().tolist())
    assert row["loss/good"] == pytest.approx(np.log(5))
    assert np.isnan(row["loss/bad"])


def test_sources_of_one_name_are_told_apart():
    assert distinct_labels(("a", "b", "a", "a")) == ("a", "b", "a#2", "a#3")
