"""Parameters of which this process may hold a part only."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from trainkit.evaluation_mode import changed

if TYPE_CHECKING:
    import torch
    from torch import nn


def num_elements(parameter: nn.Parameter) -> int:
    """Elements of the full parameter; ZeRO-3 leaves an empty one behind between uses."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def made_whole() -> AbstractContextManager[None]:
    """Within, transformers makes models whole; under ZeRO-3 it would shard them or their parts."""
    known = sys.modules.get("transformers.integrations.deepspeed")
    return changed([] if known is None else [(known, "_hf_deepspeed_config_weak_ref", None)])


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a parameter, or of an optimizer's state, that this process holds."""
    part: torch.Tensor = getattr(tensor, "ds_tensor", tensor)
    return part.to_local() if hasattr(part, "to_local") else part


def all_ranks(value: torch.Tensor) -> torch.Tensor:
    """A number that an engine computed over all ranks, as a plain tensor."""
    plain: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return plain


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_whole(parameter: nn.Parameter) -> bool:
    """Whether this process can read all of the values now, outside the engine's own forward."""
    is_part = hasattr(parameter, "ds_id") or hasattr(parameter, "to_local")
    return not (is_part or parameter.is_meta)


def where_it_computes(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The device and dtype of a model, parts of which, or all weights, may have no memory yet."""
    tensors = [*model.parameters(), *model.buffers()]
    device = next(each.device for each in tensors if not each.is_meta)
    return device, next(each.dtype for each in tensors if each.is_floating_point())


@contextmanager
def written_by_all(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within, parameters are whole and can be written; every rank writes the same values.

    No engine has wrapped the model yet; ZeRO-3 may have sharded it.
    """
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        yield
        return
    from deepspeed import zero

    with zero.GatheredParameters(list(parameters), modifier_rank=0):
        yield
