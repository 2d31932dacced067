"""AdamW over flat buffers: the optimizer's pass, in place."""

import math

import torch
from torch import Tensor

from trainkit.kernels.launch import HAS_TRITON, runs_kernel

# -- AdamW in plain torch: torch.optim.AdamW's arithmetic on whole buffers ------------------------


def square_sum_reference(x: Tensor) -> Tensor:
    """The sum of squares; 0-d, fp32 (fp64 of fp64)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(x, dtype=wide).square()


def adamw_reference(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    factor: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One update of fp32 weights from gradients that are multiplied by ``factor`` first.

    Args:
        weight: (N,), fp32 (fp64 for the truth).
        gradient: (N,), of any precision.
        exp_avg: (N,), the first moment.
        exp_avg_sq: (N,), the second moment.
        factor: 0-d, what the gradients are clipped by.
        lr: the learning rate.
        beta1: of the first moment.
        beta2: of the second moment.
        eps: added to the root.
        weight_decay: decoupled.
        step: of this update, from 1.
    """
    g = gradient.to(weight.dtype) * factor.to(weight.dtype)
    weight = weight * (1 - lr * weight_decay)
    exp_avg = exp_avg + (g - exp_avg) * (1 - beta1)
    exp_avg_sq = exp_avg_sq * beta2 + g * g * (1 - beta2)
    root = exp_avg_sq.sqrt() / (1 - beta2**step) ** 0.5 + eps
    return weight - lr / (1 - beta1**step) * exp_avg / root, exp_avg, exp_avg_sq


if HAS_TRITON:
    from trainkit.kernels.adamw import kernel


def square_sum(x: Tensor) -> Tensor:
    """The sum of squares of a buffer, the same bits in every run.

    Returns:
        0-d, fp32 (fp64 of fp64).
    """
    if x.numel() and runs_kernel(x):
        return kernel.launch_square_sum(x)
    return square_sum_reference(x)


def add_square_sum_(x: Tensor, total: Tensor, is_bad: Tensor) -> None:
    """Add the sum of squares of x to a total, and note where it is NaN or infinite.

    ``is_bad``, 0-d fp32, is made 1 where the sum is not finite.

    Args:
        x: of any shape.
        total: 0-d fp32.
        is_bad: 0-d fp32, made 1 where the sum is not finite.
    """
    x = x.detach().contiguous()
    if x.numel() and runs_kernel(x):
        kernel.launch_add_square_sum(x, total, is_bad)
        return
    square = square_sum_reference(x).to(total.dtype)
    total += square
    torch.maximum(is_bad, (~square.isfinite()).to(is_bad.dtype), out=is_bad)


def adamw_(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    factor: Tensor,
    held: Tensor,
    steps: Tensor,
    copy: Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    clear: bool = True,
) -> None:
    """One AdamW update in place: clip, decay, step, round and clear in one pass.

    Args:
        weight: (N,) fp32 or fp64, contiguous; updated.
        gradient: (N,) of any precision; zeroed where ``clear``, also of a step that is held back.
        exp_avg: (N,) as weight; updated.
        exp_avg_sq: (N,) as weight; updated.
        factor: 0-d, what gradients are multiplied by.
        held: 0-d, on the device: where it is not 0 the step is not taken.
        steps: 0-d, on the device: updates so far; the caller counts this one if it is taken.
        copy: (N,) half-precision weights, given the new weights; None where there are none.
        lr: the learning rate.
        beta1: of the first moment.
        beta2: of the second moment.
        eps: added to the root.
        weight_decay: decoupled.
        clear: zero the gradient.
    """
    numbers = {
        "lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay,
    }  # fmt: skip
    if runs_kernel(weight, gradient):
        if weight.numel():
            logs = (math.log2(beta) if beta else -math.inf for beta in (beta1, beta2))
            scalars = torch.tensor(
                (1 - lr * weight_decay, lr, eps, 1 - beta1, beta2, 1 - beta2, *logs),
                dtype=torch.float64,
                pin_memory=weight.is_cuda,
            ).to(weight.device, non_blocking=True)
            buffers = (weight, gradient, exp_avg, exp_avg_sq, copy)
            kernel.launch_step(*buffers, factor, held, steps, scalars, clear=clear)
        return
    if not bool(held):
        new = adamw_reference(
            weight, gradient, exp_avg, exp_avg_sq, factor, **numbers, step=int(steps) + 1
        )
        for buffer, values in zip((weight, exp_avg, exp_avg_sq), new, strict=False):
            buffer.copy_(values)
        if copy is not None:
            copy.copy_(weight)
    if clear:
        gradient.zero_()
