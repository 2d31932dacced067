"""A copy of a state that training cannot change any more, so that it can be written meanwhile."""

import copy
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch

_Copies = dict[Any, tuple[torch.Tensor, torch.Tensor]]
"""A place in memory to the tensor there and its copy. The tensor is held: what a composed one is
made of may be made for the asking, and once let go of, its place is another's."""


@torch.no_grad()
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


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested state that `snapshot` copies: each once."""
    found: dict[Any, torch.Tensor] = {}

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if is_composed(value):
                inner = value.__tensor_flatten__()[0]  # type: ignore[attr-defined]
                walk([getattr(value, name) for name in inner])
            else:
                found[value.data_ptr(), value.shape] = value
        elif isinstance(value, dict):
            walk(list(value.values()))
        elif type(value) in (list, tuple):
            for each in value:
                walk(each)

    walk(value)
    return list(found.values())


def pin_ahead(tensors: Iterable[torch.Tensor]) -> threading.Thread | None:
    """Have the pinned memory made that `snapshot` will copy these into, while the caller goes on.

    The driver takes most of a second for a GiB. What torch has once made it keeps, and hands out
    again for whatever has a like size.

    Args:
        tensors: those of a GPU count; a tensor that is copied twice is given twice.

    Returns:
        What does it; None where there is nothing to do.
    """
    on_gpu = [each for each in tensors if each.device.type == "cuda"]
    if not on_gpu:
        return None
    device, sizes = on_gpu[0].device, [each.numel() * each.element_size() for each in on_gpu]

    def make() -> None:
        torch.cuda.set_device(device)  # a thread begins with the first GPU
        with suppress(RuntimeError):  # without so much memory the save itself will say so
            held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            del held

    thread = threading.Thread(target=make, name="pin", daemon=True)
    thread.start()
    return thread


def is_composed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of others and has no memory of its own, as torchao's states are."""
    return hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "to_local")


def _copy(value: Any, copies: _Copies) -> Any:
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value, copies)
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
