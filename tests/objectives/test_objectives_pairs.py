"""DPO, ORPO and SimPO against the plain model in fp64, and against themselves cut otherwise."""

import json
import re

import pytest
from commands import trainkit
from objectives.pair_cases import (
    adapters,
    cut_otherwise,
    fp8_base,
    fp64_run,
    fp64_step,
    over_fp8,
    pair,
    resumed_alike,
    step_of,
    train,
)

from trainkit.data.formats import read_row
from trainkit.data.messages import RowError, TextRow
from trainkit.train.reference import read_known, write_known

CASES = {
    **{kind: {"loss": kind} for kind in ("sigmoid", "hinge", "ipo", "nca_pair")},
    **{kind: {"loss": kind} for kind in ("sppo_hard", "apo_zero", "apo_down")},
    "robust": {"loss": "robust", "label_smoothing": 0.1},
    "conservative": {"label_smoothing": 0.1, "beta": 0.5},
    "by length": {"length_normalized": True},
}


def held_against_fp64(
    tmp_path, *, objective="dpo", preference=None, lora=True, wrapped=adapters, **options
):
    given = preference or {}
    trainer, data, (row,), found = step_of(
        tmp_path, objective=objective, preference=preference, lora=lora, max_steps=1, **options
    )
    data.train.samples.set_epoch(0)
    items = [data.train.samples[place] for place in range(trainer.args.train_batch_size)]
    pairs = [item[place : place + 2] for item in items for place in range(0, len(item), 2)]
    wrapped = wrapped if lora else None
    wanted, gradients, said = fp64_step(trainer, pairs, objective, given, wrapped)
    sums, reference, _ = said
    # Both in fp64 but for the plain model's fp32 norms, positions and softmax.
    assert row["loss"] == pytest.approx(wanted, rel=1e-6)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    return row, sums, reference


@pytest.mark.parametrize("name", CASES)
def test_each_loss_of_dpo_is_its_formula_on_the_plain_model(name, tmp_path):
    held_against_fp64(tmp_path, preference=CASES[name])


@pytest.mark.parametrize("preference", [{}, {"loss": "ipo"}, {"loss": "apo_zero"}])
def test_full_fine_tuning_is_held_against_the_model_before_training(preference, tmp_path):
    """Three steps: from the second on, the model is not its reference any more."""
    options = {"lora": False, "stored": True, "max_steps": 3, "learning_rate": 0.3, "batch": 3}
    options |= {"lr_scheduler_type": "constant", "preference": preference}
    trainer, data, rows, _ = step_of(tmp_path, **options)
    wanted = fp64_run(trainer, data, "dpo", preference, num_steps=3, rate=0.3)
    assert [row["loss"] for row in rows] == pytest.approx(wanted, rel=1e-6)
    assert abs(rows[-1]["logps/chosen_change"]) > 1e-3


def test_a_reference_that_is_asked_ahead_is_the_one_that_is_asked_at_each_step(tmp_path):
    options = {"max_steps": 3, "batch": 2, "optim": "sgd", "learning_rate": 0.1}
    live, ahead = (
        step_of(tmp_path / str(stored), stored=stored, **options)[2] for stored in (False, True)
    )
    for mine, theirs in zip(live, ahead, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-9)
        assert theirs["rewards/margins"] == pytest.approx(mine["rewards/margins"], abs=1e-9)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("objective", ["orpo", "simpo"])
def test_losses_without_a_reference(objective, lora, tmp_path):
    held_against_fp64(tmp_path, objective=objective, lora=lora)


@pytest.mark.parametrize("stored", [False, True], ids=["live", "stored"])
def test_a_base_in_fp8_is_its_own_reference(stored, tmp_path):
    """Both are of the base as it is multiplied; what is rounded there is rounded in fp64, too."""
    given = {"prepare": fp8_base, "wrapped": over_fp8, "stored": stored}
    row, *_ = held_against_fp64(tmp_path, batch=2, **given)
    assert row["logps/chosen_change"]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("objective", "preference"),
    [
        ("orpo", {"sft_prompt": True}),
        ("simpo", {"sft_weight": 1.0}),
        ("dpo", {"sft_weight": 0.3}),
        ("dpo", {"loss": "ipo", "sft_weight": 0.3}),
    ],
    ids=["orpo", "cpo-simpo", "rpo", "ipo"],
)
def test_the_cross_entropy_next_to_the_loss(objective, preference, packing, tmp_path):
    given = {"objective": objective, "preference": preference, "packing": packing}
    held_against_fp64(tmp_path, **given, patched=packing, batch=2)


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_figures_have_their_names_and_values(packing, patched, tmp_path):
    row, sums, reference = held_against_fp64(tmp_path, packing=packing, patched=patched, batch=2)
    rewards = 0.1 * (sums - reference)
    wanted = {
        "rewards/chosen": rewards[:, 0].mean(),
        "rewards/rejected": rewards[:, 1].mean(),
        "rewards/margins": (rewards[:, 0] - rewards[:, 1]).mean(),
        "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).double().mean(),
        "logps/chosen": sums[:, 0].mean(),
        "logps/rejected": sums[:, 1].mean(),
    }
    for name, value in wanted.items():
        assert row[name] == pytest.approx(float(value), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_the_cut_into_micro_batches_and_ranks_changes_nothing(lora, tmp_path):
    wide, *others = cut_otherwise(train, tmp_path, max_steps=3, lora=lora, stored=not lora)
    for other in others:
        assert other[0] == pytest.approx(wide[0], rel=1e-4, abs=1e-7)
        for mine, theirs in zip(wide, other, strict=True):
            assert theirs == pytest.approx(mine, rel=5e-3, abs=1e-7)


ASKED = [{"role": "user", "content": "Hi?"}]
BETTER = {"role": "assistant", "content": "Yes."}
WORSE = {"role": "assistant", "content": "No."}
MORE = [{"role": "user", "content": "SECRET"}, BETTER]
ROWS = {
    "explicit": {"prompt": ASKED, "chosen": [BETTER], "rejected": [WORSE]},
    "implicit": {"chosen": [*ASKED, BETTER], "rejected": [*ASKED, WORSE]},
    "whole": {"prompt": ASKED, "chosen": [*ASKED, BETTER], "rejected": [*ASKED, WORSE]},
    "ultrafeedback": {
        "prompt": "Hi?",
        "chosen": [*ASKED, BETTER],
        "rejected": [*ASKED, WORSE],
        "messages": [*ASKED, BETTER],
        "score_chosen": 7.0,
    },
    "llama-factory": {
        "conversations": [{"from": "human", "value": "Hi?"}],
        "chosen": {"from": "gpt", "value": "Yes."},
        "rejected": {"from": "gpt", "value": "No."},
    },
    "instruction": {"instruction": "Hi?", "input": "", "chosen": "Yes.", "rejected": "No."},
    "axolotl": {"messages": ASKED, "chosen": BETTER, "rejected": WORSE},
    "openai": {
        "input": {"messages": ASKED},
        "preferred_output": [BETTER],
        "non_preferred_output": [WORSE],
    },
    "ms-swift": {"messages": [*ASKED, BETTER], "rejected_response": "No."},
    "ms-swift whole": {"messages": [*ASKED, BETTER], "rejected_messages": [*ASKED, WORSE]},
}


@pytest.mark.parametrize("name", ROWS)
def test_every_format_is_one_prompt_and_two_answers(name):
    both = read_row(ROWS[name], "preference").conversations
    found = [[(turn.role, turn.content, turn.train) for turn in one.messages] for one in both]
    asked = ("user", "Hi?", False)
    assert found == [[asked, ("assistant", text, None)] for text in ("Yes.", "No.")]


def test_what_the_user_says_within_an_answer_is_not_scored():
    row = {"prompt": ASKED, "chosen": [BETTER, *MORE], "rejected": [WORSE, *MORE]}
    for one in read_row(row, "preference").conversations:
        assert [turn.train for turn in one.messages] == [False, None, False, None]


@pytest.mark.parametrize("format", ["rated", "prompt_completion"])
def test_a_prompt_that_a_completion_repeats_is_there_once(format):
    row = {"prompt": ASKED, "completion": [*ASKED, BETTER], "label": True}
    parsed = read_row(row, format)
    one = parsed.conversations[0] if format == "rated" else parsed
    assert [turn.role for turn in one.messages] == ["user", "assistant"]
    with pytest.raises(RowError, match="not the row's prompt"):
        read_row({**row, "completion": MORE}, format)
    assert read_row({**row, "prompt": [{"role": "system", "content": "."}]}, format)


def test_texts_stay_texts():
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    wanted = (TextRow("4", prompt="2+2="), TextRow("5", prompt="2+2="))
    assert read_row({**row, "system": " "}, "preference").conversations == wanted
    for name in ("preference", "prompt_completion", "rated"):
        with pytest.raises(RowError, match="'system' and a 'prompt' of plain text"):
            read_row({**row, "system": "Be kind.", "completion": "4", "label": True}, name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rejected": [BETTER]}, "same_answers"),
        ({"prompt": "Other?", "chosen": [*ASKED, BETTER]}, "prompt_differs"),
        ({"prompt": None, "rejected": MORE}, "prompt_differs"),
        ({"prompt": None, "chosen": "Yes.", "rejected": "No."}, "no_prompt"),
        ({"rejected": None}, "wrong_type"),
        ({"messages": [*ASKED, BETTER], "rejected_response": "No."}, "wrong_type"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(change, reason):
    with pytest.raises(RowError) as caught:
        read_row({**ROWS["explicit"], **change}, "preference")
    assert caught.value.reason == reason


RECIPE = """\
objective: dpo
preference: {beta: 0.2}
model: {name_or_path: MODEL, dtype: float32}
data: {train: [pairs.jsonl], eval: [pairs.jsonl], packing: true, max_length: 128, cache_dir: cache}
lora: {r: 4}
training: {per_device_train_batch_size: 2, max_steps: 4, save_steps: 2, eval_steps: 2,
  eval_strategy: steps, learning_rate: 1e-2}
"""


def start(root, model, recipe=RECIPE, rows=None):
    (root / "r.yaml").write_text(recipe.replace("MODEL", str(model)))
    rows = rows or [pair(number) for number in range(12)]
    (root / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))


def logged(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


TRAINED = {
    "lora": RECIPE,
    "fp8": RECIPE.replace("{r: 4}", "{r: 4, quantize: fp8}"),
    "full": RECIPE.replace("lora: {r: 4}\n", "").replace("1e-2", "1e-4"),
}


@pytest.mark.sample("full", "fp8")
@pytest.mark.parametrize("kind", TRAINED)
def test_a_recipe_trains_and_a_resumed_run_has_the_same_bytes(kind, tmp_path, tiny_qwen2):
    start(tmp_path, tiny_qwen2, TRAINED[kind])
    rows = resumed_alike(tmp_path, kind != "full")
    assert any("eval_rewards/accuracies_low" in row for row in rows)
    first = next(row for row in rows if "loss" in row)
    assert first["loss"] == pytest.approx(0.6931472, abs=1e-5)  # adapters begin as nothing
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert any(abs(row.get("rewards/margins", 0)) > 1e-4 for row in rows)


def test_the_reference_is_asked_again_where_its_answers_would_be_others_and_nowhere_else(
    tmp_path, tiny_qwen2
):
    start(tmp_path, tiny_qwen2, RECIPE.replace("lora: {r: 4}\n", "").replace("4, save", "1, save"))

    def asked(*changes):
        said = trainkit(tmp_path, "sft", "r.yaml", *changes)
        assert said.code == 0, said.err
        return int(re.search(r"log-probabilities of (\d+) answers", said.err)[1])

    assert asked() == 24
    same = ("training.learning_rate=1e-5", "preference.beta=0.5", "training.seed=7")
    assert asked(*same, "training.per_device_train_batch_size=1", "preference.loss=ipo") == 0
    shorter = asked("data.max_length=80", "data.truncation=right", "data.max_dropped=90%")
    assert 0 < shorter < 24  # those that are cut, and no others
    assert asked("kernels=true") == 24
    rows = [pair(number) for number in range(14)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, reversed(rows))))
    assert asked() == 4


def test_a_cache_that_does_not_hold_what_the_model_says_is_refused(tmp_path, tiny_qwen2):
    start(tmp_path, tiny_qwen2, RECIPE.replace("lora: {r: 4}\n", "").replace("4, save", "1, save"))
    trainkit(tmp_path, "sft", "r.yaml")
    (kept,) = (tmp_path / "cache/reference").glob("*.npz")
    known = read_known(kept)
    write_known(kept, {name: value - 50 for name, value in known.items()})
    said = trainkit(tmp_path, "sft", "r.yaml")
    assert said.code == 1
    assert "nats a token off" in said.err
    kept.write_bytes(kept.read_bytes()[:-40])  # a damaged one is as good as none
    assert trainkit(tmp_path, "sft", "r.yaml").code == 0
    assert read_known(kept) == pytest.approx(known)
