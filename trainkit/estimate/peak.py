"""The peak of a step: its moments one after another, each as bytes by owner.

A step has four kinds of moments: the head (all activations, and the logits), the backward pass of
each layer (fewer activations, more gradients), the end of the backward pass, and the optimizer.
What layers, head and loss hold is recorded (`record`); what a run holds besides, masters,
gradients, states and what ranks share, is counted here.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainkit.estimate.job import LayerKind, ModelShape
from trainkit.estimate.plan import Plan
from trainkit.options.optimizers import Optimizer

if TYPE_CHECKING:
    from trainkit.estimate.record import Frontier, Layer

SUB_GROUP = 1e9
"""Numbers that DeepSpeed's ZeRO-3 gathers ahead, and steps at a time."""

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: blocks of 64 with 8-bit scales, these in blocks of 256."""

MATRIX_BYTES = {
    "bfloat16": 2.0,
    "float16": 2.0,
    "float32": 4.0,
    "nf4": NF4,
    "int8": 1.0,
    "fp8": 1.0,
}
"""What a number of the layers takes where ranks gather it."""

RANK = 128
"""Of GaLore's and APOLLO's projections, where ``training.optim_args`` says nothing."""

PIECE = 2**25
"""Numbers that are fp32 at a time without masters, as in ``train.optimizer.rounding``."""


def optimizer_bytes(
    row: Optimizer, shape: ModelShape, *, full: bool, rank: int = RANK, args: str | None = None
) -> float:
    """Bytes of state per trained number, on the GPU.

    With ``full`` all weights are trained; else matrices of adapters, which are too thin to project.
    """
    if not full:
        return row.matrix_bytes + row.kept_by(args)

    def of_layer(kind: LayerKind) -> float:
        found = 8.0 * kind.vectors
        for each in kind.matrices:
            bytes_ = row.matrix_bytes * each.inputs * each.outputs
            if row.per_rank_bytes is not None:
                # A moment has rank rows (or columns) of the longer side; the projection, of the
                # shorter.
                sides = (each.inputs, each.outputs)
                bytes_ = rank * (row.per_rank_bytes * max(sides) + 4 * min(sides))
            found += each.number * bytes_
        return found

    total: float = shape.total(of_layer) + row.embedding_bytes * shape.table + 8.0 * shape.others
    if not shape.tied:
        total += row.head_bytes * shape.table
    return total / shape.parameters + row.kept_by(args)


def passing(plan: Plan, numel: int) -> float:
    """What a parameter of so many numbers has for its step in the backward pass."""
    element = plan.trained_element
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
    largest = 0 if plan.adapters is not None else largest_matrix(shape)
    if plan.adapters is None and shape.tables:
        largest = max(largest, shape.table)
    if not plan.keeps_masters:  # one weight after another
        return (of_all + of_largest) * largest
    return of_all * plan.trained * _sharded(plan, 1) + of_largest * largest


def largest_matrix(shape: ModelShape) -> int:
    """Numbers of the largest weight of any layer."""
    sizes = (
        e.numbers if e.in_stack else e.inputs * e.outputs for k in shape.kinds for e in k.matrices
    )
    return max(sizes, default=0)


def _sharded(plan: Plan, least: int) -> float:
    return 1 / plan.gpus if plan.stage >= least else 1.0


def weights(plan: Plan) -> float:
    shape, recorded = plan.shape, plan.recorded
    total = plan.over_layers(lambda layer: layer.weights)
    if shape.has_embeddings or (shape.has_head and shape.tied):
        total += recorded.embeddings
    total += shape.has_head * recorded.head + recorded.tower
    if plan.fp8 is not None:
        in_fp8 = shape.numbers_of(plan.job.in_fp8)
        taken = plan.fp8 * shape.matrix_numbers
        # Codes, kept between steps; or, of a frozen base, 16 bits for what was not taken.
        total += taken if plan.adapters is None else in_fp8 - taken
    if plan.fsdp and plan.adapters is None:  # its fp32 shards are the masters
        return 0.0
    return 0.0 if plan.offloads_weights else total * _sharded(plan, 3)


def masters(plan: Plan) -> float:
    """fp32 copies of trained half-precision weights."""
    engine = plan.stage > 0
    if not (plan.trainer or engine) or plan.offloads_optimizer or plan.optimizer is None:
        return 0.0
    element = plan.trained_element
    if (element == 4 and (not engine or plan.fsdp)) or not plan.keeps_masters:
        return 0.0
    return 4.0 * plan.trained * _sharded(plan, 1)


def optimizer(plan: Plan) -> float:
    if plan.optimizer is None or plan.offloads_optimizer:
        return 0.0
    return plan.optimizer * plan.trained * _sharded(plan, 1)


def gradient_bytes(plan: Plan) -> float:
    """Of one trained number, from the moment its layer's backward pass is done."""
    element = plan.trained_element
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
    element = plan.trained_element
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
        live = min(2 * _of_a_layer(plan) + plan.shape.table, SUB_GROUP)
        total += MATRIX_BYTES[plan.base] * (live + plan.shape.table)
    return total


def _of_a_layer(plan: Plan) -> float:
    """Weights of the largest layer's matrices."""
    return max((kind.numbers - kind.vectors for kind in plan.shape.kinds), default=0)


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

    ``layer`` counts from 0; their number is the moment of the loss.
    """
    if not plan.fsdp:
        return 0.0
    shape, each = plan.shape, MATRIX_BYTES[plan.base] * _of_a_layer(plan)
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
    return layers + tables + 4 * plan.recorded.kinds[shape.order[layer]].trained


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
    if ranks == 1:
        return shape
    from trainkit.estimate.build import shape_of, split_config  # which need torch

    part = shape_of(split_config(shape.config, ranks), shape.name)
    return replace(part, config=shape.config)  # which `record` splits


def in_flight(schedule: str, ranks: int, stages: int, rank: int, micro_batches: int) -> int:
    """How often a rank has gone forward through a stage before it first goes back through it."""
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
    order = tuple(plan.shape.order[at] for at in plan.dealt[rank])
    shape = replace(plan.shape, order=order, has_embeddings=has_first, has_head=has_last)
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
FRAGMENTATION = 0.007
"""Share of the rest: rounding of the allocator, and small tensors that nobody counts."""

RESERVED = 1.03
"""What the allocator takes over what is used: 1.01 to 1.04 where a GPU is nearly full."""

CONTEXT_GIB = 0.7
"""What the driver takes of a GPU for each process."""

HELD_ON_THE_WAY = 3
"""Layers whose offloaded inputs are on the GPU at a time."""


@dataclass(frozen=True)
class Peak:
    """The worst moment of a step."""

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

    ``is_first``: of a run that starts, where most optimizers make their states.
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
        "weights": weights(plan) + plan.second,
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
    matrix = largest_matrix(shape)
    if plan.adapters is not None:
        matrix = int(max(layer.trained for layer in plan.recorded.kinds))
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
    """Of the text model; and, around it, of what sees."""
    seen, each = plan.seen, gradient_bytes(plan)
    if seen is None:
        yield from _moments_of_text(plan)
        return
    early = plan.accumulation > 1 or plan.flat
    gradients = each * plan.trained * early
    yield "the images", {"activations": seen.forward, "gradients": gradients}
    for name, owners in _moments_of_text(plan):
        more = 0.0 if name == STEP else seen.kept
        yield name, {**owners, "activations": owners.get("activations", 0.0) + more}
    gone = plan.trained if early else plan.trained - seen.trained
    for done, most in seen.moving:
        gradients = each * (gone + (0 if early else done))
        yield "the backward pass of images", {"activations": most, "gradients": gradients}


def _moments_of_text(plan: Plan) -> Iterator[tuple[str, dict[str, float]]]:
    shape, recorded = plan.shape, plan.recorded
    each = gradient_bytes(plan)
    all_gradients = each * plan.trained
    # Under accumulation the gradients of earlier micro-batches are there from the start.
    # In one buffer they are always there.
    earlier = all_gradients if plan.accumulation > 1 or plan.flat else 0.0
    layers = [recorded.kinds[kind] for kind in shape.order]
    kept = _kept_by_layer(plan)
    before = recorded.before
    others, late_gradients = _of_others(plan, sum(kept), layers)

    def worst(frontier: Frontier, done: float) -> tuple[float, float]:
        """Bytes and gradients at a phase's worst moment, given those that were there before."""
        grown = ((most, max(earlier, done + each * numbers)) for numbers, most in frontier)
        return max(grown, key=sum)

    done = after = 0.0
    if shape.has_head:
        most, gradients = worst(recorded.loss, 0.0)
        yield (
            "the loss",
            {
                "activations": before + sum(kept) + others,
                "logits": most,
                "gradients": gradients,
                "buffers": gathered(plan, shape.layers),
            },
        )
        after = recorded.after
        # A tied head's gradient waits for the embedding's.
        done = each * recorded.loss[-1][0]
    forward = [
        layer.forward + sum(kept[:at])
        for at, layer in enumerate(layers)
        if not plan.is_recomputed(at)
    ]
    if forward:
        yield (
            "the forward pass",
            {"activations": before + max(forward) + others, "gradients": earlier},
        )
    for at in reversed(range(len(layers))):
        layer, held = layers[at], sum(kept[: at + 1])
        if plan.is_recomputed(at):
            held = sum(kept[:at]) + max(layer.kept, kept[at])
            if at and not kept[at - 1]:  # its input is back, and so may be that of the next one
                held += 2 * layer.output
        most, gradients = worst(layer.moving, done)
        owners = {
            "activations": before + held + others + most,
            "gradients": gradients + late_gradients,
            "logits": after,
            "buffers": gathered(plan, at),
        }
        yield f"the backward pass of layer {at}", owners
        done += each * layer.trained
    if shape.has_embeddings:
        most = max(most for _, most in recorded.end)
        yield (
            "the end of the backward pass",
            {
                "gradients": max(earlier, all_gradients),
                "activations": most,
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


def _of_others(plan: Plan, kept: float, layers: list[Layer]) -> tuple[float, float]:
    """Bytes of other micro-batches on their way through a pipeline, and of late gradients."""
    others = max(plan.held - plan.held_late - 1, 0.0) * kept
    if not plan.held_late:
        return others, 0.0
    others += plan.held_late * sum(_kept_for_weights(plan, at) for at in range(len(layers)))
    # The head's gradient waits in fp32; those of a stage's weights come together.
    others += 4 * plan.shape.table if plan.trains_head else 0
    in_stages = max(map(max, plan.stage_layers)) * max(each.trained for each in layers)
    return others, plan.element * in_stages


def _kept_for_weights(plan: Plan, at: int) -> float:
    """Bytes of a layer between the two parts of its backward pass, as ``zbv`` has them.

    What the layer keeps, computed again or not, and the gradients of its products' outputs.
    """
    kind = plan.shape.order[at]
    outputs = sum(each.outputs * each.number for each in plan.shape.kinds[kind].matrices)
    return plan.recorded.kinds[kind].kept + plan.element * outputs * plan.tokens


def _kept_by_layer(plan: Plan) -> list[float]:
    """Bytes that each layer keeps from its forward to its backward pass."""
    kept, recomputed = [], 0
    for at, kind in enumerate(plan.shape.order):
        layer = plan.recorded.kinds[kind]
        if not plan.is_recomputed(at):
            kept.append(layer.kept)
            continue
        recomputed += 1
        slim = layer.selectively if plan.selective else layer.output
        kept.append(0.0 if plan.offloads_inputs and recomputed > HELD_ON_THE_WAY else slim)
    return kept
