"""A start killed before its first checkpoint: every way on that its message offers works."""

import json
import os
import shutil
import signal
import sys

import pytest
from commands import run_command, trainkit_each
from ranks import RankFailure, run_ranks

from trainkit.errors import RunDirectoryError
from trainkit.run import RunDirectory
from trainkit.run.starts import read_starts
from trainkit.train.resume.given import read_command

MOMENTS = (
    *("run", "logs", "status.json", "changes.jsonl", "recipe.yaml", "resolved.yaml"),
    *("environment.json", "samples.json", "checkpoint-2"),
)
"""What the run was about to make, the first time, when it was killed."""


def killed_before(cwd, argv, name):
    """Runs in the forked process: the command, which dies before it makes a file."""

    def hook(event, arguments):
        if event == "os.rename":
            made = arguments[1]
        elif event == "os.mkdir":
            made = arguments[0]
        else:
            return
        if os.path.basename(os.fspath(made)) == name:  # noqa: PTH119 - within an audit hook
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return run_command(cwd, argv)


@pytest.mark.sample("run", "recipe.yaml", "checkpoint-2")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_is_begun_again_wherever_its_start_was_killed(project, moment):
    command = ["sft", "--config", "r.yaml", "--output-dir", "run", "training.max_steps=2"]
    root, run = project.root, project.root / "run"
    case = {"world_size": 1, "cwd": str(root), "argv": command, "name": moment}
    with pytest.raises(RankFailure):
        run_ranks("resume.test_resume_start:killed_before", **case)
    assert run.exists() is (moment != "run")
    given = ["--config", "r.yaml", "--output-dir", "run"]
    ways = (given, ["--resume", "run"], [*given, "--resume"], ["--resume", "run", *given[:2]])
    folders = [root.parent / f"{root.name}-{number}" for number in range(len(ways))]
    for folder in folders:
        shutil.copytree(root, folder, symlinks=True)
    commands = [["sft", *way, "training.max_steps=2"] for way in ways]
    new, resumed, *others = trainkit_each(folders, commands)
    if new.code:
        assert "continue that run with --resume" in new.err
        assert (folders[0] / "run/status.json").exists()  # without it nothing is overwritten
    if resumed.code:
        assert ("there is no such run directory" if moment == "run" else "with --config") in (
            resumed.err
        )
        assert not (folders[1] / "run/recipe.yaml").exists()
    if moment == "run":
        others.pop()  # there is nothing to go on with
    assert [said.code for said in others] == [0] * len(others), others
    for folder, said in zip(folders, (new, resumed, *others), strict=False):
        if not said.code:
            assert (folder / "run/final/adapter_model.safetensors").is_file()
            assert len((folder / "run/metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.parametrize("key", ["overrides", "changes", "accepted", "retired", "passed_over"])
@pytest.mark.parametrize("value", [None, "x", [5, "a"], {"a": 1}, True])
def test_a_start_whose_record_is_of_another_shape_is_named(tmp_path, key, value):
    (tmp_path / "changes.jsonl").write_text(json.dumps({"step": 0, key: value}) + "\n")
    with pytest.raises(RunDirectoryError, match=r"changes\.jsonl.*line 1 is damaged"):
        read_starts(RunDirectory(tmp_path))


def test_a_run_whose_starts_are_gone_is_not_gone_on_with(tmp_path):
    """A rate of the command line is in there alone; with the recipe it is what is typed."""
    run = RunDirectory.create_at(tmp_path / "run")
    recipe = "model: {name_or_path: m}\ndata: {train: [d.jsonl]}\n"
    run.write_text(run.recipe, recipe)
    run.checkpoint(2).mkdir()
    with pytest.raises(RunDirectoryError, match=r"no changes\.jsonl"):
        read_command(None, [], {}, resume=str(run.root))
    given = read_command(run.recipe, [], {}, resume=str(run.root))
    assert given.resume == run.root
