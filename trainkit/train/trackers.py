"""The runs of trackers (``training.report_to``): a continued run goes on in the same ones.

A tracker would begin a run of its own at every start, and the curve of one run would be in several.
The names of its runs are kept in ``trackers.json``; a continued run hands them back through the
variables that the trackers themselves read. What the environment says already wins.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from trainkit.run.directory import RunDirectory
from trainkit.run.files import read_json
from trainkit.train.hooks import Hook, LoopState

FILE = "trackers.json"


@dataclass(frozen=True)
class Tracker:
    """A row of the table.

    Attributes:
        variables: what hands a name back; ``{}`` stands for it.
    """

    package: str
    run_id: Callable[[Any], str]
    variables: Mapping[str, str]


TRACKERS: Mapping[str, Tracker] = {
    "wandb": Tracker(
        "wandb", lambda wandb: wandb.run.id, {"WANDB_RUN_ID": "{}", "WANDB_RESUME": "allow"}
    ),
    "mlflow": Tracker(
        "mlflow", lambda mlflow: mlflow.active_run().info.run_id, {"MLFLOW_RUN_ID": "{}"}
    ),
    "swanlab": Tracker(
        "swanlab",
        lambda swanlab: swanlab.get_run().id,
        {"SWANLAB_RUN_ID": "{}", "SWANLAB_RESUME": "allow"},
    ),
}
"""Trackers whose runs can be gone on with. TensorBoard shows the files of one directory together;
of others each start is a run of its own."""


def go_on_with(run: RunDirectory, args: TrainingArguments, *, goes_on: bool) -> list[str]:
    """Have trackers go on with the runs that an earlier start began, if there was one.

    Returns:
        Notes for the console: which goes on, and which begins another run.
    """
    known = read_json(run.root / FILE) or {}
    notes = []
    for name in args.report_to if goes_on else ():
        if name in known and name in TRACKERS:
            for variable, value in TRACKERS[name].variables.items():
                os.environ.setdefault(variable, value.format(known[name]))
            notes.append(f"{name} goes on with its run {known[name]}")
        elif name != "tensorboard":
            notes.append(f"{name} begins another run: it does not say how to go on with one")
    if "swanlab" in args.report_to:
        swanlab = importlib.import_module("swanlab")
        try:  # from 0.10 on it raises where there is no run, and transformers waits for None
            swanlab.get_run()
        except RuntimeError:
            given = {"project": "PROJECT", "id": "RUN_ID", "resume": "RESUME", "mode": "MODE"}
            settings = {key: os.environ.get(f"SWANLAB_{word}") for key, word in given.items()}
            settings["experiment_name"] = args.run_name
            swanlab.init(**{key: value for key, value in settings.items() if value})
    return notes


class RememberTrackers(Hook):
    """Keeps the names of the trackers' runs, once they have begun."""

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Ask each that tracks; the trackers' own callbacks come first."""
        directory = loop.run.directory
        found = read_json(directory.root / FILE) or {}
        for name, tracker in TRACKERS.items():
            package = sys.modules.get(tracker.package)
            if name in (loop.args.report_to or ()) and package is not None:
                try:
                    found[name] = tracker.run_id(package)
                except AttributeError:
                    continue  # it is switched off, or another version keeps the name elsewhere
        if found:
            directory.write_json(directory.root / FILE, found)
