"""GLM-4-9B to Qwen2 and back: the tables of tensor names and what happens to each.

The fused projections are taken apart, and the rows of q and k are reordered so that Qwen2's
rotary pairing meets GLM's (``partial_rope`` has the derivation). v and the output projection stay
as they are, since the reordering cancels in the product of q and k.
"""

from collections.abc import Mapping

from trainkit.checkpoint.convert.glm_formats import Geometry
from trainkit.checkpoint.convert.keymap import (
    Copy,
    Each,
    Keymap,
    Left,
    PermuteHeadRows,
    Rule,
    SplitRows,
    Then,
    interleaved_to_half_order,
)


def keymap_to_qwen2(source: str, geometry: Geometry) -> Keymap:
    """The table from a GLM layout to Qwen2; ``.inverted()`` is the way back."""
    deinterleave = PermuteHeadRows(interleaved_to_half_order(geometry.head_dim))
    gate_and_up = SplitRows((geometry.intermediate_size,) * 2)  # the gate comes first
    rows = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    if source == "glm":
        rules = _glm_rules(deinterleave, gate_and_up)
        left: tuple[Left, ...] = ()
    else:
        q_k_v = Then(SplitRows((rows[0], rows[1], rows[1])), Each((deinterleave,) * 2 + (Copy(),)))
        rules = _chatglm_rules(q_k_v, gate_and_up)
        left = (
            Left(r"transformer\.rotary_pos_emb\.inv_freq", "computed from the config"),
            Left(
                r"transformer\.encoder\.layers\.\d+\.self_attention\.rotary_emb\.inv_freq",
                "computed from the config",
            ),
        )
    if geometry.is_tied:
        rules = tuple(rule for rule in rules if rule.target != ("lm_head.weight",))
    return Keymap(f"{source} to qwen2", rules, left)


def qwen2_shape(name: str, geometry: Geometry) -> tuple[int, ...]:
    """The shape that config.json promises for one of Qwen2's tensors."""
    hidden, inner = geometry.hidden_size, geometry.intermediate_size
    queries, keys = (
        geometry.num_heads * geometry.head_dim,
        geometry.num_kv_heads * geometry.head_dim,
    )
    shapes = {
        "embed_tokens.weight": (geometry.vocab_size, hidden),
        "lm_head.weight": (geometry.vocab_size, hidden),
        "q_proj.weight": (queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries),
        "gate_proj.weight": (inner, hidden),
        "up_proj.weight": (inner, hidden),
        "down_proj.weight": (hidden, inner),
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
    }
    return shapes.get(".".join(name.split(".")[-2:]), (hidden,))


def _layer_rules(source: str, pairs: Mapping[str, str]) -> tuple[Rule, ...]:
    return tuple(
        Rule((f"{source}.{{layer}}.{old}",), (f"model.layers.{{layer}}.{new}",))
        for old, new in pairs.items()
    )


def _chatglm_rules(q_k_v: Then, gate_and_up: SplitRows) -> tuple[Rule, ...]:
    old, new = "transformer.encoder.layers", "model.layers.{layer}"
    fused = tuple(
        Rule(
            (f"{old}.{{layer}}.self_attention.query_key_value.{kind}",),
            tuple(f"{new}.self_attn.{part}_proj.{kind}" for part in "qkv"),
            q_k_v,
        )
        for kind in ("weight", "bias")
    )
    return (
        Rule(("transformer.embedding.word_embeddings.weight",), ("model.embed_tokens.weight",)),
        *fused,
        Rule(
            (f"{old}.{{layer}}.mlp.dense_h_to_4h.weight",),
            (f"{new}.mlp.gate_proj.weight", f"{new}.mlp.up_proj.weight"),
            gate_and_up,
        ),
        *_layer_rules(
            old,
            {
                "self_attention.dense.weight": "self_attn.o_proj.weight",
                "mlp.dense_4h_to_h.weight": "mlp.down_proj.weight",
                "input_layernorm.weight": "input_layernorm.weight",
                "post_attention_layernorm.weight": "post_attention_layernorm.weight",
            },
        ),
        Rule(("transformer.encoder.final_layernorm.weight",), ("model.norm.weight",)),
        Rule(("transformer.output_layer.weight",), ("lm_head.weight",)),
    )


def _glm_rules(deinterleave: PermuteHeadRows, gate_and_up: SplitRows) -> tuple[Rule, ...]:
    layer = "model.layers.{layer}"
    permuted = tuple(
        Rule((name,), (name,), deinterleave)
        for part in ("q_proj", "k_proj")
        for name in (f"{layer}.self_attn.{part}.weight", f"{layer}.self_attn.{part}.bias")
    )
    same = (
        "self_attn.v_proj.weight",
        "self_attn.v_proj.bias",
        "self_attn.o_proj.weight",
        "mlp.down_proj.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    )
    return (
        Rule(("model.embed_tokens.weight",), ("model.embed_tokens.weight",)),
        *permuted,
        Rule(
            (f"{layer}.mlp.gate_up_proj.weight",),
            (f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"),
            gate_and_up,
        ),
        *_layer_rules("model.layers", {name: name for name in same}),
        Rule(("model.norm.weight",), ("model.norm.weight",)),
        Rule(("lm_head.weight",), ("lm_head.weight",)),
    )
