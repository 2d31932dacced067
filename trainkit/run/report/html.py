"""``report.html``: the complete record of a run as one page that needs nothing else."""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from trainkit.errors import TrainkitError
from trainkit.run.directory import RunDirectory
from trainkit.run.files import read_json
from trainkit.run.format import format_count, format_duration, format_loss, format_number
from trainkit.run.metrics import SCORE_HEAD, read_scores, score_cells
from trainkit.run.report.curves import History, seconds_spent
from trainkit.run.report.page import curves, details, figures, page, paragraph, section, table
from trainkit.run.report.plot import svg_plots
from trainkit.run.starts import read_starts
from trainkit.terminal import visible

logger = logging.getLogger(__name__)

# -- What of a run is not the plain model: its attention, kernels and products in fp8 -------------


def kernels_section(kernels: Mapping[str, Any] | None) -> str:
    """Attention, what kernels replaced, and how they compare with the plain model."""
    if not kernels:
        return ""
    parts = []
    attention = kernels.get("attention")
    if attention:
        parts.append(paragraph(f"Attention: {attention.get('name')}, {attention.get('reason')}."))
    rows = [
        (row["op"], row["status"], row["num_modules"], row["reason"])
        for row in (*kernels.get("ops", ()), *kernels.get("lora", ()))
    ]
    if rows:
        parts.append(table(("op", "status", "modules", "reason"), rows))
    checks: Sequence[Mapping[str, Any]] = kernels.get("self_check", ())
    if checks:
        keys = list(dict.fromkeys(key for row in checks for key in row))
        cells = [[figure(row.get(key)) for key in keys] for row in checks]
        parts.append(details("Self-check before training", table(keys, cells)))
    return "".join(parts)


def fp8_section(kernels: Mapping[str, Any] | None) -> str:
    """Which groups of layers multiply in fp8, what that saves and what it costs."""
    chosen: Mapping[str, Any] | None = (kernels or {}).get("fp8")
    if not chosen:
        return ""
    groups: Sequence[Mapping[str, Any]] = chosen.get("groups", ())
    if not groups:
        number = sum(row["number"] for row in chosen.get("layers", ()))
        return paragraph(f"{number} linear layers of the base are in fp8, whatever that costs.")
    budget = chosen["policy"]["loss_budget"]
    about = [
        f"Saves {chosen['saved_ms']:.3g} of {chosen['most_ms']:.3g} ms a micro-batch "
        f"({chosen['timing']})."
    ]
    loss, cost = chosen.get("loss"), chosen.get("loss_increase")
    if loss is None or cost is None:
        about.append("What it costs was not measured, since no budget limits it.")
    else:
        about.append(
            f"Costs {cost:.4f} nats before training, {cost / max(loss, 1e-9):.2%} of the loss "
            f"{loss:.4f} on {chosen['num_tokens']} tokens; the budget is {budget:.2%}."
        )
    rows = [
        (
            group["group"],
            len(group["layers"]),
            group["runs"],
            figure(group["loss_increase"]),
            f"{group['forward_ms']:.3g}",
            f"{group['backward_ms']:.3g}",
            group["reason"],
        )
        for group in groups
    ]
    rows += [
        (reason, number, "16 bits", "", "", "", "") for reason, number in chosen["kept"].items()
    ]
    heads = ("group", "layers", "runs", "costs, nats", "forward, ms", "backward, ms", "why not all")
    return "".join(map(paragraph, about)) + table(heads, rows)


def figure(value: Any) -> str:
    """A value of a table's cell."""
    if value is None:
        return ""
    return format_number(value) if isinstance(value, float) else str(value)


MAX_ANSWERS = 30
MAX_EVALUATIONS = 50
SAMPLES = "samples.json"
"""``{"samples": [{"pieces": [[is_trained, text], ...], "num_tokens", "num_trained_tokens",
"is_cut"}]}``"""

_RELOAD = 30
_OWN = ("training.output_dir", "name")
"""Keys that differ between any two runs."""

_FILE_COLUMNS = {
    "path": "file",
    "rows": "rows",
    "kept": "kept",
    "dropped": "dropped",
    "cut": "cut",
    "samples": "samples",
    "tokens": "tokens",
    "trained_tokens": "trained tokens",
    "sha256": "sha256",
}


def write_report(
    run: RunDirectory, history: History | None = None, *, is_training: bool = False
) -> None:
    """Write the page from what the run directory holds at this moment.

    Args:
        run: whose page.
        history: what it has logged, where that has been read.
        is_training: it is not the last one; a browser loads it again by itself.
    """
    run.write_text(run.report, render_report(run, history, is_training=is_training))


def render_report(
    run: RunDirectory, history: History | None = None, *, is_training: bool = False
) -> str:
    """The page as HTML; it asks for nothing over the network."""
    history = history or History.read(run.metrics)
    data, answers = read_json(run.data), read_json(run.generation_eval)
    kernels = read_json(run.kernels)
    sections = [
        _of(run.generation_eval, lambda: _head(run, history, answers, is_training=is_training)),
        _of(run.data, lambda: _warnings(run, history, data)),
        section("Curves", _curves(run, history)),
        section("Evaluations", _evaluations(history)),
        section(
            "Answers to held-out conversations", _of(run.generation_eval, lambda: _answers(answers))
        ),
        section("Benchmarks", _benchmarks(run)),
        section("Data", _of(run.data, lambda: _data(data))),
        section(
            "Samples", _of(run.root / SAMPLES, lambda: _samples(read_json(run.root / SAMPLES)))
        ),
        section("Kernels", _of(run.kernels, lambda: kernels_section(kernels))),
        section("FP8", _of(run.kernels, lambda: fp8_section(kernels))),
        section("Memory and time", _of(run.memory, lambda: _memory(read_json(run.memory)))),
        section("Against the run before", _against_earlier(run, history)),
        section("Recipe", _recipe(run)),
        section("Starts", _starts(run)),
        section("Command", _command(run)),
        section(
            "Environment", _of(run.environment, lambda: _environment(read_json(run.environment)))
        ),
    ]
    return page(run.name, "".join(sections), reload_seconds=_RELOAD if is_training else None)


def _of(file: Path, draw: Callable[[], str]) -> str:
    """A part of the page; where the file that it is drawn from is damaged, that takes its place."""
    try:
        return draw()
    except (LookupError, TypeError, ValueError, AttributeError):
        logger.warning("%s:1 does not hold what a run writes there, and is left out", file)
        return paragraph(f"{file.name} is damaged.", "warning")


def _head(
    run: RunDirectory,
    history: History,
    answers: Mapping[str, Any] | None,
    *,
    is_training: bool,
) -> str:
    status = run.status()
    # The last page is written while the status still says running: a run that gets here is done.
    state = "done" if status.state == "running" and not is_training else status.state
    if is_training and status.total_steps:
        said = f"step {history.last_step:,} of {status.total_steps:,}"
        status = replace(status, reason=said)
    reason = f": {escape(status.reason)}" if status.reason else ""
    return (
        f"<h1>{escape(run.name)}</h1>"
        f"<p><span class='state {escape(state)}'>{escape(state)}</span>{reason}"
        f" <span class='dim'>started {escape(status.started)}</span></p>"
        + figures(headline_figures(run, history, answers))
    )


def headline_figures(
    run: RunDirectory, history: History, answers: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    """What a reader looks for first, as (label, value)."""
    first, last = history.first, history.last
    columns = history.columns
    found: list[tuple[str, str]] = []
    if answers:
        found.append(("exact match, held out", f"{answers['accuracy']:.1%}"))
    if first and last:
        begun, ended = format_loss(first["loss"]), format_loss(last["loss"])
        found.append(("training loss", f"{begun} → {ended}"))
    evaluation = columns.series("eval_loss")
    if len(evaluation):
        found.append(("evaluation loss", format_loss(evaluation.values[-1])))
    if last:
        found.append(("steps", f"{max(history.last_step, run.status().last_step or 0):,}"))
    if last and last.get("epoch") is not None:
        found.append(("epochs", format_number(last["epoch"])))
    tokens = sum(columns.series("num_tokens").values)
    if tokens:
        found.append(("tokens", format_count(tokens)))
    timed = columns.series("step_seconds")
    if len(timed):
        spent = seconds_spent(timed.steps, timed.values)[-1]
        found.append(("time in steps", format_duration(spent)))
    speed = sorted(columns.series("tokens_per_second").values)
    if speed:
        found.append(("median tokens/s", format_count(speed[len(speed) // 2])))
    memory = columns.series("peak_memory_gib").values
    if memory:
        found.append(("peak memory", f"{format_number(max(memory))} GiB"))
    return found


def _warnings(run: RunDirectory, history: History, data: Mapping[str, Any] | None) -> str:
    found = []
    broken = history.columns.series("loss").broken_steps
    if broken:
        found.append(
            f"The loss was NaN or infinite in {len(broken)} steps, first in {broken[0]:.0f}."
        )
    for step in run.status().resumed_at_steps:
        found.append(f"The run was continued from step {step}.")
    for split in ("train", "eval"):
        found += ((data or {}).get(split) or {}).get("warnings", [])
    return "".join(paragraph(text, "warning") for text in found)


def _curves(run: RunDirectory, history: History) -> str:
    pictures = svg_plots(run, history)
    if not pictures:
        return paragraph("None: fewer than two steps were logged.")
    return curves(pictures)


def _answers(answers: Mapping[str, Any] | None) -> str:
    if not answers:
        return ""
    rows = sorted(answers["rows"], key=lambda row: row["is_exact"])
    num_wrong = answers["num_total"] - answers["num_exact"]
    # Wrong ones teach most, but a page of them alone would mislead about a model that is right.
    shown = rows[: min(num_wrong, MAX_ANSWERS * 2 // 3)]
    shown += rows[num_wrong : num_wrong + MAX_ANSWERS - len(shown)]
    note = f"{answers['num_exact']} of {answers['num_total']} answers are exact. "
    note += "Some wrong ones, then some right ones; all of them are in generation_eval.json."
    marks = {True: "✓", False: "✗"}
    cells = [(r["question"], r["expected"], r["given"], marks[r["is_exact"]]) for r in shown]
    return paragraph(note) + table(("question", "expected", "given", ""), cells)


def _evaluations(history: History) -> str:
    """What was measured on the way, the last first."""
    found = history.evaluations
    keys = list(dict.fromkeys(key for row in found for key in row if key.startswith("eval_")))
    keys = [
        key
        for key in keys
        if not key.endswith(("_runtime", "_per_second")) and "num_trained_tokens" not in key
    ]
    cells = [
        (f"{row['step']:,}", *(format_loss(row.get(key)) if key in row else "" for key in keys))
        for row in found[: -MAX_EVALUATIONS - 1 : -1]
    ]
    head = ("step", *(key.removeprefix("eval_") for key in keys))
    return table(head, cells) if cells else ""


def _samples(samples: Mapping[str, Any] | None) -> str:
    """A few samples as the model gets them; what is trained is marked."""
    if not samples:
        return ""
    parts = [paragraph("As the model gets them; what is trained is marked.")]
    for sample in samples["samples"]:
        text = "".join(
            f"<mark>{escape(visible(piece))}</mark>" if is_trained else escape(visible(piece))
            for is_trained, piece in sample["pieces"]
        )
        title = f"{sample['num_tokens']:,} tokens, {sample['num_trained_tokens']:,} trained"
        cut = paragraph("... cut here") if sample["is_cut"] else ""
        parts.append(details(title, f"<pre class='sample'>{text}</pre>{cut}"))
    return "".join(parts).replace("<details>", "<details open>", 1)


def _against_earlier(run: RunDirectory, history: History) -> str:
    """What differs from the run that was begun before this one, next to it."""
    started = run.status().started
    others = [each for each in _neighbours(run) if (each[0] or "") < (started or "")]
    if not others:
        return ""
    other = max(others, key=lambda each: each[0] or "")[1]
    mine, theirs = _values(run), _values(other)
    differing = [
        (key, theirs.get(key, ""), mine.get(key, ""))
        for key in dict.fromkeys([*theirs, *mine])
        if theirs.get(key) != mine.get(key) and key not in _OWN
    ]
    now = headline_figures(run, history, read_json(run.generation_eval))
    earlier = History.read(other.metrics), read_json(other.generation_eval)
    before = dict(headline_figures(other, *earlier))
    figures_of_both = [(label, before.get(label, ""), value) for label, value in now]
    command = escape(shlex.join(["trainkit", "compare", other.name, run.name]))
    more = f"<p><code>{command}</code> says which differences are noise.</p>"
    return table(("", other.name, run.name), [*figures_of_both, *differing]) + more


def _neighbours(run: RunDirectory) -> Iterable[tuple[str | None, RunDirectory]]:
    """The other runs of the same folder, with the time at which each began."""
    for status in run.root.parent.glob("*/status.json"):
        if status.parent == run.root or not (status.parent / "metrics.jsonl").is_file():
            continue
        other = RunDirectory(status.parent)
        with contextlib.suppress(TrainkitError):
            yield other.status().started, other


def _values(run: RunDirectory) -> dict[str, str]:
    """The resolved recipe by dotted key, as text without origins."""
    if not run.resolved.is_file():
        return {}
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in run.resolved.read_text(encoding="utf-8").splitlines():
        plain = line.partition("  # ")[0].rstrip()
        key, colon, value = plain.strip().partition(":")
        if not colon or key.startswith("#"):
            continue
        indent = len(plain) - len(plain.lstrip())
        path = [each for each in path if each[0] < indent]
        if value.strip():
            found[".".join([*(name for _, name in path), key])] = value.strip()
        else:
            path.append((indent, key))
    return found


def _benchmarks(run: RunDirectory) -> str:
    """The newest scores of `trainkit eval`; nothing where there are none."""
    scores = read_scores(run.root)
    return table(SCORE_HEAD, map(score_cells, scores)) if scores else ""


def _data(data: Mapping[str, Any] | None) -> str:
    parts = []
    for split in ("train", "eval"):
        summary = (data or {}).get(split)
        if not summary:
            continue
        body = [
            [_file_cell(key, row.get(key, "streamed")) for key in _FILE_COLUMNS]
            for row in summary["files"]
        ]
        files = table(list(_FILE_COLUMNS.values()), body) if body else ""
        parts.append(f"<h3>{split}</h3>{files}")
        held_out = summary.get("held_out")
        if held_out and split == "eval":
            parts.append(
                paragraph(
                    f"{held_out['conversations']:,} of {held_out['of']:,} conversations, held out "
                    f"of the training data: {summary['totals']['samples']:,} samples, "
                    f"{summary['totals']['trained_tokens']:,} trained tokens."
                )
            )
        reasons = [
            (row["path"], reason, count)
            for row in summary["files"]
            for reason, count in row.get("reasons", {}).items()
        ]
        if reasons:
            parts.append(table(("file", "why rows were dropped or cut", "rows"), reasons))
        parts += [paragraph(note) for note in summary.get("notes", ())]
    return "".join(parts)


def _file_cell(key: str, value: Any) -> str:
    if key == "sha256":
        return str(value)[:12]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _recipe(run: RunDirectory) -> str:
    if not run.resolved.is_file():
        return ""
    lines = []
    for line in run.resolved.read_text(encoding="utf-8").splitlines():
        is_default = line.rstrip().endswith("default")
        lines.append(f"<span class='dim'>{escape(line)}</span>" if is_default else escape(line))
    return paragraph("Every value and where it came from; defaults are grey.") + (
        "<pre>" + "\n".join(lines) + "</pre>"
    )


def _memory(memory: Mapping[str, Any] | None) -> str:
    """The estimate next to what was measured; nothing for a run on a CPU."""
    if not memory:
        return ""
    said, measured = memory["estimated"], memory["measured"]
    rows: list[tuple[str, str, str]] = [
        ("peak, GiB", figure(said["peak_gib"]), figure(measured.get("peak_gib"))),
        ("first step, GiB", "", figure(measured.get("first_step_gib"))),
        ("a step, s", figure(said["step_seconds"]), figure(measured.get("step_seconds"))),
    ]
    rows += [(f"{name}, GiB", figure(gib), "") for name, gib in said["by_owner"].items() if gib]
    about = f"Estimated for {said['gpus']} x {said['gpu']}: {said['anchored_on']}."
    return paragraph(about) + table(("", "estimated", "measured"), rows)


def _starts(run: RunDirectory) -> str:
    """What a continued run was given on the way; nothing for a run that began and ended."""
    starts = read_starts(run)
    if len(starts) < 2:
        return ""
    rows = []
    for start in starts:
        changes = [f"{row['key']}: {row['before']} → {row['now']}" for row in start.changes]
        accepted = [f"{row['key']}: {row['before']} → {row['now']}" for row in start.accepted]
        cells = (start.overrides, changes, accepted, start.retired)
        rows.append((start.step, start.time, *("; ".join(cell) for cell in cells)))
    heads = ("from step", "time", "overrides", "changed", "accepted", "retired")
    return table(heads, rows)


def _command(run: RunDirectory) -> str:
    if not run.command.is_file():
        return ""
    return f"<pre>{escape(run.command.read_text(encoding='utf-8'))}</pre>"


def _environment(environment: Mapping[str, Any] | None) -> str:
    if not environment:
        return ""
    apart = ("packages", "variables", "git")
    rows = [(key, _plain(value)) for key, value in environment.items() if key not in apart]
    git = environment.get("git") or {}
    if git:
        states = {"True": "with uncommitted changes", "False": "clean"}
        state = states.get(str(git.get("dirty")), "its changes unknown")
        rows.append(("git", f"{git.get('commit')} on {git.get('branch')}, {state}"))
    parts = [table(("", ""), rows)]
    for key in ("variables", "packages"):
        if environment.get(key):
            parts.append(details(key.capitalize(), table(("", ""), environment[key].items())))
    if git.get("diff"):
        parts.append(details("Uncommitted changes", f"<pre>{escape(git['diff'])}</pre>"))
    return "".join(parts)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs: Iterable[tuple[Any, Any]] = value.items()
        return ", ".join(f"{key}: {_plain(item)}" for key, item in pairs if item not in (None, []))
    if isinstance(value, list):
        return " ".join(_plain(item) for item in value) or "none"
    return str(value)
