"""An optimizer's state by the names of its parameters, so that any number of ranks can take it up.

torch's own functions for this (2.13) fail where a parameter group is empty, as that without weight
decay is under LoRA, and take an optimizer step to make the states that they load into.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainkit.checkpoint.weights.contents import refuse_unfit
from trainkit.parallel.part_files import FOLDER, read_table

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
