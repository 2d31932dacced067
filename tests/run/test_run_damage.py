"""A damaged record is named by file and line: never a traceback, never dropped without a word."""

import pytest

from trainkit.errors import RunDirectoryError
from trainkit.run.model_card import model_card
from trainkit.run.report.html import render_report

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


def test_a_status_with_a_number_that_is_none(trained_run):
    trained_run.status_file.write_text('{"total_steps": "many"}')
    with pytest.raises(RunDirectoryError, match="total_steps"):
        trained_run.status()
