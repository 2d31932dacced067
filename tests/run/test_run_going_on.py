"""The command that goes on with a run can be pasted as it is."""

import re
import shlex
from pathlib import Path

import pytest

import trainkit
from trainkit.cli.app import COMMANDS
from trainkit.run import RunDirectory
from trainkit.run.status import resume_command

TWO_HOSTS = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("environ", "starter"),
    [
        ({}, ["sft"]),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, ["sft"]),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, ["launch", "--nproc-per-node", "2"]),
        (TWO_HOSTS, ["launch", "--nnodes", "2", "--nproc-per-node", "8"]),
    ],
)
def test_it_starts_as_many_processes_as_the_run_has(tmp_path, monkeypatch, environ, starter):
    for name in TWO_HOSTS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    run = RunDirectory.create_at(tmp_path / "it's a run; é")
    run.write_status("interrupted")
    words = shlex.split(resume_command(run.root, "a.b=[1, 2]"))
    assert words == ["trainkit", *starter, "--resume", str(run.root), "a.b=[1, 2]"]


def test_a_run_whose_status_is_damaged_has_one_too(tmp_path):
    (tmp_path / "status.json").write_text('{"num_ranks": "many"}')
    assert resume_command(tmp_path) == f"trainkit sft --resume {tmp_path}"


def test_no_command_has_a_path_as_it_is():
    """Directories have blanks in their names; what a shell would split is quoted everywhere."""
    sources = Path(trainkit.__file__).parent.rglob("*.py")
    bare = re.compile(rf"trainkit (?:{'|'.join(COMMANDS)}) (?:--resume )?\{{")
    found = {str(path): bare.findall(path.read_text(encoding="utf-8")) for path in sources}
    assert {name: words for name, words in found.items() if words} == {}
