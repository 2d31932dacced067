"""What a person sees while a run goes: a live display on a terminal, plain lines elsewhere.

Everything goes to standard error; standard output is for programs. Only the main process prints.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainkit.redact import redact_text
from trainkit.run.files import explain_os_errors
from trainkit.run.metrics import format_count, format_duration, format_loss, format_number

_REFRESH_PER_SECOND = 4
_COPIED = re.compile(r"\btrainkit [a-z-]+ |(?<!\w)~?/\w+/\S")
# The pace of recent steps says when the run ends; the pace of all steps includes the slow first.
_PACE_WINDOW = 50


class Console:
    """The run's voice.

    Args:
        interactive: True for the live display, False for plain lines, None to find out: live only
            on a terminal that can move its cursor (no ``NO_COLOR``, ``TERM`` not ``dumb``).
        dist_rank: this process's global number; every process but 0 is silent.
        stream: where to write, standard error by default.
        rows: takes each row of metrics and the summary as well, for programs.
    """

    def __init__(
        self,
        interactive: bool | None = None,
        *,
        dist_rank: int = 0,
        stream: TextIO | None = None,
        rows: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._rows = rows
        self._stream = stream or sys.stderr
        self._silent = dist_rank != 0
        self.interactive = _can_be_live(self._stream) if interactive is None else interactive
        self._rich = RichConsole(
            file=self._stream,
            highlight=False,
            soft_wrap=not self.interactive,
            force_terminal=True if self.interactive else None,
            no_color=None if self.interactive else True,
        )
        self._live: Live | None = None
        self._progress = _Progress(total_steps=0)

    def start(self, total_steps: int, *, first_step: int = 0) -> None:
        self._progress = _Progress(total_steps=total_steps, step=first_step)
        if self._silent or not self.interactive or self._live is not None:
            return
        self._live = Live(
            console=self._rich,
            get_renderable=self._render,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=True,
            # A print from a library would tear the display; a redirected stdout is left alone.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )
        self._live.start()

    def log(self, metrics: Mapping[str, float | int | str | None]) -> None:
        """Show one row of metrics (the keys of ``metrics.jsonl``; ``eval_*`` rows get a line)."""
        if self._silent:
            return
        if self._rows is not None:
            self._rows(metrics)
        evaluation = {key: value for key, value in metrics.items() if key.startswith("eval_")}
        self._progress.update(metrics)
        if evaluation and "loss" not in metrics:
            self._write(Text(_evaluation_line(self._progress.step, evaluation)))
        elif not self.interactive:
            self._write(Text(self._progress.plain_line()))

    def step(self, step: int) -> None:
        """Move the progress bar without a row of metrics, for steps that are not logged."""
        self._progress.advance(step)

    def doing(self, what: str) -> None:
        """Name what comes behind the last step, where the time to go stood."""
        self._progress.doing = what

    def note(self, text: str) -> None:
        self._write(Text(redact_text(text)))

    def warn(self, text: str) -> None:
        """Say something the user should act on."""
        self._write(Text.assemble(("warning: ", "bold yellow"), redact_text(text)))

    def finish(self, summary: Mapping[str, object] | None = None, *, title: str = "done") -> None:
        """Take the live display down and print the closing summary.

        Without a summary it closes without a word (after a failure).
        """
        self.stop()
        if summary is None or self._silent:
            return
        if self._rows is not None:
            self._rows({"state": title, **{label: str(value) for label, value in summary.items()}})
        width = max((len(label) for label in summary), default=0)
        self._write(Text(title, style="bold"))
        for label, value in summary.items():
            # Paths stay on one line, whatever the width, so that they can be copied.
            line = Text(f"  {label:<{width}}  {redact_text(str(value))}")
            self._rich.print(line, soft_wrap=True)

    def stop(self) -> None:
        """Take the live display down; safe to call at any time, and twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _write(self, text: Text) -> None:
        # A command or a path that is broken into lines cannot be copied: the terminal wraps it.
        if not self._silent:
            self._rich.print(text, soft_wrap=True if _COPIED.search(text.plain) else None)

    def _render(self) -> RenderableType:
        return self._progress.render(self._rich.width)


class _Progress:
    """The numbers of the moment and their two forms: a block of lines, or one line."""

    def __init__(self, *, total_steps: int, step: int = 0) -> None:
        self.total_steps = total_steps
        self.step = step
        self.doing = "finishing"
        self._latest: dict[str, float | int | str | None] = {}
        self._sources: dict[str, float | int | str | None] = {}
        self._pace: deque[tuple[int, float]] = deque(maxlen=_PACE_WINDOW)
        self._pace.append((step, time.monotonic()))

    def advance(self, step: int) -> None:
        if step > self.step:
            self.step = step
            self._pace.append((step, time.monotonic()))

    def update(self, metrics: Mapping[str, float | int | str | None]) -> None:
        step = metrics.get("step")
        if isinstance(step, int):
            self.advance(step)
        self._latest.update({key: value for key, value in metrics.items() if value is not None})
        if "loss" in metrics:  # a source that is not in this row says nothing now
            self._sources = {k: v for k, v in metrics.items() if k.startswith("loss/")}

    @property
    def _is_last(self) -> bool:
        return 0 < self.total_steps <= self.step

    def eta_seconds(self) -> float | None:
        """None where the end is not known, or only the work behind the last step is left."""
        if not self.total_steps or self._is_last:
            return None
        (first, began), (last, ended) = self._pace[0], self._pace[-1]
        if last == first:
            return None
        return max(self.total_steps - self.step, 0) * (ended - began) / (last - first)

    def _fields(self) -> list[tuple[str, str]]:
        """Label and value, the most wanted first: a narrow terminal shows only these."""
        latest, fields = self._latest, []
        if "loss" in latest:
            fields.append(("loss", format_loss(latest["loss"])))
        if "learning_rate" in latest:
            fields.append(("lr", format_number(latest["learning_rate"])))
        if "tokens_per_second" in latest:
            fields.append(("tok/s", format_count(latest["tokens_per_second"])))
        if "peak_memory_gib" in latest:
            fields.append(("mem", f"{format_number(latest['peak_memory_gib'])} GiB"))
        for key, value in self._sources.items():
            fields.append((key, format_loss(value)))
        return fields

    def plain_line(self) -> str:
        total = str(self.total_steps) if self.total_steps else "?"
        words = [f"step {self.step:>{len(total)}}/{total}"]
        words += [f"{label} {value}" for label, value in self._fields()]
        eta = self.eta_seconds()
        if eta is not None:
            words.append(f"eta {format_duration(eta)}")
        return "  ".join(words)

    def render(self, width: int) -> RenderableType:
        eta = self.eta_seconds()
        count = f"{self.step}/{self.total_steps or '?'}"
        remaining = f"eta {format_duration(eta)}" if eta is not None else "eta -"
        if self._is_last:
            remaining = self.doing
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=max(self.total_steps, 1), completed=self.step)
        head.add_row(Text(count, style="bold"), bar, Text(remaining))

        body = Text(no_wrap=True, overflow="ellipsis")
        for label, value in self._fields():
            piece = ("  " if body.plain else "") + f"{label} {value}"
            if len(body.plain) + len(piece) > width:
                break
            body.append(piece[: -len(value)], style="dim")
            body.append(value)
        return Group(head, body)


def _evaluation_line(step: int, evaluation: Mapping[str, float | int | str | None]) -> str:
    shown = {
        key.removeprefix("eval_"): value
        for key, value in evaluation.items()
        if not key.endswith(("runtime", "per_second")) and "tokens/" not in key
    }
    values = "  ".join(
        f"{key} {format_count(value) if key.startswith('num_') else format_loss(value)}"
        for key, value in shown.items()
    )
    return f"evaluation at step {step}: {values}"


def _can_be_live(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in {"dumb", ""}:
        return False
    return stream.isatty()


# These libraries keep their records from the root logger, so each needs the handler itself.
_LIBRARIES = ("transformers", "datasets", "accelerate", "DeepSpeed", "peft")


class RankLogHandler(logging.FileHandler):
    """Appends redacted records to ``logs/rank<N>.log``.

    A record that arrives twice (from a library's logger and from the root) is written once, and a
    full disk costs the record, not the run. What trainkit itself warns of is said as well.
    """

    def __init__(self, path: Path, dist_rank: int, say: Callable[[str], None] | None) -> None:
        with explain_os_errors(path):
            super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setLevel(logging.INFO)
        layout = f"%(asctime)s rank{dist_rank} %(levelname)s %(name)s: %(message)s"
        self.setFormatter(logging.Formatter(layout))
        self._last_record: logging.LogRecord | None = None
        self._say, self._said = say, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if record is self._last_record:
            return
        self._last_record = record
        super().emit(record)
        is_ours = record.levelno >= logging.WARNING and record.name.startswith("trainkit.")
        if self._say and is_ours and (text := record.getMessage()) not in self._said:
            self._said.add(text)
            self._say(text)

    def format(self, record: logging.LogRecord) -> str:
        """The record's line, traceback included, without secrets."""
        return redact_text(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.flush()


def start_rank_log(
    path: Path, dist_rank: int, say: Callable[[str], None] | None = None
) -> RankLogHandler:
    handler = RankLogHandler(path, dist_rank, say)
    root = logging.getLogger()
    if root.level > logging.INFO or root.level == logging.NOTSET:
        # The console must stay as quiet as it was: handlers that took their calm from the root's
        # level get it themselves.
        for other in root.handlers:
            other.setLevel(max(other.level, root.level))
        root.setLevel(logging.INFO)
    root.addHandler(handler)
    for name in _LIBRARIES:
        logging.getLogger(name).addHandler(handler)
    logging.captureWarnings(True)
    return handler


def stop_rank_log(handler: RankLogHandler) -> None:
    logging.captureWarnings(False)
    for name in ("", *_LIBRARIES):
        logging.getLogger(name).removeHandler(handler)
    handler.close()
