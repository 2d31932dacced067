"""Curves of a run as PNG or SVG pictures, and several runs over one another.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart. Raw values are faint;
an exponential mean is drawn over them. Nothing here uses pyplot, whose global state is not for
threads.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import RunDirectoryError
from trainkit.run.directory import RunDirectory
from trainkit.run.files import write_bytes_atomic
from trainkit.run.format import format_count
from trainkit.run.report.curves import (
    Columns,
    History,
    Series,
    by_minutes,
    read_rows,
    series,
    smoothed,
    thinned,
    warmup_end,
)

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
_LINES = ("-", "--", ":", "-.")
_INK, _GRID, _SHADE, _EVALUATION = "#333333", "#e3e3e3", "#f1f1f1", COLOURS[1]
_MOST_POINTS = 800  # of a line: a picture is some 800 pixels wide
# Fewer points than this show their own shape; a mean would only hide it.
_FEWEST_TO_SMOOTH = 20


@dataclass(frozen=True)
class Curve:
    """One picture of a run.

    Attributes:
        name: of the file.
        key: of the metric.
        title: in words.
        unit: of the vertical axis.
        smooth: draw an exponential mean over faint raw values.
        log_scale: where the highest value would flatten all others against the axis.
        from_zero: the axis starts at 0, so that heights compare.
    """

    name: str
    key: str
    title: str
    unit: str
    smooth: bool = True
    log_scale: bool = False
    from_zero: bool = False


LOSS = Curve("loss", "loss", "Loss", "nats per trained token", log_scale=True)
EVAL_LOSS = Curve(
    "eval_loss", "eval_loss", "Evaluation loss", "nats per trained token", False, log_scale=True
)
CURVES = (
    LOSS,
    Curve("learning_rate", "learning_rate", "Learning rate", "per step", False, from_zero=True),
    Curve("grad_norm", "grad_norm", "Gradient norm", "before clipping", log_scale=True),
    Curve("tokens_per_second", "tokens_per_second", "Speed", "tokens per second", from_zero=True),
    Curve("memory", "peak_memory_gib", "Peak memory", "GiB", False, from_zero=True),
    Curve("token_accuracy", "token_accuracy", "Token accuracy", "share of trained tokens"),
    Curve("mfu", "mfu", "Model FLOPs utilisation", "share of the peak", from_zero=True),
)
BY_SOURCE = Curve("loss_by_source", "loss/", "Loss by source", "nats per trained token")
"""Its key is the beginning of the keys of its lines."""
MEASURED = Curve("evaluations", "eval_", "Evaluations", "score", False)
"""Benchmarks and answers during training; its key is the beginning of theirs."""

_OVERVIEW = ("loss", "learning_rate", "grad_norm", "tokens_per_second")


def draw_plots(run: RunDirectory, history: History | None = None) -> list[Path]:
    """Draw every curve of a run that has two points or more, and ``plots/overview.png``.

    Returns:
        The files written; each appears complete.
    """
    history = history or History.read(run.metrics)
    rows, resumed = history.columns, run.status().resumed_at_steps
    run.plots.mkdir(exist_ok=True)
    written = [
        _save(figure, run.plots / f"{curve.name}.png") for curve, figure in _pictures(run, history)
    ]
    shown = [each for each in CURVES if each.name in _OVERVIEW and len(rows.series(each.key)) > 1]
    if shown:
        figure, panels = _figure(len(shown))
        for axes, curve in zip(panels, shown, strict=True):
            _draw(axes, curve, rows, resumed=resumed, has_legend=axes is panels[0])
        _lay_out(figure)
        written.append(_save(figure, run.plots / "overview.png"))
    return written


def svg_plots(run: RunDirectory, history: History | None = None) -> list[tuple[str, str]]:
    """Every curve of a run as (title, ``<svg>`` element), for a page that holds its pictures."""
    pictures = _pictures(run, history or History.read(run.metrics))
    return [(curve.title, _svg(figure, curve.name)) for curve, figure in pictures]


def _pictures(run: RunDirectory, history: History) -> Iterator[tuple[Curve, Any]]:
    """A figure for every curve; the files and the report hold the same ones."""
    rows, resumed = history.columns, run.status().resumed_at_steps
    drawn = [curve for curve in CURVES if len(rows.series(curve.key)) > 1]
    several = dict(_lines_by_name(rows))
    for curve in [*drawn[:1], *several, *drawn[1:]]:
        figure = history.figures.get(curve.name)
        if figure is None:
            figure, (axes,) = _figure(1)
            if curve in several:
                several[curve](axes, rows)
            else:
                _draw(axes, curve, rows, resumed=resumed)
            _lay_out(figure)
            history.figures[curve.name] = figure
        yield curve, figure


def draw_comparison(runs: Sequence[Path | str], output: Path | None = None) -> list[Path]:
    """Lay the curves of several runs over one another; no picture is overwritten.

    Args:
        runs: run directories, or logs of Hugging Face's Trainer (see ``read_rows``).
        output: the PNG file to write; ``comparison.png`` here without it.

    Returns:
        The files written.

    Raises:
        RunDirectoryError: a path is not a run, none of them has a curve yet, or the file is there.
    """
    target = output or Path("comparison.png")
    if target.exists():
        raise RunDirectoryError(
            "the picture exists, and is not overwritten",
            where=str(target),
            fix="give another name with --output, or remove it",
        )
    paths = [Path(run) for run in runs]
    return [_save(_comparison(paths, _panels(paths)), target)]


def comparison_svgs(runs: Sequence[Path | str]) -> list[tuple[str, str]]:
    """The curves of several runs over one another, each as (title, ``<svg>`` element).

    Raises:
        RunDirectoryError: a path is not a run, or none of them has a curve yet.
    """
    paths = [Path(run) for run in runs]
    titled = {f"{curve.title} by {by}": (curve, rows, by) for curve, rows, by in _panels(paths)}
    return [(title, _svg(_comparison(paths, [panel]), title)) for title, panel in titled.items()]


def _panels(paths: Sequence[Path]) -> list[tuple[Curve, list[Any], str]]:
    """What several runs are drawn in: a curve, every run's rows, and what they are drawn over."""
    rows = [read_rows(path) for path in paths]
    panels: list[tuple[Curve, list[Any], str]] = [(LOSS, [*rows], "step")]
    # Two ways to the same loss differ in time, not in steps.
    panels += [(LOSS, [by_minutes(each) for each in rows], "minutes in training steps")]
    others = [curve for curve in (EVAL_LOSS, *CURVES[2:]) if curve.name != "mfu"]
    panels += [(curve, [*rows], "step") for curve in others]
    panels = [
        panel for panel in panels if any(len(series(each, panel[0].key)) > 1 for each in panel[1])
    ][:6]
    if not panels:
        raise RunDirectoryError(
            "there are no curves yet: no run has two logged steps",
            where=", ".join(str(path) for path in paths),
        )
    return panels


def _comparison(paths: Sequence[Path], panels: Sequence[tuple[Curve, list[Any], str]]) -> Any:
    figure, all_axes = _figure(len(panels), legend_lines=len(paths))
    for axes, (curve, each_rows, label) in zip(all_axes, panels, strict=True):
        for index, each in enumerate(each_rows):
            points = thinned(series(each, curve.key), _MOST_POINTS)
            _draw_line(axes, curve, points, *_look(index), faint=0.12)
        _dress(axes, curve, label)
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, linestyle=line, linewidth=width)
        for colour, line, width in map(_look, range(len(paths)))
    ]
    figure.legend(
        handles, distinct_names(paths), loc="outside upper left", frameon=False, fontsize=9
    )
    _lay_out(figure)
    return figure


def _look(index: int) -> tuple[str, str, float]:
    """Colour, line and width of one of several runs: equal curves show through one another."""
    return COLOURS[index % len(COLOURS)], _LINES[index % len(_LINES)], 2.8 if index == 0 else 1.8


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The directories' names, with as many parents as it takes to tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(path) for path in paths]


def _figure(num_panels: int, *, legend_lines: int = 0) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(num_panels, 2)
    lines = -(-num_panels // columns)
    # One panel is 900 pixels wide: its text is legible when a page shows it at half of that.
    height = 3.1 * lines + 0.22 * legend_lines
    figure = Figure(figsize=(5.6 * columns, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    flat = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes in flat[num_panels:]:
        axes.set_axis_off()
    return figure, flat[:num_panels]


def _draw(
    axes: Any,
    curve: Curve,
    rows: Columns,
    *,
    resumed: Sequence[int],
    has_legend: bool = True,
) -> None:
    """One metric of one run, with what happened to the run."""
    end = warmup_end(rows.series("learning_rate"))
    if end is not None:
        axes.axvspan(0, end, color=_SHADE, zorder=0, label="warm-up")
    values = rows.thinned(curve.key, _MOST_POINTS)
    _draw_line(axes, curve, values, COLOURS[0], name=curve.title.lower())
    if curve.key == "loss":
        evaluation = rows.series("eval_loss")
        if len(evaluation):
            axes.plot(
                evaluation.steps,
                evaluation.values,
                "o-",
                color=_EVALUATION,
                markersize=5,
                markeredgecolor="white",
                linewidth=1.4,
                label="evaluation",
            )
    for index, step in enumerate(resumed):
        label = "resumed" if index == 0 else None
        axes.axvline(step, color=_INK, linestyle=(0, (2, 2)), linewidth=1, label=label)
    _dress(axes, curve, "step")
    # One plain line needs no key.
    if has_legend and len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(fontsize=8.5, frameon=False, handlelength=1.6)


def _lines_by_name(rows: Columns) -> list[tuple[Curve, Callable[..., None]]]:
    """The pictures with a line for each source or figure, where there is any, and how to draw."""
    found: list[tuple[Curve, Callable[..., None]]] = []
    if source_keys(rows):
        found.append((BY_SOURCE, _draw_sources))
    if measured_keys(rows):
        found.append((MEASURED, _draw_measured))
    return found


def measured_keys(rows: Columns) -> list[str]:
    """Figures of benchmarks and answers that have a curve, in order of appearance."""
    keys = [key for key in rows.keys if key.startswith(MEASURED.key) and "/" in key]
    others = (f"{MEASURED.key}{BY_SOURCE.key}", f"{MEASURED.key}num_")  # counts, always the same
    own = [key for key in keys if not key.startswith(others)]
    return [key for key in own if len(rows.series(key)) > 1]


def _draw_measured(axes: Any, rows: Columns) -> None:
    for index, key in enumerate(measured_keys(rows)):
        colour, line, _ = _look(index)
        values = rows.thinned(key, _MOST_POINTS)
        name = key.removeprefix(MEASURED.key)
        axes.plot(values.steps, values.values, line, color=colour, label=name)
        axes.plot(values.steps, values.values, "o", color=colour, markersize=4)
    _dress(axes, MEASURED, "step")
    axes.legend(fontsize=8.5, frameon=False, handlelength=2.2)


def source_keys(rows: Columns) -> list[str]:
    """The metrics that are losses of one source and have a curve, in order of appearance."""
    keys = [key for key in rows.keys if key.startswith(BY_SOURCE.key)]
    return [key for key in keys if len(rows.series(key)) > 1]


def _draw_sources(axes: Any, rows: Columns) -> None:
    """One line a source; the points are evaluations, in the colour of their source."""
    for index, key in enumerate(source_keys(rows)):
        colour, line, _ = _look(index)
        name = key.removeprefix(BY_SOURCE.key)
        values = rows.thinned(key, _MOST_POINTS)
        _draw_line(axes, BY_SOURCE, values, colour, line, 1.8, faint=0.12)
        axes.plot([], [], line, color=colour, label=name)
        evaluation = rows.series(f"eval_{key}")
        axes.plot(evaluation.steps, evaluation.values, "o", color=colour, markersize=4)
    _dress(axes, BY_SOURCE, "step")
    axes.legend(fontsize=8.5, frameon=False, handlelength=2.2)


def _draw_line(
    axes: Any,
    curve: Curve,
    values: Series,
    colour: str,
    line: str = "-",
    width: float = 2,
    *,
    faint: float = 0.28,
    name: str | None = None,
) -> None:
    if not len(values):
        return
    if curve.smooth and len(values) >= _FEWEST_TO_SMOOTH:
        axes.plot(values.steps, values.values, color=colour, alpha=faint, linewidth=0.8)
        means = smoothed(values.values)
        label = f"{name}, smoothed" if name else None
        axes.plot(values.steps, means, line, color=colour, linewidth=width, label=label)
    else:
        axes.plot(values.steps, values.values, line, color=colour, linewidth=width, label=name)
    if values.broken_steps:
        heights = [min(values.values)] * len(values.broken_steps)
        label = "NaN or infinite" if name else None
        axes.plot(values.broken_steps, heights, "x", color="#C00000", markersize=7, label=label)


def _dress(axes: Any, curve: Curve, x_label: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    low, high = axes.dataLim.y0, axes.dataLim.y1
    heights = sorted(float(y) for line in axes.get_lines() for y in line.get_ydata())
    typical = heights[len(heights) // 2] if heights else 0.0
    if curve.log_scale and low > 0 and high > 30 * typical:
        axes.set_yscale("log")
    elif curve.from_zero and low >= 0:
        axes.set_ylim(0, high * 1.08 or 1)
    if curve.key == "tokens_per_second":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    elif curve.key == "learning_rate":
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power_of_ten(value)))
    if x_label == "step":
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.set_title(curve.title, loc="left", fontsize=11, color=_INK, fontweight="bold")
    axes.set_xlabel(x_label, color=_INK, fontsize=9.5)
    axes.set_ylabel(curve.unit, color=_INK, fontsize=9.5)
    axes.tick_params(labelsize=9, colors=_INK, length=3)
    axes.grid(color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _power_of_ten(value: float) -> str:
    """``1.5e-3``: as recipes write learning rates."""
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-") if value else "0"


def _lay_out(figure: Any) -> None:
    """Once; matplotlib would draw the whole figure another time for it."""
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine(None)


def _svg(figure: Any, name: str) -> str:
    """Text stays text, in the reader's own font; names of clip paths differ by picture."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "<svg" + buffer.getvalue().partition("<svg")[2]


def _save(figure: Any, path: Path) -> Path:
    buffer = io.BytesIO()
    # Lightly packed: a fifth larger, and drawn in three quarters of the time.
    figure.savefig(buffer, format="png", pil_kwargs={"compress_level": 1})
    write_bytes_atomic(path, buffer.getvalue())
    return path
