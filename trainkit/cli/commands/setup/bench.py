"""``trainkit bench``: trainkit and its peers side by side on this machine."""

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trainkit.cli.echo import echo

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


@app.callback()
def bench() -> None:
    """Measure trainkit and its peers side by side."""


@app.command()
def step(
    models: Annotated[
        str, typer.Option(help="Names with commas between them.")
    ] = "qwen2-0.5b,llama-3.2-1b,qwen2-7b",
    providers: Annotated[
        str, typer.Option(help="Names with commas between them.")
    ] = "hf_sdpa,hf_flash,torch_compile,liger,liger_flash,trainkit,trainkit_compile",
    loss_chunk_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens whose logits exist at a time (trainkit)."),
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the figures here (PNG).", show_default=False)
    ] = None,
) -> None:
    """Forward and backward of whole models: ms, tokens/s, MFU, peak memory, loss."""
    from trainkit.bench import step as bench_step
    from trainkit.bench.providers import MODELS, PROVIDERS

    chosen = _names(models, MODELS, "--models")
    cells = [
        bench_step.Cell(model, provider, loss_chunk_tokens=loss_chunk_tokens)
        for model in chosen
        for provider in _names(providers, PROVIDERS, "--providers")
    ]
    _need_a_gpu()
    report = _Report("step", as_json=as_json, output=output)
    report.ceilings()
    for row in bench_step.run(cells):
        report.add(row.pop("model"), row, ("ms", "tokens_per_second", "mfu", "peak_memory_gib"))
    if picture is not None:
        from trainkit.bench.measure.picture import draw_steps

        draw_steps(report.records, picture)


@app.command()
def ops(
    names: Annotated[
        str, typer.Option("--ops", help="Names with commas between them.")
    ] = "rms_norm,add_rms_norm,apply_rope,swiglu,swiglu_packed,cross_entropy",
    providers: Annotated[
        str, typer.Option(help="Names with commas between them.")
    ] = "trainkit,eager,torch_compile,liger,quack",
    as_json: AsJson = False,
    output: Output = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the figures here (PNG).", show_default=False)
    ] = None,
) -> None:
    """The ops against their peers: microseconds, and the share of the copy bandwidth reached."""
    from trainkit.bench import ops as bench_ops
    from trainkit.bench.op_cases import PROVIDERS
    from trainkit.kernels.ops import OPS

    chosen = _names(names, OPS, "--ops")
    peers = _names(providers, PROVIDERS, "--providers")
    _need_a_gpu()
    report = _Report("ops", as_json=as_json, output=output)
    copy = report.ceilings()["gb_per_second"]
    for row in bench_ops.run(chosen, peers, copy):
        size = row.pop("case")
        case = f"{row['op']} {size} {row.get('pass', '')} {row.get('clock', '')}".strip()
        report.add(case, {**row, "size": size}, ("microseconds", "share_of_copy"))
    if picture is not None:
        from trainkit.bench.op_picture import draw_ops

        draw_ops(report.records, picture)


@app.command()
def packing(
    model: Annotated[str, typer.Option(help="The model's shape.")] = "qwen2-0.5b",
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Trained tokens per second on conversations of very different lengths, padded and packed."""
    from trainkit.bench import packing as bench_packing
    from trainkit.bench.providers import MODELS

    (name,) = _names(model, MODELS, "--model")
    pairs = [
        (provider, layout)
        for provider in ("hf_sdpa", "liger", "trainkit")
        for layout in bench_packing.LAYOUTS
        if layout != "packed" or provider == "trainkit"
    ]
    _need_a_gpu()
    report = _Report("packing", as_json=as_json, output=output)
    cells = [bench_packing.Cell(name, *pair) for pair in pairs]
    for row in bench_packing.run(cells):
        case = f"{row.pop('model')} {row.pop('layout')}"
        report.add(case, row, ("trained_tokens_per_second", "tokens_per_second", "peak_memory_gib"))


@app.command()
def loss(
    providers: Annotated[
        str, typer.Option(help="Of trainkit, liger, torch_compile, eager.")
    ] = "trainkit,liger,torch_compile",
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Linear layer and cross entropy in one: the share of the matmul rate next to it, memory."""
    import torch

    from trainkit.bench import linear_loss

    chosen = _names(providers, linear_loss.PROVIDERS, "--providers")
    _need_a_gpu()
    report = _Report("linear_cross_entropy", as_json=as_json, output=output)
    report.ceilings()
    for row in linear_loss.run(linear_loss.CASES, chosen, torch.device("cuda")):
        report.add(row.pop("case"), row, ("ms", "share_of_matmul", "extra_memory_gib"))


@app.command()
def curve(
    samples: Annotated[
        Path, typer.Argument(help="JSON lines, as `trainkit data preview --json` prints them.")
    ],
    model: Annotated[str, typer.Option(help="The model's shape.")] = "qwen2-0.5b",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 300,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations in a step.")] = 16,
    max_length: Annotated[int, typer.Option(min=1, help="Longer ones are cut.")] = 192,
    as_json: AsJson = False,
    output: Output = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the curves here (PNG).", show_default=False)
    ] = None,
) -> None:
    """Loss curves of trainkit and of plain runs that differ in their attention kernel."""
    from trainkit.bench import curve as bench_curve
    from trainkit.bench.measure.picture import draw_curves
    from trainkit.bench.providers import MODELS

    (name,) = _names(model, MODELS, "--model")
    runs = [
        bench_curve.Run(name, provider, str(samples), steps, batch_size, max_length)
        for provider in bench_curve.RUNS
    ]
    report = _Report("curve", as_json=as_json, output=output)
    losses = {}
    for row in bench_curve.curves(runs):
        if "error" in row:
            raise typer.BadParameter(f"{row['provider']} failed:\n{row['error']}")
        losses[row["provider"]] = row["losses"]
    case = f"{name}, {steps} steps, against {bench_curve.RUNS[0]}"
    for provider, row in bench_curve.distances(losses).items():
        shown = ("mean_difference", "max_difference")
        sizes = {"batch_size": batch_size, "max_length": max_length}
        report.add(case, {"provider": provider, **row, **sizes}, shown)
    if picture is not None:
        draw_curves(losses, picture)


@app.command()
def data(
    model: Annotated[
        Path, typer.Option(help="A directory with a ChatML tokenizer.", show_default=False)
    ],
    rows: Annotated[int, typer.Option(min=1, help="Conversations to make.")] = 100_000,
    path: Annotated[
        Path | None, typer.Option(help="Use this file instead.", show_default=False)
    ] = None,
    num_workers: Annotated[int, typer.Option(min=0, help="Processes.")] = 2,
    providers: Annotated[
        str, typer.Option(help="Names with commas between them.")
    ] = "trainkit,trl",
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Preparing conversations (read, render, tokenise, mask, pack), against TRL: s, CPU s, GiB."""
    from trainkit.bench import data as bench_data

    chosen = _names(providers, bench_data.PROVIDERS, "--providers")
    report = _Report("data", as_json=as_json, output=output)
    with tempfile.TemporaryDirectory() as scratch:
        file = path or Path(scratch) / "conversations.jsonl"
        if path is None:
            bench_data.write_conversations(file, rows)
        case = f"{rows} conversations" if path is None else file.name
        size = {"file_mib": round(file.stat().st_size / 2**20, 1), "num_workers": num_workers}
        jobs = [bench_data.Job(name, str(file), str(model), num_workers) for name in chosen]
        for row in bench_data.run(jobs):
            figures = ("seconds", "cpu_seconds", "rows_per_second", "peak_memory_gib")
            report.add(case, {**row, **size}, figures)


@app.command()
def lora(
    model: Annotated[str, typer.Option(help="The model's shape.")] = "qwen2-7b",
    providers: Annotated[
        str, typer.Option(help="Of peft, unsloth, trainkit, frozen (no adapters).")
    ] = "peft,trainkit,frozen",
    modes: Annotated[
        str, typer.Option(help="Names with commas between them.")
    ] = "lora,lora_checkpointed,qlora_checkpointed",
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

    from trainkit.bench import lora as bench_lora

    (name,) = _names(model, bench_lora.SHAPES, "--model")
    chosen = _names(providers, bench_lora.PROVIDERS, "--providers")
    _need_a_gpu()
    report = _Report("lora", as_json=as_json, output=output)
    report.ceilings()
    with tempfile.TemporaryDirectory() as folder:
        if "unsloth" in chosen:
            bench_lora.save_base(bench_lora.SHAPES[name], folder, torch.device("cuda"))
            torch.cuda.empty_cache()
        cells = [
            bench_lora.Cell(name, provider, mode, offload=offload, folder=folder)
            for mode in _names(modes, bench_lora.MODES, "--modes")
            for provider in chosen
        ]
        for row in bench_lora.run(cells, peer_path=peer_path):
            case = f"{row.pop('model')} {row.pop('mode')}"
            report.add(case, row, ("ms", "tokens_per_second", "peak_memory_gib"))


@app.command()
def ladder(
    model: Annotated[str, typer.Option(help="The model's shape.")] = "qwen2-7b",
    as_json: AsJson = False,
    output: Output = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the ladder here (PNG).", show_default=False)
    ] = None,
) -> None:
    """QLoRA's tricks one on top of the other: seconds, GiB, saving, loss error of each."""
    import torch

    from trainkit.bench import ladder as bench_ladder
    from trainkit.bench.lora import SHAPES

    (name,) = _names(model, SHAPES, "--model")
    _need_a_gpu()
    report = _Report("ladder", as_json=as_json, output=output)
    rows = []
    for row in bench_ladder.run(bench_ladder.Settings(name), torch.device("cuda")):
        rows.append(row)
        shown = ("seconds", "speedup", "peak_memory_gib", "memory_saving", "loss_error")
        report.add(f"{row['row']:>2} {row['name']}", {"provider": "ladder", **row}, shown)
    if picture is not None:
        title = f"QLoRA, {name}, one {report.common['gpu']}"
        bench_ladder.draw(rows, picture, title=title)


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
            fix="`trainkit bench data` runs on a CPU",
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


class _Report:
    """Prints figures as they come, as a table or as records."""

    def __init__(self, bench: str, *, as_json: bool, output: Path | None) -> None:
        from trainkit.bench.measure.record import environment

        self._bench = bench
        self._as_json = as_json
        self._output = output
        self.common = environment()
        self.records: list[dict[str, Any]] = []

    def ceilings(self) -> dict[str, float]:
        """What this GPU can do at most, in this run; empty without one."""
        import torch

        from trainkit.bench.measure.ceilings import ceilings

        if not torch.cuda.is_available():
            return {}
        values = ceilings(torch.device("cuda"))
        torch.cuda.empty_cache()
        self.add("ceiling", {"provider": "torch", **values}, tuple(values))
        return values

    def add(self, case: str, row: dict[str, Any], shown: Sequence[str]) -> None:
        """One provider's figures on a case."""
        from trainkit.bench.measure.record import UNITS, append, records

        provider = row["provider"]
        if "error" in row:
            sys.stderr.write(f"{case} {provider} failed:\n{row['error']}\n")
            return
        conditions = {
            name: value for name, value in row.items() if name not in UNITS and name != "provider"
        }
        new = records(self._bench, case, provider, row, self.common, **conditions)
        self.records += new
        if self._output is not None:
            append(self._output, new)
        if self._as_json:
            for record in new:
                echo(json.dumps(record))
        else:
            figures = "  ".join(f"{row[name]:10.4g} {UNITS[name]}" for name in shown if row[name])
            echo(f"{case:<22} {provider:<16}{figures}")
