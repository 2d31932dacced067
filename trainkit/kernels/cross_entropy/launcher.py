"""Launching the cross-entropy kernels: settings by shape, and the arguments' order."""

from torch import Tensor

from trainkit.kernels.cross_entropy import kernel
from trainkit.kernels.launch import (
    INTERPRETING,
    Kernel,
    next_power_of_2,
    num_multiprocessors,
    remembered,
)

CROSS_ENTROPY = Kernel(kernel.cross_entropy_rows)
SUM_LOSSES = Kernel(kernel.sum_losses)


@remembered
def config(vocab: int, element_size: int) -> tuple[int, int, int, int, int]:
    """(BLOCK, NUM_STREAMED, num_warps, STAGES, programs per multiprocessor) by row length."""
    block = next_power_of_2(max(16, vocab))
    if INTERPRETING:
        block = min(block, 4096)
        return block, -(-vocab // block) - 1, 4, 1, 2
    if block * element_size <= 16384:
        return block, 0, 4, 1, 2
    # A longer row needs larger tiles. Both settings fill the shared memory with reads in flight.
    block, stages = (16384, 7) if vocab > 65536 else (8192, 8)
    block //= element_size
    return block, -(-vocab // block) - 1, 8, stages, 4 if vocab > 65536 else 2


def launch(
    logits: Tensor,
    labels: Tensor,
    options: tuple[int, float, float | None, float],
    *,
    scale: Tensor | float,
    make_scale: bool = False,
    num_items: Tensor | None = None,
    losses: Tensor | None = None,
    dlogits: Tensor | None = None,
    correct: Tensor | None = None,
    grad_output: Tensor | None = None,
    skip_unit_grad_output: bool = False,
    codes: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Losses and gradients of the rows of logits (N, V), each only where an output is given.

    Args:
        logits: (N, V), unit column stride.
        labels: (N,), contiguous.
        options: the loss, `LossOptions`.
        scale: factor of the gradients (not of the losses): a number, a 0-d tensor, or one a row
            (N,), contiguous.
        make_scale: the scale is a tensor that receives one over num_items, or over the number of
            labels that are not ignored; 0 instead of infinity.
        num_items: of one element.
        losses: (N,) receives the losses.
        dlogits: (N, V), unit column stride, receives the gradients; may be logits itself.
        correct: (N,) receives 1 where no other column exceeds the label's.
        grad_output: 0-d, a further factor of the gradients.
        skip_unit_grad_output: do nothing at all when grad_output is 1, decided on the device.
        codes: (N, V) e4m3, unit column stride, and (N, 1) fp32 receive the gradients in 8 bits.
    """
    ignore_index, label_smoothing, softcap, z_loss = options
    num_rows, vocab = logits.shape
    block, streamed, warps, stages, per_multiprocessor = config(vocab, logits.element_size())
    if skip_unit_grad_output:  # most often nothing is left to do: one wave of programs says so
        per_multiprocessor = 1
    # Without rows there is still a scale to make.
    programs = max(1, min(num_rows, num_multiprocessors(logits) * per_multiprocessor))
    kind, value = _kind_of_scale(scale, make_scale, num_items)
    out = logits if dlogits is None else dlogits
    filler = labels
    CROSS_ENTROPY.launch(
        programs,
        (
            logits,
            out,
            labels,
            filler if losses is None else losses,
            filler if correct is None else correct,
            scale if isinstance(scale, Tensor) else filler,
            filler if num_items is None else num_items,
            filler if grad_output is None else grad_output,
            *(codes or (filler, filler)),
        ),
        (logits.stride(0), out.stride(0), codes[0].stride(0) if codes else 0),
        (num_rows, programs, ignore_index, value),
        (
            kind,
            grad_output is not None,
            skip_unit_grad_output,
            losses is not None,
            correct is not None,
            dlogits is not None,
            codes is not None,
            label_smoothing,
            softcap or 0.0,
            z_loss,
            vocab,
            block,
            streamed,
            stages,
        ),
        warps,
        stages,
    )


def _kind_of_scale(
    scale: Tensor | float, make_scale: bool, num_items: Tensor | None
) -> tuple[int, float]:
    """Where the kernel takes the scale from, and the number if it is one."""
    if not isinstance(scale, Tensor):
        return kernel.SCALE_IS_A_NUMBER.value, float(scale)
    if make_scale:
        made = kernel.ONE_OVER_TRAINED if num_items is None else kernel.ONE_OVER_NUM_ITEMS
        return made.value, 0.0
    return (kernel.SCALE_A_ROW if scale.dim() else kernel.SCALE_IS_A_TENSOR).value, 0.0


def launch_sum(losses: Tensor, scale: Tensor | float) -> Tensor:
    """The sum of the losses (N,) times the scale, in a fixed order."""
    loss = losses.new_empty(())
    on_device = isinstance(scale, Tensor)
    SUM_LOSSES.launch(
        1,
        (losses, scale if isinstance(scale, Tensor) else losses, loss),
        (),
        (losses.shape[0], 0.0 if on_device else float(scale)),
        (on_device, 8192),
        8,
    )
    return loss
