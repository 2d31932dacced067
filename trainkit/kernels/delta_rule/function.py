"""The gated delta rule over packed documents, as linear-attention layers of hybrids have it."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.kernels.launch import HAS_TRITON, KernelFunction, runs_kernel

if HAS_TRITON:
    from trainkit.kernels.delta_rule import kernel


def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float | None = None,
    rounded: bool = False,
) -> Tensor:
    """`gated_delta_rule` in chunks of plain torch, one document after another, in fp32 or fp64.

    Where ``rounded``, factors of products are rounded to v's dtype, as the kernels and autocast
    round them. What fp32 would cost on a GPU's matrix units was measured: half the error, a third
    more time.
    """
    dtype = v.dtype
    wide = torch.promote_types(dtype, torch.float32)
    factor = dtype if rounded else wide

    def product(a: Tensor, b: Tensor) -> Tensor:
        return a.to(factor).to(wide) @ b.to(factor).to(wide)

    q, k, v, g, beta = (x.to(wide).transpose(0, 1) for x in (q, k, v, g, beta))
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    repeat = v.shape[0] // k.shape[0]
    q, k = q.repeat_interleave(repeat, 0), k.repeat_interleave(repeat, 0)
    bounds = cu_seqlens.tolist()
    none = (q * k).sum(-1)[:, :0] * g[:, :0] * beta[:, :0]  # of no token, with its gradients
    outputs = [v[:, :0] * none[..., None]]
    for begin, end in itertools.pairwise(bounds):
        state = v.new_zeros(v.shape[0], k.shape[-1], v.shape[-1])
        for start in range(begin, end, 64):
            part = slice(start, min(start + 64, end))
            query, key, value, rate = (x[:, part] for x in (q, k, v, beta[..., None]))
            cum = g[:, part].cumsum(-1)[..., None]
            eye = torch.eye(cum.shape[1], dtype=wide, device=v.device)
            is_later = torch.ones_like(eye).triu(1).bool()
            # A token's decay to itself is 1 and has no gradient: as a difference of two sums it
            # would drown what strong decays leave.
            between = (cum - cum.mT).masked_fill(eye.bool(), 0.0)
            decay = between.masked_fill(is_later, float("-inf")).exp()
            system = (rate * key @ key.mT) * decay  # its diagonal is taken for ones
            wrong = rate * (value - cum.exp() * product(key, state))
            inverse = torch.linalg.solve_triangular(
                system, eye.expand_as(system), upper=False, unitriangular=True
            )
            new = product(inverse, wrong)
            inner = product(product(query, key.mT) * decay, new)
            outputs.append(cum.exp() * product(query, state) + inner)
            last = cum[:, -1:]
            tail = torch.cat([(last - cum[:, :-1]).exp(), torch.ones_like(last)], 1)
            state = last.exp() * state + product(key.mT, tail * new)
    return torch.cat(outputs, 1).transpose(0, 1).to(dtype)


@torch.compiler.disable(reason="kernels over documents of any number")
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    normalize: bool = True,
    eps: float = 1e-6,
    scale: float | None = None,
) -> Tensor:
    """What a state that each token decays and corrects answers to the token's query.

    For each document and value head, S (K, V) starting at zero, and q, k of length 1 where
    ``normalize``: S = exp(g) S; S = S + k (beta (v - S^T k))^T; o = scale S^T q.
    Nothing of one document reaches another, to the bit. The host does not wait.

    Args:
        q: (T, HK, K), documents end to end.
        k: (T, HK, K).
        v: (T, HV, V); value head h reads key head h // (HV // HK).
        g: (T, HV), the logarithm of the decay, <= 0; fp32 is kept.
        beta: (T, HV), how much of the error is corrected.
        cu_seqlens: (N + 1,) int32, where documents begin and end; the last is T.
        normalize: divide rows of q and k by sqrt(their square + ``eps``).
        eps: see ``normalize``.
        scale: of the answers; K^-0.5 if None.

    Returns:
        (T, HV, V) in v's dtype. Source: arXiv 2412.06464.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not (runs_kernel(q, k, v) and kernel.serves(q, k, v)):
        return gated_delta_rule_reference(
            q, k, v, g, beta, cu_seqlens, normalize=normalize, eps=eps, scale=scale
        )
    o: Tensor = _DeltaRule.apply(q, k, v, g, beta, cu_seqlens, normalize, eps, scale)
    return o


class _DeltaRule(KernelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor,
        normalize: bool,
        eps: float,
        scale: float,
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        tensors = (q, k, v, g.contiguous(), beta.contiguous(), cu_seqlens.to(torch.int32))
        ctx.settings = kernel.Settings(q, v, normalize=normalize, scale=scale)
        o, ctx.prepared = kernel.forward(*tensors, eps, ctx.settings)
        ctx.save_for_backward(*tensors[:3], beta, g)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, g = ctx.saved_tensors
        do = do if do.stride(-1) == 1 else do.contiguous()
        *grads, dg, dbeta = kernel.backward(
            q, k, v, beta.contiguous(), do, ctx.prepared, ctx.settings
        )
        return (*grads, dg.to(g.dtype), dbeta.to(beta.dtype), None, None, None, None)
