"""The contracts of square_sum and adamw."""

from typing import Any

import torch
from op_cases.op import Case, TriedOp
from torch import Tensor

from trainkit.kernels.adamw.function import (
    adamw_,
    adamw_reference,
    square_sum,
    square_sum_reference,
)
from trainkit.kernels.contract import Draw

NUMBERS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


def adamw(factor: Tensor, *, step: int = 1, lr: float, **given: Any) -> tuple[Tensor, ...]:
    """As `adamw_`, and nothing is overwritten."""
    names = ("weight", "gradient", "exp_avg", "exp_avg_sq")
    weight, gradient, exp_avg, exp_avg_sq = (given.pop(name).detach().clone() for name in names)
    copy = torch.empty_like(gradient)
    held = torch.zeros((), device=weight.device)
    steps = torch.full((), step - 1, dtype=torch.float32, device=weight.device)
    tensors = (weight, gradient, exp_avg, exp_avg_sq, factor.detach(), held, steps, copy)
    adamw_(*tensors, lr=lr, **{**NUMBERS, **given})
    return weight, exp_avg, exp_avg_sq, copy


def _adamw_reference(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight, first, second = adamw_reference(**{**NUMBERS, "step": 1, **arguments})
    return weight, first, second, weight.to(arguments["gradient"].dtype)


def adamw_case(label: str, numel: int, *, large: bool = False, **options: Any) -> Case:
    """A step of ``numel`` weights; gradients as small as those of a model of that size."""

    def inputs(draw: Draw) -> dict[str, Tensor]:
        def wide(tensor: Tensor) -> Tensor:
            return tensor.float() if tensor.itemsize < 4 else tensor

        first = wide(draw.normal(numel, scale=1e-2))
        return {
            "weight": wide(draw.normal(numel)),
            "gradient": draw.normal(numel, scale=1e-2),
            "exp_avg": first,
            "exp_avg_sq": first.square() + wide(draw.normal(numel, scale=1e-2)).square(),
            "factor": wide(draw.normal(scale=0.3)).abs(),
        }

    return Case(label, inputs, (), {"lr": 1e-3, **options}, large)


def sum_case(label: str, numel: int, *, large: bool = False) -> Case:
    """The squares of ``numel`` numbers."""
    return Case(label, lambda draw: {"x": draw.normal(numel)}, (), {}, large)


ADAMW = TriedOp(
    name="adamw",
    function=adamw,
    reference=_adamw_reference,
    outputs=("weight", "exp_avg", "exp_avg_sq", "rounded"),
    cases=(
        adamw_case("several blocks", 3001, weight_decay=0.1, step=3),
        adamw_case("first step", 1024),
        adamw_case("late step", 513, step=100_000, beta2=0.95),
        adamw_case("one number", 1),
        adamw_case("no numbers", 0),
        adamw_case("half a billion", 494_032_768, large=True),
    ),
    tiny=adamw_case("tiny", 7),
    one_graph=False,  # the scalars of a step come from the host
)

SQUARE_SUM = TriedOp(
    name="square_sum",
    function=square_sum,
    reference=square_sum_reference,
    outputs=("sum",),
    cases=(
        sum_case("several programs", 20_001),
        sum_case("one block", 1024),
        sum_case("one number", 1),
        sum_case("no numbers", 0),
        sum_case("half a billion", 494_032_768, large=True),
    ),
    tiny=sum_case("tiny", 7),
)
