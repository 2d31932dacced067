"""How a command starts sooner: importing without what this run may never use."""

import contextlib
import functools
import gc
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any


def import_quickly() -> None:
    """Import what reads models without what this command will not ask for."""
    import_quantisation()
    leave_others_out()
    leave_deepspeed_out()


class Later(types.ModuleType):
    """A package that is executed when something of it is asked for, by whoever it is.

    What `importlib.util.LazyLoader` makes is executed by the next ``import`` of it.
    """

    _lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            spec = self.__spec__
            if "__path__" not in vars(self) and spec is not None and spec.loader is not None:
                self.__path__ = spec.submodule_search_locations or []
                spec.loader.exec_module(self)
                self.__class__ = types.ModuleType  # type: ignore[assignment]
        return types.ModuleType.__getattribute__(self, name)


def leave_torch_for_later() -> None:
    """Import tokenizers and configurations without torch, which then is there when it is used.

    transformers imports it with them, to turn the name of a configuration's dtype into torch's.
    """
    spec = importlib.util.find_spec("torch")
    if "torch" in sys.modules or spec is None:
        return
    sys.modules["torch"] = later = Later("torch")
    vars(later).update(vars(importlib.util.module_from_spec(spec)))
    del later.__path__  # the import of a part of it executes it, too
    from transformers import configuration_utils

    vars(configuration_utils)["is_torch_available"] = lambda: type(later) is not Later


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


_freeze_once = functools.cache(gc.freeze)


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
            _freeze_once()  # no more: a process that goes on may have made garbage
