"""``trainkit merge``, ``convert`` and ``checkpoint``: other weights, proved."""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainkit.cli.options import (
    AnyBase,
    BaseModel,
    Dtype,
    JsonObject,
    Output,
    TrustRemoteCode,
    expanded,
    json_lines,
    note,
    run_directories,
    tell,
)
from trainkit.errors import CheckpointError, ModelError, RecipeError
from trainkit.places import checkpoints_in, refuse_file

if TYPE_CHECKING:
    from trainkit.checkpoint.merge.merge import MergeOptions
    from trainkit.options import ModelOptions

ShardSize = Annotated[
    str, typer.Option(metavar="SIZE", help="Largest weights file, such as 5GB or 500MB.")
]

_LARGE_SHARE = 0.1  # of the adapter's own effect, lost by rounding the merged weights


@expanded
def merge(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="ADAPTER_OR_RUN",
            help="A run directory, an adapter, or a checkpoint with DeepSpeed shards.",
            autocompletion=run_directories,
        ),
    ],
    output: Output,
    base: Annotated[
        Literal["dequantized", "original"] | None,
        typer.Option(
            help="For an adapter trained over a quantised base: merge into the weights that "
            "training saw (dequantized; the default over nf4 and int8) or into the original ones "
            "(over fp8)."
        ),
    ] = None,
    base_model: BaseModel = None,
    trust_remote_code: TrustRemoteCode = False,
    dtype: Dtype = None,
    shard_size: ShardSize = "5GB",
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Compare the result with base and adapter on a few prompts; loads both.",
        ),
    ] = True,
    any_base: AnyBase = False,
    as_json: JsonObject = False,
) -> None:
    """Write one plain model: base and adapter merged, or ZeRO shards put together."""
    target, size = output.place(), _bytes(shard_size)
    refuse_file(source, ModelError)
    if not source.is_dir():
        raise ModelError("there is no such directory", where=str(source))
    from trainkit.checkpoint.merge.merge import MergeOptions, own_base
    from trainkit.checkpoint.whole.manifest import MANIFEST_NAME, UNPROVED, verify_directory
    from trainkit.infer.locate import base_of, locate, refuse_code, run_settings
    from trainkit.options import ModelOptions
    from trainkit.train.quiet import quieten_libraries

    quieten_libraries()
    directory, run = locate(source)
    if (directory / MANIFEST_NAME).exists():
        verify_directory(directory)
    elif run is not None:
        note(f"{directory} {UNPROVED}")
    model = ModelOptions(name_or_path=str(directory), trust_remote_code=trust_remote_code)
    if (directory / "adapter_config.json").exists():
        model = base_of(directory, base_model, trust_remote_code=trust_remote_code)
    refuse_code(model, (str(directory),), run)
    settings = run_settings(run)
    if base is not None and settings.dtype is not None and settings.quantize is None:
        raise RecipeError(
            "the base of this run was not quantised: rounded, it would be one that training never "
            "saw",
            where="--base",
            fix="leave --base out",
        )
    quantize = settings.quantize or ("nf4" if base is not None else None)
    options = MergeOptions(
        quantize=quantize,
        lora=settings.lora,
        compute_dtype=settings.dtype if settings.dtype != "auto" else None,
        base=base or own_base(quantize),
        dtype=dtype,
        max_shard_bytes=size,
        verify=verify,
        any_base=any_base,
        trust_remote_code=trust_remote_code,
    )
    row = _merged(directory, model, target, options)
    tell(row, as_json, *([] if as_json else _merge_summary(row)))


def _merged(
    directory: Path, model: "ModelOptions", target: Path, options: "MergeOptions"
) -> dict[str, Any]:
    from trainkit.checkpoint.zero import (
        export_zero,
        extract_adapter,
        find_zero_folder,
        needs_adapter_from_shards,
    )

    folder, is_adapter = find_zero_folder(directory), (directory / "adapter_config.json").exists()
    if folder is None and not is_adapter:
        raise ModelError(
            "there is nothing to merge: it holds neither an adapter nor DeepSpeed shards",
            where=str(directory),
            fix="a model that trained whole is used as it is; of another run, name its directory",
        )
    with ExitStack() as opened:
        adapter = directory if is_adapter else None
        if folder is not None and needs_adapter_from_shards(directory):
            temporary = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            adapter = extract_adapter(folder, directory, temporary)
        if adapter is not None:
            return _merge_adapter(adapter, model, target, options, origin=directory)
    assert folder is not None
    number = export_zero(
        folder,
        directory,
        target,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_bytes,
        with_code=options.trust_remote_code,
    )
    return {"target": str(target), "num_tensors": number}


def _merge_adapter(
    adapter: Path, model: "ModelOptions", target: Path, options: "MergeOptions", *, origin: Path
) -> dict[str, Any]:
    from trainkit.checkpoint.merge.merge import merge_adapter, own_base
    from trainkit.checkpoint.weights.adapter import read_adapter
    from trainkit.infer.base import plain_base
    from trainkit.infer.locate import base_directory

    base = base_directory(model)
    taken = read_adapter(adapter, with_peft=True)
    with plain_base(model, base, options.compute_dtype, target, note) as plain:
        done = merge_adapter(taken, plain, target, options, note, origin=origin, stored=base)
    row: dict[str, Any] = {
        "target": str(target),
        "num_merged": len(done.changes),
        "max_relative_update": max(change.relative_update for change in done.changes),
        "merged_into": options.base if options.quantize else "original",
    }
    pairs = [(change.error_dequantized, change.error_original) for change in done.changes]
    known = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    if known:
        row["weight_error_dequantized"] = sum(pair[0] for pair in known) / len(known)
        row["weight_error_original"] = sum(pair[1] for pair in known) / len(known)
    if (parity := done.parity) is not None:
        is_large = parity.divergence > _LARGE_SHARE * parity.effect
        is_rounding = options.base == own_base(options.quantize) and options.dtype != "float32"
        row |= {
            "divergence": parity.divergence,
            "other_divergence": parity.other_divergence,
            "adapter_effect": parity.effect,
            "is_rounded_away": is_rounding and is_large,
            "num_same_continuations": parity.num_same,
            "num_prompts": len(parity.prompts),
        }
    return row


def _merge_summary(row: dict[str, Any]) -> list[str]:
    if "num_tensors" in row:
        return [f"{row['target']}: {row['num_tensors']} tensors put together"]
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
    if row.get("is_rounded_away"):
        lines.append(
            "that is a large part of what the adapter does; --dtype float32 keeps all of it"
        )
    if row.get("other_divergence") is not None:
        lines.append(f"merged into the other base: {row['other_divergence']:.1e} nats a token")
    return lines


def _bytes(shard_size: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = TypeAdapter(ByteSize).validate_python(shard_size)
    except ValidationError:
        size = ByteSize(0)
    if size < 1000:
        what = f"{shard_size!r} is not a size such as 5GB or 500MB"
        raise RecipeError(what, where="--shard-size")
    return size


# -- convert: one layout into another, proved to be the same function ---------------------------

convert_app = typer.Typer()

Source = Annotated[Path, typer.Argument(metavar="SRC", help="Model directory.")]


@dataclass(frozen=True)
class Conversion:
    """What both directions take."""

    dtype: Dtype = None
    shard_size: ShardSize = "5GB"
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify", help="Compare source and result layer by layer, in float32."
        ),
    ] = True
    as_json: JsonObject = False


@convert_app.command("glm4-to-qwen2")
@expanded
def glm4_to_qwen2(source: Source, output: Output, conversion: Conversion) -> None:
    """Turn GLM-4-9B (remote-code or transformers layout) into a Qwen2 that computes the same."""
    _convert(source, output.place(), "qwen2", conversion)


@convert_app.command("qwen2-to-glm4")
@expanded
def qwen2_to_glm4(source: Source, output: Output, conversion: Conversion) -> None:
    """Turn a converted (and trained) Qwen2 back into GLM-4."""
    _convert(source, output.place(), "glm", conversion)


def _convert(source: Path, target: Path, layout: str, wanted: Conversion) -> None:
    size = _bytes(wanted.shard_size)
    from trainkit.checkpoint.weights.adapter import is_adapter
    from trainkit.train.quiet import quieten_libraries

    quieten_libraries()
    refuse_file(source, ModelError)
    if is_adapter(source):
        raise RecipeError(
            "this is an adapter, and a whole model is converted",
            where=str(source),
            fix="merge it first: trainkit merge",
        )
    from trainkit.checkpoint.convert.convert import ConvertOptions, convert_model

    options = ConvertOptions(wanted.dtype, size, wanted.verify)
    done = convert_model(source, target, layout, options, progress=note)
    row: dict[str, Any] = {"target": str(target), "num_tensors": done.num_tensors}
    text = f"{target}: {done.num_tensors} tensors"
    if (proof := done.proof) is not None:
        row["max_logit_error"], row["max_logit"] = proof.max_logit_error, proof.max_logit
        row["max_position"] = proof.positions[-1]
        text += (
            f"; logits differ by at most {proof.max_logit_error:.1e} of {proof.max_logit:.3g} "
            f"up to position {proof.positions[-1]}"
        )
    tell(row, wanted.as_json, text)


# -- checkpoint: whether it is as it was written ------------------------------------------------

checkpoint_app = typer.Typer()


@checkpoint_app.command()
def verify(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Runs, checkpoints, final models, merged models."),
    ],
    as_json: Annotated[bool, json_lines("path, status, reason")] = False,
) -> None:
    """Compare every byte with the manifest; the exit code is 1 if any directory is damaged.

    Of a run its checkpoints and its final model are compared.
    """
    from trainkit.checkpoint.whole.manifest import verify_directory

    parts: list[Path] = []
    for directory in directories:
        refuse_file(directory, CheckpointError)
        if not directory.exists():
            raise CheckpointError("there is no such directory", where=str(directory))
        is_run = (directory / "status.json").is_file()
        inside = [*checkpoints_in(directory), *directory.glob("final")] if is_run else [directory]
        if not inside:
            raise CheckpointError(
                "this run holds neither a checkpoint nor a final model", where=str(directory)
            )
        parts += inside
    is_damaged = False
    for directory in parts:
        row = {"path": str(directory), "status": "whole", "reason": None}  # read by programs
        try:
            said = f"{directory}: complete, {len(verify_directory(directory).files)} files"
        except CheckpointError as error:
            is_damaged, said = True, f"{directory}: damaged: {error.what}"
            row |= {"status": "damaged", "reason": error.what}
        tell(row, as_json, said)
    if is_damaged:
        raise typer.Exit(1)
