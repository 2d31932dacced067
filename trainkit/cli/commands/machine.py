"""``trainkit doctor``, ``kernels`` and ``bench``: this machine, its kernels, their speed."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trainkit.cli.options import TrustRemoteCode, echo, json_lines, tell


def doctor(as_json: Annotated[bool, json_lines("check, state, found, fix")] = False) -> None:
    """Check GPUs, packages, communication, disk, limits and the hub; say how to fix each fault.

    Exits with 1 where something keeps training from working.
    """
    from trainkit.doctor import diagnose

    failed = False
    for finding in diagnose():
        failed |= finding.state == "error"
        fix = [f"{'':8}   fix: {finding.fix}"] if finding.fix else []
        said = f"{finding.state:<8} {finding.check}: {finding.found}"
        tell(asdict(finding), as_json, said, *fix)
    if failed:
        raise typer.Exit(1)


# -- kernels: what they do to a model, proved ---------------------------------------------------

kernels_app = typer.Typer()

_NUM_TOKENS = 512


@kernels_app.command()
def check(
    model: Annotated[
        Path, typer.Option(help="A model directory, or a .gguf file.", show_default=False)
    ],
    as_json: Annotated[
        bool, json_lines("op, family, max_error, reference_error, speedup, status, ...")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cuda, cpu, ...; by default a GPU if there is one.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Run every op of a model's family at the model's shapes, then the patched model, both ways.

    An error stands for a distance to the fp64 truth, relative to its size; reference_error is the
    distance that plain torch has in the model's dtype, and what an op must match. The speedup is at
    512 tokens, host time included.
    """
    failure = None
    with contextlib.redirect_stdout(sys.stderr):  # libraries that are imported here print
        from trainkit.models.self_check import SelfCheckError

        try:
            rows = _checked(model, device, trust_remote_code)
        except SelfCheckError as error:
            rows, failure = error.rows, error
    _show_checks(rows, as_json=as_json)
    if failure is not None:
        raise failure


def _checked(model: Path, device: str | None, trusted: bool) -> list[dict[str, Any]]:
    import torch

    from trainkit.infer.locate import refuse_code
    from trainkit.models.loading import device_named, load_model
    from trainkit.models.self_check import self_check
    from trainkit.models.tokenizer import check_exists
    from trainkit.options import ModelOptions
    from trainkit.patching import patch

    target = device_named(device)
    source = ModelOptions(name_or_path=str(model), dtype="auto", trust_remote_code=trusted)
    check_exists(source)
    refuse_code(source, (), None)
    loaded = load_model(source, attention="sdpa", device=target)
    report = patch(loaded)
    vocabulary = loaded.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (1, _NUM_TOKENS), generator=generator)
    return self_check(loaded, report, {"input_ids": tokens})


def _show_checks(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    styles = {"max_error": ".1e", "reference_error": ".1e", "speedup": ".2f"}
    if not as_json:
        echo(f"{'op':<22}{'status':<11}{'error':>9}{'plain':>9}{'speedup':>9}  where")
    for row in rows:
        numbers = "".join(
            f"{'' if row[key] is None else format(row[key], style):>9}"
            for key, style in styles.items()
        )
        said = f"{row['op']:<22}{row['status']:<11}{numbers}  {row['detail']}".rstrip()
        tell(row, as_json, said)


# -- bench: trainkit and its peers side by side -------------------------------------------------

bench_app = typer.Typer()

AsJson = Annotated[
    bool, json_lines("bench, case, provider, metric, value, unit, gpu, versions, commit, ...")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Append the JSON lines to this file.", show_default=False),
]
Model = Annotated[str, typer.Option(help="The model's shape.")]
Names = Annotated[str, typer.Option(help="Names with commas between them.")]


@bench_app.command()
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
    from trainkit.bench.cells import Cell, Records, run
    from trainkit.bench.providers import MODELS, PROVIDERS

    settings = {"loss_chunk_tokens": loss_chunk_tokens}
    cells = [
        Cell("trainkit.bench.step", model, provider, settings=settings)
        for model in _names(models, MODELS, "--models")
        for provider in _names(providers, PROVIDERS, "--providers")
    ]
    _need_a_gpu()
    records = Records("step", output)
    _show_records(records.ceilings(), as_json=as_json)
    for row in run(cells):
        _show_records(records.of(row.pop("model"), row), row, as_json=as_json)


@bench_app.command()
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
    from trainkit.bench.cells import Cell, Records, run
    from trainkit.bench.providers import MODELS

    (name,) = _names(model, MODELS, "--model")
    chosen = _names(providers, bench.PROVIDERS, "--providers")
    _need_a_gpu()
    records = Records("lora", output)
    _show_records(records.ceilings(), as_json=as_json)
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
            _show_records(records.of(case, row), row, as_json=as_json)


@bench_app.command()
def command(
    model: Model = "qwen2-7b",
    tools: Annotated[
        str,
        typer.Option(
            help="Of trainkit, trainkit-fp8, trainkit-shared, trl, trl-liger, unsloth.",
            show_default="those installed",
        ),
    ] = "",
    modes: Annotated[
        str,
        typer.Option(
            help="Of lora, qlora (recomputed), dpo, dpo_ultrafeedback, dpo_helpsteer, images."
        ),
    ] = "lora",
    steps: Annotated[int, typer.Option(help="Optimizer steps.", min=4)] = 20,
    batch: Annotated[int, typer.Option(help="Rows of a step.", min=1)] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a row.", min=16)] = 2048,
    peer_path: Annotated[
        str, typer.Option(help="Where the other tools' packages are, if not among ours.")
    ] = "",
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """LoRA from each tool's own command: ms a step, seconds to the first one, GPU memory."""
    from dataclasses import replace

    from trainkit.bench import command as bench
    from trainkit.bench.cells import Records
    from trainkit.bench.providers import MODELS as SHAPES
    from trainkit.bench.rows import MODES, prepare

    (name,) = _names(model, SHAPES, "--model")
    chosen = _names(tools or ",".join(bench.installed(peer_path)), bench.TOOLS, "--tools")
    wanted = _names(modes, MODES, "--modes")
    shape = replace(SHAPES[name], batch_size=batch, length=length)
    records = Records("command", output)
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), shape, steps, wanted)
        for mode in wanted:
            work = bench.Work(Path(folder), shape, mode, steps)
            for tool in (each for each in chosen if mode in bench.TOOLS[each].modes):
                row = bench.measure(tool, work, peer_path=peer_path)
                _show_records(records.of(f"{name} {mode}", row), row, as_json=as_json)


def _need_a_gpu() -> None:
    """Refuse before gigabytes of weights are made that no CPU would ever get through."""
    import torch

    from trainkit.errors import TrainkitError

    if not torch.cuda.is_available():
        raise TrainkitError(
            "this benchmark is measured on a GPU, and there is none here",
            fix="run it on a machine with one; `trainkit doctor` says what it sees",
        )


def _names(text: str, known: Iterable[str], option: str) -> list[str]:
    """Names with commas between them, each one known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r}; known are {', '.join(known)}", param_hint=option)
    return names


_SHOWN = (
    "ms",
    "tokens_per_second",
    "pairs_per_second",
    "images_per_second",
    "mfu",
    "first_step_seconds",
    "gpu_memory_gib",
    "peak_memory_gib",
    "tflops",
    "gb_per_second",
)


def _show_records(
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
