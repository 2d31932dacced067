"""How a command starts sooner."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
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
