"""Recipes of each objective: shipped ones train on a CPU, and `new` writes one for a model."""

import json
from types import SimpleNamespace

import pytest
from commands import trainkit, trainkit_each
from objectives.pair_cases import pair, rated
from objectives.test_objectives_pairs import logged

from trainkit.estimate.fitted import OBJECTIVES
from trainkit.objectives.answers import wilson
from trainkit.quickstart import make_assets
from trainkit.recipe import load_recipe
from trainkit.recipe.write import shipped_recipes
from trainkit.train.evaluations import Displacement


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


@pytest.mark.sample("dpo", "kto", "distill")
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


def test_report_card_and_comparison_show_what_the_objective_measures(assets):
    for beta in ("0.1", "0.5"):
        file = shipped_recipes()["quickstart-dpo"]
        changes = ["model.name_or_path=quickstart/model", "training.max_steps=4"]
        changes += [f"preference.beta={beta}", "training.eval_strategy=steps"]
        changes += ["training.eval_steps=2", "training.report_to=none"]
        run = assets / f"b{beta}"
        given = ("--config", file, "--output-dir", run, *changes)
        said = trainkit(assets, "sft", *given, pictures=beta == "0.1")
        assert said.code == 0, said.err
    (run,) = assets.glob("b0.1")
    last = [row for row in logged(run) if "eval_loss" in row][-1]
    low, value, high = (last[f"eval_rewards/accuracies{end}"] for end in ("_low", "", "_high"))
    assert 0 <= low < value < high <= 1
    shown = f"{value:.3f} [{low:.3f}, {high:.3f}]"
    assert shown in (run / "report.html").read_text()
    assert shown in (run / "README.md").read_text()
    pictures = {path.stem for path in (run / "plots").glob("*.png")}
    assert {"reward_margins", "reward_accuracies", "logps", "evaluations"} <= pictures
    said = trainkit(assets, "compare", "b0.1", "b0.5")
    assert said.code == 0, said.err
    assert shown in said.out
    assert "preference.beta: 0.1 | 0.5" in said.out


def test_the_interval_of_a_share_is_wilsons():
    from scipy.stats import binomtest

    for right, count in ((0, 5), (3, 5), (63, 100), (100, 100)):
        wanted = binomtest(right, count).proportion_ci(method="wilson")
        assert wilson(right, count) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_falling_answers_are_warned_of_once():
    said = []
    loop = SimpleNamespace(run=SimpleNamespace(console=SimpleNamespace(warn=said.append)))
    hook = Displacement()
    for better, worse in [(0.1, -0.1)] * 12 + [(-0.1, 0.1)] * 12:
        hook.on_log(loop, {"logps/chosen_change": better, "logps/rejected_change": worse})
    assert not said
    for _ in range(30):
        hook.on_log(loop, {"logps/chosen_change": -0.1, "logps/rejected_change": -0.3})
        hook.on_log(loop, {"eval_loss": 1.0})
    assert len(said) == 1
    assert "0.100 nats a token" in said[0]


def test_an_estimate_counts_both_answers_and_says_what_it_leaves_out(tmp_path):
    text = "model: {name_or_path: Qwen/Qwen2.5-7B-Instruct}\nlora: {r: 8}\n"
    text += "data: {train: [d.jsonl], max_length: 512, packing: true}\n"
    (tmp_path / "r.yaml").write_text(text)
    words = ["estimate", "r.yaml", "--gpu", "h100", "--json"]
    commands = [[*words, f"objective={each}"] for each in ("sft", "orpo", "distill")]
    sft, orpo, distill = (said.out for said in trainkit_each(tmp_path, commands))
    assert json.loads(orpo)["step_seconds"] > 1.5 * json.loads(sft)["step_seconds"]
    assert "the time in which a teacher is asked" in distill


def test_a_method_that_is_not_one_is_refused_with_those_that_are(tmp_path):
    said = trainkit(tmp_path, "new", "--model", "m", "--method", "ppo")
    assert said.code == 2
    assert all(name in said.err for name in OBJECTIVES)
