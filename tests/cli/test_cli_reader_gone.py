"""A run of many hours does not end because nobody reads what it prints any more."""

import dataclasses
import errno
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainkit.cli.commands import sft
from trainkit.run import Console
from trainkit.terminal import lasting


@dataclasses.dataclass
class Options:
    """What a run is given."""

    rows: object = None
    resume: str | None = None


RECIPE = SimpleNamespace(recipe=SimpleNamespace(training={}))


def end_readers(monkeypatch):
    """Make standard output and standard error pipes whose reader has ended."""
    for name in ("stdout", "stderr"):
        reader, writer = os.pipe()
        os.close(reader)
        monkeypatch.setattr(sys, name, os.fdopen(writer, "w", buffering=1))


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_goes_on(monkeypatch, tmp_path, as_json):
    import trainkit.parallel.launch as launch
    import trainkit.train.build as build
    import trainkit.train.resume.given as hosts

    told = []

    def run(_, options):
        console = Console(rows=options.rows)
        for step in range(3):
            console.log({"step": step, "loss": 1.0})
            print("a library says something", flush=True)
            warnings.warn("and warns", stacklevel=1)
        console.finish({"loss": 1.0})
        told.append("done")
        return tmp_path

    monkeypatch.setattr(build, "run_sft", run)
    monkeypatch.setattr(hosts, "refuse_unlike_hosts", lambda *_: None)
    monkeypatch.setattr(launch, "quieten_imports", lambda: None)
    end_readers(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        sft._train(RECIPE, Options(), as_json=as_json)
    assert told == ["done"]


def test_a_terminal_that_was_closed_is_no_reader_either(tmp_path):
    with (tmp_path / "terminal").open("w") as file:

        class Closed:
            fileno = file.fileno

            def write(self, _):
                raise OSError(errno.EIO, "Input/output error")

        assert lasting(Closed()).write("words") == len("words")
        file.write("to nowhere")
    assert (tmp_path / "terminal").read_text() == ""


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_nobody_reading(closed, tmp_path):
    """A service starts a command with none of the three; an error still has its own exit code."""
    (tmp_path / "r.yaml").write_text("model: {name_or_path: m}\ndata: {train: [d.jsonl]}\n")
    for name, code in {"r": 0, "absent": 2}.items():
        command = f"{sys.executable} -m trainkit config show {name}.yaml {closed}"
        assert os.waitstatus_to_exitcode(os.system(f"cd {tmp_path}; {command}")) == code


def test_a_full_disk_is_still_told():
    with pytest.raises(OSError, match="No space"), Path("/dev/full").open("w", buffering=1) as file:
        lasting(file).write("words\n")
