"""Parameters of which this process may hold a part only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def num_elements(parameter: nn.Parameter) -> int:
    """Elements of the full parameter; ZeRO-3 leaves an empty one behind between uses."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def own_part(parameter: nn.Parameter) -> torch.Tensor:
    """The values of a parameter that this process holds."""
    part: torch.Tensor = getattr(parameter, "ds_tensor", parameter)
    return part


def all_ranks(value: torch.Tensor) -> torch.Tensor:
    """A number that an engine computed over all ranks, as a plain tensor."""
    plain: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return plain


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of the full parameter."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_whole(parameter: nn.Parameter) -> bool:
    """Whether this process can read all of the values now, outside the engine's own forward."""
    return not (hasattr(parameter, "ds_id") or parameter.is_meta)
