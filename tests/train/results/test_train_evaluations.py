"""Measurements while a model trains: at their steps, and training goes on as without them."""

import json
import sys
from pathlib import Path

import pytest
from ranks import run_ranks
from tiny import chat_lines

from trainkit.cli.app import main
from trainkit.errors import RecipeError
from trainkit.evals.metrics import answer_metrics
from trainkit.options.training import RegexMetric

sys.path.insert(0, str(Path(__file__).parents[2] / "evals"))
from set_files import write_sets

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"))


def test_the_curve_is_the_same_bit_for_bit(sets, tmp_path):
    ranks = run_ranks("train.results.evaluation_cases:curves", root=str(tmp_path), data=str(sets))
    for plain, measured in ranks:
        assert plain["losses"] == measured["losses"]
        assert len(plain["losses"]) == 5
        assert measured["same"]
        assert plain["weights"] == measured["weights"]
        # Each module is as it was: transformers itself switches all of them on each step.
        assert plain["modes"] == measured["modes"]
        steps = {row["step"] for row in measured["measured"] if "eval_boolq/acc" in row}
        assert steps == {2, 4}
        assert all("eval_drawn" in row for row in measured["measured"])
        names = set().union(*measured["measured"])
        assert {"eval_answers/exact_match", "eval_gsm8k/exact_match/strict-match"} <= names
    assert len({json.dumps(measured["measured"][0]["eval_drawn"]) for _, measured in ranks}) == 1


RECIPE = """
model: {{name_or_path: "{model}"}}
data: {{train: ["{data}"], max_length: 128}}
generation_eval:
  data: ["{data}"]
  every: 1
  max_new_tokens: 4
  max_samples: 2
  metrics: [exact_match, contains, {{regex: '\\d+'}}, "{judge}:falling"]
eval_tasks: {{tasks: [boolq], data: "{sets}", every: 1, limit: 2}}
early_stopping: {{patience: 2}}
training:
  max_steps: 8
  save_strategy: steps
  save_steps: 1
  load_best_model_at_end: true
  metric_for_best_model: answers/falling
  learning_rate: 1.0e-3
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_qwen2, sets):
    folder = tmp_path_factory.mktemp("recipe")
    text = chat_lines((f"{n}?", f"it is {n}") for n in range(8))
    (folder / "d.jsonl").write_text(f"{text}\n")
    # Best at the second step: 2 answers a measurement, and two calls that try it at the start.
    (folder / "judge.py").write_text(
        "calls = []\n\ndef falling(answer, expected):\n    calls.append(1)\n"
        "    return {0: 0.5, 1: 0.9}.get((len(calls) - 3) // 2, 0.1)\n"
    )
    path = folder / "r.yaml"
    path.write_text(
        RECIPE.format(
            model=tiny_qwen2, data=folder / "d.jsonl", judge=folder / "judge.py", sets=sets
        )
    )
    return path


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    directory = tmp_path_factory.mktemp("out") / "run"
    assert main(["sft", "--config", str(recipe), "--output-dir", str(directory)]) == 0
    return directory


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().split("\n") if line]


def test_a_run_ends_when_its_figure_gets_no_better_and_keeps_the_best(run):
    rows = rows_of(run)
    assert max(row["step"] for row in rows) == 4  # best at 2, and twice no better
    measured = [row for row in rows if "eval_answers/falling" in row]
    assert [row["eval_answers/falling"] for row in measured] == [0.5, 0.9, 0.1, 0.1]
    assert all("eval_boolq/acc" in row and "eval_answers/regex" in row for row in measured)
    # `final` is the model of the second step.
    from safetensors.torch import load_file

    final = load_file(run / "final/model.safetensors")
    best = load_file(run / "checkpoint-2/model.safetensors")
    assert all((final[name] == best[name]).all() for name in final)


def test_the_answers_after_training_have_all_metrics(run):
    content = json.loads((run / "generation_eval.json").read_text())
    assert set(content["metrics"]) == {"exact_match", "contains", "regex", "falling"}
    assert set(content["rows"][0]["scores"]) == set(content["metrics"])


def test_what_follows_from_the_figure_is_shown(recipe, capsys):
    assert main(["config", "show", str(recipe), "--json"]) == 0
    rows = map(json.loads, capsys.readouterr().out.strip().split("\n"))
    values = {row["key"]: (row["value"], row["origin"]) for row in rows}
    origin = "from training.metric_for_best_model"
    assert values["training.eval_strategy"] == ("steps", origin)
    assert values["training.eval_steps"] == (1, origin)
    assert values["training.greater_is_better"] == (True, origin)


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["training.metric_for_best_model=boolq/accuracy"], "boolq/acc"),
        (["training.metric_for_best_model=nothing"], "not measured in training"),
        (["training.metric_for_best_model=answers/f1"], "answers/exact_match"),
        (["generation_eval.every=null"], "after training only"),
        (["training.eval_steps=3"], "every 1 steps"),
        (["training.eval_strategy=epoch"], "every 1 steps"),
        (["training.metric_for_best_model=loss"], "data.eval is empty"),
        (["deepspeed=zero3"], "trainkit eval"),
        (["parallel.shard=fsdp2"], "trainkit eval"),
        (["generation_eval.metrics=[exact_match, exact_match]"], "two metrics"),
        (["generation_eval.metrics=[f1]"], "FILE.py:FUNCTION"),
        (["eval_tasks.tasks=[]"], "empty"),
        (["eval_tasks.every=0"], "1"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(
    recipe, tmp_path, capsys, overrides, word
):
    out = tmp_path / "out"
    assert main(["sft", "--config", str(recipe), "--output-dir", str(out), *overrides]) == 2
    err = capsys.readouterr().err
    assert word in err
    assert "Traceback" not in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["eval_tasks.tasks=[humaneval]"], "--allow-code"),
        (["eval_tasks.data=/nowhere"], "/nowhere/boolq"),
        (["generation_eval.metrics=[{regex: 'zzz'}]"], "finds nothing"),
        (["generation_eval.metrics=[{regex: '('}]"], "is no pattern"),
        (["generation_eval.metrics=[{regex: '(a+)+,'}]"], "takes longer than"),
        (["generation_eval.metrics=[no/where.py:f]"], "there is no file"),
    ],
)
def test_what_is_found_wrong_in_files_is_said_before_the_model_is_loaded(
    recipe, tmp_path, capsys, overrides, word
):
    out = tmp_path / "out"
    plain = ["training.metric_for_best_model=null", "training.load_best_model_at_end=false"]
    command = ["sft", "--config", str(recipe), "--output-dir", str(out), "early_stopping=null"]
    assert main([*command, *plain, *overrides]) == 2
    assert word in capsys.readouterr().err
    assert not out.exists()


def test_losses_of_a_source_are_better_when_lower():
    from trainkit.recipe.schema import is_loss

    assert [is_loss(name) for name in ("loss", "eval_loss", "loss/a.jsonl", "boolq/acc")] == [
        *(True, True, True),
        False,
    ]


def test_metrics_judge_answers(tmp_path):
    (tmp_path / "m.py").write_text(
        "def half(a, e):\n    return 0.5\n\ndef bad(a, e):\n    return 'x'\n"
    )
    choices = ["exact_match", "contains", RegexMetric(regex=r"#### (\d+)"), f"{tmp_path}/m.py:half"]
    metrics = {each.name: each.judge for each in answer_metrics(choices)}
    answer, expected = "so it is\n#### 12 ", "#### 12"
    assert {name: judge(answer, expected) for name, judge in metrics.items()} == {
        "exact_match": 0.0,
        "contains": 1.0,
        "regex": 1.0,
        "half": 0.5,
    }
    assert metrics["exact_match"](" #### 12\n", expected) == 1.0
    assert metrics["regex"]("none", "none") == 0.0
    with pytest.raises(RecipeError, match="finite number"):
        answer_metrics([f"{tmp_path}/m.py:bad"], ["b"])


@pytest.mark.parametrize("pattern", ["(?:a|aa)*,", r"(\w+\s?)+!", "(.*?,){11}P"])
def test_patterns_that_some_text_never_leaves_are_refused_at_the_start(pattern, monkeypatch):
    monkeypatch.setattr("trainkit.evals.metrics._SECONDS", 0.2)
    with pytest.raises(RecipeError, match="takes longer than"):
        answer_metrics([RegexMetric(regex=pattern)])


@pytest.mark.parametrize(
    "pattern", [r"#### (-?[0-9.,]+)", r"(?s).*answer is (.*?)\.", r"(?i)answer:?\s*\(?([A-J])\)?"]
)
def test_patterns_in_use_pass_the_trial(pattern, monkeypatch):
    monkeypatch.setattr("trainkit.evals.metrics._SECONDS", 0.2)
    assert answer_metrics([RegexMetric(regex=pattern)])


def test_an_answer_that_a_metric_cannot_judge_counts_as_0_and_is_told_once(tmp_path, monkeypatch):
    monkeypatch.setattr("trainkit.evals.metrics._hostile_to", lambda pattern: [])
    (tmp_path / "m.py").write_text("def inverse(a, e):\n    return 1 / (len(a) - 1)\n")
    told = []
    choices = [RegexMetric(regex="(a+)+,"), f"{tmp_path}/m.py:inverse"]
    metrics = answer_metrics(choices, ["a,b"], told.append)
    assert [[each.judge(answer, "a,") for answer in "xx"] for each in metrics] == [[0, 0], [0, 0]]
    monkeypatch.setattr("trainkit.evals.metrics._SECONDS", 0.1)
    assert metrics[0].judge("a" * 2000 + ";,", "a,") == 0.0
    assert len(told) == 2
    assert "takes longer than 0.1 s" in told[1]
    assert "inverse counts this answer as 0" in told[0]
    assert metrics[0].judge("a,", "a,") == 1.0
