"""DPO, ORPO and SimPO against the plain model in fp64, and against themselves cut otherwise."""

import json

import pytest
from commands import trainkit
from objectives.pair_cases import fp64_step, pair, step_of, train
from ranks import run_ranks

from trainkit.data.formats import read_row
from trainkit.data.messages import RowError, TextRow
from trainkit.errors import RecipeError
from trainkit.recipe import Recipe

CASES = {
    **{kind: {"loss": kind} for kind in ("sigmoid", "hinge", "ipo", "nca_pair")},
    **{kind: {"loss": kind} for kind in ("sppo_hard", "apo_zero", "apo_down")},
    "robust": {"loss": "robust", "label_smoothing": 0.1},
    "conservative": {"label_smoothing": 0.1, "beta": 0.5},
    "by length": {"length_normalized": True},
}


def held_against_fp64(tmp_path, *, objective="dpo", preference=None, lora=True, **options):
    given = preference or {}
    trainer, data, (row,), found = step_of(
        tmp_path, objective=objective, preference=preference, lora=lora, max_steps=1, **options
    )
    data.train.samples.set_epoch(0)
    items = [data.train.samples[place] for place in range(trainer.args.train_batch_size)]
    pairs = [item[place : place + 2] for item in items for place in range(0, len(item), 2)]
    wanted, gradients, (sums, reference, _) = fp64_step(trainer, pairs, objective, given, lora)
    # Both in fp64 but for the plain model's fp32 norms, positions and softmax.
    assert row["loss"] == pytest.approx(wanted, rel=1e-6)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    return row, sums, reference


@pytest.mark.parametrize("name", CASES)
def test_each_loss_of_dpo_is_its_formula_on_the_plain_model(name, tmp_path):
    held_against_fp64(tmp_path, preference=CASES[name])


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("objective", ["orpo", "simpo"])
def test_losses_without_a_reference(objective, lora, tmp_path):
    held_against_fp64(tmp_path, objective=objective, lora=lora)


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


def test_the_cut_into_micro_batches_and_ranks_changes_nothing(tmp_path):
    case = "objectives.pair_cases:train"
    wide = train(tmp_path / "wide", batch=4, max_steps=3)
    others = [
        train(tmp_path / "deep", batch=1, accumulate=4, max_steps=3),
        *run_ranks(case, root=str(tmp_path / "ranks"), batch=2, max_steps=3, patched=True),
    ]
    for other in others:
        assert other[0] == pytest.approx(wide[0], rel=1e-4)
        for mine, theirs in zip(wide, other, strict=True):
            assert theirs == pytest.approx(mine, rel=5e-3)


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


def test_texts_stay_texts():
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    wanted = (TextRow("4", prompt="2+2="), TextRow("5", prompt="2+2="))
    assert read_row(row, "preference").conversations == wanted


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rejected": [BETTER]}, "same_answers"),
        ({"prompt": "Other?", "chosen": [*ASKED, BETTER]}, "prompt_differs"),
        ({"prompt": None, "chosen": "Yes.", "rejected": "No."}, "no_prompt"),
        ({"rejected": None}, "wrong_type"),
    ],
    ids=["same", "another prompt", "no prompt", "one answer"],
)
def test_rows_that_cannot_be_compared_are_refused(change, reason):
    with pytest.raises(RowError) as caught:
        read_row({**ROWS["explicit"], **change}, "preference")
    assert caught.value.reason == reason


BASE = {"model": {"name_or_path": "m"}, "data": {"train": ["d.jsonl"]}, "objective": "dpo"}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"lora": None}, "objective"),
        ({"lora": {"init_lora_weights": "pissa"}}, "lora.init_lora_weights"),
        ({"lora": {"quantize": "fp8"}, "model": {"name_or_path": "m", "fp8": True}}, "objective"),
        ({"parallel": {"pipeline": 2}}, "objective"),
        ({"data": {"train": ["d.jsonl"], "mask": "none"}}, "data.mask"),
        ({"training": {"label_smoothing_factor": 0.1}}, "training.label_smoothing_factor"),
        ({"preference": {"loss": "ipo", "label_smoothing": 0.1}}, "preference.label_smoothing"),
        ({"objective": "orpo", "preference": {"loss": "ipo"}}, "preference.loss"),
        ({"objective": "sft", "preference": {}}, "preference"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(change, where):
    with pytest.raises(RecipeError) as caught:
        Recipe(**{**BASE, "lora": {}, **change})
    assert where in str(caught.value)


RECIPE = """\
objective: dpo
preference: {beta: 0.2}
model: {name_or_path: MODEL, dtype: float32}
data: {train: [pairs.jsonl], eval: [pairs.jsonl], packing: true, max_length: 128, cache_dir: cache}
lora: {r: 4}
training: {per_device_train_batch_size: 2, max_steps: 4, save_steps: 2, eval_steps: 2,
  eval_strategy: steps, learning_rate: 1e-2}
"""


def test_a_recipe_trains_and_a_resumed_run_has_the_same_bytes(tmp_path, tiny_qwen2):
    (tmp_path / "r.yaml").write_text(RECIPE.replace("MODEL", str(tiny_qwen2)))
    rows = [json.dumps(pair(number)) for number in range(12)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    for run, options in {"whole": {}, "stopped": {"stop_at": 2}}.items():
        trainkit(tmp_path, "sft", "r.yaml", "--output-dir", run, pictures=False, **options)
    said = trainkit(tmp_path, "sft", "--resume", "stopped", pictures=False)
    assert said.code == 0, said.err
    lines = (tmp_path / "whole/metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    assert any("eval_rewards/accuracies" in row for row in logged)
    first = next(row for row in logged if "loss" in row)
    assert first["loss"] == pytest.approx(0.6931472, abs=1e-5)  # adapters begin as nothing
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    final = [tmp_path / run / "final/adapter_model.safetensors" for run in ("whole", "stopped")]
    assert final[0].read_bytes() == final[1].read_bytes()
