"""Out of memory in a step: which batch it was, who holds the memory, and what cures it."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from trainkit.errors import TrainkitError
from trainkit.train.hooks import LoopState

_GIB = 2**30
_SHOWN, _NAMED = 16, 4
"""Lengths, and rows by their names, that are written out."""
_LONGEST = 200
"""Characters of a library's own message."""


class MemoryShortageError(TrainkitError):
    """A step did not fit into the GPU's memory.

    Attributes:
        rows: of the micro-batch that did not fit; 0 where it was not one of training.
        fits: rows that do; 0 where nobody has tried.
        is_agreed: all ranks have raised it together.
    """

    rows = 0
    fits = 0
    is_agreed = False


_SAID = (
    "out of memory",
    "alloc_failed",
    "can't allocate memory",
    "not enough memory",
)
"""By libraries that have errors of their own for it: cuBLAS, NCCL, the CPU's allocator."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that there is no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _SAID)


def out_of_memory(loop: LoopState, error: BaseException) -> MemoryShortageError:
    """What a run that ran out of memory ends with.

    Args:
        loop: the loop, whose last batch is known.
        error: torch's own.
    """
    lengths, width = lengths_of(loop.latest_batch)
    shown = ", ".join(map(str, lengths[:_SHOWN])) + (", ..." if len(lengths) > _SHOWN else "")
    owners = ", ".join(f"{owner} {gib:.2f} GiB" for owner, gib in owners_of(loop).items())
    step = loop.state.global_step + 1
    if not loop.model.training:
        return MemoryShortageError(
            f"out of memory in the evaluation after step {step - 1}: a batch of {len(lengths)} x "
            f"{width} tokens (lengths {shown}); the peak was {owners} ({_first_line(error)})",
            where="training.per_device_eval_batch_size",
            fix="halve training.per_device_eval_batch_size",
        )
    fix = (
        "halve training.per_device_train_batch_size (global_batch_size keeps the step the same), "
        "lower data.max_length, or set recompute: full; training.auto_find_batch_size: true halves "
        "it by itself"
    )
    expected = loop.run.expected
    if expected is not None and width:
        from trainkit.estimate.estimate import estimate
        from trainkit.train.memory import cures

        # The plan did not fit with this batch, whatever the estimate had said of it.
        plan = replace(expected.plan, batch_size=max(len(lengths), 1), length=width)
        known = estimate(plan, expected.gpu, replan=expected.replan)
        limit = min(known.peak.needed_gib, expected.gpu.memory_gib) * 0.95
        known = estimate(plan, replace(expected.gpu, memory_gib=limit), replan=expected.replan)
        if known.suggestions:
            fix = cures(known)
    rows = loop.guard.rows_of(loop.latest_batch)
    named = f", {', '.join(rows[:_NAMED])}{', ...' if len(rows) > _NAMED else ''}" if rows else ""
    found = MemoryShortageError(
        f"out of memory in step {step}: a batch of {len(lengths)} x {width} tokens (lengths "
        f"{shown}{named}); the peak was {owners} ({_first_line(error)})",
        where="training.per_device_train_batch_size",
        fix=fix,
    )
    found.rows = len(lengths)
    return found


def _first_line(error: BaseException) -> str:
    return str(error).partition(". GPU")[0].partition("\n")[0][:_LONGEST]


def lengths_of(batch: dict[str, Any] | None) -> tuple[list[int], int]:
    """The real lengths of a batch's rows, and the tokens that each row takes."""
    tokens = None if batch is None else batch.get("input_ids")
    if batch is None or not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
        return [], 0
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return [int(length) for length in mask.sum(dim=1)], tokens.shape[1]
    return [tokens.shape[1]] * tokens.shape[0], tokens.shape[1]


def num_tokens(batch: dict[str, Any] | None) -> int:
    """Tokens that a batch takes, its padding included."""
    lengths, width = lengths_of(batch)
    return len(lengths) * width


def owners_of(loop: LoopState) -> dict[str, float]:
    """GiB of this rank's tensors by owner; the rest of the peak is activations and logits."""
    weights = list(loop.model.parameters())
    optimizer = getattr(loop.optimizer, "optimizer", loop.optimizer)
    masters = [p for p in _parameters(optimizer) if not any(p is each for each in weights)]
    state = getattr(optimizer, "state", {})
    states = [each for held in state.values() if isinstance(held, dict) for each in held.values()]
    found = {
        "weights": _size(weights),
        "masters": _size(masters),
        "gradients": _size(each.grad for each in [*weights, *masters]),
        "optimizer": _size(states),
    }
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / _GIB
        found["activations and logits"] = max(peak - sum(found.values()), 0.0)
    return found


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    groups = getattr(optimizer, "param_groups", [])
    return [parameter for group in groups for parameter in group["params"]]


def _size(tensors: Iterable[Any]) -> float:
    """GiB of what is a tensor, sharded ones by this rank's part, each storage once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values()) / _GIB
