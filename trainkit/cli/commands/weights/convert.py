"""``trainkit convert``: checkpoints of one layout into another, proved to be the same function."""

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from trainkit.cli import output
from trainkit.cli.output import echo
from trainkit.errors import RecipeError

app = typer.Typer(no_args_is_help=True, help="Convert checkpoints between layouts.")


class Dtype(str, Enum):
    """What weights can be stored as."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class GlmLayout(str, Enum):
    """Where GLM-4's weights can go back to."""

    glm = "glm"
    chatglm = "chatglm"


Source = Annotated[Path, typer.Argument(metavar="SRC", help="Model or adapter directory.")]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Store the weights so; by default as in the source.")
]
ShardSize = Annotated[
    str, typer.Option(metavar="SIZE", help="Largest weights file, such as 5GB or 500MB.")
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify/--no-verify", help="Compare source and result layer by layer, in float32."
    ),
]
BaseModel = Annotated[
    Path | None,
    typer.Option(help="For an adapter: the model directory that it belongs to."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback()
def convert() -> None:
    """Convert checkpoints between layouts."""


@app.command("glm4-to-qwen2")
def glm4_to_qwen2(
    source: Source,
    target: output.Argument = None,
    out: output.Option = None,
    dtype: DtypeOption = None,
    shard_size: ShardSize = "5GB",
    verify: Verify = True,
    base_model: BaseModel = None,
    as_json: AsJson = False,
) -> None:
    """Turn GLM-4-9B (remote-code or transformers layout) into a Qwen2 that computes the same."""
    _run(
        source,
        output.output_of(target, out),
        "qwen2",
        dtype,
        shard_size,
        verify,
        base_model,
        as_json,
    )


@app.command("qwen2-to-glm4")
def qwen2_to_glm4(
    source: Source,
    target: output.Argument = None,
    out: output.Option = None,
    layout: Annotated[
        GlmLayout, typer.Option(help="transformers' glm, or the remote-code chatglm.")
    ] = GlmLayout.glm,
    dtype: DtypeOption = None,
    shard_size: ShardSize = "5GB",
    verify: Verify = True,
    base_model: BaseModel = None,
    as_json: AsJson = False,
) -> None:
    """Turn a converted (and trained) Qwen2 back into GLM-4."""
    _run(
        source,
        output.output_of(target, out),
        layout.value,
        dtype,
        shard_size,
        verify,
        base_model,
        as_json,
    )


def _run(
    source: Path,
    target: Path,
    layout: str,
    dtype: Dtype | None,
    shard_size: str,
    verify: bool,
    base_model: Path | None,
    as_json: bool,
) -> None:
    size = parse_shard_size(shard_size)
    from trainkit.checkpoint.weights.adapter import is_adapter
    from trainkit.train.log.quiet import quieten_libraries

    quieten_libraries()
    if is_adapter(source):
        row = _convert_adapter(source, target, layout, base_model)
    else:
        from trainkit.checkpoint.convert.convert import ConvertOptions, convert_model

        options = ConvertOptions(None if dtype is None else dtype.value, size, verify)
        done = convert_model(source, target, layout, options, progress=_say)
        row = {"target": str(target), "num_tensors": done.num_tensors}
        if done.proof is not None:
            row["max_logit_error"] = done.proof.max_logit_error
            row["max_logit"] = done.proof.max_logit
            row["max_position"] = done.proof.positions[-1]
    echo(json.dumps(row) if as_json else _summary(row))


def _convert_adapter(
    source: Path, target: Path, layout: str, base_model: Path | None
) -> dict[str, Any]:
    from trainkit.checkpoint.convert.convert_adapter import convert_adapter

    if base_model is None:
        raise RecipeError(
            "an adapter is converted by the sizes of the model that it belongs to",
            where=str(source),
            fix="give that model's directory with --base-model",
        )
    number = convert_adapter(source, target, base_model, layout)
    return {"target": str(target), "num_modules": number}


def parse_shard_size(text: str) -> int:
    """Bytes of ``--shard-size``.

    Raises:
        RecipeError: it is not a size.
    """
    from trainkit.checkpoint.weights.writer import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise RecipeError(str(error), where="--shard-size") from None


def _summary(row: dict[str, Any]) -> str:
    if "num_modules" in row:
        return f"{row['target']}: {row['num_modules']} adapted modules"
    text = f"{row['target']}: {row['num_tensors']} tensors"
    if "max_logit_error" in row:
        text += (
            f"; logits differ by at most {row['max_logit_error']:.1e} of {row['max_logit']:.3g} "
            f"up to position {row['max_position']}"
        )
    return text


def _say(line: str) -> None:
    echo(line, err=True)
