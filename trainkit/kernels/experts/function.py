"""A mixture of experts' feed-forward block, with or without an adapter on each expert."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainkit.kernels.autocast import compute_dtype
from trainkit.kernels.launch import HAS_TRITON, KernelFunction, runs_kernel
from trainkit.kernels.lora.products import MAX_RANK, pad_rank

if HAS_TRITON:
    from trainkit.kernels.experts import kernel
    from trainkit.kernels.experts.product_kernel import grouped_outer, grouped_product
    from trainkit.kernels.experts.route_kernel import Route, route

ACTIVATIONS = ("silu", "gelu_tanh")


class Limits(NamedTuple):
    """What a gate does besides: ``g * sigmoid(alpha * g) * (u + offset)``, both clamped first.

    Attributes:
        limit: of the gate from above, and of up in both directions; None for no clamp.
    """

    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0

    def clamped(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate, up + self.offset if self.offset else up


NO_LIMITS = Limits()


class Packed(NamedTuple):
    """A frozen stack of weights that is kept as codes."""

    codes: Tensor
    shape: tuple[int, ...]
    unpack: Callable[[Tensor, torch.dtype], Tensor]


def _activated(u: Tensor, activation: str, limits: Limits, interleaved: bool) -> Tensor:
    halves = (u[..., ::2], u[..., 1::2]) if interleaved else u.chunk(2, dim=-1)
    gate, up = limits.clamped(*halves)
    if limits.alpha != 1.0:
        return up * (gate * torch.sigmoid(gate * limits.alpha))
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def moe_mlp_reference(
    x: Tensor,
    index: Tensor,
    scale: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_a: Tensor | None = None,
    gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    scaling: tuple[float, float] = (1.0, 1.0),
    activation: str = "silu",
    limits: Limits = NO_LIMITS,
    interleaved: bool = False,
    transposed: bool = False,
    dropout: float = 0.0,
    halves: int = 1,
) -> Tensor:
    """`moe_mlp` as transformers loops over experts, with peft's adapters added to the weights."""

    def adapted(weight: Tensor, a: Tensor | None, b: Tensor | None, factor: float) -> Tensor:
        if a is None or b is None or dropout:
            return weight
        delta = torch.bmm(b, a).to(weight.dtype)
        return weight + factor * (delta.transpose(1, 2) if transposed else delta)

    def product(
        rows: Tensor, weight: Tensor, a: Tensor | None, b: Tensor | None, factor: float, parts: int
    ) -> Tensor:
        y = F.linear(rows, weight)
        if a is None or b is None or not dropout:
            return y
        rows = rows.to(a.dtype)
        low = [F.linear(F.dropout(rows, dropout), each) for each in a.chunk(parts)]
        return y + (factor * F.linear(torch.cat(low, -1), b)).to(y.dtype)

    gate_up = adapted(gate_up, gate_up_a, gate_up_b, scaling[0])
    down = adapted(down, down_a, down_b, scaling[1])
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    out = torch.zeros_like(x)
    # unbind's backward stacks; that of an index would fill a whole gradient for every expert
    stacks = (gate_up, gate_up_a, gate_up_b, down, down_a, down_b)
    each = [[None] * len(down) if stack is None else stack.unbind(0) for stack in stacks]
    # of all at once: an estimate, which knows no numbers, gives each expert its share
    chosen = index == torch.arange(len(down), device=index.device)[:, None, None]
    for expert, (first, a1, b1, second, a2, b2) in enumerate(zip(*each, strict=True)):
        token, choice = torch.where(chosen[expert])
        u = product(x[token], first, a1, b1, scaling[0], halves)
        if gate_up_bias is not None:
            u = u + gate_up_bias[expert]
        h = _activated(u, activation, limits, interleaved)
        y = product(h, second, a2, b2, scaling[1], 1)
        if down_bias is not None:
            y = y + down_bias[expert]
        y = y * scale[token, choice, None]
        out = out.index_add(0, token, y.to(out.dtype))
    return out


def why_no_kernel(
    x: Tensor, gate_up: Tensor | Packed, down: Tensor | Packed, rank: int = 0
) -> str | None:
    """Why the reference runs for such tensors; None where the kernels do."""
    plain = [each for each in (gate_up, down) if isinstance(each, Tensor)]
    if not runs_kernel(x, *plain):
        return "no kernel runs on such tensors here"
    if x.dtype == torch.float64:
        return "matrix units take no fp64"
    for each in plain:
        if each.dtype != x.dtype:
            return f"weights in {each.dtype} for tokens in {x.dtype}"
        if not each.is_contiguous():
            return "the weights are not contiguous"
    unit = 16 // x.element_size()
    if any(size % unit for weight in (gate_up, down) for size in weight.shape[1:]):
        return f"sizes {tuple(gate_up.shape)} that are no multiples of {unit}"
    if rank > MAX_RANK:
        return f"a rank above {MAX_RANK}"
    return None


@torch.compiler.disable(reason="grouped products launch by descriptors of tensors")
def moe_mlp(
    x: Tensor,
    index: Tensor,
    scale: Tensor,
    gate_up: Tensor | Packed,
    down: Tensor | Packed,
    gate_up_a: Tensor | None = None,
    gate_up_b: Tensor | None = None,
    down_a: Tensor | None = None,
    down_b: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    scaling: tuple[float, float] = (1.0, 1.0),
    activation: str = "silu",
    limits: Limits = NO_LIMITS,
    interleaved: bool = False,
    transposed: bool = False,
    dropout: float = 0.0,
    halves: int = 1,
) -> Tensor:
    """The sum over a token's experts of scale * down(act(gate) * up).

    The weights are not changed nor copied for an adapter, and its backward pass runs through the
    rank. Of the base x, the first product and the ranks' inputs are kept for it.

    Args:
        x: (T, H).
        index: (T, K), integers: the experts of a token; numbers outside [0, E) count for nothing.
        scale: (T, K), what an expert's result counts.
        gate_up: (E, 2I, H), gate's rows first; (E, H, 2I) if ``transposed``. Packed ones are
            unpacked in the forward pass and again in the backward pass, and get no gradient.
        down: (E, H, I); (E, I, H) if ``transposed``.
        gate_up_a: (E, R, H) or None; with ``gate_up_b`` (E, 2I, R), any strides.
        gate_up_b: see ``gate_up_a``.
        down_a: (E, R, I) or None; with ``down_b`` (E, H, R).
        down_b: see ``down_a``.
        gate_up_bias: (E, 2I) or None.
        down_bias: (E, H) or None.
        scaling: what the two low-rank products are multiplied by.
        activation: one of `ACTIVATIONS`.
        limits: what the gate does besides; an alpha goes with silu alone.
        interleaved: the rows of gate and up take turns.
        transposed: how the weights lie; the adapters' always lie as said.
        dropout: of the adapters' inputs, in plain torch.
        halves: 2 where gate's and up's, each of half of the ranks, are dropped apart.

    Returns:
        (T, H).
    """
    factors = (gate_up_a, gate_up_b, down_a, down_b)
    rank = max((a.shape[1] for a in (gate_up_a, down_a) if a is not None), default=0)
    dtype = x.dtype
    if runs_kernel(x) and torch.is_autocast_enabled(x.device.type):
        x = x.to(compute_dtype(x))
        gate_up, down = (
            each if isinstance(each, Packed) else each.to(x.dtype) for each in (gate_up, down)
        )
    codes = [each.codes if isinstance(each, Packed) else each for each in (gate_up, down)]
    unpacks = [each.unpack if isinstance(each, Packed) else None for each in (gate_up, down)]
    if dropout or why_no_kernel(x, gate_up, down, rank):
        return _plain(
            x, index, scale, codes, unpacks, *factors, gate_up_bias, down_bias,
            scaling=scaling, activation=activation, limits=limits, interleaved=interleaved,
            transposed=transposed, dropout=dropout, halves=halves,
        ).to(dtype)  # fmt: skip
    gate = (activation == "gelu_tanh", limits.limit or 0.0, *limits[1:], interleaved)
    y: Tensor = _Experts.apply(
        x, index, scale, *codes, *factors, gate_up_bias, scaling, gate, transposed, unpacks
    )
    if down_bias is not None:  # each expert's, as often as its results count
        num = gate_up.shape[0]
        at = torch.where((index < 0) | (index > num), num, index)
        shares = scale.new_zeros((x.shape[0], num + 1)).scatter_add(1, at, scale)[:, :num]
        y = torch.addmm(y, shares.to(y.dtype), down_bias.to(y.dtype))
    return y.to(dtype)


def _unpacked(
    stored: Tensor, unpack: Callable[[Tensor, torch.dtype], Tensor] | None, dtype: torch.dtype
) -> Tensor:
    return stored if unpack is None else unpack(stored, dtype)


def _plain(
    x: Tensor, index: Tensor, scale: Tensor, codes: Any, unpacks: Any, *rest: Any, **options: Any
) -> Tensor:
    """The reference; what it unpacks does not live on for the backward pass."""

    def run(x: Tensor) -> Tensor:
        stacks = (_unpacked(*each, x.dtype) for each in zip(codes, unpacks, strict=True))
        return moe_mlp_reference(x, index, scale, *stacks, *rest, **options)

    again = any(unpacks) and torch.is_grad_enabled()
    return checkpoint(run, x, use_reentrant=False) if again else run(x)


def _is_turned(a: Tensor) -> bool:
    """Whether the experts' number is fastest in a (E, R, N)."""
    return a.permute(2, 1, 0).is_contiguous()


def _factor(a: Tensor | None, like: Tensor, rank: int, num: int, width: int) -> Tensor | None:
    """(E, R, width) in the products' dtype, zero beyond the adapter's own rank."""
    if not rank:
        return None
    if a is not None and _is_turned(a):
        return kernel.turn(a.permute(2, 1, 0), rank, like.dtype)
    if a is not None and a.shape[1] == rank:
        return a.to(like.dtype, memory_format=torch.contiguous_format).contiguous()
    padded = like.new_zeros((num, rank, width))
    if a is not None:
        padded[:, : a.shape[1]] = a
    return padded


def _gradient(
    left: Tensor, right: Tensor, way: Any, like: tuple[int, torch.dtype, bool], **options: Any
) -> Tensor:
    """Of a factor (E, R, N): as it lies, for no other order is taken without a copy."""
    rank, dtype, turned = like
    found = kernel.gram(left, right, way, **options)
    return kernel.turn(found, rank, dtype).permute(2, 1, 0) if turned else found[:, :rank].to(dtype)


class _Experts(KernelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        scale: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_a: Tensor | None,
        gate_up_b: Tensor | None,
        down_a: Tensor | None,
        down_b: Tensor | None,
        gate_up_bias: Tensor | None,
        scaling: tuple[float, float],
        gate: tuple[Any, ...],
        transposed: bool,
        unpacks: Sequence[Callable[[Tensor, torch.dtype], Tensor] | None],
    ) -> Tensor:
        stored, ctx.unpacks = (gate_up, down), unpacks
        gate_up = _unpacked(stored[0], unpacks[0], x.dtype)
        num_experts = gate_up.shape[0]
        width = gate_up.shape[2 if transposed else 1] // 2
        x, scale = x.contiguous(), scale.contiguous()
        way = route(index, num_experts)
        ranks = [0 if a is None else a.shape[1] for a in (gate_up_a, down_a)]
        rank = pad_rank(max(ranks)) if any(ranks) else 0
        b1 = None if gate_up_b is None else gate_up_b.transpose(1, 2)
        b2 = None if down_b is None else down_b.transpose(1, 2)
        ctx.likes = [
            None if a is None else (a.shape[1], a.dtype, _is_turned(a))
            for a in (gate_up_a, b1, down_a, b2)
        ]

        def factor(a: Tensor | None, size: int) -> Tensor | None:
            return _factor(a, x, rank, num_experts, size)

        a1 = factor(gate_up_a, x.shape[1])
        rows, low = kernel.gather(x, way, a1, scaling[0])
        b1 = factor(b1, 2 * width)
        u = grouped_product(rows, gate_up, way, transposed=not transposed, low_rank=(low, b1))
        del rows, gate_up  # of codes only one stack is there at a time
        down = _unpacked(stored[1], unpacks[1], x.dtype)
        a2, b2 = factor(down_a, width), factor(b2, x.shape[1])  # while the device multiplies
        bias = None if gate_up_bias is None else gate_up_bias.contiguous()
        h = kernel.gate_forward(u, way, bias, gate)
        h_low = kernel.inner(h, way, a2, scaling[1])
        y = grouped_product(h, down, way, transposed=not transposed, low_rank=(h_low, b2))
        del h
        ctx.save_for_backward(x, scale, *stored, u, low, h_low, a1, b1, a2, b2, bias, *way[:-1])
        ctx.top_k, ctx.scaling = way.top_k, scaling
        ctx.gate, ctx.transposed = gate, transposed
        return kernel.combine(y, way, scale, x.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        x, scale, *stored, u, low, h_low, a1, b1, a2, b2, bias = saved[:12]
        sorted_slots = saved[12:]
        down = _unpacked(stored[1], ctx.unpacks[1], x.dtype)
        way = Route(*(*sorted_slots, ctx.top_k))
        wants_x, _, wants_scale, wants_gate_up, wants_down, *wants = ctx.needs_input_grad[:10]
        dy = dy.contiguous()
        dy_rows, dh_low = kernel.gather(dy, way, b2, ctx.scaling[1])
        dh = grouped_product(dy_rows, down, way, transposed=ctx.transposed, low_rank=(dh_low, a2))
        du, h, dscale = kernel.gate_backward(u, dh, scale, way, bias, ctx.gate)
        du_low = kernel.inner(du, way, b1, ctx.scaling[0])
        del dh
        dgate_up = ddown = None
        if wants_down:
            ddown = (
                grouped_outer(h, dy_rows, way) if ctx.transposed else grouped_outer(dy_rows, h, way)
            )
        if wants_gate_up:
            rows, _ = kernel.gather(x, way, None, 1.0)
            dgate_up = (
                grouped_outer(rows, du, way) if ctx.transposed else grouped_outer(du, rows, way)
            )
            del rows
        grads: list[Tensor | None] = [None] * 4
        if low is not None and h_low is not None and du_low is not None and dh_low is not None:
            if wants[0]:
                grads[0] = _gradient(du_low, x, way, ctx.likes[0], gathered=True)
            if wants[1]:
                grads[1] = _gradient(low, du, way, ctx.likes[1]).transpose(1, 2)
            if wants[2]:
                grads[2] = _gradient(dh_low, h, way, ctx.likes[2])
            if wants[3]:
                db = _gradient(h_low, dy_rows, way, ctx.likes[3], scale=scale)
                grads[3] = db.transpose(1, 2)
        del h, dy_rows, down
        dbias = None
        if wants[4]:
            dbias = kernel.gram(du.new_ones((du.shape[0], 16)), du, way)[:, 0].to(bias.dtype)
        dx = None
        if wants_x:
            gate_up = _unpacked(stored[0], ctx.unpacks[0], x.dtype)
            rows = grouped_product(
                du, gate_up, way, transposed=ctx.transposed, low_rank=(du_low, a1)
            )
            dx = kernel.combine(rows, way, None, x.shape[0])
        return (
            dx, None, dscale if wants_scale else None, dgate_up, ddown, *grads, dbias,
            None, None, None, None,
        )  # fmt: skip
