"""GLM-4 to Qwen2 and back: what the tensors are called, and what becomes of them.

The fused projections are taken apart, and the rows of q and k are reordered so that Qwen2's rotary
pairing meets GLM's (``rope`` has the derivation). v and the output projection stay as they are,
since the reordering cancels in the product of q and k.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trainkit.checkpoint.convert.rope import interleaved_to_half_order
from trainkit.errors import CheckpointError

# Far above any model; a config that asks for more would only keep this machine busy.
_LARGEST = {"num_layers": 10_000, "head_dim": 8192}


@dataclass(frozen=True)
class Geometry:
    """The sizes that a conversion needs, independent of how a config spells them."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    rms_norm_eps: float
    is_tied: bool

    def __post_init__(self) -> None:
        for size in fields(self):
            if size.type is int and getattr(self, size.name) <= 0:
                raise CheckpointError(f"config.json: {size.name} must be positive")
        for name, largest in _LARGEST.items():
            if getattr(self, name) > largest:
                raise CheckpointError(f"config.json: {name} is {getattr(self, name)}, not possible")
        if self.num_heads * self.head_dim != self.hidden_size:
            raise CheckpointError(
                f"{self.num_heads} heads of {self.head_dim} do not make up the hidden size "
                f"{self.hidden_size}, which Qwen2 takes for granted"
            )
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads"
            )
        if self.head_dim % 2 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise CheckpointError(
                f"rotary embedding over {self.rotary_dim} of {self.head_dim} dimensions"
            )


_MAX_NAMED = 12
COMPUTED = re.compile(r"transformer\.(rotary_pos_emb|encoder\..*\.rotary_emb)\.inv_freq")
"""What chatglm's files may hold besides; it follows from the config."""

_OURS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
OUTSIDE = {
    "chatglm": (
        "transformer.embedding.word_embeddings.weight",
        "transformer.encoder.final_layernorm.weight",
        "transformer.output_layer.weight",
    ),
    "glm": _OURS,
    "qwen2": _OURS,
}
"""Embedding, last norm and output matrix."""
_PREFIX = {"chatglm": "transformer.encoder.layers.{}."}
_OUR_PREFIX = "model.layers.{}."
_Q_K_V = tuple(f"self_attn.{part}_proj" for part in "qkv")
PROJECTIONS = {"chatglm": ("self_attention.query_key_value",), "glm": _Q_K_V, "qwen2": _Q_K_V}
_GATES = {
    "chatglm": ("mlp.dense_h_to_4h.weight",),
    "glm": ("mlp.gate_up_proj.weight",),
    "qwen2": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
}
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_SAME = {
    "chatglm": ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight", *_NORMS),
    **dict.fromkeys(("glm", "qwen2"), ("self_attn.o_proj.weight", "mlp.down_proj.weight", *_NORMS)),
}


def in_layer(layout: str, layer: int, name: str) -> str:
    return _PREFIX.get(layout, _OUR_PREFIX).format(layer) + name


def check_names(names: Iterable[str], layout: str, geometry: Geometry) -> None:
    """Hold the names of a checkpoint's tensors against those of its layout."""
    inside = [f"{name}.{kind}" for name in PROJECTIONS[layout] for kind in ("weight", "bias")]
    inside += [*_GATES[layout], *_SAME[layout]]
    layers = range(geometry.num_layers)
    wanted = {in_layer(layout, layer, name) for layer in layers for name in inside}
    wanted.update(OUTSIDE[layout][: 2 if geometry.is_tied else 3])
    present = {name for name in names if not COMPUTED.fullmatch(name)}
    problems = [
        f"{what} ({len(some)}) {', '.join(sorted(some)[:_MAX_NAMED])}"
        for what, some in (("missing", wanted - present), ("without a rule", present - wanted))
        if some
    ]
    if problems:
        raise CheckpointError(
            f"the tensors do not fit {layout}: {'; '.join(problems)}",
            fix="check that config.json and the weights belong together",
        )


def converted(
    source: str, target: str, geometry: Geometry, load: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the target by name, made of those of the source; of meta tensors, too."""
    order = torch.tensor(interleaved_to_half_order(geometry.head_dim))
    if target == "glm":
        order = order.argsort()
    keys = geometry.num_kv_heads * geometry.head_dim
    rows = [geometry.num_heads * geometry.head_dim, keys, keys]
    ours, theirs = OUTSIDE[source], OUTSIDE[target]
    yield theirs[0], load(ours[0])
    for layer in range(geometry.num_layers):

        def from_source(name: str, layer: int = layer) -> Tensor:
            return load(in_layer(source, layer, name))

        def in_target(names: Iterable[str], layer: int = layer) -> Iterator[str]:
            return (in_layer(target, layer, name) for name in names)

        for kind in ("weight", "bias"):
            parts = [from_source(f"{name}.{kind}") for name in PROJECTIONS[source]]
            q, k, v = parts if len(parts) == 3 else parts[0].split(rows)
            names = in_target(f"{name}.{kind}" for name in PROJECTIONS[target])
            yield from zip(names, (reordered(q, order), reordered(k, order), v), strict=True)
        gates = [from_source(name) for name in _GATES[source]]  # the gate comes first
        if target == "qwen2":
            gates = list(gates[0].split([geometry.intermediate_size] * 2))
        else:
            gates = [torch.cat(gates)]
        yield from zip(in_target(_GATES[target]), gates, strict=True)
        yield from zip(in_target(_SAME[target]), map(from_source, _SAME[source]), strict=True)
    for old, new in zip(ours[1:], theirs[1:], strict=True):
        if old != ours[2] or not geometry.is_tied:
            yield new, load(old)


def reordered(tensor: Tensor, order: Tensor) -> Tensor:
    """The rows of each attention head in another order."""
    heads = tensor.unflatten(0, (-1, len(order)))
    return heads.index_select(1, order.to(tensor.device)).flatten(0, 1)
