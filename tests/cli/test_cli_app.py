"""The table of commands, exit codes and messages."""

import os
import sys
import types

import pytest
from commands import python

from trainkit.cli import app as cli
from trainkit.cli.app import report_failure
from trainkit.errors import DataError, RecipeError, TrainkitError
from trainkit.version import __version__

HEAVY = {
    "pydantic", "yaml", "torch", "triton", "transformers", "datasets", "deepspeed", "peft",
    "matplotlib",
}  # fmt: skip


@pytest.fixture
def command(monkeypatch):
    """Put a command of the test's own into the table; returns the module it is looked up in."""
    module = types.ModuleType("trainkit_test_command")
    monkeypatch.setitem(sys.modules, f"trainkit.cli.commands.{module.__name__}", module)
    entry = cli.Entry(f"{module.__name__}:run", "A command of the tests.")
    monkeypatch.setitem(cli.COMMANDS, "try", entry)
    return module


def test_help_names_every_command_and_imports_none():
    code = (
        "import sys; from trainkit.cli.app import COMMANDS, main; code = main(['--help']);"
        "targets = {e.target.partition(':')[0] for e in COMMANDS.values()};"
        "found = {name.removeprefix('trainkit.cli.commands.') for name in sys.modules};"
        f"print(code, sorted((targets | {HEAVY!r}) & found))"
    )
    said = python("-c", code)
    assert said.splitlines()[-1] == "0 []"
    for name, entry in cli.COMMANDS.items():
        assert f"  {name} " in said
        assert entry.help.endswith(".")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"trainkit {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sftt"], "Did you mean 'sft'?"),
        (["sft"], "--config FILE"),
        (["sft", "--confg", "x"], "--config"),
        (["sft", "--config"], "requires an argument"),
    ],
)
def test_a_wrong_command_line_exits_2(argv, message, capsys):
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecipeError("bad", where="f.yaml:3", fix="mend it"), 2),
        (DataError("bad", where="f.jsonl:3", fix="mend it"), 2),
        (TrainkitError("bad", where="here", fix="mend it"), 1),
    ],
)
def test_known_errors_come_without_a_traceback(command, capsys, error, code):
    def run() -> None:
        raise error

    command.run = run
    assert cli.main(["try"]) == code
    shown = capsys.readouterr().err
    assert shown == f"error: {error.where}: bad\n  fix: mend it\n"


def test_a_place_is_said_once():
    assert (
        str(TrainkitError("data.max_length 9 is long", where="data.max_length")).count("max_") == 1
    )
    assert (
        str(TrainkitError("it is long", where="data.max_length")) == "data.max_length: it is long"
    )


def test_a_bug_shows_its_traceback_and_asks_for_a_report(command, capsys):
    def run() -> None:
        raise ZeroDivisionError("surprise")

    command.run = run
    assert cli.main(["try"]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "surprise" in shown
    assert "report it" in shown


def test_out_of_memory_says_what_to_lower(command, capsys):
    class OutOfMemoryError(RuntimeError):
        pass

    def run() -> None:
        raise OutOfMemoryError("CUDA out of memory")

    command.run = run
    assert cli.main(["try"]) == 1
    assert "per_device_train_batch_size" in capsys.readouterr().err


def test_ctrl_c_exits_130(command):
    def run() -> None:
        raise KeyboardInterrupt

    command.run = run
    assert cli.main(["try"]) == 130


@pytest.mark.parametrize(("given", "found"), [(None, "passive"), ("active", "active")])
def test_threads_that_wait_leave_the_processor_to_others(command, monkeypatch, given, found):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    seen = []
    command.run = lambda: seen.append(os.environ["OMP_WAIT_POLICY"])
    assert cli.main(["try"]) == 0
    assert seen == [found]


def test_only_the_first_rank_of_a_host_tells_of_the_recipe(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert report_failure(RecipeError("bad")) == 2
    assert capsys.readouterr().err == "error: rank 4: bad\n"
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("LOCAL_RANK")
    assert report_failure(RecipeError("bad")) == 2
    assert capsys.readouterr().err == ""
    assert report_failure(DataError("bad")) == 2
    assert capsys.readouterr().err == "error: rank 3: bad\n"


def test_what_the_user_can_mend_is_not_called_a_bug(capsys):
    class ConnectError(Exception):
        """As httpx calls it."""

    assert report_failure(ConnectError("[Errno -2] Name or service not known")) == 1
    said = capsys.readouterr().err
    assert "the model hub cannot be reached" in said
    assert "this is a bug" not in said
    assert report_failure(ImportError("You need to install `galore_torch`")) == 2
    assert capsys.readouterr().err == "error: You need to install `galore_torch`\n"
    assert report_failure(ImportError("cannot import name 'x'")) == 1
    assert "do not fit each other" in capsys.readouterr().err
    assert report_failure(ImportError("cannot import name 'x'", name="trainkit.run")) == 1
    assert "this is a bug" in capsys.readouterr().err


@pytest.mark.parametrize("width", [40, 80])
def test_errors_wrap_between_words_on_a_terminal(monkeypatch, capsys, width):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    report_failure(
        RecipeError(
            "data.mask: 'assitant' must be one of 'assistant', 'last_assistant' or 'none'",
            where="configs/a-recipe-with-a-long-name-that-stays-whole.yaml:8",
            fix="did you mean assistant?",
        )
    )
    lines = capsys.readouterr().err.splitlines()
    assert "configs/a-recipe-with-a-long-name-that-stays-whole.yaml:8:" in " ".join(lines)
    for line in lines:
        assert len(line) <= width or "whole.yaml" in line


@pytest.mark.parametrize("argv", [["--help"], ["sft", "--help"], ["config", "show", "--help"]])
@pytest.mark.parametrize("width", [40, 80])
def test_help_fits_the_terminal(monkeypatch, capsys, argv, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(argv) == 0
    # click lays help out for fifty columns at least.
    assert max(map(len, capsys.readouterr().out.splitlines())) <= max(width, 50)
