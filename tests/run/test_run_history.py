"""The metrics as the pictures and the report read them: the rows, whatever else is in the file."""

import json
import math
import random

import pytest

from trainkit.run import report
from trainkit.run.metrics import as_float, read_metrics
from trainkit.run.plot import History

_ODD = [
    '{"step": 41, "loss": "NaN", "grad_norm": "Infinity"}',
    '{"step": 42, "eval_loss": 1.5, "eval_boolq/acc": 0.5}',
    '{"step": 43, "loss": 1' + "0" * 400 + ', "grad_norm": 2.0}',
    '{"step": 44, "loss": 1e999, "grad_norm": 2.0}',
    '{"step": 45, "loss": 1.0, "lo{"step": 46, "loss": 1.0, "grad_norm": 1.0}',
    '{"step": 47, "loss": true, "grad_norm": null}',
    '{"step": 48, "loss": 1.0, "grad_norm": 1-2}',
    '{"step": 49.5, "loss": 1.0, "grad_norm": 1.0}',
    '{"step": 50, "loss/ä": 1.0, "loss": 1.0}',
    '{"step": 51,  "loss": 1.0, "grad_norm": 1.0}',
    '{"loss": 1.0, "step": 52}',
    '{"step": 53, "note": "a, b}", "loss": 1.0}',
    "[1, 2]",
    "",
]


def lines(odd_every):
    """Rows as they are logged, and others between them."""
    dice, odd = random.Random(0), iter(_ODD)
    for step in range(1, 400):
        row = {"step": step, "loss": dice.random(), "grad_norm": -dice.random() * 10**-7}
        yield json.dumps(row if step % 7 else {**row, "num_tokens": step})
        if step % odd_every == 0:
            yield next(odd, "")
    yield '{"step": 400, "loss": 0.5, "grad'


@pytest.mark.parametrize("odd_every", [5, 23])
def test_all_is_read_as_json_reads_it(odd_every, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines(odd_every)), encoding="utf-8")
    rows = read_metrics(path)
    history = History.read(path)
    assert set(history.keys) == {key for row in rows for key in row} - {"step"}
    for key in history.keys:
        numbers = [(row["step"], as_float(row[key])) for row in rows if key in row]
        logged = [(step, value) for step, value in numbers if value is not None]
        found = history.series(key)
        assert [*zip(found.steps, found.values, strict=True)] == [
            each for each in logged if math.isfinite(each[1])
        ]
        assert list(found.broken_steps) == [s for s, value in logged if not math.isfinite(value)]
    training = [row for row in rows if "loss" in row]
    assert (history.first, history.last) == (training[0], training[-1])
    assert history.evaluations == [row for row in rows if "eval_loss" in row]
    assert history.last_step == max(row["step"] for row in rows)


def test_a_redraw_reads_the_metrics_once(trained_run, monkeypatch):
    read, plain = [], History.read

    def count(path):
        read.append(path)
        return plain(path)

    monkeypatch.setattr(History, "read", count)
    report.draw_all(trained_run, is_training=True)
    assert read == [trained_run.metrics]
    assert (trained_run.plots / "overview.png").exists()
    assert "running" in trained_run.report.read_text()
