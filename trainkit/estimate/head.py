"""The final norm, the logits and the loss. Bytes; T tokens, H hidden, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.estimate.activations import norm_output
from trainkit.estimate.plan import Plan

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
    """The head of a plan."""
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
