"""The contracts of quantising, transposing and multiplying in e4m3."""

from collections.abc import Callable
from typing import Any

import torch
from op_cases.op import Case, TriedOp
from torch import Tensor

from trainkit.kernels.contract import Draw
from trainkit.kernels.fp8 import function, reference
from trainkit.kernels.fp8.reference import FP8, fp8_gate_reference, gated, gated_backward

_TARGET = function.SMALLEST_CAPABILITY[0] * 10 + function.SMALLEST_CAPABILITY[1]
_FAST_ACCUMULATION = 2.0**-7
"""Hopper keeps 13 bits behind the point of a running sum. Each instruction takes 32 columns and
drops at most 2^-13 of the sum so far; in the sum of squares over the 128 instructions of 4096
columns that grows with their root, and the largest case here has so many: 11 x 2^-13, with room
for sums that were larger on the way than at the end."""


def _codes(draw: Draw, rows: int, width: int) -> Tensor:
    """Codes as a product takes them; in fp64, for the exact suites, as numbers."""
    codes = draw.normal(rows, width, scale=60.0).clamp(-448, 448).to(FP8)
    return codes.to(draw.dtype) if draw.dtype.itemsize == 8 else codes


def _scales(draw: Draw, rows: int) -> Tensor:
    return draw.normal(rows, 1).float().abs().log2().round().exp2()


def quantize_case(
    label: str,
    shape: tuple[int, int],
    *,
    factor: bool = False,
    layout: str = "dense",
    large: bool = False,
    keep: bool = False,
) -> Case:
    """Quantising rows of the given shape."""

    def inputs(draw: Draw) -> dict[str, Tensor]:
        rows, width = shape
        x = draw.normal(width, rows).t() if layout == "columns first" else draw.normal(rows, width)
        if layout == "outliers":
            x[:, :2] *= 1000
            x[0] *= 2.0**-14
        if layout == "zeros":
            x[::2] = 0
        if layout == "view":
            x = draw.normal(rows, 2 * width)[:, width:]
        return {"x": x, **({"factor": _scales(draw, width).flatten()} if factor else {})}

    return Case(label, inputs, (), {"keep_largest": True} if keep else {}, large)


def _joint_case(label: str, rows: int, *widths: int, large: bool = False) -> Case:
    def inputs(draw: Draw) -> dict[str, Tensor]:
        named = {}
        for name, width in zip("xyz", widths, strict=False):
            named[name] = draw.normal(rows, width)
            named[f"factor_{name}"] = _scales(draw, width)
        return named

    return Case(label, inputs, (), {}, large)


def _transpose_case(label: str, width: int, *rows: int, large: bool = False) -> Case:
    def inputs(draw: Draw) -> dict[str, Tensor]:
        return {name: _codes(draw, n, width) for name, n in zip("xyz", rows, strict=False)}

    return Case(label, inputs, (), {}, large)


def _matmul_case(label: str, m: int, n: int, k: int, *, bias: bool = False) -> Case:
    def inputs(draw: Draw) -> dict[str, Tensor]:
        named = {
            "a": _codes(draw, m, k),
            "a_scales": _scales(draw, m),
            "b": _codes(draw, n, k),
            "b_scales": _scales(draw, n),
        }
        return {**named, "bias": draw.normal(n).bfloat16()} if bias else named

    return Case(label, inputs, (), {}, large=m * n * k > 2**22)


def _listed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of lists of parts, of their factors and of one of rows: each by its own name."""

    def call(**named: Tensor) -> Any:
        given = [[named[each] for each in names if each in named] for names in _LISTS]
        rows = [named["row_factor"]] if "row_factor" in named else []
        return function(*filter(None, given), *rows)

    return call


_LISTS = ("xyz", ("factor_x", "factor_y", "factor_z"))


def _both_case(label: str, rows: int, *widths: int, large: bool = False) -> Case:
    joint = _joint_case(label, rows, *widths)

    def inputs(draw: Draw) -> dict[str, Tensor]:
        return {**joint.inputs(draw), "row_factor": _scales(draw, rows).flatten()}

    return Case(label, inputs, (), {}, large)


def _columns_case(
    label: str, rows: int, width: int, *, codes: bool = False, large: bool = False
) -> Case:
    def inputs(draw: Draw) -> dict[str, Tensor]:
        x = _codes(draw, rows, width) if codes else draw.normal(rows, width)
        return {"x": x, "row_factor": _scales(draw, rows).flatten()}

    return Case(label, inputs, (), {}, large)


def _gate_case(label: str, rows: int, width: int, *, large: bool = False, **options: bool) -> Case:
    def inputs(draw: Draw) -> dict[str, Tensor]:
        return {"gate": draw.normal(rows, width, scale=2.0), "up": draw.normal(rows, width)}

    return Case(label, inputs, (), options, large)


def _gate_backward_case(
    label: str, rows: int, width: int, *, large: bool = False, **options: bool
) -> Case:
    forward = _gate_case(label, rows, width)

    def inputs(draw: Draw) -> dict[str, Tensor]:
        named = {**forward.inputs(draw), "dh": draw.normal(rows, width)}
        named["factor_gate"], named["factor_up"] = (_scales(draw, width) for _ in range(2))
        return named

    return Case(label, inputs, (), options, large)


def _rows_of_gate(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """What the codes stand for; in fp64, for the exact suites, h as it is."""

    def call(gate: Tensor, up: Tensor, tanh_gelu: bool = False) -> Tensor:
        if gate.dtype == torch.float64:
            return gated(gate, up, tanh_gelu)
        codes, scales = function(gate, up, tanh_gelu=tanh_gelu)
        return codes.float() * scales

    return call


def _back_through_gate(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """As `_rows_of_gate`, of both results."""

    def call(
        gate: Tensor,
        up: Tensor,
        dh: Tensor,
        factor_gate: Tensor,
        factor_up: Tensor,
        tanh_gelu: bool = False,
    ) -> tuple[Tensor, Tensor]:
        factors = (factor_gate, factor_up)
        if gate.dtype == torch.float64:
            parts = gated_backward(gate, up, dh, tanh_gelu)
            return torch.cat(parts, 1) * torch.cat(factors).t(), gated(gate, up, tanh_gelu)
        h_scales = fp8_gate_reference(gate, up, tanh_gelu)[1]
        codes, scales, h_codes = function(gate, up, dh, factors, h_scales, tanh_gelu=tanh_gelu)
        return codes.float() * scales, h_codes.float() * h_scales

    return call


def _op(
    name: str,
    outputs: tuple[str, ...],
    *cases: Case,
    call: Callable[..., Any] = lambda function: function,
    **more: Any,
) -> TriedOp:
    """A function of this name and its reference, as ``call`` makes them take named tensors."""
    ours, plain = getattr(function, name), getattr(reference, f"{name}_reference")
    given = {"outputs": outputs, "cases": cases, "smallest_target": _TARGET, **more}
    return TriedOp(name=name, function=call(ours), reference=call(plain), **given)


FP8_OPS = (
    _op(
        "fp8_quantize",
        ("codes", "scales"),
        quantize_case("odd", (5, 123)),
        quantize_case("hidden", (9, 896)),
        quantize_case("factor", (7, 96), factor=True),
        quantize_case("two blocks", (3, 9000), factor=True),
        quantize_case("too long for registers", (2, 40000), factor=True),
        quantize_case("outliers", (4, 4096), layout="outliers"),
        quantize_case("zeros", (4, 64), layout="zeros"),
        quantize_case("kept largest", (9, 896), layout="outliers", keep=True),
        quantize_case("kept, two blocks", (3, 9000), layout="zeros", keep=True),
        quantize_case("one column", (9, 1)),
        quantize_case("no rows", (0, 32)),
        quantize_case("columns first", (6, 48), layout="columns first"),
        quantize_case("view", (6, 48), layout="view", factor=True),
        quantize_case("feed-forward", (8192, 18944), factor=True, large=True),
        quantize_case("past 2^31", (131100, 16400), large=True),
        tiny=quantize_case("tiny", (3, 5)),
    ),
    _op(
        "fp8_quantize_joint",
        ("codes", "scales"),
        _joint_case("q, k and v", 5, 64, 16, 16),
        _joint_case("gate and up", 3, 208, 208),
        _joint_case("7B q, k and v", 8192, 3584, 512, 512, large=True),
        _joint_case("7B gate and up", 8192, 18944, 18944, large=True),
        tiny=_joint_case("tiny", 2, 3, 4),
        call=_listed,
    ),
    _op(
        "fp8_quantize_both",
        ("codes", "scales", "turned", "turned_scales"),
        _both_case("one", 37, 272),
        _both_case("q, k and v", 64, 64, 16, 16),
        _both_case("gate and up", 130, 208, 208),
        _both_case("no rows", 0, 32),
        _both_case("7B q, k and v", 8192, 3584, 512, 512, large=True),
        _both_case("7B gate and up", 8192, 18944, 18944, large=True),
        tiny=_both_case("tiny", 2, 3, 4),
        call=_listed,
    ),
    _op(
        "fp8_quantize_columns",
        ("turned", "scales"),
        _columns_case("odd", 37, 272),
        _columns_case("codes", 64, 96, codes=True),
        _columns_case("no rows", 0, 32),
        _columns_case("7B hidden", 8192, 3584, codes=True, large=True),
        tiny=_columns_case("tiny", 3, 5),
    ),
    _op(
        "fp8_gate",
        ("h",),
        _gate_case("odd", 5, 123),
        _gate_case("qwen2-0.5b", 3, 4864),
        _gate_case("tanh", 5, 96, tanh_gelu=True),
        _gate_case("no rows", 0, 32),
        _gate_case("7b", 1025, 18944, large=True),
        tiny=_gate_case("tiny", 3, 5),
        call=_rows_of_gate,
    ),
    _op(
        "fp8_gate_backward",
        ("gradients", "h"),
        _gate_backward_case("odd", 5, 123),
        _gate_backward_case("qwen2-0.5b", 3, 4864),
        _gate_backward_case("tanh", 5, 96, tanh_gelu=True),
        _gate_backward_case("no rows", 0, 32),
        _gate_backward_case("7b", 1025, 18944, large=True),
        tiny=_gate_backward_case("tiny", 3, 5),
        call=_back_through_gate,
    ),
    _op(
        "fp8_transpose",
        ("out",),
        _transpose_case("one", 96, 48),
        _transpose_case("q, k and v", 320, 272, 16, 16),
        _transpose_case("odd", 35, 71, 5),
        _transpose_case("7B gate and up", 3584, 18944, 18944, large=True),
        tiny=_transpose_case("tiny", 3, 5),
        call=_listed,
    ),
    _op(
        "fp8_matmul",
        ("out",),
        _matmul_case("small", 5, 32, 48),
        _matmul_case("bias", 33, 64, 96, bias=True),
        _matmul_case("no rows", 0, 32, 48),
        _matmul_case("7B output", 2048, 3584, 3584),
        _matmul_case("narrow with bias", 2048, 512, 4096, bias=True),
        tiny=_matmul_case("tiny", 2, 16, 16),
        hardware_error=_FAST_ACCUMULATION,
    ),
)
