"""The contracts of rms_norm and layer_norm, each also of a sum, and of rms_norm with a gate."""

from collections.abc import Callable
from typing import Any

from op_cases.op import Case, tried
from torch import Tensor

from trainkit.kernels.contract import Draw

Layout = Callable[[Draw, tuple[int, ...]], Tensor]


def dense(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    return draw.normal(*shape)


def sliced(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """The first columns of wider rows, as from a packed projection."""
    return draw.normal(*shape[:-1], 3 * shape[-1])[..., : shape[-1]]


def swapped(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Heads before positions over position-major memory."""
    first, second, *rest = shape
    return draw.normal(second, first, *rest).transpose(0, 1)


def columns_first(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Transposed memory: the last axis is not the dense one."""
    *rest, last = shape
    return draw.normal(last, *rest).movedim(0, -1)


def expanded(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """One row for all, its stride 0."""
    return draw.normal(*[1] * (len(shape) - 1), shape[-1]).expand(shape)


def rms_norm_case(
    label: str,
    shape: tuple[int, ...],
    *,
    layout: Layout = dense,
    wide_weight: bool = False,
    residual: bool = False,
    bias: bool = False,
    gate: bool = False,
    grads: tuple[str, ...] = ("x", "weight"),
    large: bool = False,
    **options: Any,
) -> Case:
    """A call on x of the given shape; with a residual or a gate, of the op that takes it."""

    def inputs(draw: Draw) -> dict[str, Tensor]:
        tensors = {"x": layout(draw, shape)}
        if residual:
            tensors["residual"] = draw.normal(*shape)
        if gate:
            tensors["gate"] = layout(draw, shape)
        weight = draw.normal(shape[-1])
        tensors["weight"] = weight.float() if wide_weight and weight.itemsize < 4 else weight
        if bias:
            tensors["bias"] = draw.normal(shape[-1]).to(weight.dtype)
        return tensors

    if bias and "weight" in grads:
        grads = (*grads, "bias")
    if residual and "x" in grads:
        grads = ("x", "residual", *grads[1:])
    if gate and "x" in grads:
        grads = ("x", "gate", *grads[1:])
    return Case(label, inputs, grads, options, large)


_GEMMA: dict[str, Any] = {"offset": 1.0, "cast": "gemma"}


def _cases(residual: bool) -> tuple[Case, ...]:
    def case(label: str, shape: tuple[int, ...], **settings: Any) -> Case:
        return rms_norm_case(label, shape, residual=residual, **settings)

    return (
        case("odd", (5, 7, 123)),
        case("qwen2-0.5b", (3, 11, 896)),
        case("qwen2-7b", (2, 9, 3584)),
        case("gemma", (5, 320), **_GEMMA),
        case("one row", (1, 896)),
        case("tiles", (300, 24)),  # several for each program, under the interpreter as well
        case("two columns", (7, 2)),
        case("no rows", (0, 4, 896)),
        case("heads", (2, 5, 4, 128)),
        case("sliced", (3, 5, 192), layout=sliced),
        case("swapped", (3, 5, 2, 64), layout=swapped),
        case("columns first", (6, 4, 48), layout=columns_first),
        case("expanded", (6, 4, 48), layout=expanded),
        case("wide weight", (9, 256), wide_weight=True),
        case("frozen weight", (9, 256), grads=("x",)),
        case("frozen input", (9, 256), grads=("weight",)),
        case("eps", (9, 64), eps=1e-2),
        case("tall", (16384, 896), large=True),
        case("1.5b", (4097, 1536), large=True),
        case("3b", (4097, 2048), large=True),
        case("7b", (4097, 3584), large=True),
        case("8b", (4097, 4096), large=True),
        case("70b", (2049, 8192), large=True),
        case("wide", (513, 20000), large=True),
        case("q norm", (65537, 128), large=True),
        case("gemma 2b", (2049, 2304), large=True, **_GEMMA),
    )


RMS_NORM = tried(
    "rms_norm", cases=_cases(residual=False), tiny=rms_norm_case("tiny", (3, 5), **_GEMMA)
)

ADD_RMS_NORM = tried(
    "add_rms_norm", cases=_cases(residual=True), tiny=rms_norm_case("tiny", (3, 5), residual=True)
)


def _layer_norm_cases(residual: bool) -> tuple[Case, ...]:
    def case(label: str, shape: tuple[int, ...], **settings: Any) -> Case:
        return rms_norm_case(label, shape, residual=residual, **{"bias": True, **settings})

    return (
        case("odd", (5, 7, 123)),
        case("gpt2", (3, 11, 768)),
        case("without bias", (5, 320), bias=False),
        case("nemotron", (5, 320), offset=1.0),
        case("one row", (1, 896)),
        case("tiles", (300, 24)),
        case("two columns", (7, 2), eps=0.1),  # with less, the gradient of x cancels
        case("no rows", (0, 4, 896)),
        case("heads", (2, 5, 4, 128)),
        case("far from zero", (5, 320), layout=far),
        case("sliced", (3, 5, 192), layout=sliced),
        case("swapped", (3, 5, 2, 64), layout=swapped),
        case("columns first", (6, 4, 48), layout=columns_first),
        case("expanded", (6, 4, 48), layout=expanded),
        case("frozen weight", (9, 256), grads=("x",)),
        case("frozen input", (9, 256), grads=("weight",)),
        case("eps", (9, 64), eps=1e-2),
        case("tall", (16384, 768), large=True),
        case("opt 2.7b", (4097, 2560), large=True),
        case("8b", (4097, 4096), large=True),
        case("70b", (2049, 8192), large=True),
        case("wide", (513, 20000), large=True),
        case("q norm", (65537, 128), large=True, bias=False),
    )


def far(draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """Rows whose mean is many times their spread: squares that are summed before it would drown."""
    return (draw.normal(*shape).float() + 50.0).to(draw.dtype)


LAYER_NORM = tried(
    "layer_norm",
    cases=_layer_norm_cases(residual=False),
    tiny=rms_norm_case("tiny", (3, 5), bias=True),
)

ADD_LAYER_NORM = tried(
    "add_layer_norm",
    cases=_layer_norm_cases(residual=True),
    tiny=rms_norm_case("tiny", (3, 5), residual=True, bias=True),
)


def _gated_cases() -> tuple[Case, ...]:
    def case(label: str, shape: tuple[int, ...], **settings: Any) -> Case:
        return rms_norm_case(label, shape, gate=True, **settings)

    kimi: dict[str, Any] = {"activation": "sigmoid", "cast": "gemma"}
    return (
        case("odd", (5, 7, 123)),
        case("mamba2", (3, 11, 512), gate_first=True),
        case("groups", (3, 11, 384), gate_first=True, group=96),
        case("groups, gate last", (300, 24), group=8),
        case("kimi", (2, 9, 4, 128), **kimi),
        case("gemma, gate first", (5, 320), gate_first=True, cast="gemma"),
        case("sigmoid", (5, 320), activation="sigmoid"),
        case("one row", (1, 896)),
        case("tiles", (300, 24)),
        case("no rows", (0, 4, 896)),
        case("sliced", (3, 5, 192), layout=sliced),
        case("swapped", (3, 5, 2, 64), layout=swapped, gate_first=True),
        case("columns first", (6, 4, 48), layout=columns_first, group=16),
        case("expanded", (6, 4, 48), layout=expanded),
        case("wide weight", (9, 256), wide_weight=True),
        case("wide weight, gate first", (9, 256), wide_weight=True, gate_first=True),
        case("frozen weight", (9, 256), grads=("x",)),
        case("frozen input", (9, 256), grads=("weight",), gate_first=True),
        case("eps", (9, 64), eps=1e-2),
        case("qwen3-next", (65537, 128), large=True),
        case("bamba", (2049, 8192), gate_first=True, large=True),
        case("nemotron-h", (4097, 8192), gate_first=True, group=1024, large=True),
        case("wide", (513, 20000), large=True),
    )


GATED_RMS_NORM = tried(
    "gated_rms_norm",
    cases=_gated_cases(),
    tiny=rms_norm_case("tiny", (3, 6), gate=True, gate_first=True, group=3),
)

NORMS = (RMS_NORM, ADD_RMS_NORM, LAYER_NORM, ADD_LAYER_NORM, GATED_RMS_NORM)
