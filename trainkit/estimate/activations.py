"""What a decoder layer keeps for its backward pass, and what the pass needs besides. Bytes.

Counted tensor by tensor, for trainkit's kernels and for plain transformers (with peft). H hidden,
F feed-forward, A query width, K key width; sizes are per token unless something else is said.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.estimate.plan import Plan

_STATISTIC = 4
"""An fp32 number per row: a norm's reciprocal, attention's log-sum-exp."""


def kept_per_token(plan: Plan) -> float:
    """Bytes that a layer keeps for each token when nothing is recomputed."""
    block = plan.element * plan.shape.hidden if plan.is_tiled else _feed_forward(plan)
    return _norms(plan) + _attention(plan) + block


def input_per_token(plan: Plan) -> float:
    """Bytes of a layer's input, which is all that a recomputed layer keeps."""
    return plan.stream * plan.shape.hidden


def kept_selectively(plan: Plan) -> float:
    """Bytes per token where products and attention are kept and the rest is recomputed."""
    shape, e = plan.shape, plan.element
    # q, k, v, o_proj's and the first layers of the feed-forward block; nobody asks for down_proj's.
    products = shape.hidden + shape.query + 2 * shape.key + 2 * shape.ffn
    attention = shape.query + _STATISTIC / e * shape.heads
    return input_per_token(plan) + e * (products + attention)


def backward_per_token(plan: Plan) -> float:
    """Bytes per token that exist for a moment beyond what the layer has kept.

    The feed-forward block's: the gradients of gate, up and their product next to those of the
    residual stream.
    """
    shape = plan.shape
    stream: float = 2 * plan.stream * shape.hidden
    if not plan.fuses("rms_norm"):
        stream += 2 * 4 * shape.hidden
    return stream + (0 if plan.is_tiled else _wide_gradients(plan))


def attention_backward_per_token(plan: Plan) -> float:
    """The same at the moment of attention's backward pass, when the block behind it has let go.

    The gradients of q, k, v and attention's output, sums of q's in fp32, and that of the residual
    stream. Less than the block's, unless the block is tiled.
    """
    shape, e = plan.shape, plan.element
    block = e * shape.hidden if plan.is_tiled else _feed_forward(plan)
    gradients = e * (2 * shape.query + 2 * shape.key) + 4 * shape.query
    return plan.stream * shape.hidden + gradients - block - _norms(plan) / shape.traits.norms


def of_a_tile(plan: Plan) -> float:
    """Bytes of the one tile of a feed-forward block that is there at a time."""
    if not plan.is_tiled or plan.tile_tokens is None:
        return 0.0
    shape = plan.shape
    sums = plan.adapter_numbers_per_layer
    if plan.adapters is None:
        sums = 3 * shape.hidden * shape.ffn
    return (_feed_forward(plan) + _wide_gradients(plan)) * plan.tile_tokens + 4 * sums


def _wide_gradients(plan: Plan) -> float:
    """Of gate and up, a token."""
    codes = 2 * plan.shape.ffn if plan.base == "fp8" else 0  # in fp8, too
    return 2 * plan.element * plan.shape.ffn + codes


def backward_of_weights(plan: Plan) -> float:
    """Bytes of a layer's largest weight for a moment: its gradient, or itself unpacked."""
    largest = max(inputs * outputs for inputs, outputs in plan.shape.linears().values())
    if plan.adapters is None:
        return plan.element * largest
    # Unpacked: the next one is made before the last one is let go. In fp8: turned.
    return {"nf4": 2 * 2, "fp8": 1}.get(plan.base, 0) * largest


def _norms(plan: Plan) -> float:
    """The norms' own inputs; their outputs belong to the layers that read them."""
    shape = plan.shape
    count, width = shape.traits.norms, shape.hidden
    if plan.fuses("rms_norm"):
        return count * (plan.stream * width + _STATISTIC)
    return count * (4 * width + norm_output(plan) * width + _STATISTIC)


def norm_output(plan: Plan) -> int:
    """Bytes that Hugging Face's norm keeps of a number besides its input in fp32.

    Where its weight is trained, what the weight multiplies: rounded, or still in fp32.
    """
    if plan.adapters is not None:
        return 0
    return 4 if plan.shape.traits.wide_norms else plan.element


def _attention(plan: Plan) -> float:
    shape, e = plan.shape, plan.element
    a, k = shape.query, shape.key
    # q and k after the rotation, v, and the output, which is the input of o_proj as well.
    value = a + 2 * k if shape.traits.packed_qkv else k
    kept: float = e * (2 * a + k + value) + _STATISTIC * shape.heads
    if plan.masked:  # heads of k and v are repeated, and each layer makes a mask of its own
        kept += e * (2 * (a - k) + plan.length)
    if shape.traits.head_norms:
        if plan.fuses("rms_norm"):
            kept += e * (a + k) + _STATISTIC * (shape.heads + shape.kv_heads)
        else:
            kept += (4 + norm_output(plan)) * (a + k)
            kept += _STATISTIC * (shape.heads + shape.kv_heads)
    names = ["qkv_proj"] if shape.traits.packed_qkv else ["q_proj", "k_proj", "v_proj"]
    kept += _shared_input(plan, names, shape.hidden)
    if plan.adapters is None:
        copies = shape.traits.rope_copies and not plan.ops
        codes = a if plan.in_fp8("o_proj") else 0  # of the output, next to attention's own
        return kept + (e * a if copies else 0) + codes
    return kept + _shared_input(plan, ["o_proj"], shape.query, kept_anyway=True)


def _feed_forward(plan: Plan) -> float:
    shape, e = plan.shape, plan.element
    first = ["gate_up_proj"] if shape.traits.packed_gate else ["gate_proj", "up_proj"]
    kept = _shared_input(plan, first, shape.hidden) + 2 * e * shape.ffn
    if not plan.fuses("swiglu") and not plan.fuses_lora:
        kept += e * shape.ffn  # the activated gate
    if plan.adapters is None:
        # The product; where the whole block is in fp8 it is formed again in the backward pass.
        in_one = not shape.traits.packed_gate
        if in_one and all(plan.in_fp8(name) for name in (*first, "down_proj")):
            return kept
        return kept + (1 if plan.in_fp8("down_proj") else e) * shape.ffn
    if plan.fuses_lora:  # the product is formed again in the backward pass
        return kept + (e * plan.adapters.rank if plan.adapted("down_proj") else 0)
    return kept + _shared_input(plan, ["down_proj"], shape.ffn)


def _shared_input(plan: Plan, names: list[str], width: int, *, kept_anyway: bool = False) -> float:
    """What layers that read the same input keep of it: once, or a copy each under peft."""
    e = plan.element
    if plan.adapters is None:
        kinds = {plan.in_fp8(name) for name in names}
        return sum(1 if in_fp8 else e for in_fp8 in kinds) * width
    adapted = [name for name in names if plan.adapted(name)]
    if not adapted:
        return 0
    inner = e * plan.adapters.rank * len(adapted)
    if plan.fuses_lora:
        return inner + (0 if kept_anyway else e * width)
    # peft casts the input to the adapter's dtype; autocast makes a new copy for every layer.
    mask = width if plan.adapters.dropout > 0 else 0
    return inner + len(adapted) * (e * width + mask)


# -- The final norm, the logits and the loss. Bytes; T tokens, H hidden, V vocabulary -------------


CHUNK_BYTES = int(1.65 * 2**30)
ROWS_MULTIPLE = 256
NUMBERS_THAT_FILL = 112 * 128 * 128
"""All as in ``kernels.linear_cross_entropy``, which a test compares."""


@dataclass(frozen=True)
class Head:
    """What the head adds to the activations.

    Attributes:
        kept: by the final norm, until its backward pass.
        forward: besides, at the worst moment until the loss's own backward pass is done.
        after: besides, while the decoder layers go backward.
    """

    kept: float
    forward: float
    after: float


def head(plan: Plan) -> Head:
    shape, e, tokens = plan.shape, plan.element, plan.tokens
    if not shape.has_head:
        return Head(0.0, 0.0, 0.0)
    trained = plan.trains_head
    if plan.fuses("rms_norm"):
        norm = plan.stream * shape.hidden
    else:
        norm = (4 + norm_output(plan)) * shape.hidden
    normed = e * shape.hidden * tokens
    copy = e * shape.table if plan.upcast else 0  # autocast's copy of an fp32 head
    codes = 2 * shape.table if plan.fp8_head else 0  # of the head's weight, by rows and by columns
    if plan.fuses("linear_cross_entropy"):
        a_logit = e + 1 if plan.fp8_head else e  # in fp8 their gradient has codes of its own
        limit = plan.chunk_tokens
        if limit is None and plan.fp8_head and not trained:
            fill = -(-NUMBERS_THAT_FILL // (shape.hidden * ROWS_MULTIPLE)) * ROWS_MULTIPLE
            limit = min(fill, default_chunk_tokens(shape.vocab, a_logit))
        rows = chunk_rows(tokens, shape.vocab, a_logit, limit)
        logits = a_logit * rows * (-(-shape.vocab // 64) * 64)
        if trained and not plan.in_backward:  # the loss's backward pass rounds the head's gradient
            logits = max(logits, e * shape.table)
        wide = e if plan.fp8_head else 4
        gradients = wide * shape.hidden * tokens + (4 * shape.table if trained else 0)
        after = e * shape.hidden * tokens + (e * shape.table if trained and shape.tied else 0)
        return Head(norm * tokens, normed + copy + codes + gradients + logits, copy + after)
    # The loss in fp32: log-probabilities, their gradient, and the logits' gradient.
    wide = 12 * shape.vocab * tokens
    kept = (normed if trained else 0) + copy + codes
    after = e * shape.hidden * tokens + (e * shape.table if trained and shape.tied else 0)
    return Head(norm * tokens, kept + wide, copy + after)


def chunk_rows(tokens: int, vocab: int, element: int, limit: int | None = None) -> int:
    """Rows whose logits exist at a time in the fused loss."""
    if limit is None:
        limit = default_chunk_tokens(vocab, element)
    if tokens <= limit:
        return tokens
    chunks = -(-tokens // limit)
    return min(-(-tokens // (chunks * ROWS_MULTIPLE)) * ROWS_MULTIPLE, limit)


def default_chunk_tokens(vocab: int, element: int) -> int:
    """As many rows as a chunk's bytes hold."""
    fitting = CHUNK_BYTES // (vocab * element)
    return max(ROWS_MULTIPLE, fitting // ROWS_MULTIPLE * ROWS_MULTIPLE)
