"""A kept batch once more through a model, forth and back, watching where numbers stop being any.

Shapes: B batch, S sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.objectives.objective import LossSetup, Objective, Step
from trainkit.objectives.step_loss import accepts_num_items
from trainkit.options import PreferenceOptions
from trainkit.train.faults.bad_batch import BadBatch
from trainkit.train.optimizer.finite_weights import numbers_of


@dataclass(frozen=True)
class MicroBatch:
    """Some rows, or documents of a packed row.

    Attributes:
        rows: their samples, ``file:line``.
        values: what the model and the loss take.
    """

    rows: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What came of a replay.

    Attributes:
        loss: the mean over what is trained in the micro-batch; the largest, or one that is none.
        grad_norm: over all trained weights, of the same micro-batch.
        first_module: the first whose output is not finite, in the order of the forward pass.
        largest_input: the largest finite number that went into it.
        first_gradient: of the weights without a finite gradient, the one nearest to the loss.
        rows: of the micro-batch.
    """

    loss: float
    grad_norm: float
    first_module: str | None = None
    largest_input: float | None = None
    first_gradient: str | None = None
    rows: tuple[str, ...] = ()

    def is_bad(self, limit: float) -> bool:
        """Whether a step with it could not be taken; ``limit`` is that of a spike."""
        finite = abs(self.loss) < float("inf") and self.grad_norm < float("inf")
        return not finite or self.loss > limit

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def micro_batches(kept: Sequence[BadBatch]) -> list[MicroBatch]:
    """Those that were bad by themselves; all of the step where none was."""
    found = [
        (loss, MicroBatch(tuple(rows), {**extras, **tensors}))
        for each in kept
        for loss, rows, tensors, extras in zip(
            each.losses, each.rows, each.batches, each.extras, strict=True
        )
    ]
    bad = [batch for loss, batch in found if not abs(loss) < float("inf")]
    return bad or [batch for _, batch in found]


def replay(
    model: nn.Module,
    objective: Objective,
    batches: Sequence[MicroBatch],
    preference: PreferenceOptions | None = None,
) -> Outcome:
    """The worst of some micro-batches: the first that is not finite, else that of the largest loss.

    Args:
        model: on the device where it runs; its gradients are cleared.
        objective: whose loss is taken.
        batches: on any device.
        preference: of the recipe.
    """
    setup = LossSetup(model, accepts_num_items(model), preference=preference)
    worst: Outcome | None = None
    for batch in batches:
        found = _one(setup, objective, batch)
        if found.is_bad(float("inf")):
            return found
        if worst is None or found.loss > worst.loss:
            worst = found
    assert worst is not None
    return worst


def _one(setup: LossSetup, objective: Objective, batch: MicroBatch) -> Outcome:
    model = setup.model
    with _watching_outputs(model) as first_bad:
        loss, norm, first_gradient = _forth_and_back(setup, objective, batch)
        name = first_bad()
    found = Outcome(loss, norm, name, None, first_gradient, batch.rows)
    if name is None:
        return found
    with _watching_input(model.get_submodule(name)) as largest:
        _forth_and_back(setup, objective, batch)
        return replace(found, largest_input=largest())


def _forth_and_back(
    setup: LossSetup, objective: Objective, batch: MicroBatch
) -> tuple[float, float, str | None]:
    """Loss, norm of the gradient, and the weight nearest to the loss without a finite one."""
    torch.manual_seed(0)  # dropout
    model, takes_num_items = setup.model, setup.takes_num_items
    model.train()
    model.zero_grad()
    device = next(model.parameters()).device
    inputs = {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in batch.values.items()
    }
    loss = objective.loss(setup)
    num_trained = int(torch.count_nonzero(inputs["labels"][..., 1:] != -100))
    num_items = loss.num_items(inputs, num_trained)

    def plain(model: nn.Module, given: dict[str, Any], num: Any) -> tuple[Tensor, Any]:
        outputs = model(**given, **({"num_items_in_batch": num} if takes_num_items else {}))
        return outputs["loss"], outputs

    step = Step(
        num_items=torch.tensor(num_items, device=device),
        num_micro_batches=1,
        num_ranks=1,
        trainer_divides=not takes_num_items,
        trainer_loss=plain,
    )
    value, _ = loss.training(model, inputs, step)
    first_gradient, total = None, torch.zeros((), device=device, dtype=torch.float64)
    if value.requires_grad:
        value.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                norm = parameter.grad.double().norm()
                total = total + norm**2
                if not bool(norm.isfinite()):
                    first_gradient = name
    model.zero_grad()
    norm = float(total.sqrt())
    return float(value.detach()), norm if norm == norm else float("inf"), first_gradient


@contextmanager
def _watching_outputs(model: nn.Module) -> Iterator[Any]:
    """Within, a function that says which module's output was not finite first."""
    flags: list[tuple[str, Tensor]] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            del module, inputs
            for tensor in _floats(output):
                flags.append((name, tensor.detach().isfinite().all()))

        return hook

    handles = [
        module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name
    ]

    def first_bad() -> str | None:
        return next((name for name, is_finite in flags if not bool(is_finite)), None)

    try:
        yield first_bad
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _watching_input(module: nn.Module) -> Iterator[Any]:
    """Within, a function that says the largest finite number that went into a module."""
    found = [0.0]

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        for tensor in (*_floats(args), *_floats(list(kwargs.values()))):
            finite = tensor.detach()[tensor.isfinite()]
            if finite.numel():
                found.append(float(finite.abs().max()))

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield lambda: max(found)
    finally:
        handle.remove()


def _floats(value: Any) -> Iterator[Tensor]:
    """The tensors of numbers in an output."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _floats(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _floats(each)


def single_rows(batch: MicroBatch) -> list[MicroBatch]:
    """Each row of a micro-batch by itself, or each document of a packed row."""
    values = batch.values
    ids = values.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return []
    if len(ids) == len(batch.rows):
        spans = [(slice(row, row + 1), slice(None)) for row in range(len(ids))]
    else:
        positions = values.get("position_ids")
        if len(ids) != 1 or not isinstance(positions, Tensor):
            return []
        starts = (positions[0] == 0).nonzero().flatten().tolist()[: len(batch.rows) + 1]
        ends = [*starts[1:], ids.shape[1]][: len(batch.rows)]
        if len(ends) != len(batch.rows):
            return []
        spans = [(slice(0, 1), slice(a, b)) for a, b in zip(starts, ends, strict=False)]
    return [
        MicroBatch(
            (name,),
            {
                key: value[span[: value.dim()]].clone()
                for key, value in values.items()
                if isinstance(value, Tensor) and value.shape == ids.shape
            },
        )
        for name, span in zip(batch.rows, spans, strict=True)
    ]


def magnitudes(model: nn.Module) -> dict[str, float]:
    """How large the trained weights are on average, by name."""
    return {
        name: float(parameter.detach().float().abs().mean())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel()
    }


def unsound_weights(model: nn.Module) -> list[str]:
    """Weights that hold NaN or infinity, by name."""
    return [name for name, tensor in numbers_of(model, None) if not bool(tensor.isfinite().all())]
