"""``report.html``: the whole record of a run as one page that needs nothing else."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.run.directory import RunDirectory
from trainkit.run.files import read_json
from trainkit.run.format import format_duration
from trainkit.run.metrics import read_metrics

MAX_ANSWERS = 30

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:62rem;margin:0 auto;
padding:1rem}h1{font-size:1.5rem;margin:.2rem 0;overflow-wrap:anywhere}h2{font-size:1.15rem;
margin:2rem 0 .5rem;border-bottom:1px solid #ddd}
table{border-collapse:collapse;font-size:.85rem}
th,td{text-align:left;padding:.2rem .7rem .2rem 0;vertical-align:top;border-bottom:1px solid #eee;
overflow-wrap:anywhere}th{font-weight:600}.wide{overflow-x:auto}img{max-width:100%}pre{background:
#f6f6f6;padding:.7rem;overflow-x:auto;font-size:.8rem}.figures{display:flex;flex-wrap:wrap;gap:.5rem
2rem;margin:1rem 0}.figures div{min-width:7rem}.figures b{display:block;font-size:1.3rem}.done{color:
#00734d}.failed,.interrupted,.wrong{color:#b34700}details{margin:.5rem 0}@media print{details>*{
display:block}body{font-size:12px}}
"""


def write_report(run: RunDirectory) -> None:
    """Write the page from what the run directory holds at this moment."""
    run.write_text(run.report, render_report(run))


def render_report(run: RunDirectory) -> str:
    """The page as HTML; it asks for nothing over the network."""
    data, answers = read_json(run.data), read_json(run.generation_eval)
    sections = [
        _head(run, answers),
        _section("Curves", _picture(run.plots / "overview.png")),
        _section("Answers to held-out conversations", _answers(answers)),
        _section("Data", _data(data)),
        _section("Kernels", _kernels(read_json(run.kernels))),
        _section("Recipe, every value and where it came from", _text(run.resolved)),
        _section("Command", _text(run.command)),
        _section("Environment", _environment(read_json(run.environment))),
    ]
    title = html.escape(run.name)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>"
        + "".join(sections)
        + "</body></html>\n"
    )


def _head(run: RunDirectory, answers: Mapping[str, Any] | None) -> str:
    status = run.status()
    rows = [row for row in read_metrics(run.metrics) if "loss" in row]
    evaluations = [row for row in read_metrics(run.metrics) if "eval_loss" in row]
    figures: list[tuple[str, str]] = []
    if rows:
        seconds = sum(float(row.get("step_seconds") or 0) for row in rows)
        tokens = sum(int(row.get("num_tokens") or 0) for row in rows)
        figures += [
            ("steps", str(rows[-1]["step"])),
            ("training loss", f"{rows[0]['loss']:.3f} → {rows[-1]['loss']:.3f}"),
            ("tokens", f"{tokens:,}"),
            ("time in steps", format_duration(seconds)),
        ]
    if evaluations:
        figures.append(("evaluation loss", f"{evaluations[-1]['eval_loss']:.3f}"))
    if answers:
        figures.append(("exact match", f"{answers['accuracy']:.1%}"))
    # The report is written before the status says so: a run that gets here has trained.
    state = "done" if status.state == "running" else status.state
    reason = f" {html.escape(status.reason)}" if status.reason else ""
    cells = "".join(f"<div>{label}<b>{html.escape(value)}</b></div>" for label, value in figures)
    return (
        f"<h1>{html.escape(run.name)}</h1><p class='{state}'>{state}{reason}</p>"
        f"<div class='figures'>{cells}</div>"
    )


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>{body}" if body else ""


def _picture(path: Path) -> str:
    if not path.is_file():
        return "<p>No curves: fewer than two steps were logged.</p>"
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    label = "loss, learning rate, gradient norm and speed over the steps"
    return f'<img alt="{label}" src="data:image/png;base64,{encoded}">'


def _answers(answers: Mapping[str, Any] | None) -> str:
    if not answers:
        return ""
    rows = sorted(answers["rows"], key=lambda row: row["is_exact"])[:MAX_ANSWERS]
    table = _table(
        ("question", "expected", "given", ""),
        [
            (r["question"], r["expected"], r["given"], "yes" if r["is_exact"] else "no")
            for r in rows
        ],
    )
    note = f"{answers['num_exact']} of {answers['num_total']} exact; wrong ones first."
    return f"<p>{note}</p>{table}"


def _data(data: Mapping[str, Any] | None) -> str:
    if not data:
        return ""
    parts = []
    columns = ("path", "rows", "kept", "dropped", "cut", "samples", "tokens", "trained_tokens")
    for split in ("train", "eval"):
        summary = data.get(split)
        if summary:
            body = [[row[column] for column in columns] for row in summary["files"]]
            parts.append(f"<h3>{split}</h3>" + _table(columns, body))
            parts += [f"<p class='wrong'>{html.escape(w)}</p>" for w in summary["warnings"]]
    return "".join(parts)


def _kernels(kernels: Mapping[str, Any] | None) -> str:
    if not kernels:
        return ""
    attention = kernels.get("attention", {})
    head = f"<p>attention: {html.escape(str(attention.get('name')))}, "
    head += f"{html.escape(str(attention.get('reason')))}</p>"
    rows = [
        (row["op"], row["status"], row["num_modules"], row["reason"])
        for row in (*kernels.get("ops", ()), *kernels.get("lora", ()))
    ]
    checks: Sequence[Mapping[str, Any]] = kernels.get("self_check", ())
    body = head + (_table(("op", "status", "modules", "reason"), rows) if rows else "")
    if checks:
        keys = list(dict.fromkeys(key for row in checks for key in row))
        table = _table(keys, [[row.get(key, "") for key in keys] for row in checks])
        body += f"<details><summary>Self-check before training</summary>{table}</details>"
    return body


def _environment(environment: Mapping[str, Any] | None) -> str:
    if not environment:
        return ""
    rows = [
        (key, _plain(value))
        for key, value in environment.items()
        if key not in ("packages", "variables")
    ]
    packages = _table(("package", "version"), environment.get("packages", {}).items())
    return _table(("", ""), rows) + f"<details><summary>Packages</summary>{packages}</details>"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_plain(item) for item in value)
    return str(value)


def _text(path: Path) -> str:
    if not path.is_file():
        return ""
    return f"<pre>{html.escape(path.read_text(encoding='utf-8'))}</pre>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    header = "".join(f"<th>{html.escape(str(cell))}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<div class='wide'><table><tr>{header}</tr>{body}</table></div>"
