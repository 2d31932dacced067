"""Triton kernels with their references; the public functions.

On a CPU tensor an op runs its reference in plain torch, except under ``TRITON_INTERPRET=1``, where
the Triton kernel runs. Nothing here mutates its inputs, saved tensors or incoming gradients.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainkit.kernels import launch as launch  # which fixes Triton's interpreter

if TYPE_CHECKING:
    from trainkit.kernels.causal_conv.function import causal_conv as causal_conv
    from trainkit.kernels.cross_entropy.function import cross_entropy as cross_entropy
    from trainkit.kernels.cross_entropy.function import cross_entropy_chunk as cross_entropy_chunk
    from trainkit.kernels.delta_rule.function import gated_delta_rule as gated_delta_rule
    from trainkit.kernels.experts.function import moe_mlp as moe_mlp
    from trainkit.kernels.linear_cross_entropy.divergence import (
        linear_divergence as linear_divergence,
    )
    from trainkit.kernels.linear_cross_entropy.function import (
        linear_cross_entropy as linear_cross_entropy,
    )
    from trainkit.kernels.linear_cross_entropy.function import (
        linear_cross_entropy_counted as linear_cross_entropy_counted,
    )
    from trainkit.kernels.linear_cross_entropy.token_losses import (
        linear_token_losses as linear_token_losses,
    )
    from trainkit.kernels.lora.function import lora_linear as lora_linear
    from trainkit.kernels.lora.function import lora_qkv as lora_qkv
    from trainkit.kernels.lora.mlp import lora_mlp as lora_mlp
    from trainkit.kernels.lora.products import Projection as Projection
    from trainkit.kernels.rms_norm.function import add_layer_norm as add_layer_norm
    from trainkit.kernels.rms_norm.function import add_rms_norm as add_rms_norm
    from trainkit.kernels.rms_norm.function import layer_norm as layer_norm
    from trainkit.kernels.rms_norm.function import rms_norm as rms_norm
    from trainkit.kernels.rms_norm.gated import gated_rms_norm as gated_rms_norm
    from trainkit.kernels.rope.function import apply_rope as apply_rope
    from trainkit.kernels.swiglu.function import geglu_tanh as geglu_tanh
    from trainkit.kernels.swiglu.function import swiglu as swiglu
    from trainkit.kernels.swiglu.function import swiglu_packed as swiglu_packed

_HOMES = {
    "causal_conv.function": "causal_conv",
    "cross_entropy.function": "cross_entropy cross_entropy_chunk",
    "delta_rule.function": "gated_delta_rule",
    "experts.function": "moe_mlp",
    "linear_cross_entropy.divergence": "linear_divergence",
    "linear_cross_entropy.function": "linear_cross_entropy linear_cross_entropy_counted",
    "linear_cross_entropy.token_losses": "linear_token_losses",
    "lora.function": "lora_linear lora_qkv",
    "lora.mlp": "lora_mlp",
    "lora.products": "Projection",
    "rms_norm.function": "add_layer_norm add_rms_norm layer_norm rms_norm",
    "rms_norm.gated": "gated_rms_norm",
    "rope.function": "apply_rope",
    "swiglu.function": "geglu_tanh swiglu swiglu_packed",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = [*_HOME]  # noqa: PLE0604


class _Ops(ModuleType):
    """Imports an op when it is asked for; its folder does not take the place of one of its name."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        op = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        setattr(self, name, op)
        return op

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOME or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Ops
