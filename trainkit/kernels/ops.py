"""The registry of ops: everything that tests, self-checks and benchmarks walk over.

Adding an op is one folder (reference, kernel, function, spec) and one line here.
"""

from trainkit.kernels.adamw.spec import ADAMW, SQUARE_SUM
from trainkit.kernels.adamw_8bit.spec import ADAMW_8BIT
from trainkit.kernels.causal_conv.spec import CAUSAL_CONV
from trainkit.kernels.contract import OpSpec
from trainkit.kernels.cross_entropy.spec import CROSS_ENTROPY
from trainkit.kernels.delta_rule.spec import GATED_DELTA_RULE
from trainkit.kernels.experts.spec import MOE_MLP
from trainkit.kernels.fp8.spec import (
    FP8_GATE,
    FP8_GATE_BACKWARD,
    FP8_MATMUL,
    FP8_QUANTIZE,
    FP8_QUANTIZE_BOTH,
    FP8_QUANTIZE_COLUMNS,
    FP8_QUANTIZE_JOINT,
    FP8_TRANSPOSE,
)
from trainkit.kernels.linear_cross_entropy.spec import LINEAR_CROSS_ENTROPY, LINEAR_TOKEN_LOSSES
from trainkit.kernels.rms_norm.spec import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    GATED_RMS_NORM,
    LAYER_NORM,
    RMS_NORM,
)
from trainkit.kernels.rope.spec import APPLY_ROPE
from trainkit.kernels.row_reduce.spec import ROW_MAX, ROW_MIN
from trainkit.kernels.swiglu.spec import GEGLU, GEGLU_TANH, SWIGLU, SWIGLU_PACKED

OPS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        RMS_NORM,
        ADD_RMS_NORM,
        LAYER_NORM,
        ADD_LAYER_NORM,
        GATED_RMS_NORM,
        APPLY_ROPE,
        SWIGLU,
        GEGLU_TANH,
        GEGLU,
        SWIGLU_PACKED,
        MOE_MLP,
        CAUSAL_CONV,
        GATED_DELTA_RULE,
        CROSS_ENTROPY,
        LINEAR_CROSS_ENTROPY,
        LINEAR_TOKEN_LOSSES,
        ROW_MAX,
        ROW_MIN,
        FP8_QUANTIZE,
        FP8_QUANTIZE_JOINT,
        FP8_QUANTIZE_BOTH,
        FP8_QUANTIZE_COLUMNS,
        FP8_GATE,
        FP8_GATE_BACKWARD,
        FP8_TRANSPOSE,
        FP8_MATMUL,
        SQUARE_SUM,
        ADAMW,
        ADAMW_8BIT,
    )
}
