"""Checkpoints: what is saved is copied, and written while training goes on.

A step waits only for the copy to host memory: of the weights that are saved, and of this rank's
part of the optimizer. So a host needs, besides, as much memory as its ranks' parts of a checkpoint.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from trainkit.checkpoint.weights.contents import ANOTHER, saved_by_torch, taking_up
from trainkit.checkpoint.whole.atomic import readable
from trainkit.errors import CheckpointError
from trainkit.models.linears import is_packed
from trainkit.models.scalar_head import has_scalar_head, name_scalar_head
from trainkit.options.optimizers import optimizer_row
from trainkit.parallel.engine import Ranks, is_composed, pin_ahead, snapshot
from trainkit.parallel.parameters import num_elements, own_part
from trainkit.parallel.part_files import refuse_other
from trainkit.train.checkpoints import (
    BASE,
    SCHEDULER,
    TRAINER_STATE,
    ResumePoint,
    Save,
    folder_name,
    read_weights,
    remember_origin,
)
from trainkit.train.evaluations import random_state, set_random_state
from trainkit.train.faults.numbers import NumberError, number_advice
from trainkit.train.hooks import Hook, LoopState

if TYPE_CHECKING:
    from trainkit.train.hub import Hub


def random_file(folder: Path, args: Any) -> Path:
    return folder / f"rng_state{'' if args.world_size <= 1 else f'_{args.process_index}'}.pth"


def load_random_state(folder: Path, args: Any, point: ResumePoint | None) -> None:
    """Go on drawing where a checkpoint left off; one of other ranks leaves all as it is."""
    path = random_file(folder, args)
    ranks = None if point is None else point.fingerprint.get("num_ranks")
    if not path.is_file() and ranks not in (None, args.world_size):
        return
    # What numpy's arrays name in a pickle, wherever this numpy keeps it.
    rebuild: Any = np.zeros(0).__reduce__()[0]
    numpy_state = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), rebuild]
    with torch.serialization.safe_globals(numpy_state):
        saved = saved_by_torch(path)
    with taking_up(path):
        set_random_state(saved, of_all=args.world_size > 1)


def load_schedule(scheduler: Any, folder: Path, step: int, args: Any) -> None:
    path = folder / SCHEDULER
    saved, own = saved_by_torch(path), scheduler.state_dict()
    with taking_up(path):
        refuse_other(path, dict.fromkeys(saved), dict.fromkeys(own))
        if isinstance(scheduler, LambdaLR):  # it follows the step; fp16's scaler leaves some out
            refuse_other(path, saved, own, free=("_is_initial", "_get_lr_called_within_step"))
            count = saved["last_epoch"]
            if type(count) is not int or not (0 <= count <= step if args.fp16 else count == step):
                raise CheckpointError(
                    f"last_epoch is {count!r:.40} in it, and {step} in the run",
                    where=str(path),
                    fix=ANOTHER,
                )
        scheduler.load_state_dict(saved)


class Saves(Hook):
    """``checkpoint-N``, when it is due; the best of them at the end, where that is wanted."""

    _has_pinned = False
    hub: Hub | None = None
    """Gets each of them, where that is wanted."""

    def due(self, loop: LoopState) -> None:
        if not self._has_pinned and loop.args.save_strategy != "no":
            # The optimizer has its states now; pinned for the first save alone, it takes seconds.
            pin_ahead(loop.engine.copied_by_a_save())
        self._has_pinned = True
        if not loop.control.should_save:
            return
        loop.hook(Numbers).check(loop, folder_name(loop.state.global_step))
        with nullcontext() if loop.run.watch is None else loop.run.watch.slow("saving"):
            self.save_checkpoint(loop)
        loop.event("on_save")

    def save_checkpoint(self, loop: LoopState) -> None:
        """Copy what makes it, and let it appear whole when it is written."""
        args, state, writer = loop.args, loop.state, loop.checkpoints
        saving = writer.saving(
            state.global_step,
            loop.ranks,
            state,
            limit=args.save_total_limit,
            keep=None if self.hub is None else self.hub.uploading,
        )
        with saving as save:
            _write_weights(loop, save)
            if not args.save_only_model:
                loop.engine.save_state(save)
                drawn = random_state(of_all=args.world_size > 1)
                small = {random_file(save.directory, args): drawn}
                if args.should_save:
                    small[save.directory / SCHEDULER] = snapshot(loop.scheduler.state_dict())
                for path, values in small.items():  # few numbers, which nothing changes any more
                    save.defer(path, partial(torch.save, values, path))
            if loop.stream is not None:
                save.attempt(partial(loop.stream.save, save.directory))
            loop.tell("save", save)
            if number := state.best_global_step:
                best = writer.root / folder_name(number)
                if best.is_dir() or number == state.global_step:
                    state.best_model_checkpoint = str(best)
            if args.should_save:
                for each in loop.exported():
                    state.stateful_callbacks[type(each).__name__] = each.state()
                path = save.directory / TRAINER_STATE
                save.attempt(partial(state.save_to_json, str(path)))
        if args.push_to_hub:
            writer.wait()
            if self.hub is not None:
                target = writer.root / folder_name(state.global_step)
                self.hub.push_checkpoint(target, state.global_step)

    def end(self, loop: LoopState) -> None:
        """A run that was asked to stop will go on: from its last checkpoint, not from the best."""
        loop.checkpoints.wait()
        args, best = loop.args, loop.state.best_model_checkpoint
        if loop.stop.has_saved or best is None:
            return
        folder = Path(best)
        if args.load_best_model_at_end and folder.is_dir():
            loop.engine.load_best(folder, partial(read_weights, loop.model, folder))
        if args.should_save and args.save_total_limit == 1:
            loop.checkpoints.thin_out(1, {folder})


def save_model(loop: LoopState, folder: Path) -> None:
    """Write the model alone, at once; all ranks call it."""
    save = Save(folder, at_once=True)
    _write_weights(loop, save)
    save.finish(records=False)


def _write_weights(loop: LoopState, save: Save) -> None:
    def write(weights: Mapping[str, Any]) -> None:
        loop.model.save_pretrained(save.directory, state_dict=weights)
        loop.tokenizer.save_pretrained(save.directory)
        if has_scalar_head(loop.model):
            name_scalar_head(save.directory, loop.model.config)
        base = Path(loop.model.config.name_or_path)
        of_images = loop.run.recipe.data.images.processor
        remember_origin(save.directory, base, loop.checkpoints.fingerprint.get(BASE), of_images)

    # peft's own forward pass over experts changes the model's modules while it runs: nobody may
    # walk over them then, as its `save_pretrained` does.
    in_the_op = loop.run.built.runs.get("lora_experts") == "on"
    runs_peft = any(
        isinstance(each, ParamWrapper) and not (in_the_op and each.num_experts > 1)
        for each in loop.model.modules()
    )
    now = Save(save.directory, at_once=True) if runs_peft else save
    loop.engine.save_weights(now, write)
    save.problem = save.problem or now.problem


# What a run needs on the disk: a checkpoint and the final model, told before the first step.

_MASTER_BYTES = 4.0


def refuse_small_disk(loop: LoopState, run: Path) -> None:
    """See before the first step that a checkpoint and the final model fit."""
    saves = loop.args.save_strategy != "no"
    final = weight_bytes(loop)
    checkpoint = expected_bytes(loop) if saves else 0
    free = shutil.disk_usage(run).free
    if free >= checkpoint + final:
        return
    ways = "free some space, or write to a larger disk with --output-dir"
    if saves and not loop.args.save_only_model:
        only = f"{readable(final)} a checkpoint, which cannot be continued"
        ways += f"; training.save_only_model=true leaves the optimizer out ({only})"
    raise CheckpointError(
        f"a checkpoint takes about {readable(checkpoint)} and the final model {readable(final)}; "
        f"{readable(free)} are free",
        where=str(run),
        fix=ways,
    )


def expected_bytes(loop: LoopState) -> int:
    """Bytes of a checkpoint, over all processes, before there is an optimizer's state."""
    weights = weight_bytes(loop)
    if loop.args.save_only_model:
        return weights
    row = optimizer_row(loop.args.optim)
    trained = [p for p in loop.model.parameters() if p.requires_grad]
    has_masters = any(p.element_size() < 4 for p in trained)
    has_masters &= loop.engine.keeps_masters or loop.run.recipe.model.master_weights
    each = row.matrix_bytes + row.paged + (_MASTER_BYTES if has_masters else 0.0)
    return weights + int(sum(map(num_elements, trained)) * each)


def checkpoint_bytes(loop: LoopState) -> int:
    """Bytes that a checkpoint holds, over all processes: weights, or adapters, and states."""
    if loop.args.save_only_model:
        return weight_bytes(loop)
    return weight_bytes(loop) + optimizer_bytes(loop) * loop.layout.optimizer_shards


def weight_bytes(loop: LoopState) -> int:
    """Bytes of the saved weights; of an adapter, the adapter's."""
    is_peft = hasattr(loop.model, "peft_config")
    engine = loop.layout.engine
    weights = 0
    for name, parameter in loop.model.named_parameters():
        if parameter.requires_grad or not is_peft:
            weights += num_elements(parameter) * engine.saved_bytes(name, parameter)
    return weights


def optimizer_bytes(loop: LoopState) -> int:
    """Bytes of everything that the optimizer keeps and the model does not."""
    of_model = {id(parameter) for parameter in loop.model.parameters()}
    held: dict[int, torch.Tensor] = {}
    optimizer, outer = loop.optimizer, None
    while optimizer is not None and optimizer is not outer:  # DeepSpeed's has ours inside
        groups = [group["params"] for group in optimizer.param_groups]
        values = [tuple(entry.values()) for entry in optimizer.state.values() if entry]
        for tensor in itertools.chain(*groups, *values):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in of_model:
                held[id(tensor)] = own_part(tensor)
        optimizer, outer = getattr(optimizer, "optimizer", None), optimizer
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


# Each step's numbers are watched, and a bad step leaves no trace.


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
        saved = model.state_dict(keep_vars=True)
        for name, _ in model.named_buffers():
            if name in saved:
                owner, _, key = name.rpartition(".")
                self._buffers.append((name, model.get_submodule(owner), key))

    def buffers(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return ((name, getattr(module, key)) for name, module, key in self._buffers)


@torch.no_grad()
def check_weights(
    model: nn.Module, optimizer: Any, ranks: Ranks, *, what: str, fix: str, walk: Walk | None = None
) -> None:
    """Refuse to go on with weights or optimizer states that are NaN or infinite, on any rank.

    One pass over them; all ranks call it together.
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
        if checkpoint is not None:
            loop.run.numbers.load(checkpoint)

    def save(self, loop: LoopState, save: Save) -> None:
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
            loop.guard.keep_batch(error)
            raise
