"""Attention: ``attn_implementation: auto``, what it runs on, and the proof that it is the model's.

`choice` picks, `pattern` says what each token may look at, `forward` and `blockwise` compute it,
`packable` refuses what cannot be packed, `proof` compares with transformers' own eager attention.
"""

from trainkit.models.attention.choice import (
    NAME,
    OF_IMAGES,
    Attention,
    Engine,
    attention_heads,
    install,
    register,
    resolve_attention,
)

__all__ = [
    "NAME",
    "OF_IMAGES",
    "Attention",
    "Engine",
    "attention_heads",
    "install",
    "register",
    "resolve_attention",
]
