"""Converts a checkpoint tensor by tensor, and writes down what it did.

The result is written next to the target and renamed when complete, so a full disk or a kill leaves
no directory that looks finished. ``conversion.json`` in the result maps every tensor to its
sources with both digests; it also keeps what the target has no tensor for, so that the way back
gives the source's own bytes.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainkit.checkpoint.convert.glm_formats import (
    FORMATS,
    Geometry,
    GlmSource,
    biases_of,
    detect_format,
    has_biases,
    head_and_embedding,
    keymap_to_qwen2,
    qwen2_shape,
)
from trainkit.checkpoint.convert.keymap import Keymap, Step
from trainkit.checkpoint.convert.proof import Proof, prove_same_function
from trainkit.checkpoint.weights.companions import (
    RECORD_NAME,
    carry_companions,
    code_of,
    write_code,
)
from trainkit.checkpoint.weights.export import DTYPES, cast, dtype_named
from trainkit.checkpoint.weights.plain_files import plain_file, read_config, read_json
from trainkit.checkpoint.weights.reader import TensorInfo, WeightsReader
from trainkit.checkpoint.weights.writer import WeightsWriter, tensor_bytes, tensor_sha256
from trainkit.checkpoint.whole.atomic import free_space_check, staged_directory
from trainkit.errors import CheckpointError

logger = logging.getLogger(__name__)

_MAX_KEPT_BYTES = 1 << 16
_PLAIN_DTYPES = (*DTYPES.values(), torch.float64)
_WHOLE_NUMBERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
_STORED = {str(dtype).removeprefix("torch."): dtype for dtype in (*_PLAIN_DTYPES, *_WHOLE_NUMBERS)}
"""What a tensor that is left out may be stored as; nothing is computed with it."""


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
    """Convert a model directory between a GLM layout and Qwen2.

    One of the two formats, keys of ``FORMATS``, must be ``qwen2``.

    Raises:
        CheckpointError: the source cannot be converted exactly, is hostile or damaged, the disk is
            full, or the proof fails. The target does not exist then.
    """
    source, target = Path(source), Path(target)
    config = read_config(source)
    source_format = detect_format(config)
    geometry = FORMATS[source_format].geometry(config)
    keymap = keymap_between(source_format, target_format, geometry)
    old_record = _read_record(source)
    with WeightsReader(source) as files:
        reader = GlmSource(files, source_format, config, geometry)
        steps = keymap.steps(geometry.num_layers, reader.tensors)
        plan = _plan(steps, reader, dtype_named(options.dtype))
        _check_shapes(plan if target_format == "qwen2" else reader.tensors.values(), geometry)
        original = _original_config(old_record, target_format, geometry)
        steps, plan = _without_biases(steps, plan, reader, target_format, geometry, original)
        kept = _kept_before(old_record, target_format, reader)
        plan += [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in kept]
        free_space_check(target, sum(info.num_bytes for info in plan))
        metadata = {"kind": "conversion", "from": source_format, "to": target_format}
        with staged_directory(target, metadata=metadata) as staging:
            progress(f"writing {len(plan)} tensors")
            rows = _write(steps, kept, reader, staging, plan, options.max_shard_bytes)
            new_config = _new_config(config, original, target_format, geometry, plan)
            (staging / "config.json").write_text(_pretty(new_config), encoding="utf-8")
            companions = carry_companions(source, staging, config, new_config)
            code = code_of(source, config)
            write_code(staging, old_record, new_config)
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
                "left_out": _left_out(keymap, files, reader.doubled, source_format),
                "remote_code": code,
                "companions": companions,
                "proof": proof.to_dict() if proof else None,
                "tensors": rows,
            }
            (staging / RECORD_NAME).write_text(_pretty(record), encoding="utf-8")
    return Conversion(target, len(plan), proof)


def keymap_between(source_format: str, target_format: str, geometry: Geometry) -> Keymap:
    """The keymap from one layout to another, one of which is Qwen2."""
    if target_format == "qwen2" and source_format != "qwen2":
        return keymap_to_qwen2(source_format, geometry)
    if source_format == "qwen2" and target_format != "qwen2":
        return keymap_to_qwen2(target_format, geometry).inverted()
    raise CheckpointError(f"from {source_format} to {target_format} there is nothing to convert")


def _plan(steps: Sequence[Step], reader: GlmSource, dtype: torch.dtype | None) -> list[TensorInfo]:
    """The shapes of the result, from the shapes of the source."""
    plan = []
    for step in steps:
        shadows = [
            torch.empty(info.shape, dtype=dtype or info.dtype, device="meta")
            for info in (reader.tensors[name] for name in step.source)
        ]
        try:
            results = step.transform.forward(shadows)
        except (RuntimeError, ValueError) as error:
            shapes = ", ".join(f"{name} {list(reader.tensors[name].shape)}" for name in step.source)
            raise CheckpointError(
                f"{shapes} does not fit the sizes of config.json ({error})",
                where=str(reader.directory),
            ) from None
        plan += [
            TensorInfo(name, result.dtype, tuple(result.shape))
            for name, result in zip(step.target, results, strict=True)
        ]
    return plan


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


def _write(
    steps: Sequence[Step],
    kept: Sequence[tuple[str, torch.Tensor]],
    reader: GlmSource,
    staging: Path,
    plan: Sequence[TensorInfo],
    max_shard_bytes: int,
) -> list[dict[str, Any]]:
    dtypes = {info.name: info.dtype for info in plan}
    rows: list[dict[str, Any]] = []
    with WeightsWriter(staging, plan, max_shard_bytes=max_shard_bytes) as writer:
        for step in steps:
            sources = [reader.load(name) for name in step.source]
            digests = {
                name: tensor_sha256(tensor)
                for name, tensor in zip(step.source, sources, strict=True)
            }
            results = step.transform.forward(sources)
            for name, result in zip(step.target, results, strict=True):
                writer.write(name, cast(name, result, dtypes[name]))
            rows.append(
                {
                    "from": digests,
                    "to": {name: writer.sha256[name] for name in step.target},
                    "transform": type(step.transform).__name__,
                }
            )
        for name, tensor in kept:
            writer.write(name, tensor)
    return rows


def _new_config(
    config: Mapping[str, Any],
    original: dict[str, Any] | None,
    target_format: str,
    geometry: Geometry,
    plan: Sequence[TensorInfo],
) -> dict[str, Any]:
    """The result's config: the source's original one on the way back, else a fresh one."""
    names = {info.name for info in plan}
    has_biases_now = bool(names & biases_of(target_format, geometry))
    if original is not None and has_biases(target_format, original) in (has_biases_now, None):
        return original
    fresh = FORMATS[target_format].config(geometry)
    if original is not None:  # of a model without biases; training has given it some
        fresh = {**original, **FORMATS[target_format].written}
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


def _original_config(
    record: Mapping[str, Any] | None, target_format: str, geometry: Geometry
) -> dict[str, Any] | None:
    """The config of the model that was converted to this one, where this is the way back."""
    original = (record or {}).get("source_config")
    if not isinstance(original, dict) or original.get("model_type") != target_format:
        return None
    return original if FORMATS[target_format].geometry(original) == geometry else None


def _without_biases(
    steps: list[Step],
    plan: list[TensorInfo],
    reader: GlmSource,
    target_format: str,
    geometry: Geometry,
    original: Mapping[str, Any] | None,
) -> tuple[list[Step], list[TensorInfo]]:
    """Leave the biases out again that the original had none of, unless training changed them."""
    if original is None or has_biases(target_format, original) is not False:
        return steps, plan
    names = biases_of(target_format, geometry)
    sources = [name for step in steps if names & set(step.target) for name in step.source]
    if any(reader.load(name).any() for name in sources):
        return steps, plan
    kept = [step for step in steps if not names & set(step.target)]
    return kept, [info for info in plan if info.name not in names]


def _left_out(
    keymap: Keymap, reader: WeightsReader, doubled: str | None, layout: str
) -> list[dict[str, Any]]:
    """The source's tensors without a counterpart in the target, with their bytes."""
    rows: list[dict[str, Any]] = []
    if doubled is not None:
        rows.append({"name": doubled, "reason": "tied", "same_as": head_and_embedding(layout)[1]})
    for name, info in reader.tensors.items():
        reason = keymap.left_reason(name)
        if reason is None:
            continue
        if info.num_bytes > _MAX_KEPT_BYTES:
            raise CheckpointError(f"{name} has {info.num_bytes} bytes: too large for {reason!r}")
        data = tensor_bytes(reader.load(name)).hex()
        dtype = str(info.dtype).removeprefix("torch.")
        shape = list(info.shape)
        rows.append({"name": name, "reason": reason, "dtype": dtype, "shape": shape, "hex": data})
    return rows


def _kept_before(
    record: Mapping[str, Any] | None, target_format: str, reader: GlmSource
) -> list[tuple[str, torch.Tensor]]:
    """What an earlier conversion left out of its source, when this one goes back to it."""
    if record is None or record.get("from") != target_format:
        return []
    kept = []
    try:
        for row in record["left_out"]:
            if "same_as" in row:
                embedding = head_and_embedding("qwen2")[1]
                kept.append((str(row["name"]), reader.load(embedding)))
                continue
            data = torch.frombuffer(bytearray.fromhex(row["hex"]), dtype=torch.uint8)
            dtype = _STORED[row["dtype"]]
            kept.append((str(row["name"]), data.view(dtype).reshape(row["shape"])))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{RECORD_NAME} of the source is damaged: {error}") from None
    return kept


def _read_record(source: Path) -> dict[str, Any] | None:
    if not (source / RECORD_NAME).exists():
        return None
    record = read_json(plain_file(source, RECORD_NAME))
    return record if isinstance(record, dict) else None


def _pretty(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
