"""``trainkit kernels``: what the kernels do to a model, proved."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trainkit.cli.arguments import TrustRemoteCode
from trainkit.cli.output import echo

app = typer.Typer(no_args_is_help=True, help="Check the kernels against plain torch.")

_NUM_TOKENS = 512


@app.callback()
def kernels() -> None:
    """Check the kernels against plain torch."""


@app.command()
def check(
    model: Annotated[
        Path, typer.Option(help="A model directory, or a .gguf file.", show_default=False)
    ],
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object {op, family, max_error, reference_error, speedup, status, "
            "...} a line.",
        ),
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
        from trainkit.models.checks.self_check import SelfCheckError

        try:
            rows = _checked(model, device, trust_remote_code)
        except SelfCheckError as error:
            rows, failure = error.rows, error
    _show(rows, as_json=as_json)
    if failure is not None:
        raise failure


def _checked(model: Path, device: str | None, trusted: bool) -> list[dict[str, Any]]:
    import torch

    from trainkit.infer.locate import refuse_code
    from trainkit.models.checks.self_check import self_check
    from trainkit.models.device import device_named
    from trainkit.models.loading import check_exists, load_model
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


def _show(rows: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            echo(json.dumps(row))
        return
    echo(f"{'op':<22}{'status':<11}{'error':>9}{'plain':>9}{'speedup':>9}  where")
    for row in rows:
        numbers = "".join(
            f"{'' if row[key] is None else format(row[key], style):>9}"
            for key, style in (
                ("max_error", ".1e"),
                ("reference_error", ".1e"),
                ("speedup", ".2f"),
            )
        )
        echo(f"{row['op']:<22}{row['status']:<11}{numbers}  {row['detail']}".rstrip())
