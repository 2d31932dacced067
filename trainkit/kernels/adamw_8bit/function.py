"""AdamW with 8-bit moments: the optimizer's pass, in place."""

import torch
from torch import Tensor

from trainkit.kernels.adamw.function import adamw_reference
from trainkit.kernels.adamw_8bit.reference import (
    dequantize_reference,
    noise_reference,
    quantize_reference,
    round_reference,
)
from trainkit.kernels.launch import HAS_TRITON, runs_kernel

if HAS_TRITON:
    from trainkit.kernels.adamw_8bit import kernel


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
        seed: what the rounding follows from, below 2**62.
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
