"""Norms that quantise what they give, where all that reads it would.

A norm has its row in registers; whoever quantises it later reads it again.
"""

from torch import nn

from trainkit.models.linears import kind_of
from trainkit.models.proof.norms import RMSNorm

READERS = {
    "input_layernorm": (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.qkv_proj",
    ),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
}
"""Norms of a decoder layer, and which of its linear layers read them, by their paths."""


def let_norms_quantize(model: nn.Module) -> int:
    """Have trainkit's norms make rows in e4m3 for layers in fp8.

    Args:
        model: patched; its linear layers are what they will be.

    Returns:
        How many norms do.
    """
    number = 0
    for layer in model.modules():
        modules = dict(layer.named_children())
        for name, paths in READERS.items():
            norm = modules.get(name)
            if not isinstance(norm, RMSNorm):
                continue
            norm.feeds_fp8 = _all_quantize(layer, paths)
            number += norm.feeds_fp8
    return number


def _all_quantize(layer: nn.Module, paths: tuple[str, ...]) -> bool:
    readers = [_base(found) for path in paths if (found := _at(layer, path)) is not None]
    kinds = [kind_of(reader) for reader in readers]
    return bool(kinds) and all(kind is not None and kind.quantizes_rows for kind in kinds)


def _at(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _base(linear: nn.Module) -> nn.Module:
    base: nn.Module = getattr(linear, "base_layer", linear)
    return base
