"""The contract of adamw_8bit."""

from dataclasses import replace
from typing import Any

import torch
from op_cases.adamw import NUMBERS, adamw_case
from op_cases.op import Case, TriedOp
from torch import Tensor

from trainkit.kernels.adamw.function import adamw_reference
from trainkit.kernels.adamw_8bit.function import adamw_8bit_
from trainkit.kernels.adamw_8bit.reference import (
    dequantize_reference,
    noise_reference,
    quantize_reference,
    round_reference,
)


def adamw_8bit(*, seed: int = 0, step: int = 1, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`adamw_8bit_` from moments that are quantised first, and nothing is overwritten.

    Returns:
        New weight (N,), and what the codes of the new moments stand for, (N,) fp32 each.
    """
    if given["weight"].dtype == torch.float64:
        return adamw_8bit_reference(seed=seed, step=step, **given)
    names = ("weight", "gradient", "exp_avg", "exp_avg_sq", "factor")
    weight, gradient, *exp, factor = (given.pop(name).detach() for name in names)
    weight, held = weight.clone(), torch.zeros((), device=weight.device)
    first, first_scale = quantize_reference(exp[0], signed=True)
    second, second_scale = quantize_reference(exp[1], signed=False)
    moments, scales = (first, second), (first_scale, second_scale)
    numbers = {**NUMBERS, "seed": seed, "step": step, **given}
    adamw_8bit_(weight, gradient, moments, scales, factor, held, **numbers)
    return (
        weight,
        dequantize_reference(first, first_scale, signed=True),
        dequantize_reference(second, second_scale, signed=False),
    )


def adamw_8bit_reference(*, seed: int = 0, **given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """One update from moments that are quantised before and after; in fp64 nothing is rounded."""
    given, dtype = {**NUMBERS, "step": 1, **given}, given["weight"].dtype
    if dtype == torch.float64:
        return adamw_reference(**given)
    first, second = _kept(given["exp_avg"], True), _kept(given["exp_avg_sq"], False)
    given |= {"weight": given["weight"].float(), "exp_avg": first, "exp_avg_sq": second}
    new, first, second = adamw_reference(**given)
    if dtype == torch.bfloat16:
        new = round_reference(new, noise_reference(new.numel(), seed, new.device))
    return new.to(dtype), _kept(first, True), _kept(second, False)


def _kept(moment: Tensor, signed: bool) -> Tensor:
    """What is left of a moment in 8 bits."""
    return dequantize_reference(*quantize_reference(moment, signed=signed), signed=signed)


def case(label: str, numel: int, **options: Any) -> Case:
    """As AdamW's, with a step large enough to move bfloat16 weights."""
    return adamw_case(label, numel, **{"lr": 1e-2, "seed": 12345, **options})


ADAMW_8BIT = TriedOp(
    name="adamw_8bit",
    function=adamw_8bit,
    reference=adamw_8bit_reference,
    outputs=("weight", "exp_avg", "exp_avg_sq"),
    cases=(
        case("several blocks", 3001, weight_decay=0.1, step=3),
        case("first step", 1024),
        case("late step", 513, step=100_000, beta2=0.95),
        case("one number", 1),
        case("no numbers", 0),
        replace(case("a feed-forward weight", 2**25), large=True),
    ),
    tiny=case("tiny", 7),
    one_graph=None,  # an optimizer of its own, which nobody compiles
)
