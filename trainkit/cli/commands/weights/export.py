"""``trainkit export``: a trained model for another program, proved to say the same."""

import functools
import inspect
import json
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from trainkit.cli import output
from trainkit.cli.arguments import BaseModel, TrustRemoteCode
from trainkit.cli.commands.weights.convert import AsJson, DtypeOption
from trainkit.cli.completion import run_directories
from trainkit.cli.output import echo
from trainkit.errors import RecipeError

app = typer.Typer(no_args_is_help=True, help="Write a trained model for another program.")


class GgufType(str, Enum):
    """How the weights of a GGUF are stored."""

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q6_k = "q6_k"
    q5_k_m = "q5_k_m"
    q4_k_m = "q4_k_m"


class Kind(str, Enum):
    """A kind of conversations."""

    plain = "plain"
    system = "system"
    tools = "tools"
    thinking = "thinking"
    turns = "several turns"


Source = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL",
        help="A run directory, a checkpoint, an adapter, or a model directory.",
        autocompletion=run_directories,
    ),
]
AnyBase = Annotated[
    bool,
    typer.Option("--any-base", help="Merge an adapter into other weights than its own base."),
]
MinAgreement = Annotated[
    float | None,
    typer.Option(
        help="Share of greedy tokens that must be the trained model's; 0.99 for plain weights."
    ),
]
Except = Annotated[
    list[Kind] | None,
    typer.Option("--except", help="Prompts of this kind may differ from training's."),
]
Name = Annotated[str | None, typer.Option(help="What the server calls the model.")]
Type = Annotated[GgufType, typer.Option("--type", help="How the weights are stored.")]


@app.callback()
def export() -> None:
    """Write a trained model for another program, with the proof that it says the same."""


def _export(
    source: Source,
    target: output.Argument = None,
    out: output.Option = None,
    base_model: BaseModel = None,
    trust_remote_code: TrustRemoteCode = False,
    any_base: AnyBase = False,
    name: Name = None,
    min_agreement: MinAgreement = None,
    excepted: Except = None,
    as_json: AsJson = False,
    *,
    kind: str,
    own: dict[str, Any],
) -> None:
    """What every export does; all but the last two are options of each command."""
    path = output.output_of(target, out)
    if min_agreement is not None and not 0 <= min_agreement <= 1:
        raise RecipeError(f"{min_agreement} is not between 0 and 1", where="--min-agreement")
    from trainkit.infer.locate import find_model, run_settings
    from trainkit.train.log.quiet import quieten_libraries

    quieten_libraries()
    from trainkit.export.run import ExportOptions, Job, export
    from trainkit.export.source import Held

    options = ExportOptions(
        **own,
        name=_served_name(name, source),
        min_agreement=min_agreement,
        excepted=tuple(each.value for each in excepted or ()),
    )
    paths = find_model(source, base_model=base_model, trust_remote_code=trust_remote_code)
    settings = run_settings(paths.run)
    held = Held(settings.quantize, settings.dtype, any_base)
    certificate = export(kind, paths, Job(options, path, _say), held)
    echo(json.dumps(certificate) if as_json else _summary(path, certificate))


_SHARED = [each for each in inspect.signature(_export).parameters.values() if each.kind.value == 1]


def _command(own: Callable[..., dict[str, Any]]) -> None:
    """Add a command: its own options, which it makes ``ExportOptions`` of, and the shared ones."""
    options = inspect.signature(own).parameters
    given = [*_SHARED[:3], *options.values(), *_SHARED[3:]]

    @functools.wraps(own)
    def command(**values: Any) -> None:
        mine = own(**{key: values.pop(key) for key in options})
        _export(**values, kind=own.__name__, own=mine)

    del command.__wrapped__
    command.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in given}
    app.command()(command)


@_command
def gguf(kind: Type = GgufType.f16) -> dict[str, Any]:
    """A GGUF for llama.cpp and what is built on it."""
    return {"type": kind.value}


@_command
def ollama(
    kind: Type = GgufType.q8_0,
    system: Annotated[str | None, typer.Option(help="A system prompt for all chats.")] = None,
) -> dict[str, Any]:
    """A GGUF and a Modelfile with the trained template, stop tokens and settings."""
    return {"type": kind.value, "system": system}


@_command
def vllm(
    as_adapter: Annotated[
        bool, typer.Option("--as-adapter", help="Keep base and adapter apart.")
    ] = False,
    dtype: DtypeOption = None,
) -> dict[str, Any]:
    """A directory for vLLM and SGLang, and the command that serves it."""
    return {"as_adapter": as_adapter, "dtype": None if dtype is None else dtype.value}


@_command
def fp8() -> dict[str, Any]:
    """FP8 weights and activations (compressed-tensors), made without data."""
    return {}


@_command
def awq(
    group_size: Annotated[
        int, typer.Option(help="Inputs that share a scale: 128, 64 or 32.")
    ] = 128,
) -> dict[str, Any]:
    """Weights in 4 bits (AWQ), with scales searched over the run's own data."""
    if group_size not in (128, 64, 32):
        raise RecipeError(f"{group_size} is not 128, 64 or 32", where="--group-size")
    return {"group_size": group_size}


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _served_name(name: str | None, source: str) -> str:
    """What was asked for, or what is safe of the source's own name."""
    if name is not None:
        if _NAME.fullmatch(name) is None:
            raise RecipeError(
                f"{name!r} is not letters, digits, dots, dashes and underscores (64 at most)",
                where="--name",
            )
        return name
    kept = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source).absolute().name).strip("-._")
    return kept[:64] or "model"


def _summary(target: Path, certificate: dict[str, Any]) -> str:
    prompts, answers = certificate["prompts"], certificate["answers"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in prompts["kinds"].items())
    different = {kind: count for kind, count in prompts["excepted"].items() if count}
    lines = [
        f"{target}: {prompts['num_equal']} of {prompts['num_prompts']} prompts are training's, "
        f"token by token ({kinds})",
        f"{answers['agreement']:.1%} of {answers['num_tokens']} greedy tokens are the trained "
        f"model's; {answers['divergence_nats']:.1e} nats a token from it "
        f"({certificate['read_with']})",
    ]
    lines += [f"{count} prompts with {kind} differ" for kind, count in different.items()]
    adapter = certificate["adapter"]
    if adapter is not None:
        lines.append(
            f"the adapter is in it: {adapter['effect_nats']:.1e} nats a token and "
            f"{adapter['tokens_changed']:.0%} of the tokens away from the base"
        )
    lines += [f"note: {note}" for note in certificate["notes"]]
    return "\n".join([*lines, f"serve it: {certificate['command']}"])


def _say(line: str) -> None:
    echo(line, err=True)
