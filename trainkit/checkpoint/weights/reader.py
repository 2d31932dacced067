"""Reads weights one tensor at a time out of a directory that need not be trusted.

safetensors checks a header against its file, and only the requested tensor is loaded. Pickles
(``pytorch_model.bin``) are not opened: they may hold code.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trainkit.checkpoint.weights.plain_files import is_plain_name, plain_file, read_json
from trainkit.errors import CheckpointError
from trainkit.places import WEIGHTS

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class TensorInfo:
    """What a file says about one of its tensors.

    Attributes:
        shape: may be empty (a scalar) and may hold zeros.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def finite(name: str, tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """The same tensor, of a file."""
    if not tensor.is_floating_point():
        return tensor
    values = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # fp8 is not asked
    if not values.isfinite().all():
        count = int(values.numel() - values.isfinite().sum())
        raise CheckpointError(
            f"{name}: {count} of {values.numel()} values are NaN or infinite",
            where=str(path),
            fix="fetch or write the file again; of a run, take an earlier checkpoint",
        )
    return tensor


def refuse_not_finite(directory: Path) -> None:
    """Read all weights of a model or an adapter for what is not finite."""
    adapter = (directory / ADAPTER_WEIGHTS).exists()
    with adapter_file(directory) if adapter else WeightsReader(directory) as reader:
        for name in reader.tensors:
            reader.load(name)


@contextlib.contextmanager
def adapter_file(directory: Path) -> Iterator[SafetensorsFile]:
    with contextlib.closing(SafetensorsFile(plain_file(directory, ADAPTER_WEIGHTS))) as file:
        yield file


class SafetensorsFile:
    """One safetensors file, its header checked by the library, its tensors read on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._file = safe_open(path, framework="pt")
            for name in self._file.offset_keys():
                about = self._file.get_slice(name)
                dtype, shape = DTYPES[about.get_dtype()], tuple(about.get_shape())
                self.tensors[name] = TensorInfo(name, dtype, shape)
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(
                f"it is not a whole safetensors file of known dtypes: {error}",
                where=str(path),
                fix="fetch or write the file again",
            ) from None

    def load(self, name: str) -> torch.Tensor:
        return finite(name, self._file.get_tensor(name), self.path)

    def close(self) -> None:
        del self._file


def tensors_in(path: Path) -> dict[str, TensorInfo]:
    """What a safetensors file holds, by its checked header."""
    return SafetensorsFile(path).tensors


def weight_files(directory: Path) -> list[str]:
    """The files that a model directory's weights are loaded from, an index included."""
    files = find_weights(directory)
    shards = sorted({*files.values()})
    return shards if "" in files else [WEIGHTS[1], *shards]


def find_weights(directory: Path) -> dict[str, str]:
    """Tensor name to file name as the index says; without an index one nameless entry."""
    file, index = WEIGHTS
    if not (directory / index).exists():
        if os.path.lexists(directory / file):
            return {"": file}
        raise CheckpointError(
            f"no weights: neither {file} nor an index of its shards",
            where=str(directory),
            fix="weights in another form: load them with transformers, and save_pretrained",
        )
    content = read_json(plain_file(directory, index))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map", where=str(directory))
    for name, file_name in weight_map.items():
        if (
            not isinstance(file_name, str)
            or not is_plain_name(file_name)
            or not file_name.endswith(".safetensors")
        ):
            raise CheckpointError(
                f"{index} sends {name!r} to {file_name!r}, which is not a *.safetensors file of "
                "the directory",
                where=str(directory),
            )
    return weight_map


class WeightsReader:
    """The weights of a model directory: one file, or shards with an index; a context manager."""

    def __init__(self, directory: Path) -> None:
        """Open every header of ``model.safetensors`` or its sharded form."""
        self.directory = Path(directory)
        self._open: dict[str, SafetensorsFile] = {}
        self.files = find_weights(self.directory)
        self._home: dict[str, str] = {}
        self._infos: dict[str, TensorInfo] = {}
        try:
            for file_name in dict.fromkeys(self.files.values()):
                self._index_file(file_name)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WeightsReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def load(self, name: str) -> torch.Tensor:
        return self._open[self._home[name]].load(name)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open = {}

    def _index_file(self, file_name: str) -> None:
        file = SafetensorsFile(plain_file(self.directory, file_name))
        self._open[file_name] = file
        listed = {name for name, home in self.files.items() if home == file_name}
        if listed != {""}:
            missing, extra = listed - file.tensors.keys(), file.tensors.keys() - listed
            if missing or extra:
                raise CheckpointError(
                    f"{file_name} and the index disagree: "
                    f"missing {sorted(missing)[:4]}, not listed {sorted(extra)[:4]}",
                    where=str(self.directory),
                )
        for name, info in file.tensors.items():
            self._home[name] = file_name
            self._infos[name] = info
