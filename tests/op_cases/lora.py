"""The contracts of adapted layers: their weights and factors are handed over as tensors.

K inputs, N outputs, R rank, H hidden, F feed-forward.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from op_cases.op import Case, TriedOp
from torch import Tensor
from torch.nn import functional

from trainkit.kernels.contract import Draw
from trainkit.kernels.launch import INTERPRETING
from trainkit.kernels.lora.function import activate, lora_linear, lora_qkv
from trainkit.kernels.lora.mlp import lora_mlp
from trainkit.kernels.lora.products import Projection

Shapes = tuple[tuple[int, int, int, bool] | None, ...]
"""Of each layer K, N, R and whether it has a bias; None in place of ``up`` packs it with gate."""


def layers_of(h: int, f: int) -> dict[str, Shapes]:
    """Every combination of adapters, by the name of its op."""
    up, down = (h, f), (f, h)
    return {
        "lora_linear": ((h, 40, 4, True),),
        "lora_qkv": ((h, 40, 4, True), (h, 8, 4, True), (h, 8, 4, False)),
        "lora_qkv_ranks": ((h, 40, 3, True), (h, 8, 0, False), (h, 8, 20, False)),
        "lora_mlp": ((*up, 4, False), (*up, 4, False), (*down, 4, False)),
        "lora_mlp_gelu": ((*up, 4, False), (*up, 4, False), (*down, 4, False)),
        "lora_mlp_bias": ((*up, 2, True), (*up, 5, True), (*down, 20, True)),
        "lora_mlp_gate": ((*up, 4, False), (*up, 0, False), (*down, 0, False)),
        "lora_mlp_up": ((*up, 0, False), (*up, 4, False), (*down, 0, False)),
        "lora_mlp_down": ((*up, 0, False), (*up, 0, False), (*down, 4, False)),
        "lora_mlp_packed": ((h, 2 * f, 4, False), None, (*down, 4, False)),
        "lora_mlp_packed_down": ((h, 2 * f, 0, False), None, (*down, 4, False)),
    }


def projections(shapes: Shapes, tensors: dict[str, Tensor]) -> Iterator[Projection | None]:
    for index, shape in enumerate(shapes):
        if shape is None:
            yield None
        else:
            parts = (tensors.get(f"{part}{index}") for part in ("weight", "bias", "a", "b"))
            yield Projection(*parts, scaling=0.75 if index else 2.0)


def linear_reference(x: Tensor, layer: Projection) -> Tensor:
    """``x W^T + b + s (x A^T) B^T``, with the factors in x's dtype as in a 16-bit run."""
    out = functional.linear(x, layer.weight, layer.bias)
    if layer.lora_a is None or layer.lora_b is None:
        return out
    inner = functional.linear(x, layer.lora_a.to(x.dtype))
    return out + functional.linear(inner, layer.lora_b.to(x.dtype)) * layer.scaling


def mlp_reference(x: Tensor, gate: Any, up: Any, down: Any, *, activation: str = "silu") -> Tensor:
    """``down(act(gate(x)) * up(x))``; without ``up``, ``gate`` gives both halves, gate first."""
    halves = linear_reference(x, gate).chunk(2, -1)
    gated, raised = halves if up is None else (linear_reference(x, each) for each in (gate, up))
    return linear_reference(activate(gated, activation) * raised, down)


def qkv_reference(x: Tensor, *layers: Projection) -> tuple[Tensor, ...]:
    return tuple(linear_reference(x, each) for each in layers)


LAYOUTS = ("columns first", "tokens first", "sliced", "expanded")
CALLS = {
    "lora_linear": (lora_linear, linear_reference, ("y",)),
    "lora_qkv": (lora_qkv, qkv_reference, ("q", "k", "v")),
    "lora_mlp": (lora_mlp, mlp_reference, ("y",)),
}


def lora_case(
    label: str,
    shapes: Shapes,
    tokens: tuple[int, ...],
    *,
    layout: str = "dense",
    frozen: str = "",
    large: bool = False,
    **options: Any,
) -> Case:
    """A call on so many tokens; ``frozen`` names what needs no gradient besides the layers."""
    grads = ["x"]
    for index, shape in enumerate(shapes):
        grads += [f"a{index}", f"b{index}"] if shape and shape[2] else []

    def inputs(draw: Draw) -> dict[str, Tensor]:
        wide = torch.promote_types(draw.dtype, torch.float32)  # factors are trained
        drawn = {"x": rows_of(draw, shapes[0][0])}
        for index, shape in enumerate(shapes):
            if shape is None:
                continue
            k, n, r, bias = shape
            drawn[f"weight{index}"] = draw.normal(n, k, scale=k**-0.5)
            if bias:
                drawn[f"bias{index}"] = draw.normal(n)
            if r:
                drawn[f"a{index}"] = draw.normal(r, k, scale=k**-0.5).to(wide)
                drawn[f"b{index}"] = draw.normal(n, r, scale=r**-0.5).to(wide)
        return drawn

    def rows_of(draw: Draw, width: int) -> Tensor:
        if layout == "columns first":
            return draw.normal(width, *tokens).movedim(0, -1)
        if layout == "tokens first":
            return draw.normal(*reversed(tokens), width).transpose(0, 1)
        if layout == "expanded":
            return draw.normal(1, 1, width).expand(*tokens, width)
        return draw.normal(*tokens, 2 * width if layout == "sliced" else width)[..., :width]

    return Case(label, inputs, tuple(g for g in grads if g[0] != frozen), options, large)


def called(function: Any, shapes: Shapes, x: Tensor, *, activation: str = "", **tensors: Tensor):
    options = {"activation": activation} if activation else {}
    return function(x, *projections(shapes, tensors), **options)


def lora_op(name: str, shapes: Shapes, small: Shapes) -> TriedOp:
    function, reference, outputs = CALLS["_".join(name.split("_")[:2])]
    options = {"activation": "gelu_tanh"} if name.endswith("gelu") else {}

    def case(label: str, *tokens: int, **given: Any) -> Case:
        return lora_case(label, shapes, tokens, **options, **given)

    # Under the interpreter the other ones run the same kernels, a second or two each.
    is_shown = INTERPRETING and name not in ("lora_linear", "lora_mlp")
    others = (
        case("several splits", 3, 400, large=is_shown),
        case("one row", 1, large=is_shown),
        case("no rows", 2, 0),
        *(case(f"frozen {each}", 2, 5, frozen=each, large=is_shown) for each in "xab"),
        *(case(layout, 4, 6, layout=layout, large=is_shown) for layout in LAYOUTS),
    )
    return TriedOp(
        name=name,
        function=functools.partial(called, function, shapes),
        reference=functools.partial(called, reference, shapes),
        outputs=outputs,
        cases=(case("rows", 2, 37), *others),
        has_habits=not is_shown,
        tiny=lora_case("tiny", small, (3,), **options),
        roundings=16.0,  # gradients of factors are few numbers, of rows alike: errors scatter
        one_graph=None,
    )


LORA = tuple(
    lora_op(name, shapes, small)
    for (name, shapes), small in zip(
        layers_of(24, 88).items(), layers_of(5, 7).values(), strict=True
    )
)
