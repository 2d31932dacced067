"""What users type first: ``-h`` anywhere, ``python -m trainkit``, a bare recipe, other names."""

import json

import pytest

from trainkit.cli.app import COMMANDS, LazyCommand, main
from trainkit.recipe import key_references
from trainkit.recipe.keys import FOREIGN, REMOVED
from trainkit.recipe.training import EVERY, FIELDS


def command_lines():
    """Every command and subcommand of the table."""
    for name in COMMANDS:
        yield (name,)
        for subcommand, command in getattr(LazyCommand(name).load(), "commands", {}).items():
            if not command.hidden:
                yield (name, subcommand)


@pytest.mark.parametrize("words", [(), *command_lines()], ids=" ".join)
def test_every_command_answers_to_a_short_h(words, capsys):
    assert main([*words, "-h"]) == 0
    short = capsys.readouterr().out
    assert main([*words, "--help"]) == 0
    assert short == capsys.readouterr().out
    assert f"Usage: {' '.join(('trainkit', *words))}" in short


def test_a_seed_is_one_that_every_generator_takes(capsys):
    """numpy's and torch's ended in a traceback, each with other numbers."""
    found = 0
    for words in command_lines():
        main([*words, "-h"])
        if "--seed" not in capsys.readouterr().out:
            continue
        found += 1
        for seed in (-1, 2**32):
            assert main([*words, "--seed", str(seed)]) == 2
            assert "Invalid value for '--seed'" in capsys.readouterr().err, words
    assert found >= 4


@pytest.mark.parametrize("command", [("sft",), ("data", "check"), ("config", "show")])
def test_a_recipe_needs_no_option(command, tmp_path, capsys):
    """The recipe is read: its one mistake is named, with its line."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {name_or_path: m}\ndata: {train: [d.jsonl]}\ndata_typo: 1\n")
    assert main([*command, str(recipe), "training.seed=1"]) == 2
    assert f"{recipe}:3" in capsys.readouterr().err


def test_a_recipe_after_an_option_that_may_stand_alone(tmp_path, capsys):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {name_or_path: m}\ndata: {train: [d.jsonl]}\ndata_typo: 1\n")
    for option in ("--deepspeed", "--resume"):
        assert main(["sft", option, str(recipe)]) == 2
        assert f"{recipe}:3" in capsys.readouterr().err


def keys(capsys, *words):
    code = main(["config", "keys", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("name", [*FOREIGN, *REMOVED, *sorted(EVERY.keys() - FIELDS)])
def test_config_keys_answers_every_other_name(name, capsys):
    code, out, _ = keys(capsys, name)
    assert code == 0
    assert name in out
    target = FOREIGN[name].target if name in FOREIGN else None
    assert target is None or f"\n{target}: " in f"\n{out}"


@pytest.mark.parametrize("word", ["nonsense_xyz", "max_lenght"])
def test_config_keys_says_when_it_knows_none(word, capsys):
    code, out, err = keys(capsys, word)
    assert (code, out) == (1, "")
    assert f"no key and no other tool's name for one has {word!r}" in err


def test_config_keys_as_json_keeps_stdout_for_objects(capsys):
    code, out, err = keys(capsys, "--json", "cutoff-len", "lora.r")
    assert code == 0
    found = [json.loads(line)["key"] for line in out.splitlines()]
    assert {"data.max_length", "lora.r"} <= set(found) <= {row.key for row in key_references()}
    assert "LLaMA-Factory" in err


@pytest.mark.parametrize("name", ["w.safetensors", "r.yaml", "d.jsonl.gz", "m.gguf", "notes"])
def test_a_file_where_a_directory_is_meant(name, tmp_path, capsys, monkeypatch):
    """Each command says what it is, and what takes it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("x")
    (tmp_path / "a.yaml").write_text("model: {name_or_path: m}\ndata: {train: [d.jsonl]}\n")
    commands = [
        ["merge", name, "out"],
        ["checkpoint", "verify", name],
        ["convert", "glm4-to-qwen2", name, "out"],
        ["show", name],
        ["runs", name],
        ["plot", name, "-o", "p.png"],
        ["diagnose", name],
        ["chat", "m", "--adapter", name],
        *([["sft", "a.yaml", "--resume", name]] * (name != "r.yaml")),
        *([["chat", name], ["new", "--model", name]] * (name != "m.gguf")),
    ]
    for words in commands:
        assert main(words) in (1, 2)
        said = capsys.readouterr().err
        assert f"{name}: this is a" in said, (words, said)
        assert "where a directory is meant\n  fix: " in said
