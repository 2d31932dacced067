"""``trainkit sft`` up to the training: what the options mean, and what stops before torch."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from trainkit.cli.app import main
from trainkit.run import RunDirectory
from trainkit.run.starts import Start, append_start


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "m").mkdir()
    path = tmp_path / "r.yaml"
    path.write_text("model: {name_or_path: ./m}\ndata: {train: [a.jsonl]}\n")
    return path


@pytest.fixture
def trained(monkeypatch):
    """Stand in for the training; collects what it was asked to do."""
    calls = []
    build = types.ModuleType("trainkit.train.build")

    def run_sft(loaded, options):
        calls.append((loaded, options))
        return None if options.dry_run else Path("train_model/demo-1")

    build.run_sft = run_sft
    monkeypatch.setitem(sys.modules, "trainkit.train.build", build)
    return calls


def test_the_last_line_is_the_run_directory(recipe, trained, capsys):
    assert main(["sft", "--config", "r.yaml"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "train_model/demo-1"
    ((loaded, options),) = trained
    assert (loaded.recipe.parallel.shard, loaded.recipe.kernels) == ("none", False)
    assert (options.resume, options.output_dir, options.dry_run, options.rows) == (
        None,
        None,
        False,
        None,
    )


@pytest.mark.parametrize("on_cpu", [False, True])
def test_on_a_cpu_there_is_no_gpu_to_choose_for(recipe, trained, monkeypatch, on_cpu):
    """Attention and kernels ask torch, which then finds none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main(["sft", "--config", "r.yaml", f"training.use_cpu={str(on_cpu).lower()}"]) == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if on_cpu else "0,1")


def test_options_reach_the_recipe_and_the_run(recipe, trained, capsys):
    argv = "sft -c r.yaml --deepspeed training.seed=3 --replace_kernel --pretrain --resume"
    argv += " --output_dir out/run --dry_run data.max_length=64 --json"
    assert main(argv.split()) == 0
    assert capsys.readouterr().out == ""
    ((loaded, options),) = trained
    recipe = loaded.recipe
    assert (recipe.parallel.shard, recipe.kernels, recipe.data.mask) == ("zero2", True, "none")
    assert (recipe.training["seed"], recipe.data.max_length) == (3, 64)
    assert (options.resume, options.dry_run) == (None, True)
    assert options.rows is not None
    assert options.output_dir == Path("out/run")
    assert options.command == tuple(argv.split()), "as it was typed, so that it can be typed again"


@pytest.mark.parametrize("resume", ["old", "old/checkpoint-4"])
def test_a_run_is_continued_with_its_own_recipe(recipe, trained, resume):
    run = RunDirectory.create_at("old")
    run.checkpoint(4).mkdir()
    run.write_text(run.recipe, recipe.read_text())
    append_start(run, Start(overrides=("training.max_steps=7", "kernels=true")))
    assert main(["sft", "--resume", resume, "training.seed=3", "--deepspeed", "zero1"]) == 0
    ((loaded, options),) = trained
    training = loaded.recipe.training
    assert (training["max_steps"], training["seed"], loaded.recipe.kernels) == (7, 3, True)
    assert options.resume == Path(resume).resolve()
    assert options.overrides == ("training.seed=3", "parallel.shard=zero1")
    assert loaded.origins["training.max_steps"] == "override at step 0"


@pytest.mark.parametrize("arguments", [[], ["--resume"], ["--resume", "nowhere"]])
def test_without_a_recipe(recipe, trained, capsys, arguments):
    assert main(["sft", *arguments]) != 0
    assert not trained
    message = capsys.readouterr().err
    assert "nowhere" in message if "nowhere" in arguments else "--config FILE" in message


def test_a_directory_in_use_is_refused_before_anything_is_loaded(recipe, trained, capsys):
    Path("there").mkdir()
    assert main(["sft", "--config", "r.yaml", "--output-dir", "there"]) == 0, "empty ones are free"
    Path("there", "kept").write_text("mine")
    assert main(["sft", "--config", "r.yaml", "--output-dir", "there"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert main(["sft", "--config", "r.yaml", "--output-dir", "there", "--dry-run"]) == 0
    assert len(trained) == 2


def test_the_output_directory_may_stand_in_the_recipe(recipe, trained):
    assert main(["sft", "--config", "r.yaml", "training.output_dir=there"]) == 0
    assert trained[0][1].output_dir == Path("there")
    assert main(["sft", "-c", "r.yaml", "training.output_dir=there", "--output-dir", "here"]) == 0
    assert trained[1][1].output_dir == Path("here")


MISTAKES = {
    "--config gone.yaml": "there is no recipe at",
    "--config r.yaml training.lerning_rate=1": "did you mean training.learning_rate?",
    "--config r.yaml --deepspeed zero4": "did you mean zero",
    "--config r.yaml data.train=gone.jsonl": "there is no file",
    "--config r.yaml model.name_or_path=./gone": "there is no model at",
    "--config r.yaml r.yaml": "section.key=value",
}


def test_mistakes_stop_before_torch_and_leave_nothing(recipe):
    before = sorted(path.name for path in recipe.parent.iterdir())
    code = (
        "import sys; from trainkit.cli.app import main\n"
        "for words in sys.argv[1:]:\n"
        "    print(main(['sft', *words.split()]), end='', file=sys.stderr)\n"
        "from trainkit.recipe import dump_resolved, load_recipe, resolve_accumulation\n"
        "loaded = load_recipe('r.yaml')\n"
        "dump_resolved(loaded), resolve_accumulation(loaded.recipe, 2)\n"
        "slow = {'torch', 'transformers', 'accelerate', 'deepspeed', 'datasets', 'numpy', 'peft'}\n"
        "print(sorted(slow & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *MISTAKES], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
    said = done.stderr.split("error: ")[1:]
    for each, message in zip(said, MISTAKES.values(), strict=True):
        assert message in each
        assert each.endswith("\n2")
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in recipe.parent.iterdir()) == before
