"""Out of memory in a step: which batch it was, who holds the memory, and what cures it."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from trainkit.errors import TrainkitError
from trainkit.models.loss import take_counts as take_correct
from trainkit.run.starts import Start, append_start, read_starts
from trainkit.run.status import resume_command
from trainkit.train.hooks import Hook, LoopState
from trainkit.train.run import Run

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
    """

    rows = 0
    fits = 0
    is_agreed = False
    overrides: tuple[str, ...] = ()


_SAID = ("out of memory", "alloc_failed", "can't allocate memory", "not enough memory")
"""By libraries that have errors of their own for it: cuBLAS, NCCL, the CPU's allocator."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that there is no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _SAID)


def out_of_memory(loop: LoopState, error: BaseException) -> MemoryShortageError:
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
    lengths, width = lengths_of(batch)
    return len(lengths) * width


def owners_of(loop: LoopState) -> dict[str, float]:
    """GiB of this rank's tensors by owner; the rest of the peak is activations and logits."""
    weights = list(loop.model.parameters())
    optimizer = getattr(loop.optimizer, "optimizer", loop.optimizer)
    groups = getattr(optimizer, "param_groups", [])
    known = {id(each) for each in weights}
    masters = [p for group in groups for p in group["params"] if id(p) not in known]
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


def _size(tensors: Iterable[Any]) -> float:
    """GiB of what is a tensor, sharded ones by this rank's part, each storage once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values()) / _GIB


# ``training.auto_find_batch_size``: the micro-batch that fits, the step keeps its rows.
#
# The longest batch there is runs forth and back before the first step; where it does not fit, on
# any rank, all take half of it, and twice the accumulation. A step that still runs out of memory
# makes one process go back to its last checkpoint with half the rows. Several processes cannot:
# the others wait in the middle of the step. They stop together, and the run goes on with half
# when it is resumed. What was found is recorded as an override, like one that a user gives.

_SIZE, _ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"


def smaller(rows: int) -> int | None:
    """The largest part of a micro-batch that is at most half of it; None of one row."""
    return next((size for size in range(rows // 2, 0, -1) if rows % size == 0), None)


def shortage_of(loop: LoopState, error: Exception) -> MemoryShortageError:
    """A shortage behind which the run goes on in this process, with a smaller micro-batch."""
    run, args = loop.run, loop.run.args
    if isinstance(error, MemoryShortageError):
        found = error
    elif is_shortage(error):
        found = out_of_memory(loop, error)
    else:
        raise error
    size: int | None = found.fits
    if not found.fits and found.rows and run.recipe.training.get("auto_find_batch_size"):
        size = smaller(args.per_device_train_batch_size)
    if size:
        found.overrides = (f"training.{_SIZE}={size}",)
        if run.recipe.global_batch_size is None or _ACCUMULATION in run.recipe.training:
            rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
            found.overrides += (f"training.{_ACCUMULATION}={rows // size}",)
    if found.is_agreed or (run.process.world_size == 1 and size):
        return found.with_traceback(None)  # which would keep the model alive
    if found is error:
        raise error
    if size:
        starts = read_starts(run.directory)
        if not starts or starts[-1].overrides != found.overrides:  # another rank may have
            append_start(run.directory, Start(overrides=found.overrides))
        fix = (
            f"{resume_command(run.root)}: it goes on with {size} rows at a time instead of "
            f"{args.per_device_train_batch_size} (training.auto_find_batch_size); or {found.fix}"
        )
        found = MemoryShortageError(found.what, where=found.where, fix=fix)
    raise found from error


def try_hooks(run: Run) -> list[Hook]:
    """Where a rank can run a batch by itself: no other rank has a part of the weights."""
    layout, kwargs = run.layout, run.args.gradient_checkpointing_kwargs or {}
    is_alone = layout.data_size == run.process.world_size and layout.engine.holds_whole_model
    return [TryLongestBatch()] if is_alone and not kwargs.get("use_reentrant") else []


class TryLongestBatch(Hook):
    """Before the first step: does the longest batch fit on every rank?"""

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Try."""
        was_training, wanted = loop.model.training, loop.args.per_device_train_batch_size
        loop.model.train()
        mine: int | None = wanted
        try:  # fewer and fewer of the longest rows
            while mine is not None and not self._fits(loop, mine):
                mine = smaller(mine)
        finally:
            loop.model.train(was_training)
        size = int(min(gather_object([mine or 0])))
        if mine is None:
            raise MemoryShortageError(
                "not even one row of the longest fits into memory",
                where=f"training.{_SIZE}",
                fix="lower data.max_length, set recompute: full, or lora: {quantize: nf4}",
            )
        if size < wanted:
            error = MemoryShortageError(
                f"a micro-batch of {wanted} of the longest rows does not fit into memory; {size} "
                "rows do"
                if size
                else "on another rank not even one row of the longest fits into memory",
                where=f"training.{_SIZE}",
            )
            error.rows, error.fits, error.is_agreed = mine, size, bool(size)
            raise error

    def _fits(self, loop: LoopState, size: int) -> bool:
        try:
            self._run(loop, size)
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            error.__traceback__ = None  # which keeps the activations alive
            fits = False
        else:
            fits = True
        take_correct(loop.model.modules())  # what the head has counted of it is no part of the run
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return fits

    def _run(self, loop: LoopState, size: int) -> None:
        """With what the first step will take besides: the estimate knows."""
        device, expected = loop.args.device, loop.run.expected
        owners = {} if expected is None else expected.peak.by_owner
        to_come_gib = owners.get("optimizer", 0.0) + owners.get("gradients", 0.0) / 2
        on_gpu = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(on_gpu):
            to_come = torch.empty(
                int(to_come_gib * 2**30) if on_gpu else 0, dtype=torch.uint8, device=device
            )
            trained = [each for each in loop.model.parameters() if each.requires_grad]
            loss = loop.loss_of(loop.train_data.longest_batch(size))
            # Not `backward`: an engine would hear of it, and share the gradients.
            torch.autograd.grad(loss, trained, allow_unused=True)
            del to_come
