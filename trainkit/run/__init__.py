"""The run directory: metrics, environment, plots, report, console. No torch at import."""

from trainkit.redact import redact, redact_text
from trainkit.run.console import Console, start_rank_log, stop_rank_log
from trainkit.run.directory import RunDirectory
from trainkit.run.environment import capture_environment, command_script
from trainkit.run.metrics import MetricsWriter, read_metrics

__all__ = [
    "Console",
    "MetricsWriter",
    "RunDirectory",
    "capture_environment",
    "command_script",
    "read_metrics",
    "redact",
    "redact_text",
    "start_rank_log",
    "stop_rank_log",
]
