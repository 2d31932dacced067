"""What ``chat`` and ``generate`` share: their options, and the way to a loaded model."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainkit.cli.app import without_collection
from trainkit.cli.completion import run_directories
from trainkit.cli.output import echo

if TYPE_CHECKING:
    from trainkit.infer.engine import Engine
    from trainkit.infer.locate import ModelPaths


class LoadDtype(str, Enum):
    """What weights can be in memory."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Base(str, Enum):
    """How a base under an adapter is held."""

    auto = "auto"
    none = "none"
    nf4 = "nf4"
    fp8 = "fp8"


Model = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL",
        help="A run directory, a checkpoint, an adapter, or a model.",
        autocompletion=run_directories,
    ),
]
Adapter = Annotated[Path | None, typer.Option(help="An adapter to put over the model.")]
System = Annotated[str | None, typer.Option(help="The system prompt.")]
MaxNewTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")]
Temperature = Annotated[float | None, typer.Option(help="Sample; lower is closer to greedy.")]
TopP = Annotated[float | None, typer.Option(help="Sample from this share of the likelihood.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many tokens; 0 is all.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1, repeats are rarer.")]
Beams = Annotated[int, typer.Option("--beams", help="Search with this many beams.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the sampling.")]
DtypeOption = Annotated[LoadDtype, typer.Option(help="Of the weights in memory.")]
Quantize = Annotated[
    Base,
    typer.Option(
        help="How the model's linear layers are held: none, as they were saved; nf4, in 4 bits; "
        "fp8, in 8, those that an fp8 run had so; auto: nf4 where the adapter was trained over it."
    ),
]
AnyBase = Annotated[
    bool, typer.Option("--any-base", help="Put the adapter over other weights than its own base.")
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify/--no-verify", help="Compare the model's files with their manifest before loading."
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1; by default the GPU if there is one.")]


@dataclass(frozen=True)
class Trust:
    """What is taken on trust.

    Attributes:
        verify: compare the model's files with their manifest.
        any_base: take another base than an adapter's own.
    """

    verify: bool
    any_base: bool


@dataclass(frozen=True)
class Held:
    """How the weights are in memory.

    Attributes:
        dtype: of those that are not quantised.
        quantize: how linear layers are.
        device: where they are.
    """

    dtype: LoadDtype
    quantize: Base
    device: str

    def settings(self) -> dict[str, str]:
        """What answers depend on, as a file of answers records it."""
        if self.quantize is Base.auto:
            return {"dtype": self.dtype.value}
        return {"dtype": self.dtype.value, "quantize": self.quantize.value}


@without_collection()
def load(paths: "ModelPaths", held: Held, system: str | None, trust: Trust) -> "Engine":
    """Load a found model."""
    from trainkit.train.log.quiet import quieten_libraries

    quieten_libraries()  # first: some libraries speak when they are imported
    from trainkit.infer.engine import load_engine
    from trainkit.infer.locate import run_settings

    def say(line: str) -> None:
        echo(line, err=True)

    quantize = None if held.quantize is Base.none else held.quantize.value
    if held.quantize is Base.auto:
        quantize = run_settings(paths.run).quantize if paths.adapter is not None else None
        if quantize == "fp8":
            say("the adapter was trained over a base in fp8, and answers over it in 16 bits here;")
            say("--quantize fp8 holds it as it was in training")
            quantize = None
    return load_engine(
        paths,
        dtype=held.dtype.value,
        quantize=quantize,
        device=held.device,
        system=system,
        verify=trust.verify,
        any_base=trust.any_base,
        say=say,
    )
