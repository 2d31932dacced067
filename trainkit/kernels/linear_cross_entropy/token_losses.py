"""The loss of every token by itself, with a gradient: what preference objectives are made of.

The sum of log-probabilities of an answer, a ratio to a reference model, a weight a token: each is a
function of the tokens' own losses, known only after all of them. So unlike `linear_cross_entropy`,
whose gradient is made on the forward pass, the backward pass makes each chunk's logits once more;
nothing of their size is kept.

M rows of ``hidden``, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.kernels.cross_entropy.function import cross_entropy_chunk
from trainkit.kernels.launch import device_of
from trainkit.kernels.linear_cross_entropy.function import (
    add_product,
    check_shapes,
    chunk_rows,
    compute_dtype_of,
    default_chunk_tokens,
    grad_scale_of,
    logits_buffer,
    write_logits,
)


@torch.compiler.disable(reason="a loop over chunks in one buffer is nothing to trace")
def linear_token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Cross entropy of each row of ``hidden @ weight.T + bias`` against its label.

    Args:
        hidden: (..., H).
        weight: (V, H).
        labels: (...), aligned with the rows of ``hidden`` (no shift happens here).
        bias: (V,).
        ignore_index: the label of rows that are not trained.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        chunk_tokens: rows whose logits exist at a time; None takes `default_chunk_tokens`.

    Returns:
        (...), the negative log-probabilities in fp32 (fp64 for fp64); 0, without a gradient, where
        a row is not trained.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_shapes(hidden, weight, labels, bias, chunk_tokens)
    options = {"ignore_index": ignore_index, "softcap": softcap}
    dtype = compute_dtype_of(hidden, weight)
    return _TokenLosses.apply(hidden, weight, bias, labels, dtype, chunk_tokens, options)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        dtype: torch.dtype,
        chunk_tokens: int | None,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.dtype, ctx.chunk_tokens, ctx.options = dtype, chunk_tokens, options
        ctx.save_for_backward(hidden, weight, bias, labels)
        with torch.autocast(hidden.device.type, enabled=False), device_of(hidden):
            rows, matrix, offset = _cast(hidden, weight, bias, dtype)
            flat = labels.reshape(-1)
            wide = torch.promote_types(dtype, torch.float32)
            losses = rows.new_zeros(len(rows), dtype=wide)
            for part, logits in _chunks(rows, matrix, offset, chunk_tokens):
                cross_entropy_chunk(
                    logits, flat[part], losses[part], 1.0, want_grad=False, **options
                )
        return losses.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        want_dhidden, want_dweight, want_dbias = ctx.needs_input_grad[:3]
        wide = torch.promote_types(ctx.dtype, torch.float32)
        dhidden = dweight = dbias = None
        with torch.autocast(hidden.device.type, enabled=False), device_of(hidden):
            rows, matrix, offset = _cast(hidden, weight, bias, ctx.dtype)
            flat, factors = labels.reshape(-1), grad_output.reshape(-1).to(wide)
            size = _power_of_2(factors) / grad_scale_of(ctx.dtype)
            scales = factors / size
            if want_dhidden:
                dhidden = rows.new_empty(rows.shape, dtype=wide)
            if want_dweight:
                dweight = torch.zeros_like(matrix, dtype=wide)
            if want_dbias:
                dbias = rows.new_zeros(len(matrix), dtype=wide)
            unused = rows.new_empty(len(rows), dtype=wide)
            for part, logits in _chunks(rows, matrix, offset, ctx.chunk_tokens):
                cross_entropy_chunk(logits, flat[part], unused[part], scales[part], **ctx.options)
                if dhidden is not None:
                    add_product(dhidden[part], logits, matrix)
                if dweight is not None:
                    add_product(dweight, logits.t(), rows[part], add=True)
                if dbias is not None:
                    dbias += logits.sum(0, dtype=wide)
            if dhidden is not None:
                dhidden = (dhidden * size).to(hidden.dtype).view(hidden.shape)
            if dweight is not None:
                dweight = (dweight * size).to(weight.dtype)
            if dbias is not None:
                dbias = (dbias * size).to(bias.dtype)
        return dhidden, dweight, dbias, None, None, None, None


def _power_of_2(factors: Tensor) -> Tensor:
    """About the largest factor: it stays out of the products, so that small ones do not underflow.

    A power of two, so that a factor which 16 bits hold exactly still is after the division.
    """
    if not len(factors):
        return factors.new_ones(())
    exponent = torch.frexp(factors.abs().amax()).exponent
    return torch.ldexp(factors.new_ones(()), exponent)


def _cast(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    return rows, weight.to(dtype), None if bias is None else bias.to(dtype)


def _chunks(rows: Tensor, matrix: Tensor, offset: Tensor | None, chunk_tokens: int | None) -> Any:
    """Which rows, and their logits (rows, V) in a buffer that the next chunk writes again."""
    limit = chunk_tokens or default_chunk_tokens(len(matrix), rows.element_size())
    chunk = chunk_rows(len(rows), limit)
    buffer = logits_buffer(rows, chunk, len(matrix))
    for start in range(0, len(rows), max(chunk, 1)):
        part = slice(start, min(start + chunk, len(rows)))
        logits = buffer[: part.stop - start, : len(matrix)]
        write_logits(logits, rows[part], matrix, offset)
        yield part, logits
