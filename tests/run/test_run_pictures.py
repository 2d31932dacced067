import contextlib
import json
import math
import random
import re
from html.parser import HTMLParser

import pytest
from matplotlib.image import imread

from trainkit.errors import RunDirectoryError
from trainkit.run.plot import (
    History,
    Series,
    by_minutes,
    distinct_names,
    draw_comparison,
    draw_plots,
    read_rows,
    smoothed,
    thinned,
    warmup_end,
)
from trainkit.run.report import SAMPLES, render_report, write_report


def test_smoothing_follows_a_falling_curve_and_takes_the_noise_out():
    truth = [4 * math.exp(-step / 100) for step in range(1000)]
    noise = random.Random(0)
    noisy = [value + noise.gauss(0, 0.2) for value in truth]
    mean = smoothed(noisy)
    # The mean reaches over about 1/100 of the run on both sides, 20 values: the noise falls by
    # sqrt(20) to 0.045, and 4 of those bound a thousand draws. Away from the ends it does not lag.
    worst = max(abs(a - b) for a, b in zip(mean[50:-50], truth[50:-50], strict=True))
    assert worst < 4 * 0.2 / math.sqrt(20)
    assert smoothed([3.0] * 7) == pytest.approx([3.0] * 7)
    assert smoothed([]) == []


def test_thinning_keeps_the_spikes():
    values = [1.0] * 10_000
    values[7777] = 50.0
    thin = thinned(Series(list(range(10_000)), values, []), 500)
    assert len(thin) <= 502
    assert max(thin.values) == 50.0
    assert thin.steps == sorted(thin.steps)


def test_broken_values_are_counted_not_drawn():
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": "NaN"}, {"step": 3, "loss": math.inf}]
    found = History(rows).series("loss")
    assert [*map(list, (found.steps, found.values, found.broken_steps))] == [[1], [1], [2, 3]]


def test_warmup_is_read_from_the_learning_rate():
    rates = [0.1, 0.2, 0.3, 0.3, 0.2]
    steps = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert warmup_end(Series(steps[: len(rates)], rates, [])) == 2
    assert warmup_end(Series(steps, [0.3] * 5, [])) is None
    assert warmup_end(Series([], [], [])) is None


def test_time_counts_the_steps_a_row_stands_for():
    rows = [{"step": s, "loss": 1.0, "step_seconds": 6.0} for s in (10, 20)]
    assert [row["step"] for row in by_minutes(rows)] == [1.0, 2.0]


def test_plots_appear_whole_and_are_not_empty(trained_run):
    written = {path.stem: path for path in draw_plots(trained_run)}
    assert set(written) >= {"loss", "learning_rate", "grad_norm", "tokens_per_second", "overview"}
    assert sorted(trained_run.plots.iterdir()) == sorted(written.values())
    picture = imread(written["loss"])
    assert picture.shape[1] > 800
    # The loss is drawn in the first colour of the palette, #0072B2.
    blue = abs(picture[..., :3] - [0, 0x72 / 255, 0xB2 / 255]).max(axis=-1) < 0.02
    assert blue.sum() > 300


def test_a_run_without_steps_draws_nothing(run):
    assert draw_plots(run) == []
    assert "fewer than two steps" in render_report(run)


def test_comparison_reads_runs_and_trainer_logs(trained_run, tmp_path):
    history = [{"step": s, "loss": 3.0 / s, "epoch": 1.0} for s in range(1, 30)]
    hf = tmp_path / "checkpoint-29"
    hf.mkdir()
    state = {"log_history": [*history, {"step": 29, "train_runtime": 3.0}]}
    (hf / "trainer_state.json").write_text(json.dumps(state))
    lines = tmp_path / "log_history.json"
    lines.write_text("".join(json.dumps(row) + "\n" for row in history))
    assert len(read_rows(hf)) == 30
    assert len(read_rows(lines)) == 29
    output = tmp_path / "picture.png"
    assert draw_comparison([trained_run.root, hf, lines], output) == [output]
    drawn = output.read_bytes()
    with pytest.raises(RunDirectoryError, match="not overwritten"):
        draw_comparison([trained_run.root], output)
    assert output.read_bytes() == drawn
    assert imread(output).shape[0] > 500
    with pytest.raises(RunDirectoryError, match="no metrics here"):
        draw_comparison([tmp_path / "nothing"], tmp_path / "other.png")


def test_names_are_told_apart(tmp_path):
    assert distinct_names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert distinct_names([tmp_path / "x"]) == ["x"]


class _Links(HTMLParser):
    """Collects whatever a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.fetched = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in {"src", "href", "xlink:href", "action", "data"} and value[:1] != "#":
                self.fetched.append(value)
        if tag in {"script", "link", "iframe"}:
            self.fetched.append(tag)


def _fill(run):
    file = {"path": "a<b>.jsonl", "rows": 5, "kept": 4, "dropped": 1, "cut": 0, "samples": 4}
    file |= {"tokens": 4000, "trained_tokens": 1000, "sha256": "0" * 64, "reasons": {"empty": 1}}
    run.write_json(run.data, {"train": {"files": [file], "warnings": ["look at <this>"]}})
    row = {"question": "q", "expected": "<script>alert(1)</script>", "given": "g"}
    wrong = {**row, "is_exact": False}
    answers = {"accuracy": 0.75, "num_total": 4, "num_exact": 3}
    run.write_json(
        run.generation_eval, {**answers, "rows": [wrong, *[{**row, "is_exact": True}] * 3]}
    )
    ops = [{"op": "rope", "status": "off", "reason": "no GPU", "num_modules": 0}]
    run.write_json(run.kernels, {"attention": {"name": "sdpa", "reason": "CPU"}, "ops": ops})
    run.write_text(run.resolved, "name: x  # default\nseed: 1  # a.yaml:2\n")
    run.write_json(run.environment, {"packages": {"rich": "1"}, "git": None, "gpus": []})


def test_the_report_needs_nothing_else_and_escapes_what_it_shows(trained_run):
    _fill(trained_run)
    write_report(trained_run)
    text = trained_run.report.read_text()
    links = _Links()
    links.feed(text)
    assert links.fetched == []
    assert not re.search(r"url\((?!#)|@import", text)
    assert "<script" not in text
    for shown in ("75.0%", "a&lt;b&gt;.jsonl", "look at &lt;this&gt;", "no GPU", "seed: 1", "<svg"):
        assert shown in text
    # Clip paths of two pictures must not share a name, or one is cut by the other's frame.
    for name in set(re.findall(r'id="(p[0-9a-f]{8,})"', text)):
        assert text.count(f'id="{name}"') == 1


def test_the_report_tells_of_trouble(trained_run):
    with contextlib.closing(trained_run.open_metrics(resume_step=40)) as metrics:
        metrics.append({"step": 41, "loss": float("nan")})
    trained_run.write_status("failed", reason="the loss became NaN")
    text = render_report(trained_run)
    assert "continued from step 40" in text
    assert "NaN or infinite in 1 steps, first in 41" in text
    assert "the loss became NaN" in text


def test_the_report_says_what_was_held_out(run):
    totals = {"samples": 5, "trained_tokens": 1234}
    held = {"files": [], "held_out": {"conversations": 4, "of": 200}, "totals": totals}
    run.write_json(run.data, {"train": {**held, "files": []}, "eval": held})
    page = render_report(run)
    assert page.count("4 of 200 conversations, held out of the training data") == 1
    assert "1,234 trained tokens" in page


def test_samples_are_shown_with_their_masks_and_escaped(run):
    pieces = [[False, "<script>x</script>"], [True, "é <b>\x1b[31m"]]
    sample = {"pieces": pieces, "num_tokens": 9, "num_trained_tokens": 4, "is_cut": True}
    run.write_json(run.root / SAMPLES, {"samples": [sample]})
    page = render_report(run)
    assert "&lt;script&gt;x&lt;/script&gt;<mark>é &lt;b&gt;\\u001b[31m</mark>" in page
    assert "9 tokens, 4 trained" in page
    assert "cut here" in page


def test_the_page_of_a_run_that_trains_says_so_and_loads_itself_again(trained_run):
    trained_run.write_status("running", total_steps=90)
    page = render_report(trained_run, is_training=True)
    assert "state running'>running</span>: step 60 of 90" in page
    assert 'http-equiv="refresh"' in page
    last = render_report(trained_run)
    assert "state done'>done<" in last
    assert "http-equiv" not in last
    evaluations = last.partition("<h2>Evaluations</h2>")[2].partition("</section>")[0]
    assert [evaluations.index(f"<td>{step}</td>") for step in (60, 40, 20)] == sorted(
        evaluations.index(f"<td>{step}</td>") for step in (60, 40, 20)
    )
    assert evaluations.count("0.6000") == 3
