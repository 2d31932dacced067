"""Writes weights as safetensors in shards of a chosen size, one of them in memory at a time."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path

import torch
from safetensors.torch import save_file

from trainkit.checkpoint.weights.plain_files import write_json
from trainkit.checkpoint.weights.reader import TensorInfo
from trainkit.errors import CheckpointError
from trainkit.places import WEIGHTS

INDEX_NAME = WEIGHTS[1]


def write_tensors(
    directory: Path,
    plan: Sequence[TensorInfo],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    max_shard_bytes: int,
) -> None:
    """Write a model's weights: ``model.safetensors``, or shards with an index.

    A shard grows beyond its limit only for a tensor that alone is larger.

    Args:
        directory: is there.
        plan: all tensors, in the order of ``tensors``; how they are dealt out is known beforehand.
        tensors: read when their shard is written.
        max_shard_bytes: in a file.
    """
    shards, coming = _dealt_out(plan, max_shard_bytes), iter(tensors)
    homes: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        held = dict(islice(coming, len(shard)))
        found = [TensorInfo(name, each.dtype, tuple(each.shape)) for name, each in held.items()]
        for planned, got in zip_longest(shard, found):
            if planned != got:
                raise CheckpointError(f"planned {planned}, got {got}", where=str(directory))
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else WEIGHTS[0]
        save_tensors(directory / file, held)
        homes |= dict.fromkeys(held, file)
    if len(shards) > 1:
        size = sum(info.num_bytes for info in plan)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(homes.items()))}
        write_json(directory / INDEX_NAME, index)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors as one safetensors file."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})


def _dealt_out(tensors: Iterable[TensorInfo], max_shard_bytes: int) -> list[list[TensorInfo]]:
    shards: list[list[TensorInfo]] = [[]]
    filled = 0
    for info in tensors:
        if shards[-1] and filled + info.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(info)
        filled += info.num_bytes
    return shards
