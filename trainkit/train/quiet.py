"""One voice on the terminal: libraries log to files, long preparation shows its progress."""

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator

from transformers.utils import logging as transformers_logging

from trainkit.data.sources import Progress
from trainkit.run import Console

NOTE_SECONDS = 10.0


def quieten_libraries() -> None:
    """Keep progress bars and advice of libraries off the terminal; errors still come through."""
    # Its warnings go to the rank's log; only the handler that prints them is taken away.
    transformers_logging.disable_default_handler()
    transformers_logging.set_verbosity_warning()
    transformers_logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    noisy = ("DeepSpeed", "accelerate", "peft", "datasets", "torch.distributed", "bitsandbytes")
    for name in noisy:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def tokenisation_progress(console: Console) -> Callable[[Progress], None]:
    """A callback that says every ten seconds how far the data is, and how long it will take."""
    started = last = time.monotonic()

    def report(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < NOTE_SECONDS:
            return
        last = now
        rate = progress.rows / (now - started)
        line = f"reading {progress.source}: {progress.rows} rows, {rate:.0f} a second"
        if progress.bytes_total and progress.bytes_done:
            share = progress.bytes_done / progress.bytes_total
            line += f", {share:.0%}, {(now - started) * (1 - share) / share:.0f} s left"
        console.note(line)

    return report


@contextlib.contextmanager
def trackers_ended() -> Iterator[None]:
    """End what tracks in this process here, and not at its exit, where their words go elsewhere."""
    code = 1
    try:
        yield
        code = 0
    finally:
        wandb = sys.modules.get("wandb")
        if getattr(wandb, "run", None) is not None:
            with contextlib.suppress(Exception):  # the run's own end is what counts
                wandb.finish(exit_code=code)  # type: ignore[union-attr]
