"""A process that trainkit starts imports nothing from the user's folder."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainkit
from trainkit.cli.app import main
from trainkit.parallel.launch import Hosts, launch_command
from trainkit.processes import STARTER, module_command

ROOT = Path(trainkit.__file__).parent
NAMES = (
    "json", "torch", "trainkit", "runpy", "pathlib", "typing", "yaml", "module", "resource", "re",
    "sitecustomize", "usercustomize", "transformers", "signal", "threading", "numpy",
)  # fmt: skip


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """A folder whose files have the names of modules; exists once one of them was run."""
    folder, canary = tmp_path / "here", tmp_path / "canary"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"import os; os.mkdir({str(canary)!r})\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # Python 3.10 does not know it
    return canary


def test_a_module_is_run_as_python_m_runs_it(canary):
    done = subprocess.run(
        module_command("json.tool", "--compact"), input="[1, 2]", capture_output=True, text=True
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[1,2]\n", "", 0)
    assert not canary.exists()


def test_trainkit_is_found_without_being_installed(canary):
    command = [sys.executable, "-I", "-S", STARTER, "trainkit.errors"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 0)
    assert not canary.exists()


def test_trainkit_itself_run_by_python_m(canary):
    """A trainkit.py of the user's would be run before it can do anything."""
    (canary.parent / "here" / "trainkit.py").unlink()
    command = [sys.executable, "-m", "trainkit", "new"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stderr.count("\n"), done.returncode) == (1, 0), done.stderr
    assert "qlora" in done.stdout
    assert not canary.exists()


def test_the_command_and_train_sh_run_nothing_of_here(canary, monkeypatch):
    monkeypatch.setenv("TRAINKIT_PYTHON", sys.executable)
    script = Path(sys.executable).with_name("trainkit")
    commands = [["bash", str(ROOT.parent / "train.sh"), "--help"], [str(script), "new"]]
    for command in commands if script.exists() else commands[:1]:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "torchrun" in done.stdout or "qlora" in done.stdout
        assert not canary.exists()
    install = (ROOT.parent / "scripts" / "install.sh").read_text()
    assert not re.search(r'"\$(python|candidate)" -[cm] ', install)  # they look here first


def test_doctor_checks_everything_and_its_processes_import_nothing_from_here(
    canary, capsys, monkeypatch
):
    """It starts torchrun."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    main(["doctor", "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {row["check"]: row for row in rows}
    assert {"python", "torch", "disk here", "open files", "hub"} <= found.keys()
    (reduced,) = [row for name, row in found.items() if name.endswith("all-reduce")]
    assert reduced["state"] == "ok", reduced
    assert all((row["state"] == "ok") == (row["fix"] is None) for row in rows)
    assert not canary.exists()


def test_every_rank_of_a_launch_is_started_so(canary):
    hosts = Hosts.from_environment({})
    for number, restarts in ((1, 0), (2, 0), (2, 1)):
        command = launch_command(["sft"], hosts, number, max_restarts=restarts)
        assert "-m" not in command
        assert command[command.index("trainkit.cli.app") - 1] == STARTER


def test_no_process_is_started_by_python_m():
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in ROOT.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"""(?:\[|executable, )["']-m["']""", line)
    ]
    assert found == []
