"""KTO against the plain model in fp64, and against itself cut otherwise."""

import json

import pytest
import torch
from commands import trainkit
from objectives.pair_cases import (
    NUM_PAIRS,
    adapters,
    answers_of,
    make_trainer,
    rated,
    resumed_alike,
    same_when_cut,
    step_of,
)
from objectives.test_objectives_pairs import RECIPE, start
from tiny import make_qwen2
from transformers import set_seed

from trainkit.data.formats import read_row
from trainkit.data.messages import RowError

WEIGHTS = {"desirable_weight": 1.3, "undesirable_weight": 0.7, "beta": 0.3}


def prompt_of(sample):
    return sample["input_ids"][: int(sample["loss_mask"].argmax())]


def summed(model, sample):
    return answers_of(model, [[sample, sample]])[0][0, 0]


def plain_kto(model, reference, samples, others, preference):
    """As the paper writes it: exp and log only."""
    weights = [preference.get(f"{kind}desirable_weight", 1.0) for kind in ("un", "")]
    beta = preference.get("beta", 0.1)
    with torch.no_grad():
        gaps = [summed(model, other) - reference(other) for other in others]
        origin = torch.stack(gaps).mean().clamp(min=0)
    losses = []
    for sample in samples:
        gain = beta * (summed(model, sample) - reference(sample) - origin)
        gain = gain if sample["desirable"] else -gain
        losses.append(weights[sample["desirable"]] * (1 - 1 / (1 + (-gain).exp())))
    return torch.stack(losses).mean(), origin


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_the_loss_is_its_formula_on_the_plain_model(packing, lora, tmp_path):
    options = {"batch": 2, "packing": True} if packing else {"batch": 8}
    trainer, data, (row,), found = step_of(
        tmp_path, objective="kto", preference=WEIGHTS, lora=lora, max_steps=1, **options
    )
    data.train.samples.set_epoch(0)
    taken = [data.train.samples[place] for place in range(trainer.args.train_batch_size)]
    samples = [sample for item in taken for sample in item]
    set_seed(1)
    model = make_qwen2(len(trainer.tokenizer))
    model = (adapters(model) if lora else model).double()

    @torch.no_grad()
    def reference(sample):
        if not lora:
            return summed(model, sample)
        with model.disable_adapter():
            return summed(model, sample)

    others = [sample["other"] for sample in samples]
    wanted, origin = plain_kto(model, reference, samples, others, WEIGHTS)
    assert row["kl"] == pytest.approx(origin.item(), rel=1e-6, abs=1e-9)
    assert (origin > 1e-3) == lora
    wanted.backward()
    assert row["loss"] == pytest.approx(wanted.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gap = (found[name] - parameter.grad).norm()
            assert gap <= 1e-5 * parameter.grad.norm(), name


def test_a_foreign_answer_is_that_to_another_prompt(tmp_path):
    _, data = make_trainer(tmp_path, objective="kto")
    samples = data.train.samples
    for index in range(len(samples.data)):
        sample, partner = samples.sample(index), samples.data[int(samples.partner[index])]
        prompt, other = prompt_of(sample), sample["other"]
        answer = partner["input_ids"][len(prompt_of(partner)) :]
        assert prompt_of(partner).tolist() != prompt.tolist()
        assert other["input_ids"].tolist() == [*prompt, *answer]
        assert other["loss_mask"].sum() == partner["loss_mask"].sum()
    assert len(set(samples.partner.tolist())) > NUM_PAIRS // 2


def train(root, **options):
    """The losses and norms of a rank, and its evaluation."""
    trainer, _ = make_trainer(root, objective="kto", preference=WEIGHTS, **options)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    figures = trainer.evaluate()
    keys = ("loss", "grad_norm", "kl")
    return [[row[key] for key in keys] for row in rows] + [[figures["eval_loss"]]]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_the_cut_into_micro_batches_and_ranks_changes_nothing(lora, tmp_path):
    given = {"lora": lora, "stored": not lora, "max_steps": 3}
    given |= {"optim": "sgd", "learning_rate": 0.01}
    same_when_cut(train, tmp_path, abs=1e-6, **given)


@pytest.mark.sample("lora")
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_recipe_trains_and_a_resumed_run_has_the_same_bytes(lora, tmp_path, tiny_qwen2):
    recipe = RECIPE.replace("objective: dpo", "objective: kto")
    recipe = recipe if lora else recipe.replace("lora: {r: 4}\n", "")
    start(tmp_path, tiny_qwen2, recipe, [rated(number) for number in range(12)])
    rows = resumed_alike(tmp_path, lora)
    first = next(row for row in rows if "loss" in row)
    assert first["loss"] == pytest.approx(0.5, abs=1e-6)
    assert any(abs(row.get("rewards/margins", 0)) > 1e-4 for row in rows)
    preview = trainkit(tmp_path, "data", "preview", "r.yaml", "--json", pictures=False)
    assert preview.code == 0, preview.err
    assert json.loads(preview.out.splitlines()[0])["num_trained_tokens"] > 0


ASKED = [{"role": "user", "content": "Hi?"}]
SAID = [{"role": "assistant", "content": "Yes."}]
ROWS = {
    "trl": {"prompt": ASKED, "completion": SAID, "label": False},
    "messages": {"messages": [*ASKED, *SAID], "label": False},
    "llama-factory": {
        "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}],
        "kto_tag": False,
    },
    "instruction": {"instruction": "Hi?", "output": "Yes.", "kto_tag": False},
}


@pytest.mark.parametrize("name", ROWS)
def test_every_format_is_a_prompt_an_answer_and_a_mark(name):
    for mark in (True, False):
        row = {key: value if value is not False else mark for key, value in ROWS[name].items()}
        found = read_row(row, "rated")
        (one,) = found.conversations
        assert [(turn.role, turn.content) for turn in one.messages] == [
            ("user", "Hi?"),
            ("assistant", "Yes."),
        ]
        assert one.messages[0].is_prompt or one.messages[0].train is False
        assert one.messages[1].train is None
        assert found.first == (0 if mark else 1)


@pytest.mark.parametrize("label", [None, "yes", 2])
def test_a_row_without_a_mark_is_refused(label):
    with pytest.raises(RowError) as caught:
        read_row({**ROWS["trl"], "label": label}, "rated")
    assert caught.value.reason == "no_label"
