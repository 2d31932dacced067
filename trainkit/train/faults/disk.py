"""What a run needs on the disk: a checkpoint and the final model, told before the first step."""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainkit.checkpoint.whole.atomic import readable
from trainkit.errors import CheckpointError
from trainkit.options.optimizers import optimizer_row
from trainkit.parallel.parameters import num_elements, own_part
from trainkit.train.hooks import LoopState

_MASTER_BYTES = 4.0


def refuse_small_disk(loop: LoopState, run: Path) -> None:
    """See before the first step that a checkpoint and the final model fit.

    Raises:
        CheckpointError: they do not, with the numbers.
    """
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


def _optimizers(loop: LoopState) -> Iterator[Any]:
    """The optimizer and those inside it: accelerate's, DeepSpeed's and ours wrap one another."""
    optimizer = loop.optimizer
    while optimizer is not None:
        yield optimizer
        inner = getattr(optimizer, "optimizer", None)
        optimizer = inner if inner is not optimizer else None


def optimizer_bytes(loop: LoopState) -> int:
    """Bytes of everything that the optimizer keeps and the model does not."""
    of_model = {id(parameter) for parameter in loop.model.parameters()}
    held: dict[int, torch.Tensor] = {}
    for optimizer in _optimizers(loop):
        groups = [group["params"] for group in optimizer.param_groups]
        values = [tuple(entry.values()) for entry in optimizer.state.values() if entry]
        for tensor in itertools.chain(*groups, *values):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in of_model:
                held[id(tensor)] = own_part(tensor)
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())
