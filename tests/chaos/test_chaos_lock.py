"""One start at a time in a run directory, and nothing of a killed one is left."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from trainkit.errors import RunDirectoryError
from trainkit.processes import Process
from trainkit.run.directory import RunDirectory, locked


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create_at(tmp_path / "run")


def hold(run, process):
    (run.root / ".lock").write_text(json.dumps(asdict(process)))


def test_a_living_start_keeps_others_out(run):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        hold(run, Process(Process.this().host, other.pid, start))
        with (
            pytest.raises(RunDirectoryError, match=f"process {other.pid} is training"),
            locked(run),
        ):
            pass
    finally:
        other.communicate(b"\n")
    with locked(run):  # it is gone now, as after a kill
        assert (run.root / ".lock").exists()
    assert not (run.root / ".lock").exists()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"pid": 3}', '{"host": 1}'])
def test_a_torn_lock_is_nobodys(run, text):
    (run.root / ".lock").write_text(text)
    with locked(run):
        assert json.loads((run.root / ".lock").read_text())["pid"] == os.getpid()


def test_another_machine_is_believed_and_the_way_out_named(run):
    hold(run, Process("elsewhere", 5, "7"))
    with pytest.raises(RunDirectoryError, match=f"rm {run.root}/.lock"), locked(run):
        pass


def test_a_pid_that_was_used_again_is_another_process(run):
    hold(run, Process(Process.this().host, os.getppid(), "1"))
    with locked(run):
        pass


def test_half_written_files_of_a_killed_start_are_swept(run):
    for path in (run.root / ".report.html.abc12_z9", run.plots / ".loss.png.k3j4h5g6"):
        path.write_text("half")
    kept = run.root / ".my-own-notes.txt"
    kept.write_text("whole")
    with locked(run):
        assert not list(run.root.glob(".report*")) + list(run.plots.glob(".*"))
    assert kept.exists()


def test_two_starts_of_one_run(project):
    """From the command line: the second is refused and nothing of the run is touched."""
    project.sft("r.yaml", "--output-dir", "run", kill_at=5)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
    hold(RunDirectory(project.root / "run"), Process(Process.this().host, other.pid, start))
    before = (project.root / "run/status.json").read_text()
    said = project.sft("--resume", "run")
    other.communicate(b"\n")
    assert said.code == 2
    assert "is training in this run" in said.err
    assert (project.root / "run/status.json").read_text() == before
    assert project.sft("--resume", "run").code == 0
    assert not (project.root / "run/.lock").exists()
