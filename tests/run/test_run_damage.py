"""A damaged record is named by file and line: never a traceback, never dropped without a word."""

import contextlib
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from trainkit.cli.app import main
from trainkit.compare.runs import read_run
from trainkit.errors import RunDirectoryError, TrainkitError
from trainkit.run.files import say_once
from trainkit.run.metrics import iter_metrics, read_scores, say_damaged
from trainkit.run.report import model_card, render_report
from trainkit.run.starts import Start, append_start, read_starts

RECORDS = ("data.json", "samples.json", "environment.json", "kernels.json", "memory.json")


@pytest.mark.parametrize("name", [*RECORDS, "generation_eval.json"])
@pytest.mark.parametrize("text", ["", "{", "{\n\n!", "[]x", '{"train": 5}', "[3]", "\x00", '"a"'])
def test_a_report_and_a_card_are_written_without_a_damaged_record(
    name, text, trained_run, caplog, monkeypatch
):
    monkeypatch.setattr("trainkit.run.report.svg_plots", lambda *_, **__: [])  # most of the time
    (trained_run.root / name).write_text(text)
    page = render_report(trained_run)
    card = model_card(trained_run, base_model="m", adapter=False)
    assert "Curves" in page
    assert "## Recipe" in card
    if text in ("", "{", "{\n\n!", "[]x", "\x00"):
        line = 3 if "\n" in text else 1
        assert f"{name}:{line} is damaged" in caplog.text


@pytest.mark.parametrize("name", RECORDS[:4])
def test_a_record_that_every_run_has_is_missed(name, trained_run, caplog, monkeypatch):
    monkeypatch.setattr("trainkit.run.report.svg_plots", lambda *_, **__: [])
    (trained_run.root / name).write_text("{}")
    render_report(trained_run)
    assert f"{name}:1 does not hold what a run writes" in caplog.text
    (trained_run.root / name).unlink()
    render_report(trained_run)
    assert f"{name} is missing" in caplog.text
    caplog.clear()
    say_once.cache_clear()
    read_run(trained_run.root, {})
    assert (f"{name} is missing" in caplog.text) == (name in ("data.json", "environment.json"))
    assert "memory.json" not in caplog.text


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


def swapped(text):
    first, second, *rest = text.splitlines(keepends=True)
    return "".join([second, first, *rest])


@pytest.mark.parametrize("name", ["metrics", "changes"])
@pytest.mark.parametrize("change", [lambda text: text[:-30], lambda text: text * 2, swapped])
def test_rows_that_were_changed_since_the_run_ended_are_told(change, name, trained_run, caplog):
    for step in (0, 4):
        append_start(trained_run, Start(step=step, overrides=()))
    trained_run.write_status("done")
    path = getattr(trained_run, name)
    path.write_text(change(path.read_text()))
    with contextlib.suppress(RunDirectoryError):
        [*iter_metrics(path)] if name == "metrics" else read_starts(trained_run)
    assert f"{name}.jsonl is not as the run left it" in caplog.text
    say_once.cache_clear()
    caplog.clear()
    with trained_run.recording_status():
        assert f"{name}.jsonl is not as the run left it" in caplog.text
    caplog.clear()
    say_once.cache_clear()
    [*iter_metrics(trained_run.metrics)]
    assert not caplog.text.count("as the run left it")


def test_rows_that_were_changed_since_a_run_was_killed_are_told(trained_run, caplog):
    """What it wrote after it last said how it was is no change."""
    writer = trained_run.open_metrics(resume_step=30)
    trained_run.write_status("running", step=30)
    writer.append({"step": 31, "loss": 1.0})
    writer.close()
    [*iter_metrics(trained_run.metrics)]
    assert "as the run left it" not in caplog.text
    lines = trained_run.metrics.read_text().splitlines(keepends=True)
    trained_run.metrics.write_text("".join([*lines[:7], *lines[8:]]))
    [*iter_metrics(trained_run.metrics)]
    assert "metrics.jsonl is not as the run left it" in caplog.text


@pytest.mark.parametrize("command", ["runs", "show", "watch", "plot", "compare", "report"])
def test_every_command_names_the_rows_that_it_leaves_out(command, trained_run, caplog, tmp_path):
    """One in the middle of a block, rows of another shape, and one whose end is yet to come."""
    lines = trained_run.metrics.read_text().split("\n")
    lines[3], lines[7], lines[9] = '{"step": 4, "lo', '{"step": -8}', '{"step": 10, "loss": [1]}'
    lines[11] = '{"step": 12, "step_seconds": NaN}'
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
    for number in (4, 8, 10, 12):
        assert caplog.text.count(f"{trained_run.metrics}:{number} is damaged") == 1
    assert ":61" not in caplog.text


@pytest.mark.parametrize("name", ["data.json", "environment.json", "generation_eval.json"])
@pytest.mark.parametrize("text", ["{", "[3]", "{}", '{"rows": [5], "variables": 3}'])
def test_a_comparison_names_damaged_records(name, text, trained_run, caplog):
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


FILE_OF_DATA = {
    **{"path": "d.jsonl", "source": "d", "sha256": "ab", "bytes": 9, "rows": 2, "kept": 2},
    **{"dropped": 0, "cut": 0, "repaired": 0, "samples": 2, "tokens": 9, "trained_tokens": 4},
    **{"reasons": {}, "dropped_for": {}, "cut_for": {}, "formats": {"messages": 2}},
}
WHOLE = {
    "data.json": {"train": {"files": [FILE_OF_DATA], "totals": FILE_OF_DATA}, "eval": None},
    "samples.json": {
        "samples": [
            {
                "pieces": [[False, "a"], [True, "b"]],
                **{"num_tokens": 2, "num_trained_tokens": 1, "is_cut": False},
            }
        ]
    },
    "kernels.json": {"model": {"rms_norm": {"is_on": True, "reason": "", "num_modules": 2}}},
    "start.json": {"seconds": {"load": 1.0, "build": 2.0}},
    "status.json": None,
    "metrics.jsonl": None,
}
"""Records as a run leaves them; None: those of the fixture."""
VALUES = [None, -5, 1e308, float("nan"), 10**30, True, "x", [], [[1]], {}, {"a": 1}]


def places_in(value, place=()):
    yield place
    inner = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else inner:
        yield from places_in(item, (*place, key))


@pytest.fixture
def laid_out_by_nobody(monkeypatch):
    """Pictures are made of what the records say, and then neither measured nor written."""
    monkeypatch.setattr("trainkit.run.plot._lay_out", lambda *_: None)
    monkeypatch.setattr("trainkit.run.plot._svg", lambda *_: "<svg/>")


@pytest.mark.usefixtures("laid_out_by_nobody")
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=strategies.randoms(use_true_random=False), name=strategies.sampled_from([*WHOLE]))
def test_any_field_of_any_record_is_anything(trained_run, random, name):
    """Every command that reads a run says what is wrong with which file, and goes on or refuses."""
    path = trained_run.root / name
    before = path.read_text() if path.exists() else None
    is_lines = name.endswith(".jsonl")
    if is_lines:
        whole = [json.loads(line) for line in before.splitlines()]
    else:
        whole = WHOLE[name] or json.loads(before)
    place = random.choice([each for each in places_in(whole) if each])
    damaged = json.loads(json.dumps(whole))
    inside = damaged
    for key in place[:-1]:
        inside = inside[key]
    if isinstance(inside, dict) and random.random() < 0.2:
        del inside[place[-1]]
    else:
        inside[place[-1]] = random.choice(VALUES)
    text = "".join(f"{json.dumps(row)}\n" for row in damaged) if is_lines else json.dumps(damaged)
    path.write_text(text)
    say_damaged.cache_clear()
    try:
        said = io.StringIO()
        for read in (
            lambda: render_report(trained_run),
            lambda: model_card(trained_run, base_model="m", adapter=False),
            lambda: read_run(trained_run.root, {}),
        ):
            refused = ""
            try:
                read()
            except TrainkitError as error:
                refused = str(error)
            assert not refused or name in refused, (place, refused)
        for words in (["runs", trained_run.root.parent], ["compare", *[trained_run.root] * 2]):
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                code = main([*map(str, words)])
            assert "bug in trainkit" not in said.getvalue(), (place, said.getvalue())
            assert code == 0 or name in said.getvalue(), (place, said.getvalue())
    finally:
        path.unlink() if before is None else path.write_text(before)


def test_a_record_that_is_missing_is_named_once(trained_run, caplog, monkeypatch):
    monkeypatch.setattr("trainkit.run.report.svg_plots", lambda *_, **__: [])
    (trained_run.root / "kernels.json").unlink(missing_ok=True)
    render_report(trained_run)
    assert caplog.text.count("kernels.json is missing") == 1
