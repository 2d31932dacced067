"""Converts a checkpoint tensor by tensor.

The result is written next to the target and renamed when complete, so a full disk or a kill leaves
no directory that looks finished. ``conversion.json`` in the result says what was made of what, and
holds the proof.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainkit.checkpoint.convert.glm_formats import FORMATS, GlmSource, detect_format, qwen2_shape
from trainkit.checkpoint.convert.layers import COMPUTED, Geometry, check_names, converted
from trainkit.checkpoint.convert.proof import Proof, prove_same_function
from trainkit.checkpoint.weights.companions import carry_companions
from trainkit.checkpoint.weights.export import DTYPES, cast, dtype_named
from trainkit.checkpoint.weights.plain_files import read_config, write_json
from trainkit.checkpoint.weights.reader import TensorInfo, WeightsReader
from trainkit.checkpoint.weights.writer import write_tensors
from trainkit.checkpoint.whole.atomic import free_space_check, staged_directory
from trainkit.errors import CheckpointError

logger = logging.getLogger(__name__)

RECORD_NAME = "conversion.json"
_PLAIN_DTYPES = (*DTYPES.values(), torch.float64)


@dataclass(frozen=True)
class ConvertOptions:
    """How to write the result.

    Attributes:
        dtype: ``float32``, ``bfloat16``, ``float16``; None keeps each tensor's own.
    """

    dtype: str | None = None
    max_shard_bytes: int = 5 * 10**9
    verify: bool = True


@dataclass(frozen=True)
class Conversion:
    """A finished conversion."""

    target: Path
    num_tensors: int
    proof: Proof | None


def convert_model(
    source: Path,
    target: Path,
    target_format: str,
    options: ConvertOptions,
    progress: Callable[[str], None] = logger.info,
) -> Conversion:
    """Convert a model directory from a GLM layout to ``qwen2``, or from there to ``glm``."""
    source, target = Path(source), Path(target)
    config = read_config(source)
    source_format = detect_format(config)
    if (source_format == "qwen2") == (target_format == "qwen2"):
        raise CheckpointError(
            f"from {source_format} to {target_format} there is nothing to convert",
            where=str(source),
        )
    geometry = FORMATS[source_format].geometry(config)
    with WeightsReader(source) as files:
        reader = GlmSource(files, source_format, config, geometry)
        check_names(reader.tensors, source_format, geometry)
        plan = _plan(reader, target_format, geometry, dtype_named(options.dtype))
        _check_shapes(plan if target_format == "qwen2" else reader.tensors.values(), geometry)
        free_space_check(target, sum(info.num_bytes for info in plan))
        metadata = {"kind": "conversion", "from": source_format, "to": target_format}
        with staged_directory(target, metadata=metadata) as staging:
            progress(f"writing {len(plan)} tensors")
            dtypes = {info.name: info.dtype for info in plan}
            tensors = (
                (name, cast(name, tensor, dtypes[name]))
                for name, tensor in converted(source_format, target_format, geometry, reader.load)
            )
            write_tensors(staging, plan, tensors, max_shard_bytes=options.max_shard_bytes)
            new_config = _new_config(config, target_format, geometry, plan)
            write_json(staging / "config.json", new_config)
            companions = carry_companions(source, staging, config, new_config)
            proof = None
            if options.verify:
                sides = (source, staging) if target_format == "qwen2" else (staging, source)
                proof = prove_same_function(*sides, geometry, dtype_named(options.dtype), progress)
            record = {
                "schema_version": 1,
                "from": source_format,
                "to": target_format,
                "dtype": options.dtype or "as in the source",
                "source_config": config,
                "left_out": [name for name in files.tensors if COMPUTED.fullmatch(name)],
                "companions": companions,
                "proof": asdict(proof) if proof else None,
            }
            write_json(staging / RECORD_NAME, record)
    return Conversion(target, len(plan), proof)


def _plan(
    reader: GlmSource, target_format: str, geometry: Geometry, dtype: torch.dtype | None
) -> list[TensorInfo]:
    last: list[TensorInfo] = []

    def shadow(name: str) -> torch.Tensor:
        info = reader.tensors[name]
        last[:] = [info]
        return torch.empty(info.shape, dtype=dtype or info.dtype, device="meta")

    try:
        return [
            TensorInfo(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in converted(reader.layout, target_format, geometry, shadow)
        ]
    except (RuntimeError, ValueError) as error:
        (info,) = last
        raise CheckpointError(
            f"{info.name} {list(info.shape)} does not fit the sizes of config.json ({error})",
            where=str(reader.directory),
        ) from None


def _check_shapes(qwen2_side: Iterable[TensorInfo], geometry: Geometry) -> None:
    """Every tensor on Qwen2's side has the shape that the config promises, and plain numbers."""
    for info in qwen2_side:
        if info.dtype not in _PLAIN_DTYPES:
            raise CheckpointError(
                f"{info.name} is stored as {str(info.dtype).removeprefix('torch.')}: quantised "
                "weights mean nothing without their scales",
                fix="convert the model before it was quantised",
            )
        wanted = qwen2_shape(info.name, geometry)
        if info.shape != wanted:
            raise CheckpointError(
                f"{info.name} would have shape {list(info.shape)}; the sizes of config.json "
                f"make it {list(wanted)}",
                fix="check that config.json and the weights belong together",
            )


def _new_config(
    config: Mapping[str, Any], target_format: str, geometry: Geometry, plan: Sequence[TensorInfo]
) -> dict[str, Any]:
    fresh = FORMATS[target_format].config(geometry)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if config.get(key) is not None:
            fresh[key] = _token_ids(config, key)
    for key, default in (("initializer_range", 0.02), ("attention_dropout", 0.0)):
        value = config.get(key, default)
        if not isinstance(value, int | float):
            raise CheckpointError(f"config.json: {key} is {value!r}, not a number")
        fresh[key] = float(value)
    dtypes = {info.dtype for info in plan}
    if len(dtypes) == 1:
        fresh["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
    return fresh


def _token_ids(config: Mapping[str, Any], key: str) -> int | list[int]:
    value = config[key]
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise CheckpointError(f"config.json: {key} is {value!r}, not a token id or a list of them")
    return value if isinstance(value, int) else ids
