"""``trainkit config``: values, origins, and a layout for people and programs."""

import json

import pytest
import yaml

from trainkit.cli.app import main

RECIPE = """\
model: {name_or_path: m}
data: {train: [a.jsonl, b.jsonl]}
training:
  learning_rate: 1e-5
  hub_token: hf_secret
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_json_lines_have_key_value_origin(recipe, capsys):
    assert main(["config", "show", recipe, "training.seed=7", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(list(row) == ["key", "value", "origin"] for row in rows)
    found = {row["key"]: (row["value"], row["origin"]) for row in rows}
    assert found["training.learning_rate"] == (1e-5, "r.yaml:4")
    assert found["training.seed"] == (7, "override")
    assert found["training.hub_token"] == ("<redacted>", "r.yaml:5")
    assert found["training.logging_steps"] == (1, "trainkit default")
    assert found["training.max_grad_norm"] == (1.0, "transformers default")
    assert found["data.train"] == (["a.jsonl", "b.jsonl"], "r.yaml:2")
    assert found["data.mask"] == ("assistant", "default")


def test_what_is_shown_is_a_recipe(recipe, tmp_path, capsys):
    assert main(["config", "show", recipe]) == 0
    text = capsys.readouterr().out
    assert "hf_secret" not in text
    assert yaml.safe_load(text)["training"]["learning_rate"] == 1e-5
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert main(["config", "show", str(again)]) == 0


def test_diff_defaults_leaves_only_choices(recipe, capsys):
    assert main(["config", "show", recipe, "--diff_defaults", "--json"]) == 0
    keys = [json.loads(line)["key"] for line in capsys.readouterr().out.splitlines()]
    assert keys == [
        "model.name_or_path",
        "data.train",
        "training.learning_rate",
        "training.hub_token",
    ]


def test_a_bad_recipe_exits_2_with_every_problem(tmp_path, capsys):
    path = tmp_path / "bad.yaml"
    path.write_text("model: {name_or_path: m}\ndata: {train: [a], cutoff_len: 3}\nlr: 1\n")
    assert main(["config", "show", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{path}:2: cutoff_len is LLaMA-Factory's name for data.max_length" in shown.err
    assert f"{path}:3: lr is torch's name for training.learning_rate" in shown.err


def test_every_key_is_printed_with_its_default(capsys):
    assert main(["config", "keys"]) == 0
    assert "objective: text; default sft" in capsys.readouterr().out
    assert main(["config", "keys", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (parallel,) = (row for row in rows if row["key"] == "parallel")
    assert parallel["default"]["shard"] == "none"
    assert parallel["default"]["pipeline"] == 1


def test_keys_can_be_looked_up(capsys):
    assert main(["config", "keys", "max_length", "--json"]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (row["key"], row["default"], row["required"]) == ("data.max_length", 2048, False)
    assert main(["config", "keys", "warmup", "name_or_path"]) == 0
    text = capsys.readouterr().out
    assert "training.warmup_steps: a number; default 0" in text
    assert "model.name_or_path: text; required" in text


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("wandb", "training.report_to"),
        ("pissa", "lora.init_lora_weights"),
        ("nf4", "lora.quantize"),
    ],
)
def test_keys_can_be_looked_up_by_a_value(capsys, value, key):
    assert main(["config", "keys", value]) == 0
    assert f"{key}: " in capsys.readouterr().out


def test_launch_names_an_option_once(capsys):
    assert main(["launch", "--help"]) == 0
    assert "--nnodes, --nnodes" not in capsys.readouterr().out
