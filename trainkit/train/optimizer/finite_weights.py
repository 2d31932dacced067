"""No weight and no state of an optimizer that is NaN or infinite gets into a checkpoint."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from trainkit.models.linears import is_packed
from trainkit.parallel.parameters import own_part
from trainkit.parallel.snapshot import is_composed
from trainkit.train.optimizer.finite import NumberError


def check_weights(
    model: nn.Module, optimizer: Any, accelerator: Accelerator, *, what: str, fix: str
) -> None:
    """Refuse to go on with weights or optimizer states that are NaN or infinite, on any rank.

    One pass over them; all ranks call it together.

    Args:
        model: whole, or sharded by ZeRO-3.
        optimizer: under any wrappers, or None.
        accelerator: knows the ranks.
        what: would have been written, for the message.
        fix: for the message.

    Raises:
        NumberError: naming the first tensors.
    """
    names, flags = [], []
    for name, tensor in numbers_of(model, optimizer):
        low, high = torch.aminmax(tensor)
        names.append(name)
        flags.append((low.isfinite() & high.isfinite()).to(accelerator.device))
    good = torch.stack(flags).tolist() if flags else []
    mine = [name for name, is_good in zip(names, good, strict=True) if not is_good]
    if accelerator.num_processes > 1:
        count = torch.tensor(len(mine), device=accelerator.device)
        torch.distributed.all_reduce(count)
        mine = list(dict.fromkeys(gather_object(mine))) if int(count) else []
    if mine:
        more = f" and {len(mine) - 3} more" if len(mine) > 3 else ""
        raise NumberError(
            f"{', '.join(mine[:3])}{more}: NaN or infinite numbers, so {what} was not written",
            fix=fix,
        )


def numbers_of(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of numbers that a checkpoint holds, with its name."""
    names = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        if not is_packed(parameter):  # codes may be kept in storage of a floating dtype
            yield from _numbers(name, parameter)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield from _numbers(name, buffer)
    while hasattr(optimizer, "optimizer"):  # accelerate's wrapper, and DeepSpeed's within
        optimizer = optimizer.optimizer
    if optimizer is None:
        return
    if hasattr(optimizer, "settle"):
        optimizer.settle()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                yield from _numbers("an fp32 master weight", parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                label = f"{key} of {names.get(id(parameter), 'an fp32 master weight')}"
                yield from _numbers(f"the optimizer's {label}", value)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor itself if it can hold NaN."""
    if isinstance(value, torch.Tensor) and is_composed(value):
        for inner in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _numbers(f"{name} ({inner})", getattr(value, inner))
        return
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if isinstance(value, torch.Tensor) and value.dtype in kinds:
        part = own_part(value).detach()  # a detached tensor has no part any more
        if part.numel():
            yield name, part
