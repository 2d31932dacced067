"""A copy of a state that training cannot change any more, so that it can be written meanwhile."""

import copy
from typing import Any

import torch

_Copies = dict[Any, tuple[torch.Tensor, torch.Tensor]]
"""A place in memory to the tensor there and its copy. The tensor is held: what a composed one is
made of may be made for the asking, and once let go of, its place is another's."""


def snapshot(value: Any) -> Any:
    """Copy every tensor of a nested state to the host; other values are copied shallowly.

    Tensors that are one stay one. Copies from a GPU go into pinned memory, all of them at once, and
    are complete when this returns.

    Args:
        value: dictionaries, lists and tuples of tensors and plain values.
    """
    copies: _Copies = {}
    found = _copy(value, copies)
    if any(device != "cpu" for *_, device in copies):
        torch.cuda.synchronize()
    return found


def is_composed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of others and has no memory of its own, as torchao's states are."""
    return hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "to_local")


def _copy(value: Any, copies: _Copies) -> Any:
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value.detach(), copies)
    if isinstance(value, dict):
        items = {key: _copy(item, copies) for key, item in value.items()}
        if type(value) is dict:
            return items
        other = copy.copy(value)  # an ordered dictionary, with what hangs on it
        other.update(items)
        return other
    if type(value) in (list, tuple):
        return type(value)(_copy(item, copies) for item in value)
    return copy.copy(value)


def _copy_tensor(tensor: torch.Tensor, copies: _Copies) -> torch.Tensor:
    if is_composed(tensor):
        names, meta = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: _copy_tensor(getattr(tensor, name), copies) for name in names}
        make = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
        whole: torch.Tensor = make(inner, meta, tensor.shape, tensor.stride())
        return whole
    place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type)
    if place in copies and tensor.numel():
        return copies[place][1]
    if tensor.device.type == "cuda":
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies[place] = tensor, host.copy_(tensor, non_blocking=True)
    else:
        copies[place] = tensor, tensor.clone()
    return copies[place][1]
