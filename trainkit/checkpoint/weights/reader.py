"""Reads weights one tensor at a time out of a directory that need not be trusted.

safetensors files are parsed here, not by a library: the header is checked against the file before
a byte of a tensor is read, and only the requested tensor is loaded. Pickles (``pytorch_model.bin``)
go through torch's weights-only unpickler, which refuses to run code.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainkit.checkpoint.weights.plain_files import (
    is_plain_name,
    plain_file,
    read_json,
    refuse_duplicates,
)
from trainkit.errors import CheckpointError

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

ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMENSIONS = 16
# What torch's weights-only unpickler raises on code, on damage, and on opcodes out of order.
_UNPICKLING_FAILURES = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
)


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
    """The same tensor, of a file.

    Raises:
        CheckpointError: it holds NaN or infinity, with which a model answers nonsense.
    """
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
    adapter = any((directory / name).exists() for name in ADAPTER_WEIGHTS)
    with adapter_file(directory) if adapter else WeightsReader(directory) as reader:
        for name in reader.tensors:
            reader.load(name)


@contextlib.contextmanager
def adapter_file(directory: Path) -> Iterator[SafetensorsFile | PickledFile]:
    """The weights of a saved adapter."""
    name = next((each for each in ADAPTER_WEIGHTS if (directory / each).exists()), None)
    if name is None:
        raise CheckpointError(f"{ADAPTER_WEIGHTS[0]} is missing", where=str(directory))
    path = plain_file(directory, name)
    with contextlib.closing(
        SafetensorsFile(path) if path.suffix == ".safetensors" else PickledFile(path)
    ) as file:
        yield file


class SafetensorsFile:
    """One safetensors file, its header checked, its tensors read on demand."""

    def __init__(self, path: Path) -> None:
        """Open and check.

        Args:
            path: a regular file; a link is refused (``plain_file`` resolves the permitted ones).
        """
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            self._places: dict[str, tuple[TensorInfo, int]] = self._parse()
        except BaseException:
            self.close()
            raise

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """What the file holds, in the order of the data."""
        return {name: info for name, (info, _) in self._places.items()}

    def load(self, name: str) -> torch.Tensor:
        info, offset = self._places[name]
        data = torch.empty(info.num_bytes, dtype=torch.uint8)
        view = data.numpy().data
        done = 0
        while done < info.num_bytes:
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                raise self._refuse(f"it ended inside {name}")
            done += count
        return finite(name, data.view(info.dtype).reshape(info.shape), self.path)

    def close(self) -> None:
        os.close(self._descriptor)

    def _refuse(self, what: str) -> CheckpointError:
        return CheckpointError(what, where=str(self.path), fix="fetch or write the file again")

    def _parse(self) -> dict[str, tuple[TensorInfo, int]]:
        size = os.fstat(self._descriptor).st_size
        prefix = os.pread(self._descriptor, 8, 0)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or header_bytes > min(_MAX_HEADER_BYTES, size - 8):
            raise self._refuse("its header is longer than the file: not a safetensors file, or cut")
        try:
            header = json.loads(
                os.pread(self._descriptor, header_bytes, 8), object_pairs_hook=refuse_duplicates
            )
        except (ValueError, RecursionError) as error:
            raise self._refuse(f"its header is not valid JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._refuse("its header is not a JSON object")
        header.pop("__metadata__", None)
        start = 8 + header_bytes
        spans = []
        for name, entry in header.items():
            info, begin, end = self._entry(name, entry)
            spans.append((begin, end, info))
        spans.sort(key=lambda span: span[:2])
        position = 0
        places = {}
        for begin, end, info in spans:
            if begin != position:
                raise self._refuse(f"{info.name} overlaps another tensor or leaves a hole")
            places[info.name] = (info, start + begin)
            position = end
        if start + position != size:
            raise self._refuse(
                f"its tensors end at byte {start + position} and the file at {size}: it was cut, "
                "or bytes were added"
            )
        return places

    def _entry(self, name: str, entry: object) -> tuple[TensorInfo, int, int]:
        try:
            assert isinstance(entry, dict)
            dtype = DTYPES[entry["dtype"]]
            shape = tuple(_count(value) for value in entry["shape"])
            begin, end = (_count(value) for value in entry["data_offsets"])
        except (AssertionError, KeyError, TypeError, ValueError):
            raise self._refuse(f"the header's entry of {name!r} is malformed: {entry!r}") from None
        info = TensorInfo(name, dtype, shape)
        if len(shape) > _MAX_DIMENSIONS or info.num_bytes != end - begin:
            raise self._refuse(
                f"{name} claims shape {list(shape)} of {entry['dtype']}, {info.num_bytes} bytes, "
                f"but has {end - begin}"
            )
        return info, begin, end


def tensors_in(path: Path) -> dict[str, TensorInfo]:
    """What a safetensors file holds, by its checked header."""
    file = SafetensorsFile(path)
    file.close()
    return file.tensors


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _wanted(error: Exception) -> str:
    """What a pickle asked for; torch's own text goes on to say how to let it have it."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return f"; it asks for {found.group(1)}" if found else ""


class PickledFile:
    """One legacy torch file of tensors, read without running code from it."""

    def __init__(self, path: Path) -> None:
        """Unpickle, weights only; the data stays in the file where its layout permits."""
        self.path = path
        try:
            try:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # the layout before torch 1.6, which cannot be mapped
                content = torch.load(path, map_location="cpu", weights_only=True)
        except _UNPICKLING_FAILURES as error:
            raise CheckpointError(
                "this pickle is refused: it is damaged or holds more than plain tensors"
                f"{_wanted(error)}",
                where=str(path),
                fix="ask for the weights as safetensors",
            ) from None
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor)
            for name, tensor in content.items()
        ):
            raise CheckpointError("it holds more than named tensors", where=str(path))
        self._content: dict[str, torch.Tensor] = content

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._content.items()
        }

    def load(self, name: str) -> torch.Tensor:
        tensor = self._content[name].detach().clone(memory_format=torch.contiguous_format)
        return finite(name, tensor, self.path)

    def close(self) -> None:
        self._content = {}


def weight_files(directory: Path) -> list[str]:
    """The files that a model directory's weights are loaded from, an index included."""
    files = find_weights(directory)
    shards = sorted({*files.values()})
    stem = "model.safetensors" if shards[0].endswith(".safetensors") else "pytorch_model.bin"
    return shards if "" in files else [f"{stem}.index.json", *shards]


def find_weights(directory: Path) -> dict[str, str]:
    """Tensor name to file name as the index says; without an index one nameless entry."""
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        index = f"{stem}{suffix}.index.json"
        if (directory / index).exists():
            return _read_index(directory, index, suffix)
        if os.path.lexists(directory / f"{stem}{suffix}"):
            return {"": f"{stem}{suffix}"}
    raise CheckpointError(
        "no weights: neither model.safetensors nor pytorch_model.bin nor an index of shards",
        where=str(directory),
    )


def _read_index(directory: Path, index: str, suffix: str) -> dict[str, str]:
    content = read_json(plain_file(directory, index))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map", where=str(directory))
    for name, file_name in weight_map.items():
        if (
            not isinstance(file_name, str)
            or not is_plain_name(file_name)
            or not file_name.endswith(suffix)
        ):
            raise CheckpointError(
                f"{index} sends {name!r} to {file_name!r}, which is not a *{suffix} file of "
                "the directory",
                where=str(directory),
            )
    return weight_map


class WeightsReader:
    """The weights of a model directory: one file, or shards with an index.

    Use it as a context manager. At most one pickled shard is held open at a time.
    """

    def __init__(self, directory: Path) -> None:
        """Open every safetensors header; pickled shards are opened when needed.

        Args:
            directory: holds ``model.safetensors``, its sharded form, or the ``pytorch_model.bin``
                forms.

        Raises:
            CheckpointError: no weights, an index that names a path, shards and index that disagree,
                a file that lies about its content.
        """
        self.directory = Path(directory)
        self._open: dict[str, SafetensorsFile | PickledFile] = {}
        self.files = find_weights(self.directory)
        self._home: dict[str, str] = {}
        self._infos: dict[str, TensorInfo] = {}
        try:
            for file_name in dict.fromkeys(self.files.values() if self.files else ()):
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
        return self._file(self._home[name]).load(name)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open = {}

    def _index_file(self, file_name: str) -> None:
        file = self._file(file_name)
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

    def _file(self, file_name: str) -> SafetensorsFile | PickledFile:
        if file_name not in self._open:
            path = plain_file(self.directory, file_name)
            if file_name.endswith(".safetensors"):
                self._open[file_name] = SafetensorsFile(path)
            else:
                for name in [name for name in self._open if name.endswith(".bin")]:
                    self._open.pop(name).close()
                self._open[file_name] = PickledFile(path)
        return self._open[file_name]
