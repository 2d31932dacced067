"""The contracts of swiglu, geglu_tanh and swiglu_packed."""

from typing import Any

from op_cases.op import Case, tried
from torch import Tensor

from trainkit.kernels.contract import Draw


def gated_case(
    label: str,
    shape: tuple[int, ...],
    *,
    layout: str = "dense",
    grads: tuple[str, ...] = ("gate", "up"),
    scale: float = 2.0,
    large: bool = False,
) -> Case:
    """A call of swiglu or geglu_tanh on operands of the given shape."""

    def inputs(draw: Draw) -> dict[str, Tensor]:
        if layout == "halves":
            gate, up = draw.normal(*shape[:-1], 2 * shape[-1], scale=scale).chunk(2, dim=-1)
        elif layout == "columns first":
            gate, up = (
                draw.normal(*reversed(shape), scale=scale).permute(*reversed(range(len(shape))))
                for _ in range(2)
            )
        elif layout == "expanded":
            gate, up = (draw.normal(1, *shape[1:], scale=scale).expand(shape) for _ in range(2))
        else:
            gate, up = draw.normal(*shape, scale=scale), draw.normal(*shape)
        return {"gate": gate, "up": up}

    return Case(label, inputs, grads, {}, large)


def packed_case(
    label: str, shape: tuple[int, ...], *, sliced: bool = False, large: bool = False, **options: Any
) -> Case:
    """A call of swiglu_packed that returns the given shape."""

    def inputs(draw: Draw) -> dict[str, Tensor]:
        width = 2 * shape[-1]
        if sliced:
            return {"gate_up": draw.normal(*shape[:-1], width + 16, scale=2.0)[..., :width]}
        return {"gate_up": draw.normal(*shape[:-1], width, scale=2.0)}

    return Case(label, inputs, ("gate_up",), options, large)


_GATED = (
    gated_case("odd", (5, 3, 123)),
    gated_case("qwen2-0.5b", (3, 4864)),
    gated_case("one element", (1, 1)),
    gated_case("no rows", (0, 896)),
    gated_case("halves", (5, 3, 896), layout="halves"),
    gated_case("columns first", (7, 64), layout="columns first"),
    gated_case("expanded", (5, 3, 64), layout="expanded"),
    gated_case("frozen up", (5, 64), grads=("gate",)),
    gated_case("frozen gate", (5, 64), grads=("up",)),
    gated_case("extreme", (5, 64), scale=60.0),
    gated_case("long", (2049, 4864), large=True),
    gated_case("7b", (1025, 18944), large=True),
    gated_case("long halves", (1025, 14336), layout="halves", large=True),
)

_OPS = tuple(
    tried(name, cases=_GATED, tiny=gated_case("tiny", (3, 5))) for name in ("swiglu", "geglu_tanh")
)

SWIGLU_PACKED = tried(
    "swiglu_packed",
    cases=(
        packed_case("odd", (5, 3, 123)),
        packed_case("odd, up first", (5, 123), order="up_gate"),
        packed_case("glm", (3, 13696)),
        packed_case("one row", (1, 896)),
        packed_case("no rows", (0, 4, 896)),
        packed_case("sliced", (2, 5, 64), sliced=True),
        packed_case("long", (2049, 8192), large=True),
        packed_case("long, up first", (1025, 13696), large=True, order="up_gate"),
    ),
    tiny=packed_case("tiny", (3, 5)),
)

GATES = (*_OPS, SWIGLU_PACKED)
