"""``README.md`` of a run: a model card with what was trained, on what, and with what result."""

from __future__ import annotations

from typing import Any

from trainkit.run.directory import RunDirectory
from trainkit.run.files import read_json
from trainkit.run.format import format_loss
from trainkit.run.metrics import read_metrics


def write_model_card(run: RunDirectory, *, base_model: str) -> None:
    """Write the card into the run directory and, if it is there, beside the final model.

    Args:
        run: a run that has trained.
        base_model: the model it started from, as the recipe names it.
    """
    text = model_card(run, base_model=base_model)
    run.write_text(run.model_card, text)


def model_card(run: RunDirectory, *, base_model: str) -> str:
    """The card as Markdown."""
    rows = [row for row in read_metrics(run.metrics) if "loss" in row]
    evaluations = [row for row in read_metrics(run.metrics) if "eval_loss" in row]
    lines = [
        "---",
        "library_name: transformers",
        f"base_model: {base_model}",
        "tags: [trainkit, text-generation]",
        "---",
        f"# {run.name}",
        f"Fine-tuned from `{base_model}` with trainkit. The model is in `final/`; `report.html`",
        "shows the run, `recipe.yaml` and `command.sh` repeat it.",
        "",
        "| | |",
        "|---|---|",
    ]
    if rows:
        lines.append(f"| steps | {rows[-1]['step']} |")
        first, last = format_loss(rows[0]["loss"]), format_loss(rows[-1]["loss"])
        lines.append(f"| training loss | {first} -> {last} |")
    if evaluations:
        lines.append(f"| evaluation loss | {format_loss(evaluations[-1]['eval_loss'])} |")
    answers = read_json(run.generation_eval)
    if answers is not None:
        share = f"{answers['accuracy']:.1%} of {answers['num_total']}"
        lines.append(f"| exact match | {share} held-out answers |")
    lines += ["", "## Data", *_data_lines(read_json(run.data)), ""]
    return "\n".join(lines)


def _data_lines(data: dict[str, Any] | None) -> list[str]:
    if data is None:
        return ["Not recorded."]
    lines = [
        "| file | rows | kept | dropped | cut | tokens | trained | sha256 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in data["train"]["files"]:
        figures = [
            row.get(k, "streamed")
            for k in ("rows", "kept", "dropped", "cut", "tokens", "trained_tokens")
        ]
        cells = " | ".join(str(figure) for figure in figures)
        lines.append(f"| {row['path']} | {cells} | {row.get('sha256', '')[:12]} |")
    return lines
