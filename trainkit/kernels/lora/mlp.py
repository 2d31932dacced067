"""A feed-forward block with adapters on any of its projections, as one backward pass.

``y = down(act(gate(x)) * up(x))``, each projection frozen with an adapter or without one; ``gate``
and ``up`` may be one packed layer. The backward pass is one sweep: dy through down's weight and
rank, the gate's kernel (`gate.py`), and both branches accumulated into dx.

The block is two autograd functions, and that is what makes checkpointing cheap. The first one
computes everything up to h and saves all that the backward pass needs; it hands on a token of y's
shape (no memory) whose gradient is dy. The second one computes ``down(h)`` and saves nothing.
Non-reentrant checkpointing stops its recomputation at the last saved tensor, so it never computes
``down`` a second time: a fifth to a third of a layer's work.

M tokens, H hidden, F feed-forward, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainkit.kernels.autocast import compute_dtype, no_autocast
from trainkit.kernels.fp8.linear import Fp8Weight, SharedInput
from trainkit.kernels.launch import as_rows
from trainkit.kernels.lora import products
from trainkit.kernels.lora.function import (
    TENSORS_PER_LAYER,
    Fixed,
    Layer,
    activate,
    carried_rows,
    input_gradient,
    load_layers,
    saved_layers,
    split_by_rank,
    through_the_rank,
    to_save,
)
from trainkit.kernels.lora.gate import (
    GateGradients,
    GateOperands,
    codes_of_gradients,
    folds,
    gate_backward,
    gate_forward,
    same_adapters,
)
from trainkit.kernels.lora.products import Projection, reshaped

ACTIVATIONS = ("silu", "gelu_tanh")


def lora_mlp(
    x: Tensor,
    gate: Projection,
    up: Projection | None,
    down: Projection,
    *,
    activation: str = "silu",
) -> Tensor:
    """A gated feed-forward block with adapters; see `lora_linear` for dtypes.

    Args:
        x: (..., H).
        gate: H to F; or H to 2F, the gate's half first, when ``up`` is None.
        up: H to F, or None for a packed gate.
        down: F to H.
        activation: "silu", or "gelu_tanh" (gemma).

    Returns:
        (..., H) in the dtype of the computation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    projections = (gate, down) if up is None else (gate, up, down)
    largest = max(each.lora_rank for each in projections)
    dtype = compute_dtype(x)
    settings = _Settings(
        dtype=dtype,
        fixed=tuple(map(Fixed.of, projections)),
        activation=activation,
        folded=folds(largest, x, dtype),
    )
    tensors = [tensor for each in projections for tensor in each.tensors()]
    quantized = carried_rows(x, dtype, settings.fixed[:-1])
    token, h, xa_down, b_down = _UpToDown.apply(x, settings, quantized, *tensors)
    return _Down.apply(token, h, xa_down, down.weight, down.bias, b_down, settings)


@dataclass(frozen=True)
class _Settings:
    dtype: torch.dtype
    fixed: tuple[Fixed, ...]
    activation: str
    folded: bool
    """The kernels add the adapters' shares inside the gate; else gate and up hold them."""


@dataclass(frozen=True)
class _Branches:
    """What comes back through the gate.

    Attributes:
        douts: gradient of each first layer's output, (M, F) each, or one (M, 2F).
        pair: the (2, M, F) buffer that two of them share, if they do.
        quantized: codes and scales of the two of them as their layers' product takes them, if the
            gate's kernels made them.
        p: their products with their adapters, made with the codes.
    """

    douts: list[Tensor]
    pair: Tensor | None
    factors: GateGradients
    quantized: tuple[Tensor, Tensor] | None = None
    p: Tensor | None = None


_BEFORE_TENSORS = 3
"""Arguments of `_UpToDown` before the layers' tensors."""


class _UpToDown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        settings: _Settings,
        quantized: tuple[Tensor, Tensor] | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        with no_autocast(x):
            first, a = load_layers(
                tensors[:-TENSORS_PER_LAYER], settings.fixed[:-1], settings.dtype
            )
            (down,), a_down = load_layers(
                tensors[-TENSORS_PER_LAYER:], settings.fixed[-1:], settings.dtype
            )
            x_rows = as_rows(x).to(settings.dtype)
            xa = None if a is None else products.rows(x_rows, a)
            inner = split_by_rank(xa, first, dim=1)
            shared = SharedInput(x_rows, quantized)
            if settings.folded:
                outputs = [layer.base(shared) for layer in first]
                h, xa_down = gate_forward(_operands(outputs, inner, first, a_down, settings))
            else:
                outputs = [
                    layer.adapted(shared, each) for layer, each in zip(first, inner, strict=True)
                ]
                gate, up = _halves(outputs)
                h = activate(gate, settings.activation) * up
                xa_down = None if a_down is None else products.rows(h, a_down)
        ctx.save_for_backward(x, xa, a, xa_down, a_down, *outputs, *to_save([*first, down]))
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        token = h.new_empty(1).expand(x.shape)
        others = (h, xa_down, down.b)
        ctx.mark_non_differentiable(*(tensor for tensor in others if tensor is not None))
        return token, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtoken: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        settings: _Settings = ctx.settings
        x, xa, a, xa_down, a_down, *rest = ctx.saved_tensors
        number = len(settings.fixed) - 1
        outputs = rest[:number]
        *first, down = saved_layers(rest[number:], settings.fixed)
        result: list[Tensor | None] = [None] * (_BEFORE_TENSORS + TENSORS_PER_LAYER * (number + 1))
        if dtoken is None:
            return tuple(result)
        with no_autocast(x):
            if ctx.needs_input_grad[0]:
                first = [layer.for_gradients() for layer in first]
            dy = as_rows(dtoken).to(settings.dtype)
            p_down = None if down.b is None else products.rows(dy, down.b.t())
            if xa_down is not None:
                dtype = down.fixed.dtype_b or dy.dtype
                result[-1] = products.columns(dy, xa_down, dtype, scale=down.fixed.scaling)
            back = _back_folded if settings.folded else _back_plain
            inner = split_by_rank(xa, first, dim=1)
            branches = back(dy, p_down, a_down, inner, outputs, first, down, settings)
            if branches.factors.da_down is not None:
                result[-2] = branches.factors.da_down.to(down.fixed.dtype_a)
            for index, db in enumerate(_db_of_layers(branches.factors, first)):
                result[_BEFORE_TENSORS + TENSORS_PER_LAYER * index + 3] = db
            p = None if a is None else _through_the_rank(branches, first, a)
            if p is not None:
                sums = products.sum_dtype(p.dtype)
                x_rows = as_rows(x).to(settings.dtype)
                stacked = products.columns(x_rows, p, sums, transposed=True)
                for index, da in enumerate(split_by_rank(stacked, first, dim=0)):
                    if da is not None:
                        place = _BEFORE_TENSORS + TENSORS_PER_LAYER * index + 2
                        result[place] = da.to(first[index].fixed.dtype_a)
            if ctx.needs_input_grad[0]:
                terms = list(zip(branches.douts, first, strict=True))
                dx = input_gradient(p, a, terms, quantized=branches.quantized)
                result[0] = dx.view(x.shape).to(x.dtype)
        wanted = ctx.needs_input_grad
        return tuple(grad if want else None for grad, want in zip(result, wanted, strict=True))


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        h: Tensor,
        xa_down: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        b_down: Tensor | None,
        settings: _Settings,
    ) -> Tensor:
        with no_autocast(token):
            down = Layer(weight, bias, b_down, settings.fixed[-1])
            return reshaped(down.adapted(SharedInput(h), xa_down), token.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, None, None, None, None, None, None


def _halves(outputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Gate and up: two outputs, or the halves of a packed one."""
    if len(outputs) == 2:
        return outputs[0], outputs[1]
    gate, up = outputs[0].chunk(2, dim=-1)
    return gate, up


def _operands(
    outputs: list[Tensor],
    inner: list[Tensor | None],
    first: list[Layer],
    a_down: Tensor | None,
    settings: _Settings,
) -> GateOperands:
    gate, up = _halves(outputs)
    if len(first) == 2:
        b_gate, b_up = first[0].b, first[1].b
    else:
        packed = first[0].b
        b_gate, b_up = (None, None) if packed is None else packed.chunk(2)
    tanh_gelu = settings.activation == "gelu_tanh"
    return GateOperands(gate, up, inner[0], inner[-1], b_gate, b_up, a_down, tanh_gelu)


def _back_folded(
    dy: Tensor,
    p_down: Tensor | None,
    a_down: Tensor | None,
    inner: list[Tensor | None],
    outputs: list[Tensor],
    first: list[Layer],
    down: Layer,
    settings: _Settings,
) -> _Branches:
    """Back through the gate by the kernel, which adds the adapters' shares on the way."""
    ops = _operands(outputs, inner, first, a_down, settings)
    num_rows, num_cols = ops.gate.shape
    pair = None
    if len(first) == 2:
        # One buffer for both gradients; dup replaces dh, element by element.
        pair = dy.new_empty((2, num_rows, num_cols))
        dgate, dup = pair
        dh = input_gradient(None, None, [(dy, down)], out=dup)
        douts = [dgate, dup]
    else:
        dh = input_gradient(None, None, [(dy, down)])
        packed = dy.new_empty((num_rows, 2 * num_cols))
        dgate, dup = packed.chunk(2, dim=-1)
        douts = [packed]
    scales = (first[0].fixed.scaling, first[-1].fixed.scaling)
    weights = [each.fixed.unpack for each in first if isinstance(each.fixed.unpack, Fp8Weight)]
    if pair is None or len(weights) != 2 or not same_adapters(ops.b_gate, ops.b_up):
        return _Branches(douts, pair, gate_backward(ops, dh, p_down, dgate, dup, scales))
    columns = (weights[0].scales.flatten(), weights[1].scales.flatten())
    grads = gate_backward(ops, dh, p_down, dgate, dup, scales, columns)
    assert grads.largest is not None
    factors = None
    if ops.b_gate is not None and ops.b_up is not None:
        factors = (ops.b_gate, ops.b_up)
    codes, row_scales, p = codes_of_gradients(pair, columns, grads.largest, factors)
    return _Branches(douts, pair, grads, (codes, row_scales), p)


def _back_plain(
    dy: Tensor,
    p_down: Tensor | None,
    a_down: Tensor | None,
    inner: list[Tensor | None],
    outputs: list[Tensor],
    first: list[Layer],
    down: Layer,
    settings: _Settings,
) -> _Branches:
    """As `_back_folded`, in torch, on outputs that hold the adapters' shares."""
    gate, up = _halves(outputs)
    sums = products.sum_dtype(dy.dtype)
    dh = input_gradient(p_down, a_down, [(dy, down)])
    activated = activate(gate, settings.activation)
    da_down = None
    if p_down is not None:
        da_down = products.columns(activated * up, p_down, sums, transposed=True)
    if settings.activation == "silu":
        dgate = torch.ops.aten.silu_backward(dh * up, gate)
    else:
        dgate = torch.ops.aten.gelu_backward(dh * up, gate, approximate="tanh")
    douts = [dgate, dh * activated]
    dbs = [
        None
        if (xa := inner[min(index, len(inner) - 1)]) is None
        else products.columns(dout, xa, sums, scale=layer.fixed.scaling)
        for index, (dout, layer) in enumerate(zip(douts, (first[0], first[-1]), strict=True))
    ]
    if len(first) == 1:
        douts = [torch.cat(douts, dim=-1)]
    return _Branches(douts, None, GateGradients(dbs[0], dbs[1], da_down))


def _db_of_layers(grads: GateGradients, first: list[Layer]) -> list[Tensor | None]:
    """Each first layer's dB, in its parameter's dtype."""
    halves = [grads.db_gate, grads.db_up]
    if len(first) == 1:
        present = [half for half in halves if half is not None]
        halves = [torch.cat(present) if present else None]
    return [
        None if db is None else db.to(layer.fixed.dtype_b)
        for db, layer in zip(halves, first, strict=True)
    ]


def _through_the_rank(branches: _Branches, first: list[Layer], a: Tensor) -> Tensor:
    """P (M, sum of R) of the first layers."""
    if branches.p is not None:
        return branches.p
    factors = [layer.b for layer in first if layer.b is not None]
    if branches.pair is not None and len(factors) == 2 and same_adapters(*factors):
        p = a.new_empty((branches.pair.shape[1], a.shape[0]))
        return products.rows_pair(branches.pair, torch.stack([factor.t() for factor in factors]), p)
    return through_the_rank(branches.douts, first, a)
