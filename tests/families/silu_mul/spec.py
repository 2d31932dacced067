"""Step 4: the calls that show what it must take."""

from families.silu_mul.function import silu_mul
from families.silu_mul.reference import silu_mul_reference
from op_cases.op import Case, TriedOp


def case(label, *shape):
    def inputs(draw):
        return {"gate": draw.normal(*shape), "up": draw.normal(*shape)}

    return Case(label, inputs, ("gate", "up"))


SILU_MUL = TriedOp(
    name="silu_mul",
    function=silu_mul,
    reference=silu_mul_reference,
    outputs=("y",),
    cases=(case("odd", 3, 7, 123), case("one", 1, 1), case("no rows", 0, 16)),
    tiny=case("tiny", 2, 3),
)
