"""Objectives that weigh tokens against the plain model in fp64, and themselves cut otherwise."""

from pathlib import Path

import pytest
import torch
from objectives.pair_cases import over_fp8, same_when_cut
from objectives.test_objectives_distill import trainer_of_rows
from tiny import make_qwen2
from transformers import TrainerCallback, set_seed

from trainkit.objectives.table import objective_of

NUM_ROWS = 12


def make_trainer(root, *, packing=False, objective="dft", in_fp8=False, patched=False, **options):
    how = {"patched": "fp8" if in_fp8 else patched, "packing": packing, "max_length": 128}
    return trainer_of_rows(root, objective_of(objective), **how, **options)


def weight_of_eaft(logits, alpha=1.0):
    """As LLaMA-Factory's `_eaft_cross_entropy` has it."""
    topk = torch.topk(logits.detach(), k=20, dim=-1).values
    logs = topk - torch.logsumexp(topk, dim=-1, keepdim=True)
    return torch.pow(-(torch.exp(logs) * logs).sum(dim=-1) / 3.0, alpha)


def wanted(model, samples, objective):
    """As TRL's `dft_loss` and LLaMA-Factory's have them: -w log p, w without gradient."""
    losses, plain, weights = [], [], []
    for sample in samples:
        ids = torch.tensor(sample["input_ids"], dtype=torch.long)[None]
        logits = model(input_ids=ids).logits[0, :-1]
        taken = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        weight = taken.exp().detach() if objective == "dft" else weight_of_eaft(logits)
        taken, weight = (
            each[torch.tensor(sample["loss_mask"])[1:] > 0] for each in (taken, weight)
        )
        losses.append(-weight * taken)
        plain.append(-taken)
        weights.append(weight)
    return [torch.cat(each).mean() for each in (losses, plain, weights)]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("change", [{}, {"patched": True}, {"in_fp8": True}], ids=str)
@pytest.mark.parametrize("objective", ["dft", "eaft"])
def test_a_step_is_autograds_on_full_logits(objective, change, packing, tmp_path):
    trainer, data = make_trainer(
        tmp_path, packing=packing, batch=2, accumulate=2, max_steps=1, optim="sgd",
        learning_rate=0.0, objective=objective, **change,
    )  # fmt: skip
    trainer.model.double()
    found = {}

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            named = model.named_parameters()
            found.update({name: p.grad.clone() for name, p in named if p.requires_grad})

    trainer.add_callback(Gradients())
    evaluated = trainer.evaluate()
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "loss" in row]
    set_seed(1)
    model = make_qwen2(len(trainer.tokenizer))
    model = (over_fp8(model) if "in_fp8" in change else model).double()
    data.train.samples.set_epoch(0)
    taken = [data.train.samples[place] for place in range(4)]
    taken = [sample for item in taken for sample in item] if packing else taken
    loss, plain, weight = wanted(model, taken, objective)
    loss.backward()
    # Both in fp64 but for the plain model's fp32 norms, positions and softmax.
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert row["cross_entropy"] == pytest.approx(plain.item(), rel=1e-6)
    figure, scale = ("probability", 1) if objective == "dft" else ("entropy", 3)
    assert row[figure] == pytest.approx(weight.item() * scale, rel=1e-6)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert trained.keys() == found.keys()
    for name, parameter in trained.items():
        assert (found[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name
    every = [data.eval.samples[place] for place in range(len(data.eval.samples))]
    every = [sample for item in every for sample in item] if packing else every
    with torch.no_grad():
        mean = wanted(model, every, objective)[0].item()
    assert evaluated["eval_loss"] == pytest.approx(mean, rel=1e-6)
    assert evaluated[f"eval_{figure}"] > 0


def train(root, **options):
    """What a rank logs, and its evaluation."""
    Path(root).mkdir(exist_ok=True)
    trainer, _ = make_trainer(root, **options)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    found = [[row[key] for key in ("loss", "grad_norm", "cross_entropy")] for row in rows]
    return [*found, [trainer.evaluate()["eval_loss"]]]


def test_the_cut_into_micro_batches_and_ranks_changes_nothing(tmp_path):
    same_when_cut(train, tmp_path, rel=5e-3, abs=1e-7, max_steps=3)
