"""Damaged recipes, DeepSpeed files and environments are named as what they are, never as a bug."""

import json

import pytest

from trainkit.cli.app import main, report_failure
from trainkit.errors import RecipeError
from trainkit.parallel.process import ProcessRank

RECIPE = "model: {name_or_path: m}\ndata: {train: [d.jsonl]}\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        b"{a: " * 50_000,
        RECIPE.encode() + b"\xff\xfe",
        RECIPE.encode() + b"\0",
        RECIPE.encode() + b"training: {seed: " + b"9" * 5000 + b"}",
        RECIPE.encode() + b"training: {seed: " + b"9" * 90 + b"}",
        RECIPE.encode() + b"training: {max_steps: -5}",
        RECIPE.encode() + b"? [a]\n: b",
        RECIPE.encode() + b"training: !!python/object:os.system {}",
    ],
    ids=range(10),
)
def test_a_damaged_recipe(content, tmp_path, capsys):
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    assert main(["sft", str(path), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "bug" not in said
    assert str(path) in said


@pytest.mark.parametrize(
    "content",
    [
        "{" * 90_000,
        "[" * 200_000,
        "[1]",
        json.dumps({"zero_optimization": {"stage": "two"}}),
        json.dumps({"zero_optimization": {"stage": 9}}),
        json.dumps({"zero_optimization": "x"}),
        json.dumps({"fp16": "yes"}),
    ],
    ids=range(7),
)
def test_a_damaged_deepspeed_file(content, tmp_path, capsys):
    recipe, config = tmp_path / "r.yaml", tmp_path / "ds.json"
    recipe.write_text(RECIPE)
    config.write_text(content)
    assert main(["sft", str(recipe), "--dry-run", "--deepspeed", str(config)]) == 2
    said = capsys.readouterr().err
    assert "bug" not in said
    assert str(config) in said


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1"},
        {"RANK": "abc", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_RANK": "first"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "garbage"},
    ],
    ids=str,
)
def test_a_damaged_environment(variables, capsys):
    with pytest.raises(RecipeError) as caught:
        ProcessRank.from_environment(variables)
    assert report_failure(caught.value) == 2
    assert "environment: " in capsys.readouterr().err


def test_what_the_system_lacks_is_no_bug(capsys):
    assert report_failure(OSError(24, "Too many open files", "/data")) == 1
    said = capsys.readouterr().err
    assert "/data: Too many open files" in said
    assert "bug" not in said


def test_a_bug_is_still_called_one(capsys):
    assert report_failure(ValueError("x")) == 1
    assert "bug" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ModuleNotFoundError("No module named 'httpx'", name="httpx"),
            "lacks the Python package httpx",
        ),
        (ModuleNotFoundError("No module named 'h.x'", name="h.x"), "lacks the Python package h"),
        (
            ImportError("cannot import name 'x' from 'peft'", name="peft"),
            "do not fit each other at peft: cannot import name 'x'",
        ),
        (ImportError("libcudart.so.13: cannot open shared object file"), "libcudart.so.13"),
    ],
    ids=str,
)
def test_a_broken_environment_is_no_bug(error, message, capsys):
    assert report_failure(error) == 1
    said = capsys.readouterr().err
    assert message in said
    assert "bug" not in said
    assert "--force-reinstall" in said


def test_a_module_of_our_own_that_is_missing_is_one(capsys):
    report_failure(ModuleNotFoundError("No module named 'trainkit.x'", name="trainkit.x"))
    assert "bug" in capsys.readouterr().err
