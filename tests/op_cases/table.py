"""Every op with its calls, by name."""

from op_cases.adamw import ADAMW, SQUARE_SUM
from op_cases.adamw_8bit import ADAMW_8BIT
from op_cases.causal_conv import CAUSAL_CONV
from op_cases.cross_entropy import CROSS_ENTROPY
from op_cases.delta_rule import GATED_DELTA_RULE
from op_cases.experts import MOE_MLP
from op_cases.fp8 import FP8_OPS
from op_cases.linear_cross_entropy import (
    LINEAR_CROSS_ENTROPY,
    LINEAR_DIVERGENCE,
    LINEAR_TOKEN_LOSSES,
)
from op_cases.lora import LORA
from op_cases.norms import NORMS
from op_cases.op import TriedOp
from op_cases.rope import APPLY_ROPE
from op_cases.swiglu import GATES

OPS: dict[str, TriedOp] = {
    op.name: op
    for op in (
        *NORMS,
        APPLY_ROPE,
        *GATES,
        MOE_MLP,
        CAUSAL_CONV,
        GATED_DELTA_RULE,
        CROSS_ENTROPY,
        LINEAR_CROSS_ENTROPY,
        LINEAR_TOKEN_LOSSES,
        LINEAR_DIVERGENCE,
        *FP8_OPS,
        *LORA,
        SQUARE_SUM,
        ADAMW,
        ADAMW_8BIT,
    )
}
