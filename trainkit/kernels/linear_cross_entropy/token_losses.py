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
from trainkit.kernels.fp8.trained import Directions
from trainkit.kernels.launch import device_of
from trainkit.kernels.linear_cross_entropy.function import (
    check_shapes,
    chunk_rows,
    compute_dtype_of,
    grad_scale_of,
)
from trainkit.kernels.linear_cross_entropy.products import (
    Products,
    add_product,
    logits_buffer,
    products_of,
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
    in_fp8: Directions | None = None,
) -> Tensor:
    """Cross entropy of each row of ``hidden @ weight.T + bias`` against its label.

    Args:
        hidden: (..., H).
        weight: (V, H).
        labels: (...), aligned with the rows of ``hidden`` (no shift happens here).
        bias: (V,).
        ignore_index: the label of rows that are not trained.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        chunk_tokens: rows whose logits exist at a time; None takes `Products.chunk_tokens`.
        in_fp8: as for `linear_cross_entropy`.

    Returns:
        (...), the negative log-probabilities in fp32 (fp64 for fp64); 0, without a gradient, where
        a row is not trained.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_shapes(hidden, weight, labels, bias, chunk_tokens)
    options = {"ignore_index": ignore_index, "softcap": softcap}
    dtype = compute_dtype_of(hidden, weight)
    return _TokenLosses.apply(hidden, weight, bias, labels, dtype, (chunk_tokens, in_fp8), options)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        dtype: torch.dtype,
        how: tuple[int | None, Directions | None],
        options: dict[str, Any],
    ) -> Tensor:
        ctx.dtype, ctx.how, ctx.options = dtype, how, options
        ctx.save_for_backward(hidden, weight, bias, labels)
        with torch.autocast(hidden.device.type, enabled=False), device_of(hidden):
            rows = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
            products = products_of(weight, bias, dtype, how[1])
            flat = labels.reshape(-1)
            wide = torch.promote_types(dtype, torch.float32)
            losses = rows.new_zeros(len(rows), dtype=wide)
            limit = how[0] or products.chunk_tokens(trained=False)
            for part, logits in _chunks(rows, products, len(weight), limit):
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
            rows = hidden.reshape(-1, hidden.shape[-1]).to(ctx.dtype)
            products = products_of(weight, bias, ctx.dtype, ctx.how[1])
            flat, factors = labels.reshape(-1), grad_output.reshape(-1).to(wide)
            size = _power_of_2(factors) / grad_scale_of(ctx.dtype)
            scales = factors / size
            if want_dhidden:
                dhidden = rows.new_empty(rows.shape, dtype=products.gradient_dtype)
            if want_dweight:
                dweight = torch.zeros_like(weight, dtype=wide)
            if want_dbias:
                dbias = rows.new_zeros(len(weight), dtype=wide)
            unused = rows.new_empty(len(rows), dtype=wide)
            limit = ctx.how[0] or products.chunk_tokens(trained=want_dweight)
            for part, logits in _chunks(rows, products, len(weight), limit):
                codes = products.gradient_codes(len(logits)) if want_dhidden else None
                cross_entropy_chunk(
                    logits,
                    flat[part],
                    unused[part],
                    scales[part],
                    want_grad=want_dweight or want_dbias or codes is None,
                    codes_out=codes,
                    **ctx.options,
                )
                if dhidden is not None:
                    products.write_gradient(dhidden[part], logits, codes)
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


def _chunks(rows: Tensor, products: Products, vocab_size: int, limit: int) -> Any:
    """Which rows, and their logits (rows, V) in a buffer that the next chunk writes again."""
    chunk = chunk_rows(len(rows), limit)
    buffer = logits_buffer(rows, chunk, vocab_size)
    for start in range(0, len(rows), max(chunk, 1)):
        part = slice(start, min(start + chunk, len(rows)))
        logits = buffer[: part.stop - start, :vocab_size]
        products.write_logits(logits, rows[part])
        yield part, logits
