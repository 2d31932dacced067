"""``trainkit bench``: trainkit and its peers side by side on this machine."""

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from trainkit.cli.output import echo

app = typer.Typer(no_args_is_help=True, help="Measure trainkit and its peers side by side.")

AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object {bench, case, provider, metric, value, unit, gpu, versions, "
        "commit, ...} a line.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Append the JSON lines to this file.", show_default=False),
]
Model = Annotated[str, typer.Option(help="The model's shape.")]
Names = Annotated[str, typer.Option(help="Names with commas between them.")]


@app.command()
def step(
    models: Names = "qwen2-0.5b,llama-3.2-1b,qwen2-7b",
    providers: Names = "hf_sdpa,hf_flash,torch_compile,liger,liger_flash,trainkit,trainkit_compile",
    loss_chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens whose logits exist at a time (trainkit).")
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Forward and backward of whole models: ms, tokens/s, MFU, peak memory, loss."""
    from trainkit.bench.cells import Cell, run
    from trainkit.bench.providers import MODELS, PROVIDERS
    from trainkit.bench.record import Records

    settings = {"loss_chunk_tokens": loss_chunk_tokens}
    cells = [
        Cell("trainkit.bench.step", model, provider, settings=settings)
        for model in _names(models, MODELS, "--models")
        for provider in _names(providers, PROVIDERS, "--providers")
    ]
    _need_a_gpu()
    records = Records("step", output)
    _show(records.ceilings(), as_json=as_json)
    for row in run(cells):
        _show(records.of(row.pop("model"), row), row, as_json=as_json)


@app.command()
def lora(
    model: Model = "qwen2-7b",
    providers: Annotated[
        str, typer.Option(help="Of peft, liger, unsloth, trainkit, frozen (no adapters).")
    ] = "peft,trainkit,frozen",
    modes: Names = "lora,lora_checkpointed,qlora_checkpointed",
    offload: Annotated[
        bool, typer.Option(help="Checkpointed activations of trainkit in host memory.")
    ] = True,
    peer_path: Annotated[
        str, typer.Option(help="Where Unsloth's packages are, if not among ours.")
    ] = "",
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """LoRA and QLoRA steps with AdamW: ms, tokens/s, peak memory."""
    import torch

    from trainkit.bench import lora as bench
    from trainkit.bench.cells import Cell, run
    from trainkit.bench.providers import MODELS
    from trainkit.bench.record import Records

    (name,) = _names(model, MODELS, "--model")
    chosen = _names(providers, bench.PROVIDERS, "--providers")
    _need_a_gpu()
    records = Records("lora", output)
    _show(records.ceilings(), as_json=as_json)
    with tempfile.TemporaryDirectory() as folder:
        if "unsloth" in chosen:
            bench.save_base(MODELS[name], folder, torch.device("cuda"))
            torch.cuda.empty_cache()
        cells = [
            Cell(bench.__name__, name, provider, mode, steps=7, settings=settings)
            for settings in [{"offload": offload, "folder": folder}]
            for mode in _names(modes, bench.MODES, "--modes")
            for provider in chosen
        ]
        for row in run(cells, environments=[bench.environment_of(c, peer_path) for c in cells]):
            case = f"{row.pop('model')} {row.pop('mode')}"
            _show(records.of(case, row), row, as_json=as_json)


def _need_a_gpu() -> None:
    """Refuse before gigabytes of weights are made that no CPU would ever get through.

    Raises:
        TrainkitError: there is no GPU.
    """
    import torch

    from trainkit.errors import TrainkitError

    if not torch.cuda.is_available():
        raise TrainkitError(
            "this benchmark is measured on a GPU, and there is none here",
            fix="run it on a machine with one; `trainkit doctor` says what it sees",
        )


def _names(text: str, known: Iterable[str], option: str) -> list[str]:
    """Names with commas between them, each one known.

    Raises:
        typer.BadParameter: one is not.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r}; known are {', '.join(known)}", param_hint=option)
    return names


_SHOWN = ("ms", "tokens_per_second", "mfu", "peak_memory_gib", "tflops", "gb_per_second")


def _show(
    records: list[dict[str, Any]], row: dict[str, Any] | None = None, *, as_json: bool
) -> None:
    """Records as JSON lines, or the figures of a provider on a case as a line of a table."""
    if row is not None and "error" in row:
        sys.stderr.write(f"{row['provider']} failed:\n{row['error']}\n")
    elif as_json:
        for record in records:
            echo(json.dumps(record))
    elif records:
        figures = (f"{r['value']:10.4g} {r['unit']}" for r in records if r["metric"] in _SHOWN)
        echo(f"{records[0]['case']:<22} {records[0]['provider']:<16}{'  '.join(figures)}")
