"""How a failed command ends: one clear message and an exit code, a traceback for a bug only."""

import errno
import os
import shutil
import sys
import textwrap
import traceback

import typer

from trainkit.errors import RecipeError, StoppedError, TrainkitError
from trainkit.terminal import visible

INTERRUPTED = 130
"""What shells give to a process that Ctrl-C ended."""

_OUT_OF_MEMORY = (
    "the GPU is out of memory. Lower training.per_device_train_batch_size (global_batch_size keeps "
    "the optimizer's batch) or data.max_length, or set recompute: full, "
    "deepspeed: zero3, or lora: {quantize: nf4}"
)
_NO_NETWORK = (
    "the model hub cannot be reached. Check the network; set training.push_to_hub: false, or give "
    "directories for the model and the data, to do without it"
)
_NOT_COMPILED = (
    "torch.compile could not compile the model. Leave out training.torch_compile, or take another "
    "training.torch_compile_backend"
)
_OF_THE_MACHINE = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
)
# By name: comparing with the classes would import torch or a client of the network.
_EXPLAINED = {
    "OutOfMemoryError": _OUT_OF_MEMORY,
    "ConnectError": _NO_NETWORK,
    "ConnectTimeout": _NO_NETWORK,
    "OfflineModeIsEnabled": _NO_NETWORK,
    "BackendCompilerFailed": _NOT_COMPILED,
    "InductorError": _NOT_COMPILED,
    "TorchRuntimeError": _NOT_COMPILED,
}
# Where the last lines of ours or transformers' are: what is refused there is a setting.
_SETTINGS_OF = {
    "/deepspeed/runtime/config": "deepspeed",
    "/deepspeed/runtime/zero/config": "deepspeed",
    "/transformers/integrations/deepspeed": "deepspeed",
    "/accelerate/utils/deepspeed": "deepspeed",
}
_BUG = (
    "this is a bug in trainkit or in a library below it. Please report it with the lines above and "
    "the run directory's environment.json"
)


def report_failure(error: BaseException) -> int:
    """Tell the user on stderr what happened.

    Args:
        error: what ended the command.

    Returns:
        The exit code.
    """
    dist_rank = os.environ.get("RANK", "0")
    prefix = "" if dist_rank == "0" else f"rank {dist_rank}: "
    if isinstance(error, StoppedError):
        _say_stopped(error, dist_rank)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, TrainkitError):
        # The recipe is the same on every rank of a host, so each host prints its errors once.
        is_first = os.environ.get("LOCAL_RANK", dist_rank) == "0"
        is_known = error.is_told_elsewhere or (isinstance(error, RecipeError) and not is_first)
        if not is_known:
            _say(str(error), prefix)
        return error.exit_code
    if isinstance(error, ImportError) and "install" in str(error):
        _say(str(error), prefix)  # transformers names the package that an option needs
        return 2
    if isinstance(error, ImportError) and not (error.name or "").startswith("trainkit"):
        _say(_misfit(error), prefix)
        return 1
    settings = _settings_at(error)
    if settings is not None:
        _say(
            f"{settings}: these settings are refused: {error}\n  fix: change what is named", prefix
        )
        return 2
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        _say(f"{error.filename or 'the system'}: {error.strerror}\n  fix: correct that", prefix)
        return 1
    traceback.print_exception(error, file=sys.stderr)
    _say(_EXPLAINED.get(type(error).__name__, _BUG), prefix)
    return 1


def _misfit(error: ImportError) -> str:
    """What a package that is missing, broken or of the wrong version means for the user."""
    package = (error.name or "").partition(".")[0]
    fix = "install trainkit again as before, with --force-reinstall: that brings versions that fit"
    if isinstance(error, ModuleNotFoundError) and package:
        return f"the environment lacks the Python package {package}\n  fix: {fix}"
    named = f" at {package}" if package else ""
    return f"the installed packages do not fit each other{named}: {error}\n  fix: {fix}"


def _settings_at(error: BaseException) -> str | None:
    """The key whose settings a library was reading when it failed."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if any("/transformers/integrations/integration_utils" in file for file in files):
        return "training.report_to"  # a tracker, which may raise anything
    if not isinstance(error, ValueError | TypeError | AttributeError | AssertionError | KeyError):
        return None
    found = [key for part, key in _SETTINGS_OF.items() if any(part in file for file in files)]
    return found[0] if found else None


def _say_stopped(error: StoppedError, dist_rank: str) -> None:
    if dist_rank == "0":
        typer.echo(visible(str(error)), err=True)


def _say(message: str, prefix: str) -> None:
    """Print ``error: message``; on a terminal in colour and wrapped between words."""
    lines = visible(f"{prefix}{message}").splitlines()
    if not sys.stderr.isatty():
        typer.echo("\n".join([f"error: {lines[0]}", *lines[1:]]), err=True)
        return
    width = shutil.get_terminal_size().columns
    lead = typer.style("error:", fg="red", bold=True)
    wrapped = [_wrap(line, width) for line in [f"error: {lines[0]}", *lines[1:]]]
    typer.echo("\n".join(wrapped).replace("error:", lead, 1), err=True)


def _wrap(line: str, width: int) -> str:
    """Break between words, keeping the indentation; paths and file:line are not broken."""
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line,
        width,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
