import json
import os
import shutil
import stat
from datetime import datetime, timezone

import pytest
from commands import python

from trainkit.checkpoint.whole.atomic import stage, staged_directory
from trainkit.errors import CheckpointError, ResumeRefusedError, RunDirectoryError
from trainkit.run import RunDirectory
from trainkit.run.directory import is_unfinished
from trainkit.run.files import RunGoneError

NOON = datetime(2026, 1, 2, 12, 0, 0, tzinfo=timezone.utc)


def test_two_runs_of_one_second_get_two_directories(tmp_path):
    first = RunDirectory.create(tmp_path, "a b/数", now=NOON)
    second = RunDirectory.create(tmp_path, "a b/数", now=NOON)
    assert first.name == "a-b-数-20260102T120000Z"
    assert second.name == "a-b-数-20260102T120000Z-2"
    assert first.status().state == "running"


@pytest.mark.parametrize("name", ["../../up", "/", "", "..", "x" * 400, "数" * 200])
def test_a_name_cannot_leave_the_parent(tmp_path, name):
    run = RunDirectory.create(tmp_path, name)
    assert run.root.parent == tmp_path.resolve()


def test_an_explicit_directory_is_never_overwritten(tmp_path):
    target = tmp_path / "deep" / "out"
    RunDirectory.create_at(target)
    before = sorted(target.rglob("*"))
    with pytest.raises(RunDirectoryError, match="never overwritten") as caught:
        RunDirectory.create_at(target)
    assert "--resume" in caught.value.fix
    assert sorted(target.rglob("*")) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory.create_at(tmp_path / "file")
    with pytest.raises(RunDirectoryError, match="part of this path is a file"):
        RunDirectory.create_at(tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    assert RunDirectory.create_at(tmp_path / "empty").status().state == "running"


def test_open_wants_a_run(tmp_path, run):
    assert RunDirectory.open(run.root).root == run.root
    with pytest.raises(RunDirectoryError, match="no run in this directory"):
        RunDirectory.open(tmp_path)
    with pytest.raises(RunDirectoryError, match="no such run"):
        RunDirectory.open(tmp_path / "nowhere")


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o027, 0o077])
def test_rights_are_those_that_the_umask_gives(umask, tmp_path):
    before = os.umask(umask)
    try:
        run = RunDirectory.create_at(tmp_path / "run")
        run.write_json(run.environment, {})
        with staged_directory(run.final) as staging:
            (staging / "w").touch(0o600)  # as safetensors makes its files
    finally:
        os.umask(before)
    for path in (run.root, *run.root.rglob("*")):
        whole = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == whole & ~umask, path


def test_a_start_that_was_killed_before_there_was_a_run_is_in_nobodys_way(tmp_path):
    root = tmp_path / "run"
    for made in ("logs", "plots", ".lock", ".status.json.0a1b2c3d"):
        root.mkdir(exist_ok=True)
        RunDirectory.check_free(root)
        assert is_unfinished(root)
        (root / made).mkdir() if "." not in made else (root / made).touch()
    assert RunDirectory.create_at(root).status().state == "running"
    assert not is_unfinished(root)
    (tmp_path / "other" / "logs").mkdir(parents=True)
    (tmp_path / "other" / "logs" / "mine.txt").touch()
    with pytest.raises(RunDirectoryError, match="not empty"):
        RunDirectory.check_free(tmp_path / "other")


@pytest.mark.parametrize("left", [None, 4])
def test_a_directory_that_is_emptied_is_named_and_not_filled_again(left, tmp_path):
    run = RunDirectory.create_at(tmp_path / "run")
    run.heartbeat(4)
    for path in run.root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if left is not None:
        run.checkpoint(left).mkdir()
        (run.checkpoint(left) / "manifest.json").touch()
        run.checkpoint(left + 1).mkdir()  # of which the files are gone, too
    there = [*run.root.iterdir()]
    expected = "there is no checkpoint" if left is None else f"is {run.checkpoint(left)}"
    for write in (run.heartbeat, lambda step: run.write_status("failed", step=step)):
        with pytest.raises(RunGoneError, match=expected):
            write(5)
    assert [*run.root.iterdir()] == there


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_directory_that_goes_away_is_named_and_not_made_again(is_moved, tmp_path):
    run = RunDirectory.create_at(tmp_path / "run")
    run.checkpoint(4).mkdir()
    (run.checkpoint(4) / "manifest.json").touch()
    run.heartbeat(4)
    if is_moved:
        run.root.rename(tmp_path / "other")
    else:
        shutil.rmtree(run.root)
    expected = str(tmp_path / "other" / "checkpoint-4") if is_moved else "was deleted"
    with pytest.raises(RunGoneError, match=expected):
        run.heartbeat(5)
    with pytest.raises(RunGoneError):
        run.write_json(run.data, {})
    with pytest.raises(CheckpointError):
        stage(run.final, makes_parent=False)
    assert not run.root.exists()
    run.root.mkdir()  # another of the same name
    for write in (run.heartbeat, lambda step: run.write_status("failed", step=step)):
        with pytest.raises(RunGoneError, match=expected):
            write(6)
    assert not any(run.root.iterdir())


def test_whatever_breaks_in_a_missing_directory_it_is_named(tmp_path):
    breaks = {
        "deleted": lambda: (shutil.rmtree(run.root), shutil.disk_usage(run.root)),
        "status": lambda: (run.status_file.unlink(), run.open_metrics()),
        "No such": lambda: shutil.disk_usage(run.root / "gone"),
    }
    for said, fails in breaks.items():
        run = RunDirectory.create_at(tmp_path / said)
        error = FileNotFoundError if said == "No such" else RunGoneError
        with pytest.raises(error, match=said), run.recording_status():
            fails()


def test_status_of_a_body_that_ends_well(trained_run):
    with trained_run.recording_status():
        assert trained_run.status().state == "running"
    status = trained_run.status()
    assert (status.state, status.reason, status.last_step) == ("done", None, 60)


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (ValueError("the shapes differ"), "failed", "ValueError: the shapes differ"),
        (KeyboardInterrupt(), "interrupted", "interrupted by Ctrl-C"),
        (SystemExit(143), "interrupted", "stopped by signal SIGTERM"),
        (SystemExit(1), "failed", "exited with 1"),
    ],
)
def test_status_of_a_body_that_raises(trained_run, error, state, reason):
    with pytest.raises(type(error)), trained_run.recording_status():
        raise error
    status = trained_run.status()
    assert (status.state, status.reason, status.last_step) == (state, reason, 60)
    assert (trained_run.logs / "traceback.txt").exists() == isinstance(error, ValueError)


def test_a_run_that_may_not_be_continued_stays_what_it_was(trained_run):
    with trained_run.recording_status():
        pass
    before = trained_run.status()
    with pytest.raises(ResumeRefusedError), trained_run.recording_status():
        raise ResumeRefusedError("other data")
    assert trained_run.status() == before
    assert before.state == "done"


def test_status_written_by_the_body_stands(run):
    def body():
        run.write_status("interrupted", reason="preempted at step 3; saved checkpoint-3", step=3)
        raise SystemExit(75)

    with pytest.raises(SystemExit), run.recording_status():
        body()
    assert run.status().reason == "preempted at step 3; saved checkpoint-3"


def test_resume_marks_its_step_and_forgets_the_later_ones(trained_run):
    trained_run.open_metrics(resume_step=40).close()
    assert trained_run.status().resumed_at_steps == [40]
    trained_run.open_metrics(resume_step=20).close()
    assert trained_run.status().resumed_at_steps == [20]


def test_heartbeat_is_rare(run):
    run.heartbeat(1)
    run.heartbeat(2)
    assert run.status().last_step == 1


def test_a_damaged_status_says_so(run):
    run.status_file.write_text("{")
    with pytest.raises(RunDirectoryError, match="damaged"):
        run.status()


def test_json_has_no_bare_nan(run):
    run.write_json(run.data, {"loss": [float("nan"), float("-inf")]})
    assert json.loads(run.data.read_text(), parse_constant=pytest.fail) == {
        "loss": ["NaN", "-Infinity"]
    }


@pytest.mark.parametrize("name", ["loop", "loop/x", "/proc/x", "x" * 300], ids=range(4))
def test_a_place_where_nothing_can_be_made_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        RunDirectory.create_at(name)


FULL = """
import resource, signal, sys
from pathlib import Path
from trainkit.errors import RunDirectoryError
from trainkit.run.directory import RunDirectory, locked
run = RunDirectory.create_at(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    with locked(run):
        pass
except RunDirectoryError as error:
    print(error)
"""


def test_a_disk_that_is_full_already_is_named(tmp_path):
    assert "no space left on the device while writing .lock" in python("-c", FULL, tmp_path / "r")
