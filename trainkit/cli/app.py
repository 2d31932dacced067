"""The ``trainkit`` command: a table of subcommands, each imported when it is called.

``trainkit --help`` reads the table only. A command is a function, or a ``typer.Typer`` with
subcommands, in a module of ``trainkit.cli.commands``; to add one, add a row.
"""

import errno
import importlib
import logging
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from trainkit.cli.options import echo
from trainkit.errors import RecipeError, StoppedError, TrainkitError
from trainkit.terminal import visible
from trainkit.version import __version__


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    Attributes:
        target: ``module:attribute`` of the command, in ``trainkit.cli.commands``.
        passes_on: options that it does not know are another command's, and are left as they are.
    """

    target: str
    help: str
    passes_on: bool = False


COMMANDS: dict[str, Entry] = {
    "new": Entry("new:new", "Write a recipe to start from."),
    "sft": Entry("sft:sft", "Train a model as a recipe says."),
    "launch": Entry(
        "launch:launch",
        "Start sft on every GPU of one or more hosts, and again after a crash.",
        passes_on=True,
    ),
    "estimate": Entry("config:estimate", "Say what a recipe takes: memory and time."),
    "config": Entry("config:app", "Show what a recipe means, value by value."),
    "data": Entry("data:app", "Look at the data, judge it, measure it."),
    "kernels": Entry("machine:kernels_app", "Check the kernels against plain torch."),
    "checkpoint": Entry(
        "weights:checkpoint_app", "Check that checkpoints are as they were written."
    ),
    "chat": Entry("chat:chat", "Talk to a trained model in the terminal."),
    "generate": Entry("chat:generate", "Answer a file of prompts."),
    "eval": Entry("evaluate:evaluate", "Measure a model on benchmarks."),
    "merge": Entry("weights:merge", "Make one plain model of an adapter or shards."),
    "convert": Entry("weights:convert_app", "Convert GLM-4 checkpoints to Qwen2 and back."),
    "export": Entry(
        "export:app", "Write a trained model for llama.cpp, Ollama or vLLM, with a proof."
    ),
    "runs": Entry("runs:runs", "List runs: state, step, loss, speed, age."),
    "show": Entry("runs:show", "Show one run and what can be done with it."),
    "watch": Entry("runs:watch", "Follow a run from another terminal or host."),
    "verify-resume": Entry(
        "faults:verify_resume",
        "Kill and resume a short run of a recipe here, and compare every byte.",
    ),
    "diagnose": Entry(
        "faults:diagnose", "Name what made a step's loss or gradient NaN, infinite or spike."
    ),
    "compare": Entry("runs:compare", "Compare runs, with what chance would do."),
    "doctor": Entry("machine:doctor", "Check that this machine is fit to train."),
    "bench": Entry("machine:bench_app", "Measure trainkit and its peers side by side."),
    "plot": Entry("runs:plot", "Draw the curves of runs over one another."),
}


class LazyCommand(TyperCommand):
    """Stands for a row in the help; becomes the command when it is called."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        return self.load().make_context(*args, **extra)

    def load(self) -> Any:
        """Import the command; bitsandbytes has its say on a machine without a GPU otherwise."""
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        entry = COMMANDS[str(self.name)]
        module, _, attribute = entry.target.partition(":")
        command = getattr(importlib.import_module(f"trainkit.cli.commands.{module}"), attribute)
        if isinstance(command, typer.Typer):
            command.rich_markup_mode = None
            command.info.help = entry.help
            command.info.no_args_is_help = True
            return _single_valued(typer.main.get_group(command))
        single = typer.Typer(rich_markup_mode=None, add_completion=False)
        settings = {"ignore_unknown_options": entry.passes_on}
        single.command(name=self.name, context_settings=settings)(command)
        return _single_valued(typer.main.get_command(single))


def _single_valued(command: Any) -> Any:
    """Refuse two values of an option that takes one, and name an override that another replaces.

    click would take the last without a word.
    """
    for inner in getattr(command, "commands", {}).values():
        _single_valued(inner)
    parse = command.parse_args

    def parse_args(context: Any, words: list[str]) -> Any:
        given: dict[str, str] = {}
        for name, word in _given_once(command, context, words):
            before = given.get(name, word)
            given[name] = word
            if before == word or context.resilient_parsing:
                continue
            if name.startswith("-"):
                what = f"{word} contradicts {before}"
                raise RecipeError(what, where="command line", fix="keep one of them")
            if os.environ.get("RANK", "0") == "0":
                echo(f"{word} replaces {before}, which stands before it", err=True)
        return parse(context, words)

    command.parse_args = parse_args
    return command


def _given_once(command: Any, context: Any, words: list[str]) -> Iterator[tuple[str, str]]:
    """Names and words of options that take one value, and of overrides, as often as they come."""
    options = [each for each in command.params if each.param_type_name == "option"]
    single = [each for each in options if not (each.multiple or each.count)]
    for option in single:
        option.multiple = True  # for this parser, which then keeps every value
    found = command.make_parser(context).parse_args([*words])[0]
    for option in single:
        option.multiple = False
        name, off = max(option.opts, key=len), option.secondary_opts
        for value in found.get(option.name) or ():
            yield name, (name if value else off[0]) if off else f"{name}={value}"
    yield from ((word.partition("=")[0], word) for word in found.get("overrides") or ())


class TableGroup(TyperGroup):
    """A group whose commands are the rows of the table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, entry in COMMANDS.items():
            self.commands[name] = LazyCommand(name=name, help=entry.help)


# Plain help: boxes of two columns cannot be read in forty characters, nor copied.
app = typer.Typer(
    cls=TableGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},  # of every command below, too
)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"trainkit {__version__}")
        raise typer.Exit


@app.callback()
def trainkit(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Fine-tune causal language models: a recipe and a messages file in, a trained model out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Returns:
        The exit code: 0, 1 for a failed run, 2 for a bad recipe, data or option, 75 for a run
        that a signal stopped, 130 for Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # A file that is opened takes the lowest free number: unless something is there, what a library
    # prints goes into the first file of the run.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if len(arguments) == 2 and arguments[0] in _COMPLETION and not arguments[1].startswith("-"):
        return _serve_shell(*arguments)
    # Before torch is imported. Its threads would spin while they wait for each other: where other
    # programs need the processor, too, a small model then trained at a tenth of the speed.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # For processes that libraries start: none imports from the user's folder.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    # Nor is a program taken from there: an empty place, or a relative one, is that folder.
    places = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(filter(os.path.isabs, places)) or os.defpath
    try:
        words = arguments
        if not (words and words[0] in COMMANDS and COMMANDS[words[0]].passes_on):
            words = normalize(words)
        typer.main.get_command(app).main(args=words, prog_name="trainkit", obj=tuple(arguments))
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except (Exception, KeyboardInterrupt, StoppedError) as error:
        return report_failure(error)
    return 0


_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
_COMPLETION = ("--show-completion", "--install-completion")


def _serve_shell(option: str, shell: str) -> int:
    """``--show-completion zsh``: typer goes by the shell that runs, and passes over the name."""
    from typer._completion_shared import get_completion_script, install

    names = {"prog_name": "trainkit", "complete_var": "_TRAINKIT_COMPLETE"}
    if shell not in _SHELLS:
        echo(f"error: {option}: there is no shell {shell!r}", err=True)
        echo(f"  fix: one of {', '.join(_SHELLS)}", err=True)
        return 2
    if option == "--show-completion":
        echo(get_completion_script(shell=shell, **names))
    else:
        _, path = install(shell=shell, **names)
        echo(f"{shell} completes trainkit's words from its next start on: {path}")
    return 0


# -- What the command line may look like before click reads it -------------------------------------


OPTIONAL_VALUES = {"sft": {"--deepspeed": "zero2", "--resume": "auto", "--allow-changed": "all"}}
"""Per command: options that may be given without a value, and what they mean then."""


def normalize(arguments: Sequence[str]) -> list[str]:
    """Rewrite a command line so that every option is spelled one way and has its value with it.

    Underscores in option names (``--replace_kernel``), options with an optional value (a bare
    ``--deepspeed``), overrides written as options (``--training.seed=1``), and the argument that
    old launchers add. What comes after ``--`` stays as it is.
    """
    command = next((word for word in arguments if not word.startswith("-")), "")
    optional, takes_overrides = OPTIONAL_VALUES.get(command, {}), command == "sft"
    end = arguments.index("--") if "--" in arguments else len(arguments)
    left, words = list(arguments[:end]), []
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            words.append(word)
        elif takes_overrides and "." in name:  # --training.seed=1 and --training.seed 1
            value = left.pop(0) if left and not equals else value
            words.append(f"{name.removeprefix('--')}={value}")
        else:
            name = name.replace("_", "-")
            is_old = takes_overrides and name == "--local-rank"
            if (is_old or name in optional) and not equals:
                value = left.pop(0) if left and _is_value(left[0]) else optional.get(name, "")
                equals = "="
            words += [] if is_old else [f"{name}{equals}{value}"]
    return [*words, *arguments[end:]]


def _is_value(word: str) -> bool:
    """Whether a word after an option belongs to it: no other option, no override, no recipe."""
    if word.startswith("-") or word.endswith((".yaml", ".yml")):
        return False
    from trainkit.recipe.document import is_override  # not for help, which needs no recipe

    return not is_override(word)


# -- How a failed command ends: one clear message and an exit code, a traceback for a bug only -----


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
_OF_THE_MACHINE = [
    getattr(errno, name) for name in ["EMFILE", "ENFILE", "ENOSPC", "EDQUOT", "EROFS", "EACCES"]
]
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
    dist_rank = os.environ.get("RANK", "0")
    prefix = "" if dist_rank == "0" else f"rank {dist_rank}: "
    if isinstance(error, StoppedError):
        if dist_rank == "0":
            echo(str(error), err=True)
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
        _say(f"{settings}: these settings are refused: {error}\n  fix: change them", prefix)
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


def _say(message: str, prefix: str) -> None:
    """Print ``error: message``; on a terminal in colour and wrapped between words.

    The indentation is kept; paths and file:line are not broken.
    """
    lines = visible(f"error: {prefix}{message}").splitlines()
    if not sys.stderr.isatty():
        typer.echo("\n".join(lines), err=True)
        return
    width = shutil.get_terminal_size().columns
    wrapped = [
        textwrap.fill(
            line,
            width,
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines
    ]
    lead = typer.style("error:", fg="red", bold=True)
    typer.echo("\n".join(wrapped).replace("error:", lead, 1), err=True)


if __name__ == "__main__":
    sys.exit(main())
