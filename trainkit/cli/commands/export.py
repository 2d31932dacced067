"""``trainkit export``: a trained model for another program, proved to say the same."""

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trainkit.cli.options import (
    AnyBase,
    BaseModel,
    Dtype,
    JsonObject,
    Output,
    TrustRemoteCode,
    expanded,
    note,
    run_directories,
    tell,
)
from trainkit.errors import RecipeError

app = typer.Typer()

Source = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL",
        help="A run directory, a checkpoint, an adapter, or a model directory.",
        autocompletion=run_directories,
    ),
]
GgufType = Annotated[
    Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m"],
    typer.Option("--type", help="How the weights are stored."),
]


class Kind(str, Enum):
    """A kind of conversations; typer knows no list of literals."""

    plain = "plain"
    system = "system"
    tools = "tools"
    thinking = "thinking"
    turns = "several turns"


@dataclass(frozen=True)
class Shared:
    """What every export takes."""

    base_model: BaseModel = None
    trust_remote_code: TrustRemoteCode = False
    any_base: AnyBase = False
    name: Annotated[str | None, typer.Option(help="What the server calls the model.")] = None
    min_agreement: Annotated[
        float | None,
        typer.Option(
            help="Share of greedy tokens that must be the trained model's; 0.99 for plain weights."
        ),
    ] = None
    excepted: Annotated[
        list[Kind] | None,
        typer.Option("--except", help="Prompts of this kind may differ from training's."),
    ] = None
    as_json: JsonObject = False


@app.command()
@expanded
def gguf(*, source: Source, output: Output, kind: GgufType = "f16", shared: Shared) -> None:
    """A GGUF for llama.cpp and what is built on it."""
    _export("gguf", source, output, shared, type=kind)


@app.command()
@expanded
def ollama(
    *,
    source: Source,
    output: Output,
    kind: GgufType = "q8_0",
    system: Annotated[str | None, typer.Option(help="A system prompt for all chats.")] = None,
    shared: Shared,
) -> None:
    """A GGUF and a Modelfile with the trained template, stop tokens and settings."""
    _export("ollama", source, output, shared, type=kind, system=system)


@app.command()
@expanded
def vllm(
    *,
    source: Source,
    output: Output,
    as_adapter: Annotated[
        bool, typer.Option("--as-adapter", help="Keep base and adapter apart.")
    ] = False,
    dtype: Dtype = None,
    shared: Shared,
) -> None:
    """A directory for vLLM and SGLang, and the command that serves it."""
    _export("vllm", source, output, shared, as_adapter=as_adapter, dtype=dtype)


@app.command()
@expanded
def fp8(source: Source, output: Output, shared: Shared) -> None:
    """FP8 weights and activations (compressed-tensors), made without data."""
    _export("fp8", source, output, shared)


def _export(target: str, source: str, output: Output, shared: Shared, **own: Any) -> None:
    """Write it for ``target``, with that command's own options."""
    path, agreement = output.place(), shared.min_agreement
    if agreement is not None and not 0 <= agreement <= 1:
        raise RecipeError(f"{agreement} is not between 0 and 1", where="--min-agreement")
    from trainkit.infer.locate import find_model
    from trainkit.train.quiet import quieten_libraries

    quieten_libraries()
    from trainkit.export.run import export
    from trainkit.export.source import Job

    job = Job(
        path,
        note,
        _served_name(shared.name, source),
        **own,
        any_base=shared.any_base,
        min_agreement=agreement,
        excepted=tuple(kind.value for kind in shared.excepted or ()),
    )
    paths = find_model(
        source, base_model=shared.base_model, trust_remote_code=shared.trust_remote_code
    )
    certificate = export(target, paths, job)
    tell(certificate, shared.as_json, *_summary(path, certificate))


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


def _summary(target: Path, certificate: dict[str, Any]) -> list[str]:
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
    return [*lines, f"serve it: {certificate['command']}"]
