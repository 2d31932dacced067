"""The parts of a checkpoint that ranks wrote together, read without running what is in them.

torch.distributed.checkpoint opens its table of contents, and values that are no tensors, with the
full unpickler, which runs whatever code a file holds. Here the table may name the classes that it
is made of, and values are read by torch's weights-only unpickler.
"""

from __future__ import annotations

import inspect
import io
import math
import pickle
from collections.abc import Mapping, Sequence
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

from trainkit.checkpoint.weights.contents import GETATTR, member, refuse_unfit
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
    """Look at the parts of a checkpoint before anything is loaded; there may be none."""
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
    """Fill ``state`` in place from the parts, whatever ranks wrote them; every rank calls it."""
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
WITHOUT = "without_state"
"""Next to it, whose state was not there yet when it was saved, since no gradient had come. A
checkpoint without this entry is of a version that did not say."""


def optimizer_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """State by parameter name, each group's options, and the parameters that have no state."""
    state, own = innermost(optimizer).state, trained_by(model, optimizer)
    return {
        "state": {name: dict(state[each]) for name, each in own.items() if each in state},
        "groups": _options(innermost(optimizer).param_groups),
        # Ranks of a pipeline have other parameters, and so an entry each.
        WITHOUT: {name: without_state(model, optimizer) for name in [*own][:1]},
    }


def without_state(model: nn.Module, optimizer: Any) -> list[str]:
    """The parameters that an optimizer keeps nothing of so far."""
    state = innermost(optimizer).state
    return [name for name, each in trained_by(model, optimizer).items() if each not in state]


def empty_state(model: nn.Module, optimizer: Any, checkpoint: Path, step: int) -> dict[str, Any]:
    folder = checkpoint / FOLDER
    table, own = read_table(folder), trained_by(model, optimizer)
    state: dict[str, dict[str, Any]] = {}
    bare: dict[str, Any] = {}
    for entry, path in (table.planner_data or {}).items():
        about = table.state_dict_metadata[entry]
        if path[:2] == (KEY, WITHOUT):
            bare[path[2]] = None
        elif path[:2] == (KEY, "state") and path[2] in own:
            room = None
            if isinstance(about, TensorStorageMetadata):
                room = torch.empty(about.size, dtype=about.properties.dtype, device="meta")
            state.setdefault(path[2], {})[path[3]] = room
    saved = {"state": state, "groups": _options(innermost(optimizer).param_groups)}
    refuse_unfit_state(model, optimizer, saved, folder, step)
    for name, entries in state.items():
        parameter = own[name].detach()
        for key, about in entries.items():
            if about is not None and about.shape == parameter.shape:
                entries[key] = torch.zeros_like(parameter, dtype=about.dtype)
            elif about is not None:
                entries[key] = torch.zeros(about.shape, dtype=about.dtype)
    return {**saved, WITHOUT: bare} if bare else saved


def take_up(
    model: nn.Module, optimizer: Any, saved: dict[str, Any], checkpoint: Path, step: int
) -> None:
    """Have an optimizer go on with what `empty_state` was filled with."""
    refuse_unfit_state(model, optimizer, saved, checkpoint / FOLDER, step)
    inner = innermost(optimizer)
    numbers = {name: number for number, name in enumerate(trained_by(model, optimizer))}
    groups, first = [], 0
    for group, options in zip(inner.param_groups, saved["groups"], strict=True):
        last = first + len(group["params"])
        groups.append({**options, "params": list(range(first, last))})
        first = last
    state = {numbers[name]: values for name, values in saved["state"].items()}
    inner.load_state_dict({"state": state, "param_groups": groups})


# What a checkpoint has of an optimizer is held against the run's own before it is loaded: torch
# casts it, copies broadcast it, and what is missing would begin at nothing.

_LIKE_THE_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}
_FREE = ("foreach", "fused", "capturable", "differentiable", "train_mode")
"""Options that change no number, or that change while it trains."""


def by_name(model: nn.Module, optimizer: Any, saved: Any, path: Path) -> dict[str, Any]:
    """What ``state_dict`` gave, as `optimizer_state` has it."""
    own = optimizer.state_dict()
    refuse_other(path, {**saved, "state": {}}, {**own, "state": {}}, free=(WITHOUT,))
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    names = dict(zip(numbers, trained_by(model, optimizer), strict=True))
    state = {names.get(number, f"state.{number}"): v for number, v in saved["state"].items()}
    found = {"state": state, "groups": _options(saved["param_groups"])}
    return {**found, WITHOUT: {"": saved[WITHOUT]}} if WITHOUT in saved else found


def refuse_unfit_state(
    model: nn.Module, optimizer: Any, saved: Mapping[str, Any], path: Path, step: int
) -> None:
    """Hold a saved state against the run's own optimizer, before it is loaded.

    States that are smaller than their parameter (projected, factored, 8 bits) are held against one
    another: those of parameters of one shape are alike.

    Of tensors of ``saved`` that are on the meta device only what they are is compared; no parameter
    may have taken more steps than ``step``.
    """
    inner, own, state = innermost(optimizer), trained_by(model, optimizer), saved["state"]
    refuse_other(path, saved["groups"], _options(inner.param_groups), "param_groups")
    for name in state.keys() - own.keys():
        raise _other(path, name, "there", "not trained")
    usual = _usual_entries(inner)
    alike: dict[Any, Any] = {}
    bare = saved.get(WITHOUT)
    excused = [
        name for names in (bare or {}).values() for name in (own if names is None else names)
    ]
    group_of = {each: n for n, group in enumerate(inner.param_groups) for each in group["params"]}
    for name, parameter in own.items():
        entries = state.get(name)
        if entries is None:
            is_missed = bare is not None and name not in excused and usual != {}
            if parameter in inner.state or is_missed:
                raise _other(path, f"{name}: the state", "missing", "there")
            continue
        if parameter in inner.state:
            wanted = inner.state[parameter]
        elif usual is not None:
            room = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            wanted = {key: room if value.dim() else value for key, value in usual.items()}
        else:
            kind = group_of[parameter], parameter.shape, frozenset(entries)
            wanted = alike.setdefault(kind, entries)
            for key in _LIKE_THE_PARAMETER & entries.keys():
                room = torch.empty(parameter.shape, dtype=entries[key].dtype, device="meta")
                refuse_other(path, entries[key], room, f"{name}: {key}")
        refuse_other(path, entries, wanted, name)
        if "step" in entries:
            refuse_steps(path, entries["step"], step, f"{name}: step")


def _usual_entries(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor] | None:
    """What one of torch's optimizers keeps of a parameter of one number; None of another one."""
    kind = type(getattr(optimizer, "inner", optimizer))
    kind = torch.optim.AdamW if kind.__name__ == "DeepSpeedCPUAdam" else kind
    of_torch = (
        *(torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD),
        *(torch.optim.Adagrad, torch.optim.RMSprop),
    )
    if kind not in of_torch:
        return None
    taken = inspect.signature(kind).parameters.keys() - {*_FREE}
    options = {key: value for key, value in optimizer.defaults.items() if key in taken}
    one = nn.Parameter(torch.zeros(1))
    one.grad = torch.zeros(1)
    trial = kind([one], **options)
    trial.step()
    return {key: value for key, value in trial.state[one].items() if value is not None}


def refuse_steps(path: Path, found: Any, step: int, name: str) -> None:
    """A count of steps is a whole number, up to the checkpoint's own.

    DeepSpeed takes one before the first.
    """
    if isinstance(found, torch.Tensor) and found.is_meta:
        return
    count = float(found)
    if not (0 <= count <= step + 1 and count == int(count)):
        raise _other(path, name, f"{count:g}", f"at most {step}")


def refuse_other(
    path: Path, found: Any, wanted: Any, name: str = "", free: Sequence[str] = _FREE
) -> None:
    """Hold a saved structure against the run's own: names, lengths, shapes, dtypes, finite numbers.

    Options that a torch of another version does not know are let pass, and so are plain numbers
    that are others: the recipe's win.
    """
    if isinstance(wanted, torch.Tensor) and wanted.dim():
        if _described(found) != _described(wanted):
            raise _other(path, name, _described(found), _described(wanted))
    elif isinstance(wanted, dict):
        if not isinstance(found, dict):
            raise _other(path, name, _described(found), _described(wanted))
        is_group = "params" in wanted or "lr" in wanted
        keys = wanted.keys() & found.keys() if is_group else {**wanted, **found}.keys()
        for key in sorted(keys - {*free}, key=str):
            below = f"{name}: {key}" if name else str(key)
            if key not in found or key not in wanted:
                ours, theirs = ("there" if key in each else "missing" for each in (wanted, found))
                raise _other(path, below, theirs, ours)
            refuse_other(path, found[key], wanted[key], below, free)
    elif isinstance(wanted, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(wanted):
            raise _other(path, name, _described(found), _described(wanted))
        for number, (theirs, ours) in enumerate(zip(found, wanted, strict=True)):
            refuse_other(path, theirs, ours, f"{name}.{number}", free)
    elif _is_number(wanted):
        if not (_is_number(found) and (getattr(found, "is_meta", False) or math.isfinite(found))):
            raise _other(path, name, _described(found), "a finite number")
    elif isinstance(wanted, bool | str | None) and found != wanted:
        raise _other(path, name, _described(found), _described(wanted))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.dim()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {[*value.shape]}"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r:.80}"


def _other(path: Path, name: str, found: str, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{name} is {found} in it, and {wanted} in the run", where=str(path), fix=_FIX
    )


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    inner: torch.optim.Optimizer = optimizer
    return inner


def trained_by(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """What the optimizer trains, in its order: parameters, or their fp32 masters, by name."""
    inner = innermost(optimizer)
    masters = getattr(inner, "masters", {})
    names = {masters.get(each, each): name for name, each in model.named_parameters()}
    every = [each for group in inner.param_groups for each in group["params"]]
    return {names.get(each, f"part {number}"): each for number, each in enumerate(every)}


def _options(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in each.items() if key != "params"} for each in groups]
