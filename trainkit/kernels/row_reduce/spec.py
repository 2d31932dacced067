"""The contracts of row_max and row_min."""

from torch import Tensor

from trainkit.kernels.contract import Draw, OpCase, OpSpec
from trainkit.kernels.row_reduce.function import (
    row_max,
    row_max_reference,
    row_min,
    row_min_reference,
)


def row_case(
    label: str, shape: tuple[int, ...], *, layout: str = "dense", large: bool = False
) -> OpCase:
    """A call on rows of the given shape."""

    def inputs(draw: Draw) -> dict[str, Tensor]:
        if layout == "columns first":
            x = draw.normal(*reversed(shape)).permute(*reversed(range(len(shape))))
        elif layout == "ties":
            x = draw.normal(*shape).round()
        elif layout == "expanded":
            x = draw.normal(1, *shape[1:]).expand(shape)
        elif layout == "negative":
            x = -draw.normal(*shape).abs() - 1.0
        else:
            x = draw.normal(*shape)
        return {"x": x}

    return OpCase(label, inputs, ("x",), {}, large)


_CASES = (
    row_case("odd", (5, 7, 123)),
    row_case("short", (70, 4)),
    row_case("one column", (9, 1)),
    row_case("longer than a block", (3, 3000)),
    row_case("ties", (33, 100), layout="ties"),
    row_case("negative", (5, 3000), layout="negative"),
    row_case("one row", (896,)),
    row_case("no rows", (0, 5)),
    row_case("columns first", (6, 4, 48), layout="columns first"),
    row_case("expanded", (6, 4, 48), layout="expanded"),
    row_case("resized vocabulary", (2, 151655)),
    row_case("vocabulary", (129, 151655), large=True),
    row_case("many rows", (100000, 64), large=True),
)

ROW_MAX = OpSpec(
    name="row_max",
    function=row_max,
    reference=row_max_reference,
    outputs=("values", "indices"),
    cases=_CASES,
    tiny=row_case("tiny", (3, 5)),
)

ROW_MIN = OpSpec(
    name="row_min",
    function=row_min,
    reference=row_min_reference,
    outputs=("values", "indices"),
    cases=_CASES,
    tiny=row_case("tiny", (3, 5)),
)
