"""A start killed before its first checkpoint: every way on that its message offers works."""

import json
import os
import random
import shutil
import signal
import sys

import pytest
from commands import run_command
from ranks import RankFailure, run_ranks
from run.test_run_damage import VALUES, places_in

from trainkit.errors import RunDirectoryError
from trainkit.run import RunDirectory
from trainkit.run.starts import read_starts

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


@pytest.mark.sample("run", "status.json", "recipe.yaml", "samples.json", "checkpoint-2")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_is_begun_again_wherever_its_start_was_killed(project, moment):
    command = ["sft", "--config", "r.yaml", "--output-dir", "run", "training.max_steps=2"]
    root, run = project.root, project.root / "run"
    with pytest.raises(RankFailure):
        run_ranks(
            "resume.test_resume_start:killed_before",
            world_size=1,
            cwd=str(root),
            argv=command,
            name=moment,
        )
    assert run.exists() is (moment != "run")
    ways = (["--output-dir", "run", "--config", "r.yaml"], ["--resume", "run"])
    for way in (*ways, ["--config", "r.yaml", "--output-dir", "run", "--resume"]):
        kept = root / "kept"
        if run.exists():
            shutil.copytree(run, kept)
        said = project.sft(*way, "training.max_steps=2")
        if said.code and "--resume" not in way:
            assert "continue that run with --resume" in said.err
            assert (run / "status.json").exists()  # without it, nothing is there to overwrite
        elif said.code and moment == "run":
            assert "there is no such run directory" in said.err
        elif said.code:
            assert "with --config" in said.err
            assert not (run / "recipe.yaml").exists()
            said = project.sft(*way, "--config", "r.yaml", "training.max_steps=2")
            assert said.code == 0, said.err
        if not said.code:
            assert (run / "final" / "adapter_model.safetensors").is_file()
            assert len((run / "metrics.jsonl").read_text().splitlines()) >= 2
        shutil.rmtree(run, ignore_errors=True)
        if kept.exists():
            kept.rename(run)


@pytest.mark.parametrize("key", ["overrides", "changes", "accepted", "retired", "passed_over"])
@pytest.mark.parametrize("value", [None, "x", [5, "a"], {"a": 1}, True])
def test_a_start_whose_record_is_of_another_shape_is_named(tmp_path, key, value):
    (tmp_path / "changes.jsonl").write_text(json.dumps({"step": 0, key: value}) + "\n")
    with pytest.raises(RunDirectoryError, match=r"changes\.jsonl.*line 1 is damaged"):
        read_starts(RunDirectory(tmp_path))


RECORDS = ("changes.jsonl", "metrics.jsonl", "status.json", "data.json", "samples.json")


def test_any_field_of_any_record_is_anything_to_a_run_that_goes_on(project):
    """It goes on as before, or says which record is wrong."""
    root, run = project.root, project.root / "run"
    command = ["--config", "r.yaml", "--output-dir", "run", "training.max_steps=3"]
    project.sft(*command, "training.save_steps=1", kill_at=3)
    run.rename(root / "whole")
    drawn = random.Random(0)
    for name in RECORDS:
        shutil.copytree(root / "whole", run)
        lines = (run / name).read_text().splitlines() if name.endswith("l") else []
        damaged = [*map(json.loads, lines)] or json.loads((run / name).read_text())
        place = drawn.choice([each for each in places_in(damaged) if each])
        inside = damaged
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = drawn.choice(VALUES)
        rows = damaged if lines else [damaged]
        (run / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        said = project.sft("--resume", "run")
        assert "bug in trainkit" not in said.err, (name, place, said.err)
        assert said.code == 0 or name in said.err, (name, place, said.err)
        shutil.rmtree(run)
