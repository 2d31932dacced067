"""Writes weights as safetensors, one tensor at a time, in shards of a chosen size.

The layout is planned from shapes alone, so a shard is never assembled in memory: its header is
written first, its room is reserved on the disk, and each tensor is written to its position when it
comes.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainkit.checkpoint.weights.plain_files import write_json
from trainkit.checkpoint.weights.reader import DTYPES, TensorInfo
from trainkit.errors import CheckpointError
from trainkit.places import WEIGHTS

INDEX_NAME = WEIGHTS[1]
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Position:
    file: str
    offset: int
    info: TensorInfo


class WeightsWriter:
    """Writes a model's weights into a directory: ``model.safetensors`` or shards with an index."""

    def __init__(
        self, directory: Path, tensors: Sequence[TensorInfo], *, max_shard_bytes: int
    ) -> None:
        """Plan the shards, write their headers and reserve their room.

        Shards are filled in the order of ``tensors``; one grows beyond its limit only for a tensor
        that alone is larger.
        """
        self.directory = directory
        self._written: set[str] = set()
        self._positions: dict[str, _Position] = {}
        self._descriptors: dict[str, int] = {}
        if len({info.name for info in tensors}) != len(tensors):
            raise CheckpointError("a tensor is planned twice", where=str(directory))
        self._num_bytes = sum(info.num_bytes for info in tensors)
        shards = _plan(tensors, max_shard_bytes)
        try:
            for number, shard in enumerate(shards, start=1):
                single = len(shards) == 1
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                self._start("model.safetensors" if single else file, shard)
        except BaseException:
            self._close()
            raise
        self._is_sharded = len(shards) > 1

    def write(self, name: str, tensor: torch.Tensor) -> None:
        place = self._positions.get(name)
        info = TensorInfo(name, tensor.dtype, tuple(tensor.shape))
        if place is None or place.info != info or name in self._written:
            planned = place.info if place else "nothing"
            raise CheckpointError(
                f"{name}: planned {planned}, got {info}", where=str(self.directory)
            )
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data  # no copy where it lies so
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptors[place.file], data[done:], place.offset + done)
        self._written.add(name)

    def finish(self) -> None:
        missing = self._positions.keys() - self._written
        self._close()
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors were never written: {sorted(missing)[:4]}",
                where=str(self.directory),
            )
        if self._is_sharded:
            index = {
                "metadata": {"total_size": self._num_bytes},
                "weight_map": {name: place.file for name, place in sorted(self._positions.items())},
            }
            write_json(self.directory / INDEX_NAME, index)

    def __enter__(self) -> "WeightsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self._close()

    def _close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def _start(self, file: str, shard: Sequence[TensorInfo]) -> None:
        # Wide elements first, so that every tensor is aligned to its own element size: torch
        # cannot view unaligned bytes, and the format permits no padding between tensors.
        ordered = sorted(shard, key=lambda info: -info.dtype.itemsize)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for info in ordered:
            header[info.name] = {
                "dtype": _NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [offset, offset + info.num_bytes],
            }
            offset += info.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(self.directory / file, flags, 0o666)
        self._descriptors[file] = descriptor
        os.posix_fallocate(descriptor, 0, start + offset)
        os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)
        for info in ordered:
            self._positions[info.name] = _Position(file, start, info)
            start += info.num_bytes


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a small set of tensors as one safetensors file."""
    from safetensors.torch import save_file

    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )


def _plan(tensors: Iterable[TensorInfo], max_shard_bytes: int) -> list[list[TensorInfo]]:
    shards: list[list[TensorInfo]] = [[]]
    filled = 0
    for info in tensors:
        if shards[-1] and filled + info.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(info)
        filled += info.num_bytes
    return shards
