"""What the options of ``trainkit sft`` mean: recipe values some, the rest ``SftOptions``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SftOptions:
    """What a run takes besides its recipe.

    Attributes:
        resume: the run or checkpoint directory to continue; None for a new run.
        allow_changed: what may differ from the run that is continued: keys, or ``all``.
        overrides: what this start was given besides the recipe and what is recorded.
        dry_run: train one optimizer step in a temporary directory, then stop.
        output_dir: the run directory to make, or None for a new one under ``train_model/``.
        command: the command line, to be kept in ``command.sh``.
        force: train although the estimate says that the memory is not enough.
        rows: takes each row of the log, and the summary at the end; what people read stays on
            standard error.
        began: when the command was given, on the clock of ``trainkit.run.stages``; None is now.
    """

    resume: Path | None = None
    allow_changed: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    output_dir: Path | None = None
    command: tuple[str, ...] = ()
    force: bool = False
    rows: Callable[[Mapping[str, Any]], None] | None = None
    began: float | None = None


def option_values(options: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe values that command-line options set.

    Args:
        options: option to value: ``{"--deepspeed": "zero2", "--replace-kernel": True}``. None means
            not given.
        recipe: the values so far. ``--replace-kernel`` leaves a mapping of single ops alone.

    Returns:
        Option to ``(dotted key, value)``, only for those that change something.
    """
    values: dict[str, Any] = {}
    for option, value in options.items():
        if value is None:
            continue
        if option == "--replace-kernel":
            if not (value and isinstance(recipe.get("kernels"), Mapping)):
                values[option if value else "--no-replace-kernel"] = ("kernels", value)
        elif option == "--pretrain":
            if value:
                values[option] = ("data.mask", "none")
        elif option == "--deepspeed":
            values[option] = ("parallel.shard", value)
        elif option == "--output-dir":
            values[option] = ("training.output_dir", str(value))
        else:
            raise ValueError(f"no option called {option}")
    return values
