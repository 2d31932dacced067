"""The peak of a step: its moments one after another, each as bytes by owner.

A step has four kinds of moments: the head (all activations, and the logits), the backward pass of
each layer (fewer activations, more gradients), the end of the backward pass, and the optimizer.

What a decoder layer keeps for its backward pass is counted tensor by tensor, for trainkit's kernels
and for plain transformers (with peft). H hidden, F feed-forward, A query width, K key width; sizes
are per token unless something else is said.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainkit.estimate.plan import Plan
from trainkit.estimate.shape import ModelShape
from trainkit.options.optimizers import Optimizer

SUB_GROUP = 1e9
"""Numbers that DeepSpeed's ZeRO-3 gathers ahead, and steps at a time."""

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: blocks of 64 with 8-bit scales, these in blocks of 256."""

MATRIX_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "nf4": NF4, "fp8": 1.0}

RANK = 128
"""Of GaLore's and APOLLO's projections, where ``training.optim_args`` says nothing."""

PIECE = 2**25
"""Numbers that are fp32 at a time without masters, as in ``train.optimizer.rounding``."""


def optimizer_bytes(
    row: Optimizer, shape: ModelShape, *, full: bool, rank: int = RANK, args: str | None = None
) -> float:
    """Bytes of state per trained number, on the GPU.

    Args:
        row: of the table of optimizers.
        shape: the model.
        full: all weights are trained; else matrices of adapters, which are too thin to project.
        rank: of projections.
        args: ``training.optim_args``, of which some keep more.
    """
    if not full:
        return row.matrix_bytes + row.kept_by(args)
    matrices = row.matrix_bytes * shape.layer_matrices
    if row.per_rank_bytes is not None:
        # A moment has rank rows (or columns) of the longer side; the projection, of the shorter.
        matrices = sum(
            rank * (row.per_rank_bytes * max(sizes) + 4 * min(sizes))
            for sizes in shape.linears().values()
        )
    total = shape.layers * (matrices + 8 * shape.layer_vectors) + row.embedding_bytes * shape.table
    if not shape.tied:
        total += row.head_bytes * shape.table
    return total / shape.parameters + row.kept_by(args)


def passing(plan: Plan, numel: int) -> float:
    """What a parameter of so many numbers has for its step in the backward pass."""
    element = plan.element if plan.adapters is None else plan.adapters.element
    step = sum(plan.stepping) * numel
    if element == 4:
        return 4.0 * numel + step
    if plan.keeps_masters:
        return (element + 4.0) * numel + step
    if plan.one_pass:
        return element * numel
    # In fp32: weight, gradient and noise, and one byte for what is finite.
    return element * numel + 13.0 * min(numel, PIECE) + step


def stepping(plan: Plan) -> float:
    """Temporaries of the optimizer's step, where it comes after the backward pass."""
    of_all, of_largest = plan.stepping
    shape = plan.shape
    largest = max(inputs * outputs for inputs, outputs in shape.linears().values())
    if plan.adapters is not None:
        largest = 0
    elif shape.tables:
        largest = max(largest, shape.table)
    if not plan.keeps_masters:  # one weight after another
        return (of_all + of_largest) * largest
    return of_all * plan.trained * _sharded(plan, 1) + of_largest * largest


def _sharded(plan: Plan, least: int) -> float:
    return 1 / plan.gpus if plan.stage >= least else 1.0


def weights(plan: Plan) -> float:
    """The model's, adapters included."""
    shape = plan.shape
    per_layer = MATRIX_BYTES[plan.base] * shape.layer_matrices
    if plan.base == "fp8":
        per_layer += (2 - MATRIX_BYTES["fp8"]) * (1 - (plan.fp8 or 0.0)) * shape.layer_matrices
    if plan.base in ("nf4", "fp8"):
        plain = 4.0 if plan.upcast else 2.0
    else:
        plain = MATRIX_BYTES[plan.base]
    if plan.base == "fp8":
        per_layer += 4 * sum(outputs for _, outputs in shape.linears().values())
    total = shape.layers * (per_layer + plain * shape.layer_vectors) + plain * shape.outside
    total += plain * shape.tower
    if plan.adapters is not None:
        total += plan.adapters.element * plan.trained
    elif plan.fp8 is not None:
        total += plan.fp8 * shape.layers * shape.layer_matrices  # codes, kept between steps
    if plan.fsdp and plan.adapters is None:  # its fp32 shards are the masters
        return 0.0
    return 0.0 if plan.offloads_weights else total * _sharded(plan, 3)


def masters(plan: Plan) -> float:
    """fp32 copies of trained half-precision weights."""
    engine = plan.stage > 0
    if not (plan.trainer or engine) or plan.offloads_optimizer or plan.optimizer is None:
        return 0.0
    element = plan.element if plan.adapters is None else plan.adapters.element
    if (element == 4 and (not engine or plan.fsdp)) or not plan.keeps_masters:
        return 0.0
    return 4.0 * plan.trained * _sharded(plan, 1)


def optimizer(plan: Plan) -> float:
    """The optimizer's states."""
    if plan.optimizer is None or plan.offloads_optimizer:
        return 0.0
    return plan.optimizer * plan.trained * _sharded(plan, 1)


def gradient_bytes(plan: Plan) -> float:
    """Of one trained number, from the moment its layer's backward pass is done."""
    element = plan.element if plan.adapters is None else plan.adapters.element
    if plan.offloads_optimizer and plan.stage > 1:
        return 0.0
    if plan.fsdp:
        return 4.0 / plan.gpus
    if plan.stage > 0:
        if plan.accumulation > 1 and element == 2:  # DeepSpeed sums them in fp32
            return 6.0 if plan.stage == 1 else 4.0 / plan.gpus
        return element * _sharded(plan, 2)
    if plan.flat and plan.accumulation == 1:
        return float(element)
    return 4.0 if plan.trainer else float(element)


def buffers(plan: Plan) -> float:
    """Of libraries: products' workspaces, an engine's buckets and gathered weights."""
    total = 0.09 * 2**30
    if plan.gpus == 1 and plan.stage == 0:
        return total
    element = plan.element if plan.adapters is None else plan.adapters.element
    # Nobody wraps the model.
    if plan.stage == 0 and (plan.in_backward or plan.flat or plan.stage_layers):
        return total
    if plan.stage == 0:  # DDP's buckets hold every gradient once more
        return total + element * plan.trained
    if plan.fsdp:
        return total
    bucket = min(plan.shape.hidden**2, plan.trained)
    total += 2 * element * bucket
    if plan.stage == 3:
        live = min(2 * plan.shape.layer_matrices + plan.shape.table, SUB_GROUP)
        total += MATRIX_BYTES[plan.base] * (live + plan.shape.table)
    return total


AVERAGED = 2**26
"""Numbers that the data ranks of a pipeline average at once, or else one weight's gradient."""


def averaged(plan: Plan) -> float:
    """Bytes of the copy in which ranks that have the same stage average their gradients."""
    if not plan.stage_layers or plan.stage or plan.gpus == 1:
        return 0.0
    largest = plan.shape.table if plan.shape.tables and plan.adapters is None else 0
    return 4.0 * min(max(AVERAGED, largest), plan.trained)


STAYS_WHOLE = 1 / 8
"""Share of a GPU's memory: a smaller model stays gathered from forward to backward under FSDP2, as
in ``parallel.fsdp``."""


def gathered(plan: Plan, layer: int) -> float:
    """FSDP2: weights that are whole in the backward pass of a layer, and its whole gradient.

    Args:
        plan: the step.
        layer: from 0; their number is the moment of the loss.
    """
    if not plan.fsdp:
        return 0.0
    shape, each = plan.shape, MATRIX_BYTES[plan.base] * plan.shape.layer_matrices
    at_loss = layer == shape.layers
    table = plan.element * shape.table if shape.tables else 0
    tables = plan.element * shape.outside if at_loss else table
    if MATRIX_BYTES[plan.base] * shape.parameters > STAYS_WHOLE * plan.gpu_gib * 2**30:
        # Two layers: one that computes, and the one that is fetched meanwhile.
        layers, tables = 0.0 if at_loss else 2 * each, table
    else:
        layers = each * min(layer + 1, shape.layers)
        if at_loss and not shape.tied:  # what the head's weight was gathered into
            tables += table
    if at_loss:
        return layers + tables
    numbers = shape.layer_matrices if plan.adapters is None else plan.adapter_numbers_per_layer
    return layers + tables + 4 * numbers


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


# -- What one rank has where ranks share a model's layers (a pipeline) or its matrix products
# A rank's share is a plan again, of a smaller model: fewer layers, perhaps without an end of the
# model; or fewer heads and a narrower feed-forward block.


WIRE_TOKENS = 64
"""What is sent from stage to stage is padded to a multiple of it, as in ``parallel.pipeline``."""


def ranks_of(plan: Plan) -> list[Plan]:
    """A plan for each rank whose share differs from the others'; the plan itself for a whole model.

    Ranks that split products have equal shares. Those of a pipeline come in its order.
    """
    if plan.tensor > 1:
        plan = replace(plan, shape=split(plan.shape, plan.tensor))
    if not plan.stage_layers:
        return [plan]
    return [_share(plan, rank) for rank in range(len(plan.stage_layers))]


def split(shape: ModelShape, ranks: int) -> ModelShape:
    """What each of some ranks has of every layer; embeddings, head and norms stay whole."""
    return replace(
        shape,
        heads=shape.heads // ranks,
        kv_heads=max(shape.kv_heads // ranks, 1),
        ffn=shape.ffn // ranks,
    )


def in_flight(schedule: str, ranks: int, stages: int, rank: int, micro_batches: int) -> int:
    """How often a rank has gone forward through a stage before it first goes back through it.

    Args:
        schedule: of the pipeline.
        ranks: of the pipeline.
        stages: on each rank.
        rank: which one.
        micro_batches: of a step.
    """
    if schedule == "1f1b":
        return min(ranks - rank, micro_batches)
    if schedule == "zbv":
        return 2 * min(ranks, micro_batches)
    a_round = micro_batches // max(1, micro_batches // ranks)
    return min((stages - 1) * a_round + 2 * (ranks - 1 - rank) + 1, stages * micro_batches)


def waiting_for_weights(schedule: str, rank: int) -> int:
    """Of these, how many have done the input's part of the backward pass only."""
    return 2 * rank + 1 if schedule == "zbv" else 0


def _share(plan: Plan, rank: int) -> Plan:
    layers, ranks = plan.stage_layers[rank], len(plan.stage_layers)
    stages, folds = len(layers), plan.schedule == "zbv"
    has_first, has_last = rank == 0, rank == (0 if folds else ranks - 1)
    flying = in_flight(plan.schedule, ranks, stages, rank, plan.accumulation)
    late = min(waiting_for_weights(plan.schedule, rank), flying - 1)
    shape = replace(plan.shape, layers=sum(layers), has_embeddings=has_first, has_head=has_last)
    # Every micro-batch has a place for what comes in; what goes out is kept for its backward pass.
    coming, going = stages - has_first, stages - has_last
    tokens = -(-plan.tokens // WIRE_TOKENS) * WIRE_TOKENS
    places = plan.accumulation * (coming + going) + flying * going / stages
    return replace(
        plan,
        shape=shape,
        held=flying / stages,
        held_late=late / stages,
        wire=places * tokens * plan.shape.hidden * plan.stream,
    )


GIB = 2**30
OWNERS = (
    "weights",
    "masters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buffers",
    "fragmentation",
)
STEP = "the optimizer's step"
FRAGMENTATION = 0.005
"""Share of the rest: rounding of the allocator, and small tensors that nobody counts."""

RESERVED = 1.03
"""What the allocator takes over what is used: 1.01 to 1.04 where a GPU is nearly full."""

CONTEXT_GIB = 0.7
"""What the driver takes of a GPU for each process."""

HELD_ON_THE_WAY = 3
"""Layers whose offloaded inputs are on the GPU at a time."""


@dataclass(frozen=True)
class Peak:
    """The worst moment of a step.

    Attributes:
        moment: in words.
        by_owner: GiB of each of `OWNERS`.
    """

    moment: str
    by_owner: dict[str, float]

    @property
    def gib(self) -> float:
        """What ``torch.cuda.max_memory_allocated`` says."""
        return sum(self.by_owner.values())

    @property
    def needed_gib(self) -> float:
        """What a GPU must have: with the allocator's reserve and the driver's context."""
        return self.gib * RESERVED + CONTEXT_GIB


def peak(plan: Plan, *, is_first: bool = False) -> Peak:
    """The peak of an optimizer step, on the rank that needs the most.

    Args:
        plan: the step.
        is_first: of a run that starts: most optimizers make their states in the first step.
    """
    each = (peak_of_rank(share, is_first=is_first) for share in ranks_of(plan))
    return max(each, key=lambda found: found.gib)


def keep_to_budget(plan: Plan) -> Plan:
    """The plan with as few layers computed again as its budget asks for; then inputs go away."""
    if plan.budget_gib is None:
        return plan

    def with_first(number: int, *, offload: bool) -> Plan:
        adapters = plan.adapters and replace(plan.adapters, offload=offload)
        return replace(plan, recompute_first=number, offload=offload, adapters=adapters)

    budget = plan.budget_gib
    numbers = range(plan.shape.layers + 1)
    first = bisect.bisect_left(
        numbers, True, key=lambda n: peak(with_first(n, offload=False)).gib <= budget
    )
    if first < len(numbers):
        return with_first(first, offload=False)
    return with_first(plan.shape.layers, offload=plan.budget_offloads)


def peak_of_rank(plan: Plan, *, is_first: bool = False) -> Peak:
    """The peak of one rank's optimizer step, by its own share of a plan (see `ranks`)."""
    makes_states = is_first and not plan.flat and (not plan.stage or plan.fsdp)
    fixed = {
        "weights": weights(plan),
        "masters": masters(plan),
        "optimizer": optimizer(plan),
        "buffers": buffers(plan) + plan.wire,
    }
    worst, moment = max(
        (
            ({owner: fixed.get(owner, 0.0) + owners.get(owner, 0.0) for owner in OWNERS}, name)
            for name, owners in _moments(plan, has_states=not makes_states)
        ),
        key=lambda each: sum(each[0].values()),
    )
    worst["fragmentation"] = FRAGMENTATION * sum(worst.values())
    return Peak(moment, {owner: worst[owner] / GIB for owner in OWNERS})


def _moments(plan: Plan, *, has_states: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """With steps in the backward pass: the same, with one parameter's gradient at a time."""
    none = {} if has_states else {"optimizer": -optimizer(plan)}
    if not plan.in_backward:
        for name, owners in _moments_of_all_gradients(plan):
            yield name, owners if name == STEP else {**owners, **none}
        return
    shape = plan.shape
    table = passing(plan, shape.table) if plan.trains_head else 0.0
    matrix = max((inputs * outputs for inputs, outputs in shape.linears().values()), default=0)
    if plan.adapters is not None:
        matrix = plan.adapter_numbers_per_layer
    held = plan.element * shape.table if plan.adapters is None else 0.0  # counted in `table`
    largest = {"the loss": 0.0, "the end of the backward pass": table}
    for name, owners in _moments_of_all_gradients(plan):
        if name == STEP:
            continue
        if name == "the loss" and table and not shape.tied:
            # The head steps while the rest of the model still waits for its backward pass.
            # Its gradient has the room of the fp32 one that it was rounded in.
            wide = table + (4 - plan.element) * shape.table
            yield "the head's step", {**owners, "logits": 0.0, "gradients": wide}
        own = {"gradients": largest.get(name, passing(plan, matrix))}
        own |= none if name == "the loss" else {}
        if name == "the end of the backward pass":
            own |= {"logits": 0.0, "activations": owners["activations"] - held}
        yield name, {**owners, **own}


def _moments_of_all_gradients(plan: Plan) -> Iterator[tuple[str, dict[str, float]]]:
    shape, tokens = plan.shape, plan.tokens
    its_head = head(plan)
    layers = _kept_by_layer(plan)
    all_gradients = gradient_bytes(plan) * plan.trained
    # Under accumulation the gradients of earlier micro-batches are there from the start.
    # In one buffer they are always there.
    earlier = all_gradients if plan.accumulation > 1 or plan.flat else 0.0
    # Other micro-batches that are on their way through a pipeline.
    others = max(plan.held - plan.held_late - 1, 0.0) * sum(layers)
    others += plan.held_late * shape.layers * _kept_for_weights(plan)
    late_gradients = 0.0
    if plan.held_late:
        # The head's gradient waits in fp32; those of a stage's weights come together.
        others += 4 * shape.table if plan.trains_head else 0
        in_stages = max(map(max, plan.stage_layers)) * _trained_per_layer(plan)
        late_gradients = plan.element * in_stages
    kept = sum(layers) + others + its_head.kept
    yield (
        "the loss",
        {
            "activations": kept,
            "logits": its_head.forward,
            "gradients": earlier,
            "buffers": gathered(plan, shape.layers),
        },
    )
    moving = backward_per_token(plan) * tokens + backward_of_weights(plan)
    moving += of_a_tile(plan)
    moving = max(moving, attention_backward_per_token(plan) * tokens)
    per_layer = gradient_bytes(plan) * _trained_per_layer(plan)
    # An untied head's gradient is there first; a tied one waits for the embedding's.
    done = 0.0
    if plan.trains_head and plan.adapters is None and not shape.tied:
        done = gradient_bytes(plan) * shape.table
    for layer in reversed(range(shape.layers)):
        again = _computed_again(plan) if plan.is_recomputed(layer) else 0.0
        owners = {
            "activations": sum(layers[: layer + 1]) + others + again + moving,
            "gradients": max(earlier, done) + late_gradients,
            "logits": its_head.after,
            "buffers": gathered(plan, layer),
        }
        yield f"the backward pass of layer {layer}", owners
        done += per_layer
    table = plan.element * shape.table if plan.adapters is None and shape.has_embeddings else 0
    yield (
        "the end of the backward pass",
        {
            "gradients": max(earlier, all_gradients),
            "logits": table if shape.tied and shape.has_head else 0.0,
            "activations": table + plan.stream * shape.hidden * tokens,
            "buffers": plan.element * shape.table if plan.fsdp else 0.0,
        },
    )
    if plan.optimizer is not None:
        step = stepping(plan)
        sums_whole = plan.stage == 1 and plan.accumulation > 1  # in fp32 already
        if plan.stage and not (plan.fsdp or plan.offloads_optimizer or sums_whole):
            # DeepSpeed's fp32 gradients of its share.
            step += 4 * plan.trained / plan.gpus
            if plan.stage == 3:
                step = min(step, 4 * SUB_GROUP)
        step += averaged(plan)
        yield STEP, {"gradients": all_gradients + step}


def _kept_for_weights(plan: Plan) -> float:
    """Bytes of a layer between the two parts of its backward pass, as ``zbv`` has them.

    What the layer keeps, computed again or not, and the gradients of its products' outputs.
    """
    outputs = sum(outputs for _, outputs in plan.shape.linears().values())
    return (kept_per_token(plan) + plan.element * outputs) * plan.tokens


def _computed_again(plan: Plan) -> float:
    """Bytes that a recomputed layer has for its own backward pass, besides what it kept."""
    whole: float = kept_per_token(plan) * plan.tokens
    if plan.selective:  # what it kept is a part of them
        kept = kept_selectively(plan) - input_per_token(plan)
        return max(whole - kept * plan.tokens, 0.0)
    return whole


def _kept_by_layer(plan: Plan) -> list[float]:
    """Bytes that each layer keeps from its forward to its backward pass."""
    whole = kept_per_token(plan) * plan.tokens
    slim = input_per_token(plan) * plan.tokens
    if plan.selective:
        slim = kept_selectively(plan) * plan.tokens
    kept = [slim if plan.is_recomputed(i) else whole for i in range(plan.shape.layers)]
    if plan.offloads_inputs:
        away = [i for i in range(plan.shape.layers) if plan.is_recomputed(i)]
        for layer in away[HELD_ON_THE_WAY:]:
            kept[layer] = 0.0
    return kept


def _trained_per_layer(plan: Plan) -> int:
    if plan.adapters is not None:
        return plan.adapter_numbers_per_layer
    return plan.shape.layer_matrices + plan.shape.layer_vectors
