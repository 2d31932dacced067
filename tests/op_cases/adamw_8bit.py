"""The contract of adamw_8bit."""

from dataclasses import replace
from typing import Any

from op_cases.adamw import adamw_case
from op_cases.op import Case, TriedOp

from trainkit.kernels.adamw_8bit.function import adamw_8bit
from trainkit.kernels.adamw_8bit.reference import adamw_8bit_reference


def case(label: str, numel: int, **options: Any) -> Case:
    """As AdamW's, with a step large enough to move bfloat16 weights."""
    return adamw_case(label, numel, **{"lr": 1e-2, "seed": 12345, **options})


ADAMW_8BIT = TriedOp(
    name="adamw_8bit",
    function=adamw_8bit,
    reference=adamw_8bit_reference,
    outputs=("weight", "exp_avg", "exp_avg_sq"),
    cases=(
        case("several blocks", 3001, weight_decay=0.1, step=3),
        case("first step", 1024),
        case("late step", 513, step=100_000, beta2=0.95),
        case("one number", 1),
        case("no numbers", 0),
        replace(case("a feed-forward weight", 2**25), large=True),
    ),
    tiny=case("tiny", 7),
    one_graph=False,  # the scalars of a step come from the host
)
