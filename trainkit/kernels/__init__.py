"""Triton kernels with their references; the public functions.

On a CPU tensor an op runs its reference in plain torch, except under ``TRITON_INTERPRET=1``, where
the Triton kernel runs. Nothing here mutates its inputs, saved tensors or incoming gradients.
"""

from trainkit.kernels.causal_conv.function import causal_conv
from trainkit.kernels.cross_entropy.function import cross_entropy, cross_entropy_chunk
from trainkit.kernels.delta_rule.function import gated_delta_rule
from trainkit.kernels.experts.function import moe_mlp
from trainkit.kernels.linear_cross_entropy.function import (
    linear_cross_entropy,
    linear_cross_entropy_counted,
)
from trainkit.kernels.linear_cross_entropy.token_losses import linear_token_losses
from trainkit.kernels.lora.function import lora_linear, lora_qkv
from trainkit.kernels.lora.mlp import lora_mlp
from trainkit.kernels.lora.products import Projection
from trainkit.kernels.rms_norm.function import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from trainkit.kernels.rms_norm.gated import gated_rms_norm
from trainkit.kernels.rope.function import apply_rope
from trainkit.kernels.swiglu.function import geglu_tanh, swiglu, swiglu_packed

__all__ = [
    "Projection",
    "add_layer_norm",
    "add_rms_norm",
    "apply_rope",
    "causal_conv",
    "cross_entropy",
    "cross_entropy_chunk",
    "gated_delta_rule",
    "gated_rms_norm",
    "geglu_tanh",
    "layer_norm",
    "linear_cross_entropy",
    "linear_cross_entropy_counted",
    "linear_token_losses",
    "lora_linear",
    "lora_mlp",
    "lora_qkv",
    "moe_mlp",
    "rms_norm",
    "swiglu",
    "swiglu_packed",
]
