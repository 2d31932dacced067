"""Cross entropy with its gradient."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.kernels.fp8.reference import fp8_quantize_reference
from trainkit.kernels.launch import HAS_TRITON, KernelFunction, as_rows, runs_kernel


class LossOptions(NamedTuple):
    """What the loss is, apart from its inputs.

    Attributes:
        ignore_index: label of the rows that are not trained.
        label_smoothing: share of the loss spread evenly over all columns.
        softcap: the logits become ``softcap * tanh(logits / softcap)`` first.
        z_loss: weight of ``logsumexp(logits)^2``.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0


PLAIN = LossOptions()

# -- Cross entropy in plain torch, with the options of the kernel ---------------------------------


def token_losses_reference(logits: Tensor, labels: Tensor, options: LossOptions = PLAIN) -> Tensor:
    """Loss of each row of logits (N, V), at least fp32; 0 where the label is ignored.

    ``(1 - e) * nll + e * mean over V of -log p + z_loss * logsumexp^2``, on
    ``softcap * tanh(logits / softcap)`` if a softcap is given.
    """
    ignore_index, label_smoothing, softcap, z_loss = options
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        values = softcap * torch.tanh(values / softcap)
    trained = labels != ignore_index
    target = labels.where(trained, 0).unsqueeze(-1).long()
    lse = torch.logsumexp(values, dim=-1)
    loss = lse - values.gather(-1, target).squeeze(-1)
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (lse - values.mean(-1))
    if z_loss:
        loss = loss + z_loss * lse.square()
    return loss.where(trained, torch.zeros_like(loss))


def cross_entropy_reference(
    logits: Tensor, labels: Tensor, *, num_items: Tensor | int | None = None, **loss: Any
) -> Tensor:
    """``sum of the token losses / num_items``; 0 with zero gradients when num_items is 0.

    Source: ``fixed_cross_entropy`` of transformers 5.23, which returns NaN in that last case.
    ``loss``: values of `LossOptions`.
    """
    options = LossOptions(**loss)
    rows, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    losses = token_losses_reference(rows, labels, options)
    if num_items is None:
        num_items = (labels != options.ignore_index).sum()
    count = torch.as_tensor(num_items, device=losses.device).to(losses.dtype).reshape(())
    return losses.sum() * torch.where(count > 0, 1.0 / count, 0.0)


if HAS_TRITON:
    from trainkit.kernels.cross_entropy import launcher


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    num_items: Tensor | int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy of logits against labels that are already aligned with their rows.

    The kernel makes the gradient together with the loss, in one extra tensor of the logits' size,
    and never waits for the device.

    Args:
        logits: (..., V), any strides.
        labels: (...), the column each row should predict. A label outside [0, V) other than
            ignore_index makes the loss NaN on a GPU and raises on a CPU.
        num_items: the denominator, a number or a tensor of one element. Default: the number of
            labels other than ignore_index.
        ignore_index: label of the rows that are not trained.
        label_smoothing: share of the loss spread evenly over all columns.
        softcap: the logits become ``softcap * tanh(logits / softcap)`` first.
        z_loss: weight of ``logsumexp(logits)^2``.

    Returns:
        A scalar, fp32 (fp64 for fp64 logits): the sum over rows divided by num_items. With no
        trained row or num_items 0 it is 0, and so are the gradients.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} misfit")
    options = LossOptions(ignore_index, label_smoothing, softcap, z_loss)
    if not runs_kernel(logits) or logits.shape[-1] == 0:
        return cross_entropy_reference(logits, labels, num_items=num_items, **options._asdict())
    # fp16 training scales the loss, so the gradient's factor is known only in the backward pass,
    # and gradients without it would underflow. A traced graph must not depend on ctx's state.
    deferred = logits.dtype == torch.float16 or torch.compiler.is_compiling()
    function = _DeferredCrossEntropy if deferred else _CrossEntropy
    return function.apply(logits, labels, num_items, options)


def cross_entropy_chunk(
    logits: Tensor,
    labels: Tensor,
    losses_out: Tensor,
    scale: Tensor | float,
    options: LossOptions = PLAIN,
    *,
    want_grad: bool = True,
    correct_out: Tensor | None = None,
    codes_out: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Losses of a chunk of logits, and its gradients in place of the logits.

    A building block without autograd, for a caller that owns the logits' buffer.

    Args:
        logits: (N, V), unit column stride, any row stride; overwritten with the scaled gradients
            if want_grad.
        labels: (N,).
        losses_out: (N,), fp32 (fp64 for fp64 logits), receives the unscaled losses.
        scale: factor of the gradients, a number or a tensor on the logits' device, 0-d or (N,).
        options: what the loss is.
        want_grad: make gradients.
        correct_out: (N,), any dtype, receives 1 where the label's logit is the row's largest and
            the label is not ignored, else 0.
        codes_out: (N, V) e4m3, unit column stride, and (N, 1) fp32, receive the scaled gradients
            in 8 bits and each row's scale, a power of two.
    """
    if not runs_kernel(logits):
        wanted = scale if want_grad or codes_out is not None else None
        gradient = _chunk_reference(logits, labels, losses_out, wanted, options, correct_out)
        if gradient is not None and want_grad:
            logits.copy_(gradient)
        if gradient is not None and codes_out is not None:
            for out, made in zip(codes_out, fp8_quantize_reference(gradient), strict=True):
                out.copy_(made)
        return
    launcher.launch(
        logits,
        labels.contiguous(),
        options,
        scale=scale,
        losses=losses_out,
        dlogits=logits if want_grad else None,
        correct=correct_out,
        codes=codes_out,
    )


def _chunk_reference(
    logits: Tensor,
    labels: Tensor,
    losses_out: Tensor,
    scale: Tensor | float | None,
    options: LossOptions,
    correct_out: Tensor | None,
) -> Tensor | None:
    """Write losses and what was right; the gradients (N, V) times the scale, None without one."""
    ignore_index, label_smoothing, softcap, z_loss = options
    losses = token_losses_reference(logits.detach(), labels, options)
    losses_out.copy_(losses)
    trained = labels != ignore_index
    target = labels.where(trained, 0).unsqueeze(-1).long()
    if correct_out is not None:
        best = logits.gather(-1, target).squeeze(-1) >= logits.amax(-1)
        correct_out.copy_(best & trained)
    if scale is None:
        return None
    # The derivative by hand: autograd inside a forward pass upsets gradient checkpointing.
    values = logits.to(losses.dtype)
    slope = None
    if softcap is not None:
        bent = torch.tanh(values / softcap)
        values, slope = softcap * bent, 1 - bent.square()
    lse = torch.logsumexp(values, dim=-1, keepdim=True)
    gradient = torch.exp(values - lse) * (1 + 2 * z_loss * lse) - label_smoothing / logits.shape[-1]
    gradient.scatter_add_(-1, target, gradient.new_full(target.shape, label_smoothing - 1))
    if slope is not None:
        gradient *= slope
    if isinstance(scale, Tensor) and scale.dim():
        scale = scale.unsqueeze(-1)
    return (gradient * scale).where(trained.unsqueeze(-1), 0)


def _launch_forward(
    logits: Tensor,
    labels: Tensor,
    num_items: Tensor | int | None,
    options: LossOptions,
    *,
    want_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | float, Tensor | None]:
    """(loss, labels (N,), the gradients' scale, the gradients (N, V) if wanted)."""
    rows = as_rows(logits)
    flat = labels.reshape(-1).contiguous()
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    losses = rows.new_empty(rows.shape[0], dtype=dtype)
    count = num_items if isinstance(num_items, Tensor) else None
    make_scale = num_items is None or (count is not None and count.device == logits.device)
    scale: Tensor | float
    if make_scale:
        scale = losses.new_empty(())
    else:
        number = float(num_items)  # type: ignore[arg-type]
        scale = 1.0 / number if number > 0 else 0.0
        if dtype == torch.float64:  # a number reaches a kernel as fp32
            scale = losses.new_tensor(scale)
    dlogits = rows.new_empty(rows.shape) if want_grad else None
    launcher.launch(
        rows,
        flat,
        options,
        scale=scale,
        make_scale=make_scale,
        num_items=count if make_scale else None,
        losses=losses,
        dlogits=dlogits,
    )
    return launcher.launch_sum(losses, scale), flat, scale, dlogits


class _CrossEntropy(KernelFunction):
    """Makes the gradient with the loss, as if the loss were the end of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        num_items: Tensor | int | None,
        options: LossOptions,
    ) -> Tensor:
        # The gradient is an attribute, not a saved tensor: it is given away, and a saved one would
        # outlive that.
        loss, flat, ctx.scale, ctx.dlogits = _launch_forward(
            logits, labels, num_items, options, want_grad=ctx.needs_input_grad[0]
        )
        ctx.options = options
        ctx.save_for_backward(logits, flat)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        logits, flat = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        # The first backward gives the prepared gradient away, made again from the logits if the
        # loss was scaled after all. A later one must not touch it, and makes its own.
        dlogits, ctx.dlogits = ctx.dlogits, None
        fresh = dlogits is None
        rows = as_rows(logits)
        if fresh:
            dlogits = rows.new_empty(rows.shape)
        launcher.launch(
            rows,
            flat,
            ctx.options,
            scale=ctx.scale,
            dlogits=dlogits,
            grad_output=grad_output,
            skip_unit_grad_output=not fresh,
        )
        return dlogits.view(logits.shape), None, None, None


class _DeferredCrossEntropy(KernelFunction):
    """Makes the gradient in the backward pass: one more read of the logits, no state."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        num_items: Tensor | int | None,
        options: LossOptions,
    ) -> Tensor:
        loss, flat, scale, _ = _launch_forward(logits, labels, num_items, options, want_grad=False)
        on_device = isinstance(scale, Tensor)
        ctx.scale, ctx.options = None if on_device else scale, options
        ctx.save_for_backward(logits, flat, scale if on_device else None)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        logits, flat, scale = ctx.saved_tensors
        rows = as_rows(logits)
        dlogits = rows.new_empty(rows.shape)
        launcher.launch(
            rows,
            flat,
            ctx.options,
            scale=ctx.scale if scale is None else scale,
            dlogits=dlogits,
            grad_output=grad_output,
        )
        return dlogits.view(logits.shape), None, None, None
