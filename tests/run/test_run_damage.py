"""A damaged record is named by file and line: never a traceback, never dropped without a word."""

import pytest

from trainkit.cli.app import main
from trainkit.compare.runs import read_run
from trainkit.errors import RunDirectoryError
from trainkit.run.metrics import read_scores, say_damaged
from trainkit.run.report import model_card, render_report

RECORDS = ("data.json", "samples.json", "environment.json", "kernels.json", "memory.json")


@pytest.mark.parametrize("name", [*RECORDS, "generation_eval.json"])
@pytest.mark.parametrize("text", ["", "{", "{\n\n!", "[]x", '{"train": 5}', "[3]", "\x00", '"a"'])
def test_a_report_and_a_card_are_written_without_a_damaged_record(name, text, trained_run, caplog):
    (trained_run.root / name).write_text(text)
    page = render_report(trained_run)
    card = model_card(trained_run, base_model="m", adapter=False)
    assert "Curves" in page
    assert "## Recipe" in card
    if text in ("", "{", "{\n\n!", "[]x", "\x00"):
        line = 3 if "\n" in text else 1
        assert f"{name}:{line} is damaged" in caplog.text


def test_damaged_rows_stay_and_are_named_when_a_run_goes_on(trained_run, caplog):
    path = trained_run.metrics
    lines = path.read_bytes().split(b"\n")
    lines[3] = b'{"step": 4, "lo\xff\xfe'
    lines[50] = b"no row"
    path.write_bytes(b"\n".join(lines) + b'{"step": 61, "torn')
    trained_run.open_metrics(resume_step=30).close()
    kept = path.read_bytes().split(b"\n")
    assert kept[3] == lines[3]
    assert f"{path}:4 is damaged" in caplog.text
    assert f"{path}:51 is damaged" in caplog.text
    superseded = path.with_name("metrics.superseded.jsonl").read_bytes()
    assert b"no row\n" in superseded
    assert sorted([*kept, *superseded.split(b"\n")]) == sorted([*lines, b""])


@pytest.mark.parametrize("command", ["runs", "show", "watch", "plot", "compare", "report"])
def test_every_command_names_the_rows_that_it_leaves_out(command, trained_run, caplog, tmp_path):
    """One in the middle of a block, rows of another shape, and one whose end is yet to come."""
    lines = trained_run.metrics.read_text().split("\n")
    lines[3], lines[7], lines[9] = '{"step": 4, "lo', '{"step": -8}', '{"step": 10, "loss": [1]}'
    trained_run.metrics.write_text("\n".join(lines) + '{"step": 61, "torn')
    say_damaged.cache_clear()
    trained_run.write_status("done")
    if command == "report":
        render_report(trained_run)
    else:
        words = {
            "runs": [trained_run.root.parent],
            "plot": [trained_run.root, "-o", tmp_path / "picture.png"],
            "compare": [trained_run.root, trained_run.root],
        }
        assert main([command, *map(str, words.get(command, [trained_run.root]))]) == 0
    for number in (4, 8, 10):
        assert caplog.text.count(f"{trained_run.metrics}:{number} is damaged") == 1
    assert ":61" not in caplog.text


@pytest.mark.parametrize("name", ["data.json", "environment.json", "generation_eval.json"])
@pytest.mark.parametrize("text", ["{", "[3]", '{"rows": [5], "variables": 3}'])
def test_a_comparison_names_damaged_records(name, text, trained_run, caplog):
    if name == "data.json" and text.startswith('{"rows'):
        return  # a record of no file is a record
    (trained_run.root / name).write_text(text)
    read_run(trained_run.root, {})
    assert f"{name}:1 " in caplog.text


@pytest.mark.parametrize("text", ["{", '{"scores": 3}', '{"scores": [{"task": "a"}]}'])
def test_damaged_scores_are_named(text, trained_run, caplog):
    path = trained_run.root / "eval" / "x" / "results.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert read_scores(trained_run.root) == []
    assert f"{path}:1 " in caplog.text


def test_a_status_with_a_number_that_is_none(trained_run):
    trained_run.status_file.write_text('{"total_steps": "many"}')
    with pytest.raises(RunDirectoryError, match="total_steps"):
        trained_run.status()
