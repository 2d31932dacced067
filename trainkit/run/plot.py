"""The curves of a run as PNG or SVG pictures, several runs over one another, and their numbers.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart. Raw values are faint;
an exponential mean is drawn over them. Nothing here uses pyplot, whose global state is not for
threads; matplotlib is imported by what draws.
"""

from __future__ import annotations

import io
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from trainkit.errors import RunDirectoryError
from trainkit.places import refuse_file
from trainkit.run.directory import RunDirectory
from trainkit.run.files import explain_os_errors, write_bytes_atomic
from trainkit.run.metrics import as_float, format_count, iter_metrics, read_metrics

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
_LINES = ("-", "--", ":", "-.")
_INK, _GRID, _SHADE, _EVALUATION = "#333333", "#e3e3e3", "#f1f1f1", COLOURS[1]
_MOST_POINTS = 800  # of a line: a picture is some 800 pixels wide
# Fewer points than this show their own shape; a mean would only hide it.
_FEWEST_TO_SMOOTH = 20
# Each pass averages over about this share of the run: noise goes, bends stay.
_SMOOTHING_SHARE = 1 / 100

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Curve:
    """One picture of a run.

    Attributes:
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
    Curve("router_loss", "router_loss", "Routers' loss", "times its factor, in the loss"),
    Curve("mfu", "mfu", "Model FLOPs utilisation", "share of the peak", from_zero=True),
)
OF_OBJECTIVES = (
    Curve("reward_margins", "rewards/margins", "Reward margin", "better less worse answer"),
    Curve("reward_accuracies", "rewards/accuracies", "Preference accuracy", "share of pairs"),
    Curve("divergence", "distill/divergence", "Divergence from the teacher", "nats per token"),
)
"""Those that some objectives have."""
PER_TOKEN = Curve("logps", "logps/", "Log-probabilities of answers", "nats per token")
"""Of better and worse answers together: both falling is a model that moves away from both."""
BY_SOURCE = Curve("loss_by_source", "loss/", "Loss by source", "nats per trained token")
"""Its key is the beginning of the keys of its lines."""
MEASURED = Curve("evaluations", "eval_", "Evaluations", "score", False)
"""Benchmarks and answers during training; its key is the beginning of theirs."""
EXPERTS = (
    Curve("experts_largest_share", "experts_largest_share/", "Largest expert", "share of a layer"),
    Curve("experts_load_cv", "experts_load_cv/", "Loads of experts", "deviation over mean"),
    Curve("experts_dead", "experts_dead/", "Experts without a token", "of a layer", False),
    Curve("experts_entropy", "experts_entropy/", "Entropy of the experts", "of equal shares"),
)
"""One line a layer."""
_MOST_NAMED = 12
"""Lines of a picture that are named."""

_OVERVIEW = ("loss", "learning_rate", "grad_norm", "tokens_per_second")


@dataclass(frozen=True)
class Series:
    """One metric over the steps."""

    steps: Sequence[float]
    values: Sequence[float]
    broken_steps: Sequence[float]

    def __len__(self) -> int:
        return len(self.steps)


class History:
    """What a run has logged, in a tenth of the room of its rows: there may be a million.

    Attributes:
        first: row of training; None without one.
        last_step: of any row; 0 without one.
        figures: what has been drawn of them, by the name of its curve.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.first: Row | None = None
        self.last: Row | None = None
        self.evaluations: list[Row] = []
        self.last_step = 0
        self.figures: dict[str, Any] = {}
        self._columns: dict[str, tuple[array[float], array[float], array[float]]] = {}
        for row in rows:
            self._add(row)

    @classmethod
    def read(cls, metrics: Path) -> History:
        """A ``metrics.jsonl``; damaged lines are named, and one that is missing has no rows."""
        return cls(iter_metrics(metrics))

    def _add(self, row: Row) -> None:
        step, is_evaluation = row["step"], False
        for key, given in row.items():
            if key == "step":
                continue
            is_evaluation |= key.startswith("eval_")
            if key not in self._columns:
                self._columns[key] = (array("d"), array("d"), array("d"))
            steps, values, broken = self._columns[key]
            value = given if type(given) is float else as_float(given)
            if value is None:
                continue
            if math.isfinite(value):
                steps.append(step)
                values.append(value)
            else:
                broken.append(step)
        if "loss" in row:
            self.first, self.last = self.first or row, row
        if is_evaluation:
            self.evaluations.append(row)
        self.last_step = max(self.last_step, step)

    @property
    def keys(self) -> list[str]:
        return list(self._columns)

    def series(self, key: str) -> Series:
        return Series(*self._columns.get(key, ([], [], [])))

    def lines(self, curve: Curve) -> list[str]:
        """The metrics with a curve of their own in one picture, in order of appearance."""
        found = [key for key in self._columns if key.startswith(curve.key) and "/" in key]
        if curve is PER_TOKEN:
            found = [key for key in found if key.endswith("_per_token")]
        if curve is MEASURED:  # counts are always the same
            others = (f"{MEASURED.key}{BY_SOURCE.key}", f"{MEASURED.key}num_")
            found = [key for key in found if not key.startswith(others)]
            own = ("eval_rewards/", "eval_logps/", "eval_lengths/", "eval_distill/")
            kept = "eval_rewards/accuracies"
            found = [key for key in found if key == kept or not key.startswith(own)]
        return [key for key in found if len(self.series(key)) > 1]


def smoothed(values: Sequence[float]) -> list[float]:
    """The exponential mean over the values before and after each one.

    A mean of what came before only lags behind a falling loss and shows it too high.
    """
    decay = 1 - 1 / max(len(values) * _SMOOTHING_SHARE, 2)

    def sums(given: Iterable[float]) -> list[float]:
        return list(accumulate(given, lambda total, value: decay * total + value))

    before, after = sums(values), sums(reversed(values))[::-1]
    weights = sums([1.0] * len(values))
    # Each value is in both sums, each weight too: once must go.
    return [
        (before[i] + after[i] - values[i]) / (weights[i] + weights[-1 - i] - 1)
        for i in range(len(values))
    ]


def thinned(curve: Series, most: int = _MOST_POINTS) -> Series:
    """At most about ``most`` points with the same outline: each stretch keeps its low and high.

    A run of a million steps must not take a minute to draw, nor lose its spikes.
    """
    if len(curve) <= most:
        return curve
    stretch = math.ceil(len(curve) / (most // 2))
    kept: list[int] = []
    for start in range(0, len(curve), stretch):
        part = curve.values[start : start + stretch]
        kept += sorted({start + part.index(min(part)), start + part.index(max(part))})
    steps, values = ([column[index] for index in kept] for column in (curve.steps, curve.values))
    return Series(steps, values, curve.broken_steps)


def warmup_end(rates: Series) -> float | None:
    """The step at which the learning rate is highest for the first time; None if it never rose."""
    values = list(rates.values)
    peak = values.index(max(values)) if values else 0
    return rates.steps[peak] if peak > 0 else None


def by_minutes(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The training rows with the minutes spent in steps so far as their ``step``."""
    timed = [row for row in rows if "loss" in row and as_float(row.get("step_seconds")) is not None]
    spent = seconds_spent(
        [row["step"] for row in timed], [as_float(row["step_seconds"]) or 0.0 for row in timed]
    )
    return [{**row, "step": each / 60} for row, each in zip(timed, spent, strict=True)]


def seconds_spent(steps: Sequence[float], step_seconds: Sequence[float]) -> list[float]:
    """The seconds in all steps up to each row: a row stands for every step since the one before."""
    befores = [0.0, *steps][:-1]
    parts = zip(befores, steps, step_seconds, strict=True)
    return list(accumulate(each * max(step - before, 1) for before, step, each in parts))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run.

    Args:
        path: a run directory; or any JSON that Hugging Face's Trainer left: ``trainer_state.json``,
            a ``log_history.json`` as an array or as JSON lines, or a directory with one of them.
    """
    for name in ("metrics.jsonl", "log_history.json", "trainer_state.json"):
        if (path / name).is_file():
            return read_rows(path / name)
    if not path.is_file():
        raise RunDirectoryError(
            "there are no metrics here (no metrics.jsonl, log_history.json or trainer_state.json)",
            where=str(path),
            fix="give the directory that `trainkit sft` printed as its last line",
        )
    if path.suffix not in (".json", ".jsonl"):
        refuse_file(path, RunDirectoryError)
    if path.name == "metrics.jsonl":
        return read_metrics(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except json.JSONDecodeError:
        content = read_metrics(path)
    if isinstance(content, dict):
        content = content.get("log_history", [content])
    rows = content if isinstance(content, list) else []
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]


def draw_plots(run: RunDirectory, history: History | None = None) -> list[Path]:
    """Draw every curve of a run that has two points or more, and ``plots/overview.png``."""
    history = history or History.read(run.metrics)
    with explain_os_errors(run.plots):
        run.plots.mkdir(exist_ok=True)
    written = [
        _save(figure, run.plots / f"{curve.name}.png") for curve, figure in _pictures(run, history)
    ]
    shown = [c for c in CURVES if c.name in _OVERVIEW and len(history.series(c.key)) > 1]
    if shown:
        figure, panels = _figure(len(shown))
        for axes, curve in zip(panels, shown, strict=True):
            _draw(axes, curve, history, run, has_legend=axes is panels[0])
        _lay_out(figure)
        written.append(_save(figure, run.plots / "overview.png"))
    return written


def svg_plots(run: RunDirectory, history: History | None = None) -> list[tuple[str, str]]:
    """Every curve of a run as (title, ``<svg>`` element), for a page that holds its pictures."""
    pictures = _pictures(run, history or History.read(run.metrics))
    return [(curve.title, _svg(figure, curve.name)) for curve, figure in pictures]


def _pictures(run: RunDirectory, history: History) -> Iterator[tuple[Curve, Any]]:
    """A figure for every curve; the files and the report hold the same ones."""
    every = (*CURVES[:1], *OF_OBJECTIVES, *CURVES[1:])
    drawn = [curve for curve in every if len(history.series(curve.key)) > 1]
    several = [
        curve for curve in (BY_SOURCE, PER_TOKEN, MEASURED, *EXPERTS) if history.lines(curve)
    ]
    for curve in [*drawn[:1], *several, *drawn[1:]]:
        if curve.name not in history.figures:
            figure, (axes,) = _figure(1)
            if curve in several:
                _draw_several(axes, curve, history)
            else:
                _draw(axes, curve, history, run)
            _lay_out(figure)
            history.figures[curve.name] = figure
        yield curve, history.figures[curve.name]


def draw_comparison(runs: Sequence[Path | str], output: Path | None = None) -> list[Path]:
    """Lay the curves of several runs over one another; no picture is overwritten."""
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
    """The curves of several runs over one another, each as (title, ``<svg>`` element)."""
    paths = [Path(run) for run in runs]
    titled = {f"{panel[0].title} by {panel[2]}": panel for panel in _panels(paths)}
    return [(title, _svg(_comparison(paths, [panel]), title)) for title, panel in titled.items()]


def _panels(paths: Sequence[Path]) -> list[tuple[Curve, list[Series], str]]:
    """What several runs are drawn in: a curve, its series of every run, and over what."""
    rows = [read_rows(path) for path in paths]
    steps = [History(each) for each in rows]
    # Two ways to the same loss differ in time, not in steps.
    minutes = [History(by_minutes(each)) for each in rows]
    wanted = [(LOSS, steps, "step"), (LOSS, minutes, "minutes in training steps")]
    others = [curve for curve in (EVAL_LOSS, *OF_OBJECTIVES, *CURVES[2:]) if curve.name != "mfu"]
    wanted += [(curve, steps, "step") for curve in others]
    panels = [(curve, [each.series(curve.key) for each in of], by) for curve, of, by in wanted]
    panels = [panel for panel in panels if any(len(each) > 1 for each in panel[1])]
    if not panels:
        raise RunDirectoryError(
            "there are no curves yet: no run has two logged steps",
            where=", ".join(str(path) for path in paths),
            fix="draw them when there are",
        )
    return panels[:6]


def _comparison(paths: Sequence[Path], panels: Sequence[tuple[Curve, list[Series], str]]) -> Any:
    from matplotlib.lines import Line2D

    figure, all_axes = _figure(len(panels), legend_lines=len(paths))
    for axes, (curve, of_runs, label) in zip(all_axes, panels, strict=True):
        for index, each in enumerate(of_runs):
            _draw_line(axes, curve, thinned(each), *_look(index), faint=0.12)
        _dress(axes, curve, label)
    handles = [
        Line2D([], [], color=colour, linestyle=line, linewidth=width)
        for colour, line, width in map(_look, range(len(paths)))
    ]
    names = distinct_names(paths)
    figure.legend(handles, names, loc="outside upper left", frameon=False, fontsize=9)
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
    axes: Any, curve: Curve, history: History, run: RunDirectory, *, has_legend: bool = True
) -> None:
    end = warmup_end(history.series("learning_rate"))
    if end is not None:
        axes.axvspan(0, end, color=_SHADE, zorder=0, label="warm-up")
    values = thinned(history.series(curve.key))
    _draw_line(axes, curve, values, COLOURS[0], name=curve.title.lower())
    evaluation = history.series("eval_loss")
    if curve.key == "loss" and len(evaluation):
        dots = {"markersize": 5, "markeredgecolor": "white", "linewidth": 1.4}
        points = evaluation.steps, evaluation.values
        axes.plot(*points, "o-", color=_EVALUATION, label="evaluation", **dots)
    for index, step in enumerate(run.status().resumed_at_steps):
        label = "resumed" if index == 0 else None
        axes.axvline(step, color=_INK, linestyle=(0, (2, 2)), linewidth=1, label=label)
    _dress(axes, curve, "step")
    # One plain line needs no key.
    if has_legend and len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(fontsize=8.5, frameon=False, handlelength=1.6)


def _draw_several(axes: Any, curve: Curve, history: History) -> None:
    """A line for each metric of a picture; the points are evaluations, in the colour of theirs."""
    keys = history.lines(curve)
    for index, key in enumerate(keys):
        colour, line, _ = _look(index)
        _draw_line(axes, curve, thinned(history.series(key)), colour, line, 1.8, faint=0.12)
        axes.plot([], [], line, color=colour, label=key.removeprefix(curve.key))
        measured = history.series(key if curve is MEASURED else f"eval_{key}")
        axes.plot(measured.steps, measured.values, "o", color=colour, markersize=4)
    _dress(axes, curve, "step")
    if len(keys) <= _MOST_NAMED:
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
    drawn, label = values.values, name
    if curve.smooth and len(values) >= _FEWEST_TO_SMOOTH:
        axes.plot(values.steps, drawn, color=colour, alpha=faint, linewidth=0.8)
        drawn, label = smoothed(drawn), f"{name}, smoothed" if name else None
    axes.plot(values.steps, drawn, line, color=colour, linewidth=width, label=label)
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
    axes.spines[["top", "right"]].set_visible(False)


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
