"""``trainkit merge``: an adapter, or a sharded checkpoint, into one plain model."""

import json
import tempfile
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainkit.cli import output
from trainkit.cli.arguments import BaseModel, TrustRemoteCode
from trainkit.cli.commands.weights.convert import AsJson, DtypeOption, ShardSize, parse_shard_size
from trainkit.cli.completion import run_directories
from trainkit.cli.output import echo
from trainkit.errors import ModelError

if TYPE_CHECKING:
    from trainkit.checkpoint.merge.merge import MergeOptions
    from trainkit.options import ModelOptions


_LARGE_SHARE = 0.1  # of the adapter's own effect, lost by rounding the merged weights


class Base(str, Enum):
    """What a QLoRA adapter can be merged into."""

    dequantized = "dequantized"
    original = "original"


Source = Annotated[
    Path,
    typer.Argument(
        metavar="ADAPTER_OR_RUN",
        help="A run directory, an adapter, or a checkpoint with DeepSpeed shards.",
        autocompletion=run_directories,
    ),
]


def merge(
    source: Source,
    out: output.Argument = None,
    output_option: output.Option = None,
    base: Annotated[
        Base | None,
        typer.Option(
            help="For an adapter trained over a quantised base: merge into the weights that "
            "training saw (dequantized; the default over nf4) or into the original ones (over fp8)."
        ),
    ] = None,
    base_model: BaseModel = None,
    trust_remote_code: TrustRemoteCode = False,
    dtype: DtypeOption = None,
    shard_size: ShardSize = "5GB",
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Compare the result with base and adapter on a few prompts; loads both.",
        ),
    ] = True,
    any_base: Annotated[
        bool,
        typer.Option("--any-base", help="Merge into other weights than the adapter's own base."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write one plain model: base and adapter merged, or ZeRO shards put together."""
    target = output.output_of(out, output_option)
    size = parse_shard_size(shard_size)
    if not source.is_dir():
        raise ModelError("there is no such directory", where=str(source))
    from trainkit.checkpoint.merge.merge import MergeOptions, own_base
    from trainkit.checkpoint.whole.manifest import MANIFEST_NAME, UNPROVED, verify_directory
    from trainkit.infer.locate import base_of, locate, refuse_code, run_settings
    from trainkit.options import ModelOptions
    from trainkit.train.log.quiet import quieten_libraries

    quieten_libraries()
    directory, run = locate(source)
    if (directory / MANIFEST_NAME).exists():
        verify_directory(directory)
    elif run is not None:
        echo(f"{directory} {UNPROVED}", err=True)
    model = ModelOptions(name_or_path=str(directory), trust_remote_code=trust_remote_code)
    if (directory / "adapter_config.json").exists():
        model = base_of(directory, base_model, trust_remote_code=trust_remote_code)
    refuse_code(model, (str(directory),), run)
    settings = run_settings(run)
    quantize = settings.quantize or ("nf4" if base is not None else None)
    options = MergeOptions(
        quantize=quantize,
        compute_dtype=settings.dtype if settings.dtype != "auto" else None,
        base=own_base(quantize) if base is None else base.value,
        dtype=None if dtype is None else dtype.value,
        max_shard_bytes=size,
        verify=verify,
        any_base=any_base,
        trust_remote_code=trust_remote_code,
    )
    row = _written(directory, model, target, options)
    echo(json.dumps(row) if as_json else _summary(row))


def _written(
    directory: Path, model: "ModelOptions", target: Path, options: "MergeOptions"
) -> dict[str, Any]:
    """The merged model, and what is said of it."""
    from trainkit.checkpoint.zero.zero import (
        export_zero,
        extract_adapter,
        find_zero_folder,
        needs_adapter_from_shards,
    )

    folder, is_adapter = find_zero_folder(directory), (directory / "adapter_config.json").exists()
    if folder is not None and needs_adapter_from_shards(directory):
        with tempfile.TemporaryDirectory() as temporary:
            adapter = extract_adapter(folder, directory, Path(temporary))
            return _merge_adapter(adapter, model, target, options, origin=directory)
    if is_adapter:
        return _merge_adapter(directory, model, target, options, origin=directory)
    if folder is not None:
        number = export_zero(
            folder,
            directory,
            target,
            dtype=options.dtype,
            max_shard_bytes=options.max_shard_bytes,
            with_code=options.trust_remote_code,
        )
        return {"target": str(target), "num_tensors": number}
    raise ModelError(
        "there is nothing to merge: it holds neither an adapter nor DeepSpeed shards",
        where=str(directory),
    )


def _merge_adapter(
    adapter: Path, model: "ModelOptions", target: Path, options: "MergeOptions", *, origin: Path
) -> dict[str, Any]:
    from trainkit.checkpoint.merge.merge import merge_adapter, own_base
    from trainkit.checkpoint.weights.adapter import read_adapter
    from trainkit.infer.locate import base_directory
    from trainkit.infer.plain_base import plain_base

    base = base_directory(model)
    taken = read_adapter(adapter, with_peft=True)
    with plain_base(model, base, options.compute_dtype, target, _say) as plain:
        done = merge_adapter(taken, plain, target, options, _say, origin=origin, stored=base)
    updates = [change.relative_update for change in done.changes]
    row: dict[str, Any] = {
        "target": str(target),
        "num_merged": len(done.changes),
        "max_relative_update": max(updates),
        "merged_into": options.base if options.quantize else "original",
    }
    pairs = [
        (change.error_dequantized, change.error_original)
        for change in done.changes
        if change.error_dequantized is not None and change.error_original is not None
    ]
    if pairs:
        row["weight_error_dequantized"] = sum(pair[0] for pair in pairs) / len(pairs)
        row["weight_error_original"] = sum(pair[1] for pair in pairs) / len(pairs)
    if done.parity is not None:
        row["divergence"] = done.parity.divergence
        row["other_divergence"] = done.parity.other_divergence
        row["adapter_effect"] = done.parity.effect
        is_rounding = options.base == own_base(options.quantize)
        row["is_rounded_away"] = (
            is_rounding
            and options.dtype != "float32"
            and done.parity.divergence > _LARGE_SHARE * done.parity.effect
        )
        row["num_same_continuations"] = done.parity.num_same
        row["num_prompts"] = len(done.parity.prompts)
    return row


def _summary(row: dict[str, Any]) -> str:
    if "num_tensors" in row:
        return f"{row['target']}: {row['num_tensors']} tensors put together"
    lines = [
        f"{row['target']}: {row['num_merged']} tensors changed, by up to "
        f"{row['max_relative_update']:.1%} of their size"
    ]
    if "weight_error_original" in row:
        lines.append(
            "error of the merged weights against those of training: "
            f"{row['weight_error_dequantized']:.1%} into the dequantized base, "
            f"{row['weight_error_original']:.1%} into the original; this is {row['merged_into']}"
        )
    if "divergence" in row:
        lines.append(
            f"{row['num_same_continuations']} of {row['num_prompts']} greedy continuations are "
            f"the adapter's; {row['divergence']:.1e} nats a token from it (the adapter itself is "
            f"{row['adapter_effect']:.1e} from the base)"
        )
        if row["is_rounded_away"]:
            lines.append(
                "that is a large part of what the adapter does; --dtype float32 keeps all of it"
            )
    if row.get("other_divergence") is not None:
        lines.append(f"merged into the other base: {row['other_divergence']:.1e} nats a token")
    return "\n".join(lines)


def _say(line: str) -> None:
    echo(line, err=True)
