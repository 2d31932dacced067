"""How a command starts sooner: importing without what this run may never use."""

import contextlib
import functools
import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any


def import_quickly() -> None:
    """Import what reads models without what this command will not ask for."""
    import_quantisation()
    leave_others_out()
    leave_deepspeed_out()


def import_quantisation() -> None:
    """Import bitsandbytes, which peft imports, without torch's compiler.

    It decorates a few functions for CPUs with ``torch.compile``, and that alone imports the whole
    compiler: more than a second, for functions that a GPU never calls. They are compiled when they
    are called for the first time instead.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    import torch

    at_once = torch.compile
    torch.compile = functools.partial(_compiled_when_called, at_once)
    try:
        # What is wrong with it is said by who needs it: peft imports it again.
        with contextlib.suppress(ImportError, OSError, RuntimeError):
            importlib.import_module("bitsandbytes")
    finally:
        torch.compile = at_once


def leave_others_out() -> None:
    """Let transformers import without packages that it takes along wherever they are installed.

    Drafts by an assistant model ask for scikit-learn, losses of object detection for scipy, its own
    Trainer for datasets: with pandas some thousand files, and a run does none of this.
    """
    from transformers import utils

    for package in ("sklearn", "scipy", "datasets"):
        vars(utils)[f"is_{package}_available"] = lambda: False


def leave_deepspeed_out() -> None:
    """Let accelerate ask for DeepSpeed's engine only where DeepSpeed was imported.

    It imports all of DeepSpeed, a second or two, to see whether a model is wrapped in that engine.
    No model can be before somebody has imported it, which a run that shards with DeepSpeed does.
    """
    from accelerate.utils import other

    vars(other)["is_deepspeed_available"] = lambda: "deepspeed" in sys.modules


def _compiled_when_called(
    compiled: Callable[..., Any], function: Callable[..., Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """``torch.compile(function, **options)``, or the decorator of these options, put off."""
    if function is None:
        return functools.partial(_compiled_when_called, compiled, **options)
    made: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        if not made:
            made.append(compiled(function, **options))
        return made[0](*args, **keywords)

    return call


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Within, nobody searches for garbage; what is there at the end is not searched later either.

    The libraries that a model needs make about a million objects, and all of them stay. To search
    them again and again, the last time when the process ends, was a third of a short command.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
            if not gc.get_freeze_count():  # once: a process that goes on may have made garbage
                gc.freeze()
