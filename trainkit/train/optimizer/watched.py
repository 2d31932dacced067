"""Each step's numbers are watched, and a bad step leaves no trace."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from torch import nn

from trainkit.models.linears import is_packed
from trainkit.parallel.engine import Ranks
from trainkit.parallel.parameters import own_part
from trainkit.parallel.snapshot import is_composed
from trainkit.train.hooks import Hook, LoopState
from trainkit.train.optimizer.finite import NumberError, number_advice

if TYPE_CHECKING:
    from trainkit.train.background import Save


class Walk:
    """The places of a model that hold numbers: found once, as a thousand modules take a while.

    Each place is read again, so what is in it may change; the model's modules may not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[int, str] = {}
        self.weights: list[tuple[str, nn.Parameter]] = []
        self._buffers: list[tuple[str, nn.Module, str]] = []
        is_adapter = isinstance(model, PeftModel)
        for name, parameter in model.named_parameters():
            self.names[id(parameter)] = name
            if is_adapter and not parameter.requires_grad:
                continue  # nothing changes them, and an adapter's checkpoint leaves them out
            if not is_packed(parameter):  # codes may be kept in storage of a floating dtype
                self.weights.append((name, parameter))
        for prefix, module in model.named_modules():
            for key in module._buffers:
                if key not in module._non_persistent_buffers_set:
                    self._buffers.append((f"{prefix}.{key}".removeprefix("."), module, key))

    def buffers(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Those that are saved, with their names."""
        return ((name, module._buffers[key]) for name, module, key in self._buffers)


@torch.no_grad()
def check_weights(
    model: nn.Module,
    optimizer: Any,
    ranks: Ranks,
    *,
    what: str,
    fix: str,
    walk: Walk | None = None,
) -> None:
    """Refuse to go on with weights or optimizer states that are NaN or infinite, on any rank.

    One pass over them; all ranks call it together.

    Args:
        model: whole, or sharded by ZeRO-3.
        optimizer: what it trains with, or None.
        ranks: the processes.
        what: would have been written, for the message.
        fix: for the message.
        walk: of this model, from an earlier check.

    Raises:
        NumberError: naming the first tensors.
    """
    names, tensors = [], []
    for name, tensor in numbers_of(model, optimizer, walk):
        names.append(name)
        tensors.append(tensor)
    bad = [number for number in not_finite_sums(tensors) if not _is_finite(tensors[number])]
    mine = [names[number] for number in bad]
    if ranks.num_processes > 1:
        count = torch.tensor(len(mine), device=ranks.device)
        torch.distributed.all_reduce(count)
        mine = list(dict.fromkeys(gather_object(mine))) if int(count) else []
    if mine:
        more = f" and {len(mine) - 3} more" if len(mine) > 3 else ""
        raise NumberError(
            f"{', '.join(mine[:3])}{more}: NaN or infinite numbers, so {what} was not written",
            fix=fix,
        )


def not_finite_sums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Which tensors have a sum of magnitudes that is NaN or infinite; read back once.

    A GPU adds up all tensors of a kind at once; looking at one after the other, the host would be
    busy for a tenth of a second with those of an adapter.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(number)
    found = []
    for (_, dtype), numbers in kinds.items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        sums = torch._foreach_norm([tensors[number] for number in numbers], 1, dtype=wide)
        good = torch.stack(sums).isfinite().tolist()
        found += [number for number, is_good in zip(numbers, good, strict=True) if not is_good]
    return sorted(found)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Large numbers may have a sum that is infinite."""
    return all(bool(end.isfinite()) for end in torch.aminmax(tensor))


def numbers_of(
    model: nn.Module, optimizer: Any, walk: Walk | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of numbers that a checkpoint holds, with its name."""
    walk = walk or Walk(model)
    names = walk.names
    for name, parameter in walk.weights:
        yield from _numbers(name, parameter)
    for name, buffer in walk.buffers():
        yield from _numbers(name, buffer)
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
        part = own_part(value)
        if part.numel():
            yield name, part


class Numbers(Hook):
    """What the rules about bad numbers remember, and a look at the weights before each save."""

    _walk: Walk | None = None

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Go on as the run before the checkpoint."""
        if checkpoint is not None:
            loop.run.numbers.load(checkpoint)

    def save(self, loop: LoopState, save: "Save") -> None:
        """What the rules remember."""
        if loop.args.should_save:
            save.attempt(partial(loop.run.numbers.save, save.directory))

    def check(self, loop: LoopState, what: str) -> None:
        """Raise a NumberError if a loss, gradient, weight or optimizer state is not finite."""
        loop.guard.flush()
        self._walk = walk = self._walk or Walk(loop.model)
        fix = number_advice(loop.args)
        try:
            check_weights(loop.model, loop.optimizer, loop.ranks, what=what, fix=fix, walk=walk)
        except NumberError as error:
            error.step = loop.state.global_step
            loop.guard.keep_latest(error)
            raise

    def leave_out_skipped(self, loop: LoopState, row: dict[str, Any]) -> None:
        """Take the steps without an update out of a row's means, and count them."""
        num_steps, num_left_out = loop.run.numbers.take_counts()
        num_skipped = loop.guard.take_skipped()
        if num_skipped or loop.args.fp16:
            row["num_skipped_steps"] = num_skipped
        if num_skipped and not 0 <= row.get("grad_norm", 0.0) < float("inf"):
            del row["grad_norm"]
        if num_left_out == num_steps and num_left_out:
            del row["loss"]
        elif num_left_out:
            row["loss"] *= num_steps / (num_steps - num_left_out)
