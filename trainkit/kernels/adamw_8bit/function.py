"""AdamW with 8-bit moments: the optimizer's pass in place, and the same out of place."""

from typing import Any

import torch
from torch import Tensor

from trainkit.kernels.adamw.function import adamw_reference
from trainkit.kernels.adamw_8bit.reference import (
    adamw_8bit_reference,
    dequantize_reference,
    noise_reference,
    quantize_reference,
    round_reference,
)
from trainkit.kernels.launch import HAS_TRITON, runs_kernel

if HAS_TRITON:
    from trainkit.kernels.adamw_8bit import kernel

SEED_END = 2**62


def adamw_8bit_(
    weight: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor] | None,
    factor: Tensor,
    held: Tensor,
    *,
    seed: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW update in place: decay, step, round by chance and quantise in one pass.

    Args:
        weight: (N,) bfloat16, rounded by chance; or fp16 or fp32, rounded to the nearest.
        gradient: (N,) of any precision; left as it is.
        moments: the first and the second, (N,) each: uint8 codes in bitsandbytes' format, or fp32.
        scales: of their codes, (N / 256,) fp32 each; None of moments in fp32.
        factor: 0-d fp32, what gradients are multiplied by.
        held: 0-d, on the device: where it is not 0 nothing is changed.
        seed: what the rounding follows from, below ``SEED_END``.
        step: of this update, from 1.
        lr: the learning rate.
        beta1: of the first moment.
        beta2: of the second moment.
        eps: added to the root.
        weight_decay: decoupled.
    """
    if not weight.numel():
        return
    if runs_kernel(weight, gradient):
        numbers = (
            1 - lr * weight_decay, lr / (1 - beta1**step), (1 - beta2**step) ** -0.5, eps,
            1 - beta1, beta2, 1 - beta2,
        )  # fmt: skip
        floats = tuple(map(float, numbers))  # an integer would be another signature
        kernel.launch_step(weight, gradient, moments, scales, factor, held, seed, floats)
        return
    if bool(held):
        return
    wide = moments
    if scales is not None:
        first, second = zip(moments, scales, strict=True)
        wide = (
            dequantize_reference(*first, signed=True),
            dequantize_reference(*second, signed=False),
        )
    new, *news = adamw_reference(
        weight.float(), gradient, wide[0], wide[1], factor,
        lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, step=step,
    )  # fmt: skip
    if weight.dtype == torch.bfloat16:
        new = round_reference(new, noise_reference(new.numel(), seed, new.device))
    weight.copy_(new)
    for number, values in enumerate(news):
        if scales is None:
            moments[number].copy_(values)
        else:
            codes, scale = quantize_reference(values, signed=number == 0)
            moments[number].copy_(codes)
            scales[number].copy_(scale)


def adamw_8bit(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    factor: Tensor,
    *,
    seed: int = 0,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    step: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `adamw_8bit_` from moments that are quantised first, and nothing is overwritten.

    Returns:
        New weight (N,), and what the codes of the new moments stand for, (N,) fp32 each.
    """
    numbers: dict[str, Any] = {
        "seed": seed, "step": step, "lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps,
        "weight_decay": weight_decay,
    }  # fmt: skip
    if weight.dtype == torch.float64:
        return adamw_8bit_reference(weight, gradient, exp_avg, exp_avg_sq, factor, **numbers)
    weight = weight.detach().clone()
    first, first_scale = quantize_reference(exp_avg.detach(), signed=True)
    second, second_scale = quantize_reference(exp_avg_sq.detach(), signed=False)
    held = torch.zeros((), device=weight.device)
    adamw_8bit_(
        weight, gradient.detach(), (first, second), (first_scale, second_scale),
        factor.detach(), held, **numbers,
    )  # fmt: skip
    return (
        weight,
        dequantize_reference(first, first_scale, signed=True),
        dequantize_reference(second, second_scale, signed=False),
    )
