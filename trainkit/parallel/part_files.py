"""The parts of a checkpoint that ranks wrote together, read without running what is in them.

torch.distributed.checkpoint opens its table of contents, and values that are no tensors, with the
full unpickler, which runs whatever code a file holds. Here the table may name the classes that it
is made of, and values are read by torch's weights-only unpickler.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from trainkit.checkpoint.weights.contents import refuse_unfit
from trainkit.checkpoint.weights.enum_pickles import GETATTR, member
from trainkit.errors import CheckpointError

FOLDER = "sharded_state"
"""Of a checkpoint: masters and optimizer states in parts."""

_TABLE = ".metadata"
_FIX = "continue from another checkpoint of the run: --resume RUN/checkpoint-N"
_METADATA = "torch.distributed.checkpoint.metadata"
_NEEDED = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata")),
        *((_METADATA, name) for name in ("TensorProperties", "TensorStorageMetadata")),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
    }
)
"""What the table is made of, besides torch's dtypes; none of it does anything when made."""


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" == GETATTR:
            return member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _NEEDED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def read_table(folder: Path) -> Metadata:
    """The table of contents of a folder of parts.

    Raises:
        CheckpointError: it is damaged, names other classes, or files outside the folder.
    """
    path = folder / _TABLE
    try:
        table = _TableUnpickler(io.BytesIO(path.read_bytes())).load()
        files = {info.relative_path for info in (table.storage_data or {}).values()}
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path), fix=_FIX) from None
    except Exception as error:  # the unpickler raises nearly anything on damage
        raise CheckpointError(
            f"this file is damaged or hostile, and was not loaded: {error}",
            where=str(path),
            fix=_FIX,
        ) from None
    for name in sorted(files):
        if not (isinstance(name, str) and Path(name).name == name and (folder / name).is_file()):
            raise CheckpointError(
                f"{name!r} is not a file of this folder", where=str(path), fix=_FIX
            )
    assert isinstance(table, Metadata)
    return table


def check_parts(checkpoint: Path) -> None:
    """Look at the parts of a checkpoint before anything is loaded; there may be none.

    Raises:
        CheckpointError: see `read_table`.
    """
    if (checkpoint / FOLDER).is_dir():
        read_table(checkpoint / FOLDER)


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        table = read_table(Path(self.path))
        if table.storage_meta is None:
            table.storage_meta = StorageMeta()
        table.storage_meta.load_id = self.load_id
        return table


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            plain = torch.load(value, weights_only=True)
        except Exception as error:
            name = read_item.dest_index.fqn
            raise CheckpointError(
                f"{name} is damaged or hostile, and was not loaded: {error}", fix=_FIX
            ) from None
        again = io.BytesIO()
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)


def save_parts(state: dict[str, Any], checkpoint: Path) -> None:
    """Write each rank's parts; every rank calls it."""
    dcp.save(state, checkpoint_id=checkpoint / FOLDER)


def load_parts(state: dict[str, Any], checkpoint: Path) -> None:
    """Fill ``state`` in place from the parts, whatever ranks wrote them; every rank calls it.

    Raises:
        CheckpointError: a file is damaged, or would run code.
    """
    folder = checkpoint / FOLDER
    table = read_table(folder).state_dict_metadata
    saved = {
        name: torch.empty(about.size, dtype=about.properties.dtype, device="meta")
        for name, about in table.items()
        if isinstance(about, TensorStorageMetadata)
    }
    wanted = {f"model.{name}": each for name, each in state["model"].items()}
    refuse_unfit(folder, saved, wanted)
    try:
        dcp.load(state, checkpoint_id=folder, storage_reader=_Reader(folder), planner=_Planner())
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, CheckpointError):
            raise first from None
        raise CheckpointError(
            f"it does not hold what this run saves there: {first}", where=str(folder), fix=_FIX
        ) from error


# An optimizer's state by the names of its parameters, so that any number of ranks can take it up.
#
# torch's own functions for this (2.13) fail where a parameter group is empty, as that without
# weight decay is under LoRA, and take an optimizer step to make the states that they load into.

KEY = "optimizer"
"""Where the parts of a checkpoint keep it."""


def optimizer_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """State by parameter name, and each group's options."""
    inner, names = innermost(optimizer), _names(model, optimizer)
    return {
        "state": {names[parameter]: dict(values) for parameter, values in inner.state.items()},
        "groups": _options(inner),
    }


def empty_state(model: nn.Module, optimizer: Any, checkpoint: Path) -> dict[str, Any]:
    """As `optimizer_state`, with room for the values that a checkpoint has.

    Raises:
        CheckpointError: its table of contents is damaged.
    """
    table = read_table(checkpoint / FOLDER)
    parameters = dict(model.named_parameters())
    state: dict[str, dict[str, Any]] = {}
    for entry, path in (table.planner_data or {}).items():
        if path[:2] != (KEY, "state") or path[2] not in parameters:
            continue
        parameter, about = parameters[path[2]].detach(), table.state_dict_metadata[entry]
        room: Any = None
        if isinstance(about, TensorStorageMetadata):
            dtype = about.properties.dtype
            if about.size == parameter.shape:
                room = torch.zeros_like(parameter, dtype=dtype)
            else:
                room = torch.zeros(about.size, dtype=dtype)
        state.setdefault(path[2], {})[path[3]] = room
    return {"state": state, "groups": _options(innermost(optimizer))}


def take_up(model: nn.Module, optimizer: Any, saved: dict[str, Any]) -> None:
    """Have an optimizer go on with what `empty_state` was filled with."""
    inner, names = innermost(optimizer), _names(model, optimizer)
    parameters = [each for group in inner.param_groups for each in group["params"]]
    numbers = {names[each]: number for number, each in enumerate(parameters)}
    groups, first = [], 0
    for group, options in zip(inner.param_groups, saved["groups"], strict=True):
        last = first + len(group["params"])
        groups.append({**options, "params": list(range(first, last))})
        first = last
    state = {numbers[name]: values for name, values in saved["state"].items() if name in numbers}
    inner.load_state_dict({"state": state, "param_groups": groups})


_LIKE_THE_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}


def refuse_unfit_state(model: nn.Module, optimizer: Any, saved: Any, path: Path) -> None:
    """Before ``load_state_dict``, which casts what it is given, and looks at no shape.

    States that are smaller than their parameter (projected, factored, 8 bits) have other entries
    besides, and those torch's optimizers make are all as their parameter is.

    Raises:
        CheckpointError: naming the parameter and its entry.
    """
    inner, names = innermost(optimizer), _names(model, optimizer)
    own = [each for group in inner.param_groups for each in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    is_torchs = type(getattr(inner, "inner", inner)).__module__.startswith("torch.optim")
    found, wanted = {}, {}
    for number, parameter in zip(numbers, own, strict=True):
        entries = saved["state"].get(number, {})
        if not entries.keys() <= {"step", *_LIKE_THE_PARAMETER}:
            continue
        for key in entries.keys() - {"step"}:
            like = inner.state.get(parameter, {}).get(key, parameter)
            of_dtype = like.dtype if is_torchs or like is not parameter else entries[key].dtype
            name = f"{names.get(parameter, number)}: {key}"
            found[name] = entries[key]
            wanted[name] = torch.empty(parameter.shape, dtype=of_dtype, device="meta")
    for number, master in enumerate(saved.get("masters", ())):
        found[f"masters.{number}"] = master
        wanted[f"masters.{number}"] = torch.empty_like(master, dtype=torch.float32, device="meta")
    refuse_unfit(path, found, wanted)


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer under accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    inner: torch.optim.Optimizer = optimizer
    return inner


def _names(model: nn.Module, optimizer: Any) -> dict[torch.Tensor, str]:
    """Of what the optimizer trains: parameters, or their fp32 masters."""
    masters = getattr(innermost(optimizer), "masters", {})
    return {masters.get(each, each): name for name, each in model.named_parameters()}


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
