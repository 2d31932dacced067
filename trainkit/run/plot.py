"""Curves of a run as PNG files, and several runs over one another.

Colours are those of Okabe and Ito, told apart by the colour-blind. Raw values are faint, an
exponential mean over about a twentieth of the run is drawn over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import RunDirectoryError
from trainkit.run.directory import RunDirectory
from trainkit.run.metrics import read_metrics

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_INK, _GRID = "#333333", "#dddddd"


@dataclass(frozen=True)
class Curve:
    """One picture of a run.

    Attributes:
        name: of the file.
        key: of the metric.
        label: of the vertical axis, with its unit.
        smooth: draw an exponential mean over faint raw values.
        log_scale: for values over several orders of magnitude.
    """

    name: str
    key: str
    label: str
    smooth: bool = False
    log_scale: bool = False


CURVES = (
    Curve("loss", "loss", "loss (nats per trained token)", smooth=True),
    Curve("learning_rate", "learning_rate", "learning rate"),
    Curve("grad_norm", "grad_norm", "gradient norm", smooth=True, log_scale=True),
    Curve("tokens_per_second", "tokens_per_second", "tokens per second", smooth=True),
    Curve("token_accuracy", "token_accuracy", "token accuracy", smooth=True),
    Curve("memory", "peak_memory_gib", "peak memory (GiB)"),
)

Points = tuple[list[float], list[float]]


def draw_plots(run: RunDirectory) -> list[Path]:
    """Draw every curve of a run that has at least two points, and ``plots/overview.png``.

    Safe to call from a thread while the run goes: figures are not shared and files appear whole.

    Returns:
        The files written.
    """
    rows = read_metrics(run.metrics)
    resumed = run.status().resumed_at_steps
    drawn = [curve for curve in CURVES if len(points(rows, curve.key)[0]) > 1]
    written = []
    for curve in drawn:
        figure, (axes,) = _figure(1)
        _draw_run(axes, curve, rows, COLOURS[0], resumed=resumed)
        written.append(_save(figure, run.plots / f"{curve.name}.png"))
    if drawn:
        figure, panels = _figure(min(len(drawn), 4))
        for axes, curve in zip(panels, drawn, strict=False):
            _draw_run(axes, curve, rows, COLOURS[0], resumed=resumed)
        written.append(_save(figure, run.plots / "overview.png"))
    return written


def draw_comparison(runs: Sequence[Path | str], output: Path | None = None) -> list[Path]:
    """Lay the curves of several runs over one another.

    Args:
        runs: run directories.
        output: the PNG file to write; ``comparison.png`` here without it.

    Returns:
        The files written.

    Raises:
        RunDirectoryError: a directory is no run, or none of them has a curve yet.
    """
    opened = [RunDirectory.open(run) for run in runs]
    rows = [read_metrics(run.metrics) for run in opened]
    shown = [c for c in CURVES if any(len(points(each, c.key)[0]) > 1 for each in rows)][:4]
    if not shown:
        raise RunDirectoryError(
            "there are no curves yet: no run has two logged steps",
            where=", ".join(str(run) for run in runs),
        )
    figure, panels = _figure(len(shown))
    for axes, curve in zip(panels, shown, strict=True):
        for index, (run, each) in enumerate(zip(opened, rows, strict=True)):
            colour = COLOURS[index % len(COLOURS)]
            _draw_run(axes, curve, each, colour, name=run.name)
    panels[0].legend(fontsize=7, frameon=False)
    return [_save(figure, output or Path("comparison.png"))]


def points(rows: Iterable[Mapping[str, Any]], key: str) -> Points:
    """The steps and finite values of one metric."""
    steps, values = [], []
    for row in rows:
        value = row.get(key)
        if isinstance(value, int | float) and value == value and abs(value) != float("inf"):
            steps.append(float(row["step"]))
            values.append(float(value))
    return steps, values


def smoothed(values: Sequence[float]) -> list[float]:
    """Exponential mean over about a twentieth of the values, without the bias of its start."""
    decay = 1 - 1 / max(len(values) / 20, 1)
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        mean = decay * mean + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        result.append(mean / weight)
    return result


def _figure(num_panels: int) -> tuple[Any, list[Any]]:
    """A figure without pyplot, whose global state is not for threads."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(num_panels, 2)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(5.2 * columns, 3.2 * rows), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False)
    flat = [axes for row in panels for axes in row]
    for axes in flat[num_panels:]:
        axes.set_axis_off()
    return figure, flat[:num_panels]


def _draw_run(
    axes: Any,
    curve: Curve,
    rows: Sequence[Mapping[str, Any]],
    colour: str,
    *,
    name: str | None = None,
    resumed: Sequence[int] = (),
) -> None:
    steps, values = points(rows, curve.key)
    if len(steps) < 2:
        return
    smooth = curve.smooth and len(steps) >= 20
    axes.plot(steps, values, color=colour, alpha=0.25 if smooth else 1.0, linewidth=1.1)
    if smooth:
        axes.plot(steps, smoothed(values), color=colour, linewidth=1.8, label=name)
    elif name is not None:
        axes.plot([], [], color=colour, label=name)
    if curve.key == "loss":
        eval_steps, eval_values = points(rows, "eval_loss")
        if eval_steps:
            label = "evaluation" if name is None else None
            axes.plot(eval_steps, eval_values, "o-", color=COLOURS[1], markersize=4, label=label)
            if label:
                axes.legend(fontsize=8, frameon=False)
    _shade_warmup(axes, rows, visible=name is None)
    for step in resumed:
        axes.axvline(step, color=_INK, linestyle=":", linewidth=1)
    if curve.log_scale and min(values) > 0 and max(values) > 30 * min(values):
        axes.set_yscale("log")
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(curve.label, color=_INK)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _shade_warmup(axes: Any, rows: Sequence[Mapping[str, Any]], *, visible: bool) -> None:
    """Grey where the learning rate still rises."""
    steps, rates = points(rows, "learning_rate")
    if not visible or not rates:
        return
    peak = max(range(len(rates)), key=lambda index: rates[index])
    if peak > 0:
        axes.axvspan(steps[0], steps[peak], color="#f2f2f2", zorder=0)


def _save(figure: Any, path: Path) -> Path:
    """Write a PNG that a reader never sees half of."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    save: Callable[..., None] = figure.savefig
    save(partial, format="png")
    partial.replace(path)
    return path
