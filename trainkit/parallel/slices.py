"""Parts of weights, read from safetensors files straight into the parts that a rank holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainkit.errors import TrainkitError
from trainkit.parallel.parameters import own_part
from trainkit.places import WEIGHTS

_SINGLE, _INDEX = WEIGHTS
ATTRIBUTE = "weights_in_files"
"""Of a model whose weights have no memory yet: its `WeightFiles`."""


@dataclass(frozen=True)
class WeightFiles:
    """Where the weights of a model without memory are.

    Attributes:
        names: of the tensor that each parameter is, by the parameter's ``id``. Adapters rename
            parameters, and leave the objects.
    """

    homes: Mapping[str, Path]
    names: Mapping[int, str]

    @classmethod
    def of(cls, model: nn.Module, directory: Path) -> WeightFiles | None:
        """The files of a directory that ``save_pretrained`` wrote.

        Returns:
            None where a parameter or a saved buffer is not in them by its own name and shape: such
            files have to be converted while they are read.
        """
        homes = _homes(directory)
        shapes = dict(_shapes(set(homes.values())))
        names = {}
        for name, parameter in model.named_parameters():
            if shapes.get(name) != tuple(parameter.shape):
                return None
            names[id(parameter)] = name
        saved = (
            model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
        )
        return None if saved else cls(homes, names)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        with safe_open(self.homes[name], "pt") as file:
            rows: torch.Tensor = file.get_slice(name)[start:stop]
        return rows


def _homes(directory: Path) -> dict[str, Path]:
    index = directory / _INDEX
    if index.exists():
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / file for name, file in placed.items()}
    single = directory / _SINGLE
    if not single.exists():
        return {}
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)


def _shapes(files: set[Path]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, tuple(file.get_slice(name).get_shape())


def names_in_files(model: nn.Module) -> dict[str, tuple[WeightFiles, str]]:
    """Parameters without memory, each with the tensor that it is; empty of a model that has all."""
    missing = {name: p for name, p in model.named_parameters() if p.is_meta}
    if not missing:
        return {}
    files = next(
        (found for each in model.modules() if (found := getattr(each, ATTRIBUTE, None))), None
    )
    found = {}
    for name, parameter in missing.items():
        key = None if files is None else files.names.get(id(parameter))
        if files is None or key is None:
            raise TrainkitError(
                f"{name} has no memory, and no file of the model holds it",
                where="parallel.shard",
                fix="set parallel: {shard: zero3}, and report this with the model's name",
            )
        found[name] = files, key
    return found


@torch.no_grad()
def fill(
    model: nn.Module,
    named: Mapping[str, tuple[WeightFiles, str]],
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
) -> None:
    """Give parameters memory for what this rank holds of them, and read that from the files.

    ``dtypes`` are those that each parameter is rounded to before it is kept, by its name.
    """
    if not named:
        return
    model._apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each)
    parameters = dict(model.named_parameters())
    for name, (files, key) in named.items():
        parameter = parameters[name]
        start, part = 0, parameter.detach()
        if isinstance(parameter, DTensor):
            _, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            start, part = offset[0], own_part(part)
        rows = files.read(key, start, start + len(part))
        part.copy_(rows.to(dtypes[name]))
