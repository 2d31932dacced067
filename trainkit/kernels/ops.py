"""The registry of ops that models call: what self-checks, tests and benchmarks walk over.

Adding an op is one folder (reference, kernel, function) and one line here.
"""

import functools

from trainkit.kernels.causal_conv.function import causal_conv, causal_conv_reference
from trainkit.kernels.contract import OpSpec
from trainkit.kernels.cross_entropy.function import cross_entropy, cross_entropy_reference
from trainkit.kernels.delta_rule.function import gated_delta_rule, gated_delta_rule_reference
from trainkit.kernels.experts.function import moe_mlp, moe_mlp_reference
from trainkit.kernels.linear_cross_entropy.divergence import (
    linear_divergence,
    linear_divergence_reference,
)
from trainkit.kernels.linear_cross_entropy.function import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_token_losses_reference,
)
from trainkit.kernels.linear_cross_entropy.token_losses import linear_token_losses
from trainkit.kernels.rms_norm import function as norms
from trainkit.kernels.rms_norm.gated import gated_rms_norm, gated_rms_norm_reference
from trainkit.kernels.rope.function import apply_rope, apply_rope_reference
from trainkit.kernels.swiglu import function as gates

OPS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        OpSpec("rms_norm", norms.rms_norm, norms.rms_norm_reference, ("y",)),
        OpSpec("add_rms_norm", norms.add_rms_norm, norms.add_rms_norm_reference, ("y", "sum")),
        OpSpec("layer_norm", norms.layer_norm, norms.layer_norm_reference, ("y",)),
        OpSpec(
            "add_layer_norm", norms.add_layer_norm, norms.add_layer_norm_reference, ("y", "sum")
        ),
        OpSpec("gated_rms_norm", gated_rms_norm, gated_rms_norm_reference, ("y",)),
        OpSpec("apply_rope", apply_rope, apply_rope_reference, ("q", "k")),
        OpSpec("swiglu", gates.swiglu, gates.swiglu_reference, ("h",)),
        OpSpec("geglu_tanh", gates.geglu_tanh, gates.geglu_tanh_reference, ("h",)),
        OpSpec("swiglu_packed", gates.swiglu_packed, gates.swiglu_packed_reference, ("h",)),
        OpSpec("moe_mlp", moe_mlp, moe_mlp_reference, ("y",)),
        OpSpec("causal_conv", causal_conv, causal_conv_reference, ("y",)),
        OpSpec(
            "gated_delta_rule",
            gated_delta_rule,
            functools.partial(gated_delta_rule_reference, rounded=True),
            ("o",),
            # The reference's backward pass multiplies by gradients that are not rounded, and sums
            # dg from the end; the kernel takes what comes before from the total, which rounds two
            # sums.
            roundings=3.0,
        ),
        OpSpec("cross_entropy", cross_entropy, cross_entropy_reference, ("loss",)),
        OpSpec(
            "linear_cross_entropy",
            linear_cross_entropy,
            linear_cross_entropy_reference,
            ("loss",),
            # 1 / 512 - 1, the gradient of a label in an untrained model, lies halfway between two
            # numbers of bf16: all rows round alike, and what divides them puts the plain model's
            # somewhere else.
            own_rounding=True,
        ),
        OpSpec(
            "linear_token_losses", linear_token_losses, linear_token_losses_reference, ("losses",)
        ),
        OpSpec(
            "linear_divergence",
            linear_divergence,
            linear_divergence_reference,
            ("loss", "figures"),
            # Logits under a cap of 8 go through the hardware's exponential and division, each two
            # units in the last place off; what is learnt from is differences of these, of order 1.
            hardware_error=8 * 2**-23,
        ),
    )
}
