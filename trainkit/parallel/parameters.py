"""Parameters of which this process may hold a part only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def num_elements(parameter: nn.Parameter) -> int:
    """Elements of the full parameter; ZeRO-3 leaves an empty one behind between uses."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of the full parameter."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_whole(parameter: nn.Parameter) -> bool:
    """Whether this process can read all of the values now, outside the engine's own forward."""
    return not (hasattr(parameter, "ds_id") or parameter.is_meta)
