"""The errors trainkit raises on purpose: what happened, where, and what to do about it.

The command line prints them without a traceback and exits with their code. Anything else that
escapes is a bug.
"""

import signal
from typing import Any


class TrainkitError(Exception):
    """A failure a user can act on.

    Args:
        what: what happened, in one sentence, with the value that broke the rule and the rule.
        where: where to look: ``file:line``, a recipe key, a directory.
        fix: what to do about it.
    """

    exit_code = 1
    is_told_elsewhere = False
    """Another process prints the same."""

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        # A sentence may begin with the key that it is about.
        place = f"{where}: " if where and not what.startswith(where) else ""
        advice = f"\n  fix: {fix}" if fix else ""
        super().__init__(f"{place}{what}{advice}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.what, self.where, self.fix)


def _rebuilt(
    kind: type[TrainkitError], what: str, where: str | None, fix: str | None
) -> TrainkitError:
    return kind(what, where=where, fix=fix)


class StoppedError(BaseException):
    """A signal ended the run. Like KeyboardInterrupt no failure, so not an Exception.

    Args:
        number: of the signal.
        reason: for the user and ``status.json``.
        is_abort: nothing was saved, because it came a second time.
    """

    def __init__(self, number: int, reason: str, *, is_abort: bool = False) -> None:
        super().__init__(reason)
        self.number = number
        self.is_abort = is_abort

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, as shells have it; 75 (try again) for others; 128 + signal if aborted."""
        if self.is_abort or self.number == signal.SIGINT:
            return 128 + self.number
        return PREEMPTED


PREEMPTED = 75
"""Exit code of a run that a signal stopped: nothing failed, the same command goes on with it."""


class RecipeError(TrainkitError):
    """The recipe, an override or a command-line option is wrong."""

    exit_code = 2


class DataError(TrainkitError):
    """The data cannot be used as it is."""

    exit_code = 2


class ModelError(TrainkitError):
    """The model or tokenizer directory cannot be used as it is."""

    exit_code = 2


class PatchError(TrainkitError):
    """A kernel cannot be put into a model: a target is missing or already taken."""


class ProofError(TrainkitError):
    """A shortcut does not compute what the plain model does; kernels.json gets ``rows``."""

    part = ""
    """Of kernels.json."""
    rows: list[dict[str, object]]


class CheckpointError(TrainkitError):
    """A checkpoint is incomplete, damaged, hostile, or does not fit the run."""


class ResumeRefusedError(CheckpointError):
    """A run may not be continued in this way; nothing of it was touched."""


class RunDirectoryError(TrainkitError):
    """The run directory cannot be made or written."""

    exit_code = 2
