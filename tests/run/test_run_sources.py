"""The losses of several sources where a person looks: console, pictures, report."""

import contextlib
import io

from trainkit.run import Console
from trainkit.run.plot import BY_SOURCE, History, draw_plots, svg_plots


def rows_of_sources():
    rows = []
    for step in range(1, 31):
        row = {"step": step, "loss": 2.0, "loss/chat": 1.0 + 1 / step, "num_trained_tokens/chat": 7}
        if step % 5 == 0:
            row["loss/rare"] = 3.0
        rows.append(row)
    rows.append({"step": 30, "eval_loss": 2.0, "eval_loss/chat": 1.5, "eval_loss/rare": 2.5})
    return rows


def test_the_console_names_the_sources_of_this_row():
    stream = io.StringIO()
    console = Console(stream=stream)
    console.start(30)
    for row in rows_of_sources()[3:5] + rows_of_sources()[5:6] + rows_of_sources()[-1:]:
        console.log(row)
    without, with_rare, again, evaluation = stream.getvalue().splitlines()
    assert "loss/chat 1.2500" in without
    assert "loss/rare 3.0000" in with_rare
    assert "loss/rare" not in without + again
    assert evaluation == "evaluation at step 30: loss 2.0000  loss/chat 1.5000  loss/rare 2.5000"


def test_a_picture_and_the_report_tell_the_sources_apart(run):
    with contextlib.closing(run.open_metrics()) as metrics:
        for row in rows_of_sources():
            metrics.append(row)
    assert History(rows_of_sources()).lines(BY_SOURCE) == ["loss/chat", "loss/rare"]
    assert "loss_by_source.png" in {path.name for path in draw_plots(run)}
    pictures = dict(svg_plots(run))
    assert ">chat<" in pictures["Loss by source"]
    assert ">rare<" in pictures["Loss by source"]


def test_benchmarks_and_answers_during_training_are_drawn(run):
    with contextlib.closing(run.open_metrics()) as metrics:
        for step in (1, 2, 3):
            metrics.append({"step": step, "loss": 3.0 / step})
            scores = {"eval_boolq/acc": step / 4, "eval_answers/exact_match": step / 5}
            metrics.append({"step": step, "eval_loss": 2.0, "eval_loss/a": 2.0, **scores})
    assert "evaluations.png" in {path.name for path in draw_plots(run)}
    assert "loss_by_source.png" not in {path.name for path in run.plots.iterdir()}  # one source
    picture = dict(svg_plots(run))["Evaluations"]
    assert ">boolq/acc<" in picture
    assert ">answers/exact_match<" in picture
    assert ">loss/a<" not in picture
