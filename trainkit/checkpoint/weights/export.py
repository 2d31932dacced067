"""Writes weights from any source as a plain model directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trainkit.checkpoint.weights.companions import copy_companions
from trainkit.checkpoint.weights.plain_files import read_config, write_json
from trainkit.checkpoint.weights.reader import TensorInfo
from trainkit.checkpoint.weights.writer import write_tensors
from trainkit.checkpoint.whole.atomic import free_space_check, staged_directory
from trainkit.errors import CheckpointError

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class TensorSource(Protocol):
    """Weights by name, read one at a time."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What there is."""

    def load(self, name: str) -> Tensor:
        """Read one."""


def dtype_named(name: str | None) -> torch.dtype | None:
    """The torch dtype of an option's value; None stays None."""
    if name is None:
        return None
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name!r} is none of {', '.join(DTYPES)}")
    return DTYPES[name]


def write_weights(source: TensorSource, directory: Path, *, max_shard_bytes: int) -> None:
    plan = list(source.tensors.values())
    tensors = ((info.name, source.load(info.name)) for info in plan)
    write_tensors(directory, plan, tensors, max_shard_bytes=max_shard_bytes)


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    result = tensor.to(dtype)
    if dtype is not tensor.dtype and (result.isinf() & tensor.isfinite()).any():
        raise CheckpointError(
            f"{name} holds {tensor.abs().max().item():.3g}, which {str(dtype)[6:]} cannot",
            fix="choose bfloat16 or float32",
        )
    return result


class CastWeights:
    """A source in another dtype; integers stay as they are."""

    def __init__(self, source: TensorSource, dtype: torch.dtype | None) -> None:
        self._source = source
        self._dtype = dtype
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, self._of(info.dtype), info.shape)
            for name, info in source.tensors.items()
        }

    def load(self, name: str) -> Tensor:
        return cast(name, self._source.load(name), self.tensors[name].dtype)

    def _of(self, own: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and own.is_floating_point else own


def export_plain(
    source: TensorSource,
    companions: Path,
    target: Path,
    *,
    dtype: str | None = "bfloat16",
    max_shard_bytes: int = 5 * 10**9,
    with_code: bool = False,
) -> int:
    """Write weights as a model that ``from_pretrained`` loads."""
    config = read_config(companions)
    cast = CastWeights(source, dtype_named(dtype))
    free_space_check(target, sum(info.num_bytes for info in cast.tensors.values()))
    with staged_directory(target, metadata={"kind": "export"}) as staging:
        write_weights(cast, staging, max_shard_bytes=max_shard_bytes)
        write_config(staging, config, dtype)
        copy_companions((companions,), staging, with_code=with_code)
    return len(cast.tensors)


def write_config(directory: Path, config: Mapping[str, object], dtype: str | None) -> None:
    """Write config.json with the dtype that the weights now have; None leaves what it says."""
    content = dict(config)
    if dtype is not None:
        content.pop("dtype", None)
        content["torch_dtype"] = dtype
    write_json(directory / "config.json", content)
