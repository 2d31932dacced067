"""The pages of a run: ``report.html``, its complete record, and ``README.md``, its model card.

Their text is in ``report.html`` and ``model_card.md`` next to this file. While a run trains, both
curves and report are drawn in a process of their own: matplotlib holds Python's lock for most of a
drawing's second, and a thread of the training process would make the steps of it wait.

    python -m trainkit.run.report RUN
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from trainkit.errors import ResumeRefusedError, RunDirectoryError
from trainkit.places import local_path
from trainkit.processes import module_command
from trainkit.redact import redact_text
from trainkit.run.directory import RunDirectory
from trainkit.run.files import WAY_OUT, RunGoneError, read_json, say_strange
from trainkit.run.metrics import (
    SCORE_HEAD,
    format_count,
    format_duration,
    format_judged,
    format_loss,
    format_number,
    judged_figures,
    read_scores,
    score_cells,
)
from trainkit.run.plot import History, draw_plots, seconds_spent, svg_plots
from trainkit.run.starts import read_starts
from trainkit.terminal import visible

logger = logging.getLogger(__name__)

MAX_ANSWERS = 30
MAX_EVALUATIONS = 50
SAMPLES = "samples.json"
"""``{"samples": [{"pieces": [[is_trained, text], ...], "num_tokens", "num_trained_tokens",
"is_cut"}]}``"""

_RELOAD_SECONDS = 30
_PATIENCE_SECONDS = 5.0

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


@functools.cache
def parts(file: str = "report.html") -> Any:
    is_page = file.endswith(".html")
    environment = jinja2.Environment(
        autoescape=is_page, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "figure": _figure,
        "figure_of": lambda key, row: _figure(row.get(key)),
        "score": lambda key, row: format_loss(row[key]) if key in row else "",
        "plain": _plain,
        "visible": visible,
        # A user's own text in Markdown: in a sentence or a cell, as code, between fences.
        "text": lambda text: _SPECIAL.sub(r"\\\1", _CONTROL.sub(" ", text)),
        "code": lambda text: _fenced(_CONTROL.sub(" ", text)),
        "fenced": _fenced,
        "json": json.dumps,
    }
    text = Path(__file__).with_name(file).read_text(encoding="utf-8")
    return environment.from_string(text).module


def _figure(value: Any) -> str:
    if value is None:
        return ""
    return format_number(value) if isinstance(value, float) else str(value)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = value.items()
        return ", ".join(f"{key}: {_plain(item)}" for key, item in pairs if item not in (None, []))
    if isinstance(value, list):
        return " ".join(_plain(item) for item in value) or "none"
    return str(value)


def write_report(
    run: RunDirectory, history: History | None = None, *, is_training: bool = False
) -> None:
    """Write the page from what the run directory holds at this moment.

    While it is training, a browser loads the page again by itself.
    """
    run.write_text(run.report, render_report(run, history, is_training=is_training))


def render_report(
    run: RunDirectory, history: History | None = None, *, is_training: bool = False
) -> str:
    """The page as HTML; it asks for nothing over the network."""
    history = history or History.read(run.metrics)
    page, status = parts(), run.status()

    def part(
        title: str, file: Path, draw: Callable[[Any], Markup], read: Callable[..., Any] = read_json
    ) -> Markup:
        """A section of what a file of the run holds; that it is damaged takes its place."""
        try:
            body = draw(read(file))
        except (jinja2.TemplateError, LookupError, TypeError, ValueError, AttributeError):
            say_strange(file)
            body = page.paragraph(f"{file.name} is damaged.", "warning")
        except RunDirectoryError as error:
            logger.warning("%s", error)
            body = page.paragraph(f"{file.name} is damaged.", "warning")
        return page.section(title, body) if title else body

    def head(answers: Any) -> Markup:
        # The last page is written while the status still says running: the run is then done.
        state = "done" if status.state == "running" and not is_training else status.state
        said = status.reason
        if is_training and status.total_steps:
            said = f"step {history.last_step:,} of {status.total_steps:,}"
        figures = headline_figures(run, history, answers)
        return page.head(run.name, state, said, status.started, figures)

    pictures, scores = svg_plots(run, history), read_scores(run.root)
    broken, resumed = history.series("loss").broken_steps, status.resumed_at_steps
    answers = run.generation_eval
    none = page.paragraph("None: fewer than two steps were logged.")
    sections = [
        part("", answers, head),
        part("", run.data, lambda data: page.warnings(data, broken, resumed)),
        page.section("Curves", page.curves(pictures) if pictures else none),
        page.section("Evaluations", page.evaluations(history.evaluations, MAX_EVALUATIONS)),
        part(
            "Answers to held-out conversations",
            answers,
            lambda found: page.answers(found, MAX_ANSWERS),
        ),
        page.section("Benchmarks", scores and page.table(SCORE_HEAD, map(score_cells, scores))),
        part("Data", run.data, page.data),
        part("Samples", run.root / SAMPLES, page.samples),
        part("Kernels", run.kernels, page.kernels),
        part("FP8", run.kernels, page.fp8),
        part("Memory and time", run.memory, page.memory),
        part("Recipe", run.resolved, page.recipe, _text_of),
        part("Starts", run.changes, page.starts, lambda _: read_starts(run)),
        part("Command", run.command, page.command, _text_of),
        part("Environment", run.environment, page.environment),
    ]
    reload_seconds = _RELOAD_SECONDS if is_training else None
    return str(page.page(run.name, Markup("").join(sections), reload_seconds))


def _text_of(file: Path) -> str:
    """A text of the run, which ends as every line does; one that is cut short is shown so."""
    text = file.read_bytes().decode("utf-8", "replace") if file.is_file() else ""
    if not text.endswith("\n") or "\ufffd" in text:
        logger.warning("%s is damaged, or missing; %s", file, WAY_OUT)
    return text


def headline_figures(
    run: RunDirectory, history: History, answers: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    """What a reader looks for first, as (label, value)."""
    first, last = history.first, history.last
    found: list[tuple[str, str]] = []
    if answers:
        exact = f"{answers['accuracy']:.1%} of {answers['num_total']}"
        found.append(("exact match, held out", exact))
    if first and last:
        begun, ended = format_loss(first["loss"]), format_loss(last["loss"])
        found.append(("training loss", f"{begun} → {ended}"))
    if evaluated := history.series("eval_loss").values:
        found.append(("evaluation loss", format_loss(evaluated[-1])))
    for name, figure in judged_figures(history.evaluations).items():
        found.append((f"{name}, held out", format_judged(figure)))
    if steps := max(history.last_step, run.status().last_step or 0):
        found.append(("steps", f"{steps:,}"))
    if last and last.get("epoch") is not None:
        found.append(("epochs", format_number(last["epoch"])))
    if tokens := sum(history.series("num_tokens").values):
        found.append(("tokens", format_count(tokens)))
    timed = history.series("step_seconds")
    if len(timed):
        spent = seconds_spent(timed.steps, timed.values)[-1]
        found.append(("time in steps", format_duration(spent)))
    if speed := sorted(history.series("tokens_per_second").values):
        found.append(("median tokens/s", format_count(speed[len(speed) // 2])))
    if memory := history.series("peak_memory_gib").values:
        found.append(("peak memory", f"{format_number(max(memory))} GiB"))
    return found


def write_model_card(
    run: RunDirectory, *, base_model: str, loader: str = "AutoModelForCausalLM", adapter: bool
) -> None:
    card = model_card(run, base_model=base_model, loader=loader, adapter=adapter)
    run.write_text(run.model_card, card)


def model_card(
    run: RunDirectory, *, base_model: str, loader: str = "AutoModelForCausalLM", adapter: bool
) -> str:
    """The card as Markdown, in which a user's own text is read as nothing but text."""
    answers, data = read_json(run.generation_eval), read_json(run.data)
    if not isinstance(answers, dict) or not {"accuracy", "num_total"} <= answers.keys():
        answers = None
    base = json.dumps(_CONTROL.sub(" ", base_model), ensure_ascii=False)
    values = {
        "name": run.name,
        "base_model": base_model,
        "is_hub_name": local_path(base_model) is None,  # the hub takes a base by no other name
        "adapter": adapter,
        "load": (_LOAD_ADAPTER if adapter else _LOAD).format(loader=loader, base=base),
        "figures": headline_figures(run, History.read(run.metrics), answers),
        "recipe": redact_text(_text_of(run.recipe)).rstrip("\n"),
    }
    card = parts("model_card.md").card
    try:
        return str(card(**values, files=data and data["train"]["files"]))
    except (jinja2.TemplateError, LookupError, TypeError, AttributeError):
        say_strange(run.data)
        return str(card(**values, files="The record is damaged."))


def _fenced(text: str, language: str | None = None) -> str:
    """Between more backticks than the text has in a row: in a sentence, or as a block."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    if language is None:
        pad = " " if longest else ""
        return f"{'`' * (longest + 1)}{pad}{text}{pad}{'`' * (longest + 1)}"
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


class CurveRefresher:
    """Starts a drawing now and then, never two at once."""

    def __init__(self, run: RunDirectory, *, interval_seconds: float = 30.0) -> None:
        self._run = run
        self._interval = interval_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._started = time.monotonic()

    def refresh(self, *, has_news: bool = False) -> bool:
        """Start a drawing if it is time; takes microseconds if not. Call it at every log.

        Returns:
            Whether one was started.
        """
        is_busy = self._process is not None and self._process.poll() is None
        interval = self._interval / 6 if has_news else self._interval
        if is_busy or time.monotonic() - self._started < interval:
            return False
        self._started = time.monotonic()
        command = module_command("trainkit.run.report", str(self._run.root))
        # A machine that cannot start one more process must not lose a run for a picture.
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            return True
        return False

    def close(self) -> None:
        """Stop a drawing that is under way: the run's end draws everything once more."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def draw_all(run: RunDirectory, *, is_training: bool = False) -> None:
    """The report and all pictures, from one reading of the metrics."""
    history = History.read(run.metrics)
    write_report(run, history, is_training=is_training)
    draw_plots(run, history)


@contextlib.contextmanager
def reported_at_an_early_end(run: RunDirectory) -> Iterator[None]:
    """Write the report of a run that fails or is stopped, as its end would; enter it first.

    The last drawing may be half a minute old, says that the run goes on, and may not be there.
    """
    try:
        yield
    except (ResumeRefusedError, RunGoneError):
        raise  # the run is what it was, or not there
    except BaseException:
        # What ended the run is more important than its page.
        with contextlib.suppress(Exception):
            if run.metrics.exists():
                write_report(run)
        raise


if __name__ == "__main__":
    # Leave through the clean-up of half-written files, and after everybody else's work.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.nice(10)
    draw_all(RunDirectory(Path(sys.argv[1])), is_training=True)
