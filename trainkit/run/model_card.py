"""``README.md`` of a run: a model card with what was trained, on what, and how to load it.

Names, paths and the recipe are a user's own text: they are written so that neither Markdown nor
the YAML at the top reads them as anything else.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from trainkit.places import local_path
from trainkit.redact import redact_text
from trainkit.run.directory import RunDirectory
from trainkit.run.files import read_json
from trainkit.run.format import format_loss
from trainkit.run.metrics import read_metrics

logger = logging.getLogger(__name__)

_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#+!|~&$-])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")

_LOAD = """\
from transformers import {loader}, AutoTokenizer

model = {loader}.from_pretrained("DIRECTORY", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")"""
_LOAD_ADAPTER = """\
from peft import PeftModel
from transformers import {loader}, AutoTokenizer

base = {loader}.from_pretrained({base}, dtype="auto")
model = PeftModel.from_pretrained(base, "DIRECTORY")
tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")"""


def write_model_card(
    run: RunDirectory, *, base_model: str, loader: str = "AutoModelForCausalLM", adapter: bool
) -> None:
    """Write the card into the run directory; see `model_card`."""
    card = model_card(run, base_model=base_model, loader=loader, adapter=adapter)
    run.write_text(run.model_card, card)


def model_card(
    run: RunDirectory, *, base_model: str, loader: str = "AutoModelForCausalLM", adapter: bool
) -> str:
    """The card as Markdown.

    Args:
        run: a run that has trained.
        base_model: the model it started from, as the recipe names it.
        loader: transformers' auto class that loads the base.
        adapter: the final model is an adapter over the base.
    """
    load = (_LOAD_ADAPTER if adapter else _LOAD).format(
        loader=loader, base=json.dumps(_line(base_model), ensure_ascii=False)
    )
    kind = "A LoRA adapter for" if adapter else "Fine-tuned from"
    lines = [
        *_front_matter(base_model, adapter=adapter),
        f"# {_text(run.name)}",
        f"{kind} {_code(base_model)}, trained with trainkit on conversations or text.",
        "",
        "## How to load it",
        "`DIRECTORY` is the directory of this file, or `final/` of the run.",
        *_fenced(load, "python"),
        "",
        "## Training",
        "| | |",
        "|---|---|",
        *_figures(run),
        "",
        "## Data",
        *_data_lines(run.data),
        "",
        "## Recipe",
        *_recipe_lines(run.recipe),
        "",
    ]
    return "\n".join(lines)


def _front_matter(base_model: str, *, adapter: bool) -> list[str]:
    """The YAML that the hub reads; it takes a base by its hub name only."""
    is_hub_name = local_path(base_model) is None
    tags = ["trainkit", "text-generation", *(["lora"] if adapter else [])]
    return [
        "---",
        f"library_name: {'peft' if adapter else 'transformers'}",
        *([f"base_model: {json.dumps(base_model)}"] if is_hub_name else []),
        "pipeline_tag: text-generation",
        f"tags: {json.dumps(tags)}",
        "---",
    ]


def _figures(run: RunDirectory) -> list[str]:
    metrics = list(read_metrics(run.metrics))
    rows = [row for row in metrics if "loss" in row]
    evaluations = [row for row in metrics if "eval_loss" in row]
    lines = []
    if rows:
        steps = max(metrics[-1]["step"], run.status().last_step or 0)
        lines.append(f"| steps | {steps} |")
        first, last = format_loss(rows[0]["loss"]), format_loss(rows[-1]["loss"])
        lines.append(f"| training loss | {first} -> {last} |")
    if evaluations:
        lines.append(f"| evaluation loss | {format_loss(evaluations[-1]['eval_loss'])} |")
    answers = read_json(run.generation_eval)
    if isinstance(answers, dict) and {"accuracy", "num_total"} <= answers.keys():
        share = f"{answers['accuracy']:.1%} of {answers['num_total']}"
        lines.append(f"| exact match | {share} held-out answers |")
    return lines


def _data_lines(file: Path) -> list[str]:
    data = read_json(file)
    if data is None:
        return ["Not recorded."]
    try:
        return _data_rows(data)
    except (LookupError, TypeError, AttributeError):
        logger.warning("%s:1 does not hold what a run writes there, and is left out", file)
        return ["The record is damaged."]


def _data_rows(data: dict[str, Any]) -> list[str]:
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
        lines.append(f"| {_text(row['path'])} | {cells} | {row.get('sha256', '')[:12]} |")
    return lines


def _recipe_lines(recipe: Path) -> list[str]:
    if not recipe.is_file():
        return ["Not recorded."]
    return _fenced(redact_text(recipe.read_text(encoding="utf-8")).rstrip("\n"), "yaml")


def _line(text: str) -> str:
    return _CONTROL.sub(" ", text)


def _text(text: str) -> str:
    """A user's text in a sentence or a table's cell."""
    return _SPECIAL.sub(r"\\\1", _line(text))


def _code(text: str) -> str:
    """A user's text as inline code: the fence is longer than any run of backticks in it."""
    text = _line(text)
    fence = "`" * (1 + _longest_fence(text))
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fenced(text: str, language: str) -> list[str]:
    fence = "`" * max(3, 1 + _longest_fence(text))
    return [f"{fence}{language}", text, fence]


def _longest_fence(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
