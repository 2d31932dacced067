"""``trainkit runs``, ``show`` and ``watch``, and what TAB offers."""

import json
import re
import subprocess
import sys

import pytest
from commands import python

from trainkit.cli.app import main
from trainkit.cli.commands import runs
from trainkit.run.directory import RunDirectory
from trainkit.run.starts import Stages, now, process_began


def make_run(parent, name, state, steps=3, **more):
    run = RunDirectory.create(parent, name)
    metrics = run.open_metrics()
    for step in range(1, steps + 1):
        metrics.append({"step": step, "loss": 4.0 / step, "tokens_per_second": 1234.5})
    metrics.append({"step": steps, "eval_loss": 1.5})
    metrics.close()
    run.checkpoint(2).mkdir()
    run.write_status(state, step=steps, total_steps=10, **more)
    return run


@pytest.fixture
def parent(tmp_path):
    make_run(tmp_path, "one", "done")
    make_run(tmp_path, "two", "failed", reason="no space\x1b]0;left\x07")
    return tmp_path


def test_runs_as_json(parent, capsys):
    assert main(["runs", str(parent), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_state = {row["state"]: row for row in rows}
    assert by_state.keys() == {"done", "failed"}
    assert by_state["done"]["step"] == 3
    assert by_state["done"]["total_steps"] == 10
    assert by_state["done"]["loss"] == pytest.approx(4 / 3)
    assert by_state["done"]["eval_loss"] == 1.5
    assert by_state["done"]["checkpoints"] == [2]


@pytest.mark.parametrize("columns", ["30", "200"])
def test_the_table_fits(parent, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["runs", str(parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("done" in line for line in lines)
    assert any("3/10" in line for line in lines)


def test_a_running_process_that_is_gone_was_killed(tmp_path, capsys):
    run = make_run(tmp_path, "gone", "running")
    status = json.loads(run.status_file.read_text())
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    run.status_file.write_text(json.dumps({**status, "pid": child.pid}))
    assert main(["show", str(run.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "killed"


def test_this_process_runs(tmp_path, capsys):
    run = make_run(tmp_path, "here", "running")
    assert main(["show", str(run.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "running"


def test_show_says_what_to_do_next_and_prints_no_escapes(parent, capsys):
    failed = next(path for path in parent.iterdir() if path.name.startswith("two"))
    assert main(["show", str(failed)]) == 0
    shown = capsys.readouterr().out
    assert f"trainkit sft --resume {failed}" in shown
    assert "\x1b" not in shown


def test_show_says_where_the_time_to_the_first_step_went(tmp_path, capsys):
    run = make_run(tmp_path, "timed", "done")
    stages = Stages(now() - 3.0)
    stages.end("imports")
    stages.end("data")
    run.write_json(run.root / "start.json", stages.to_dict())
    assert main(["show", str(run.root)]) == 0
    assert "3.0 s after the command (imports 3.0, data 0.0)" in capsys.readouterr().out


def test_a_process_knows_when_it_began():
    told = python("-c", "from trainkit.run import starts as s; print(s.process_began())")
    assert 0 <= now() - float(told) < 60
    assert process_began() < float(told)


def test_a_damaged_status_is_named(parent, capsys):
    done = next(path for path in parent.iterdir() if path.name.startswith("one"))
    (done / "status.json").write_text("{")
    assert main(["runs", str(parent)]) == 0
    assert "damaged" in capsys.readouterr().out


def test_watch_prints_the_rows_and_how_it_ended(parent, capsys):
    failed = next(path for path in parent.iterdir() if path.name.startswith("two"))
    assert main(["watch", str(failed)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/10  loss 4.0000")
    assert lines[-1].startswith("failed: no space")


def test_watch_shows_the_rows_that_a_continued_run_computes_again(tmp_path, monkeypatch, capsys):
    """Killed behind step 5 and continued from the checkpoint of step 2."""
    run = RunDirectory.create_at(tmp_path / "run")

    def write(*steps, loss):
        kept = [{"step": step, "loss": 1.0} for step in (1, 2)]
        rows = [*kept, *({"step": step, "loss": loss} for step in steps)]
        (run.root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    looks = iter(
        [
            lambda: write(3, 4, loss=2.0),
            lambda: write(3, loss=3.0),
            lambda: (write(3, 4, 5, loss=3.0), run.write_status("done")),
        ]
    )
    monkeypatch.setattr(runs.time, "sleep", lambda _: next(looks)())
    assert main(["watch", str(run.root), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = [(row["step"], row["loss"]) for row in rows]
    assert told == [(1, 1), (2, 1), (3, 2), (4, 2), (3, 3), (4, 3), (5, 3)]


ESCAPE = "\x1b]0;title\x07\x1b[2J\x9b31m"
COMMANDS_OF_A_TERMINAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def hostile(tmp_path):
    """A run whose every file, and whose name, wants to command the terminal or break what reads."""
    run = tmp_path / f"run{ESCAPE}"
    RunDirectory.create_at(run)
    words = ("state", "reason", "started", "updated", "host", "last_step", "total_steps")
    status = {**json.loads((run / "status.json").read_text()), **dict.fromkeys(words, ESCAPE)}
    (run / "status.json").write_text(json.dumps(status))
    rows = [
        {"step": 1, "loss": ESCAPE, f"loss/{ESCAPE}": ESCAPE, "learning_rate": ESCAPE},
        {"step": 2, "loss": [], "eval_loss": {ESCAPE: 1}, "tokens_per_second": {}},
        {"step": 3, "loss": 10**400, "grad_norm": -(10**400), "step_seconds": ESCAPE},
        {"step": 4, "loss": 2.0, "tokens_per_second": 1.0, f"eval_{ESCAPE}": 1.0},
        {"step": 5, "loss": 1.0, "eval_loss": 1.0, "tokens_per_second": 1.0},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    text += '{"step": 6, "loss": ' + "9" * 5000 + "}\n" + '{"step": ' + "[" * 100_000 + "\n"
    (run / "metrics.jsonl").write_text(text)
    (run / "recipe.yaml").write_text(f"name: {json.dumps(ESCAPE)}\nmodel: {{name_or_path: m}}\n")
    (run / "resolved.yaml").write_text((run / "recipe.yaml").read_text())
    for name in ("changes.jsonl", "kernels.json", "environment.json", "data.json"):
        (run / name).write_text(json.dumps({ESCAPE: ESCAPE}) + "\n")
    (run / "start.json").write_text(json.dumps({"seconds": 1, "stages": {ESCAPE: 1.0}}))
    (run / f"checkpoint-{ESCAPE}").mkdir()
    return run


@pytest.mark.parametrize(
    "command",
    [("runs", ".."), ("show",), ("watch",), ("plot",), ("compare", "."), ("diagnose",)],
    ids=lambda words: words[0],
)
def test_nothing_of_a_hostile_run_commands_the_terminal(command, hostile, capsys, monkeypatch):
    monkeypatch.chdir(hostile.parent)
    name, *more = command
    runs = [str(hostile.parent if each == ".." else hostile) for each in more or ["."]]
    if name == "compare":
        runs.append(str(hostile))
    assert main([name, *runs]) in (0, 1, 2)
    said = capsys.readouterr()
    assert said.out + said.err
    assert "bug in trainkit" not in said.err, said.err
    assert "Traceback" not in said.err, said.err
    assert not COMMANDS_OF_A_TERMINAL.search(said.out + said.err), repr(said)


def test_no_run(tmp_path, capsys):
    assert main(["show", str(tmp_path)]) == 2
    assert "not a run" in capsys.readouterr().err
    assert main(["runs", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("trainkit s", {"sft", "show"}),
        ("trainkit sft training.lear", {"training.learning_rate="}),
        ("trainkit config keys lora.qua", {"lora.quantize"}),
        ("trainkit new smol", {"smollm2-135m-lora-cpu"}),
        ("trainkit show train_model/o", {"train_model/one"}),
    ],
)
def test_tab(line, offered, tmp_path, monkeypatch, capsys):
    (tmp_path / "train_model" / "one").mkdir(parents=True)
    (tmp_path / "train_model" / "one" / "status.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("_TRAINKIT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    assert main([]) == 0
    assert offered <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("shell", "says"),
    [("bash", "complete -o default"), ("zsh", "#compdef trainkit"), ("fish", "complete --command")],
)
def test_completion_is_for_the_shell_that_is_named(shell, says, capsys, monkeypatch, tmp_path):
    """Whichever shell runs: typer takes that one and passes over the name."""
    assert main(["--show-completion", shell]) == 0
    assert says in capsys.readouterr().out
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--install-completion", shell]) == 0
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(says in text for text in written)
    assert main(["--show-completion", "tcsh"]) == 2
    assert "one of bash, zsh, fish" in capsys.readouterr().err
