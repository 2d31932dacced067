"""The ``trainkit`` command: a table of subcommands, each imported when it is called.

``trainkit --help`` reads the table only. A command is a function, or a ``typer.Typer`` with
subcommands, in a module of this package; to add one, add a row.
"""

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from trainkit.cli.arguments import normalize
from trainkit.cli.failures import report_failure
from trainkit.cli.options import echo
from trainkit.errors import StoppedError
from trainkit.version import __version__


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    Attributes:
        target: ``module:attribute`` of the command, in ``trainkit.cli.commands``.
        help: its line in the help.
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
        "weights:checkpoint_app",
        "Check that checkpoints are as they were written.",
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
        "faults:diagnose",
        "Name what made a step's loss or gradient NaN, infinite or spike.",
    ),
    "compare": Entry("runs:compare", "Compare runs, with what chance would do."),
    "doctor": Entry("machine:doctor", "Check that this machine is fit to train."),
    "bench": Entry("machine:bench_app", "Measure trainkit and its peers side by side."),
    "plot": Entry("runs:plot", "Draw the curves of runs over one another."),
}


class LazyCommand(TyperCommand):
    """Stands for a command in the help; becomes the command when it is called."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name=name, help=entry.help)
        self.entry = entry

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """The context of the real command, which click then invokes."""
        return self.load().make_context(*args, **extra)

    def load(self) -> Any:
        """Import the command; bitsandbytes has its say on a machine without a GPU otherwise."""
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        module, _, attribute = self.entry.target.partition(":")
        command = getattr(importlib.import_module(f"trainkit.cli.commands.{module}"), attribute)
        if isinstance(command, typer.Typer):
            command.rich_markup_mode = None
            return typer.main.get_group(command)
        single = typer.Typer(rich_markup_mode=None, add_completion=False)
        settings = {"ignore_unknown_options": self.entry.passes_on}
        single.command(name=self.name, context_settings=settings)(command)
        return typer.main.get_command(single)


class TableGroup(TyperGroup):
    """A group whose commands are the rows of the table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update({name: LazyCommand(name, entry) for name, entry in COMMANDS.items()})


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

    Args:
        argv: the arguments after ``trainkit``; those of the process by default.

    Returns:
        The exit code: 0, 1 for a failed run, 2 for a bad recipe, data or option, 75 for a run
        that a signal stopped, 130 for Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    served = _serve_shell(arguments)
    if served is not None:
        return served
    # Before torch is imported. Its threads would spin while they wait for each other: where other
    # programs need the processor, too, a small model then trained at a tenth of the speed.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # For processes that libraries start: none imports from the user's folder.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        typer.main.get_command(app).main(
            args=_normalized(arguments), prog_name="trainkit", obj=tuple(arguments)
        )
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except (Exception, KeyboardInterrupt, StoppedError) as error:
        return report_failure(error)
    return 0


_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
_COMPLETION = ("--show-completion", "--install-completion")


def _serve_shell(arguments: Sequence[str]) -> int | None:
    """``--show-completion zsh``: typer goes by the shell that runs, and passes over the name.

    Returns:
        The exit code; None where the arguments are something else.
    """
    if len(arguments) != 2 or arguments[0] not in _COMPLETION or arguments[1].startswith("-"):
        return None
    from typer._completion_shared import get_completion_script, install

    option, shell = arguments
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


def _normalized(arguments: Sequence[str]) -> list[str]:
    command = COMMANDS.get(arguments[0]) if arguments else None
    return list(arguments) if command and command.passes_on else normalize(arguments)


if __name__ == "__main__":
    sys.exit(main())
