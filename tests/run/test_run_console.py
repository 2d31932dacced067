import io
import time

import pytest
import rich.console

from trainkit.run import Console
from trainkit.run.console import _can_be_live
from trainkit.run.metrics import format_count, format_duration, format_loss, format_number

ROW = {
    "loss": 1.23456,
    "learning_rate": 2e-5,
    "tokens_per_second": 12345.6,
    "peak_memory_gib": 3.21,
}


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_output_is_one_line_a_row_and_has_no_escapes():
    stream = io.StringIO()
    console = Console(stream=stream)
    console.start(200)
    for step in (1, 2):
        console.log({"step": step, **ROW})
    console.log({"step": 2, "eval_loss": 0.5, "eval_num_trained_tokens": 7162.0})
    console.log({"step": 2, "eval_loss": 0.25, "eval_runtime": 3.0})
    console.warn("look out")
    console.finish({"run": "/tmp/" + "x" * 200, "loss": 1.2})
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert lines[0].startswith("step   1/200  loss 1.2346  lr 2.00e-05  tok/s 12.3k  mem 3.21 GiB")
    assert "eta" in lines[1]
    assert lines[2:5] == [
        "evaluation at step 2: loss 0.5000  num_trained_tokens 7.16k",
        "evaluation at step 2: loss 0.2500",
        "warning: look out",
    ]
    assert lines[6].split() == ["run", "/tmp/" + "x" * 200]


def test_other_processes_are_silent():
    stream = io.StringIO()
    console = Console(stream=stream, dist_rank=1)
    console.start(10)
    console.log({"step": 1, **ROW})
    console.note("x")
    console.finish({"a": 1})
    assert stream.getvalue() == ""


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_live_display_fits_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = _Terminal()
    console = Console(True, stream=stream)
    console.start(123456, first_step=100_000)
    for step in range(100_001, 100_100):
        console.log({"step": step, **ROW})
    block = console._render()
    console.finish({"model": "final"})
    assert "final" in stream.getvalue()

    paper = io.StringIO()
    rich.console.Console(file=paper, width=columns).print(block)
    lines = paper.getvalue().splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= columns
    assert lines[0].startswith("100099/123456")
    assert "loss 1.2346  lr 2.00e-05" in lines[1]
    assert ("mem 3.21 GiB" in lines[1]) == (columns > 40)


@pytest.mark.parametrize("name", ["NO_COLOR", "dumb"])
def test_a_terminal_that_asks_for_quiet_gets_plain_lines(monkeypatch, name):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert _can_be_live(_Terminal())
    if name == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.setenv("TERM", "dumb")
    assert not _can_be_live(_Terminal())
    assert not _can_be_live(io.StringIO())


@pytest.mark.parametrize("tell", ["note", "warn"])
@pytest.mark.parametrize(
    "copied",
    ["trainkit sft --resume train_model/my-first-run-20260101T000000Z", "/data/" + "x" * 60],
)
def test_what_is_copied_from_a_terminal_is_in_one_piece(monkeypatch, tell, copied):
    monkeypatch.setenv("COLUMNS", "40")
    stream = _Terminal()
    console = Console(True, stream=stream)
    getattr(console, tell)(f"continue with: {copied}")
    getattr(console, tell)("words without any of these " * 4)
    console.stop()
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith(copied)
    assert len(lines) > 3  # prose is broken between words


def test_a_logged_step_costs_well_under_a_millisecond():
    console = Console(False, stream=io.StringIO(), dist_rank=0)
    console.start(1000)
    began = time.process_time()
    for step in range(200):
        console.log({"step": step, **ROW})
    # About 0.3 ms on an idle core; ten times that still fails to matter next to a step.
    assert (time.process_time() - began) / 200 < 3e-3


def test_secrets_do_not_reach_the_terminal(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-5e1f09")
    stream = io.StringIO()
    Console(stream=stream).note("logged in with canary-5e1f09")
    assert "canary" not in stream.getvalue()


def test_numbers_for_people():
    assert [format_duration(s) for s in (0, 59.4, 187, 7500, 273600)] == [
        "0s",
        "59s",
        "3m07s",
        "2h05m",
        "3d04h",
    ]
    assert [format_count(n) for n in (0, 950, 12345, 4.56e6)] == ["0", "950", "12.3k", "4.56M"]
    assert format_loss("NaN") == "nan"
    assert format_number(0.000015) == "1.50e-05"
    assert format_number(1e30) == "1.00e+30"


@pytest.mark.parametrize("width", [40, 100])
def test_the_display_fits(width):
    stream = _Terminal()
    console = Console(interactive=True, stream=stream)
    console._rich = rich.console.Console(file=stream, width=width, force_terminal=False)
    console.start(100, first_step=3)
    console._live.stop()
    console.log({"step": 20, "loss": 1.0, "loss/code": 0.5, "loss/chat": 1.5})
    with console._rich.capture() as said:
        console._rich.print(console._render())
    lines = said.get().splitlines()
    assert all(len(line) <= width for line in lines)
    assert ("loss/chat 1.5000" in said.get()) == (width == 100)


def test_behind_the_last_step_the_display_says_what_is_done_and_no_time_to_go(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    console = Console(interactive=True, stream=_Terminal())
    said = []
    console.start(4, first_step=2)
    for step in (3, 4):
        console.step(step)
        said.append(_shown(console))
    console.doing("answering questions")
    said.append(_shown(console))
    console.finish()
    assert ["eta" in each for each in said] == [True, False, False]
    assert "finishing" in said[1]
    assert "answering questions" in said[2]


def _shown(console):
    stream = io.StringIO()
    rich.console.Console(file=stream, width=60).print(console._render())
    return stream.getvalue()
