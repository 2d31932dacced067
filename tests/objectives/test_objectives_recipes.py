"""Recipes of each objective: shipped ones train on a CPU, and `new` writes one for a model."""

import json

import pytest
from commands import trainkit
from objectives.pair_cases import pair, rated
from objectives.test_objectives_pairs import logged

from trainkit.estimate.fitted import OBJECTIVES
from trainkit.quickstart import make_assets
from trainkit.recipe import load_recipe
from trainkit.recipe.write import shipped_recipes


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    root = tmp_path_factory.mktemp("assets")
    make_assets(root / "quickstart")
    return root


def test_a_wrong_answer_is_another_one_and_both_kinds_of_marks_are_there(assets):
    rows = {
        name: [json.loads(line) for line in (assets / f"quickstart/{name}.jsonl").open()]
        for name in ("pairs", "rated")
    }
    assert len(rows["pairs"]) == len(rows["rated"]) == 300
    assert all(row["chosen"] != row["rejected"] for row in rows["pairs"])
    assert sum(row["label"] for row in rows["rated"]) == 150


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_shipped_recipe_trains_on_a_cpu(objective, assets):
    file = shipped_recipes()[f"quickstart-{objective}"]
    changes = ["model.name_or_path=quickstart/model", "training.max_steps=2"]
    if objective == "distill":
        changes.append("distill.teacher=quickstart/model")
    run = assets / f"run-{objective}"
    said = trainkit(assets, "sft", "--config", file, "--output-dir", run, *changes, pictures=False)
    assert said.code == 0, said.err
    rows = logged(run)
    assert any("eval_loss" in row for row in rows)
    assert sum("loss" in row for row in rows) == 2


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_new_writes_a_recipe_that_trains_as_it_is(objective, tmp_path, tiny_qwen2):
    rows = [rated(n) if objective == "kto" else pair(n) for n in range(12)]
    if objective == "distill":
        ids = [1, 2, 3, 4]
        said = {"teacher_ids": [[3], [4]], "teacher_logprobs": [[-0.2], [-0.2]]}
        rows = [{"input_ids": ids, "labels": [-100, -100, 3, 4], **said}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--model", tiny_qwen2, "--method", objective, "--data", "d.jsonl", "--gpu", "h100"]
    said = trainkit(tmp_path, "new", *given, "-o", "r.yaml")
    assert said.code == 0, said.err
    recipe = load_recipe(tmp_path / "r.yaml").recipe
    assert recipe.objective == objective
    assert recipe.lora is not None
    changes = ["model.dtype=float32", "training.max_steps=1", "data.cache_dir=cache"]
    said = trainkit(tmp_path, "sft", "r.yaml", "--output-dir", "run", *changes, pictures=False)
    assert said.code == 0, said.err


def test_a_method_that_is_not_one_is_refused_with_those_that_are(tmp_path):
    said = trainkit(tmp_path, "new", "--model", "m", "--method", "ppo")
    assert said.code == 2
    assert all(name in said.err for name in OBJECTIVES)
