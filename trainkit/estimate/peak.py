"""The peak of a step: its moments one after another, each as bytes by owner.

A step has four kinds of moments: the head (all activations, and the logits), the backward pass of
each layer (fewer activations, more gradients), the end of the backward pass, and the optimizer.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainkit.estimate import activations, state
from trainkit.estimate.activations import head
from trainkit.estimate.plan import Plan
from trainkit.estimate.shape import ModelShape

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
        "weights": state.weights(plan),
        "masters": state.masters(plan),
        "optimizer": state.optimizer(plan),
        "buffers": state.buffers(plan) + plan.wire,
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
    none = {} if has_states else {"optimizer": -state.optimizer(plan)}
    if not plan.in_backward:
        for name, owners in _moments_of_all_gradients(plan):
            yield name, owners if name == STEP else {**owners, **none}
        return
    shape = plan.shape
    table = state.passing(plan, shape.table) if plan.trains_head else 0.0
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
        own = {"gradients": largest.get(name, state.passing(plan, matrix))}
        own |= none if name == "the loss" else {}
        if name == "the end of the backward pass":
            own |= {"logits": 0.0, "activations": owners["activations"] - held}
        yield name, {**owners, **own}


def _moments_of_all_gradients(plan: Plan) -> Iterator[tuple[str, dict[str, float]]]:
    shape, tokens = plan.shape, plan.tokens
    its_head = head(plan)
    layers = _kept_by_layer(plan)
    all_gradients = state.gradient_bytes(plan) * plan.trained
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
            "buffers": state.gathered(plan, shape.layers),
        },
    )
    moving = activations.backward_per_token(plan) * tokens + activations.backward_of_weights(plan)
    moving += activations.of_a_tile(plan)
    moving = max(moving, activations.attention_backward_per_token(plan) * tokens)
    per_layer = state.gradient_bytes(plan) * _trained_per_layer(plan)
    # An untied head's gradient is there first; a tied one waits for the embedding's.
    done = 0.0
    if plan.trains_head and plan.adapters is None and not shape.tied:
        done = state.gradient_bytes(plan) * shape.table
    for layer in reversed(range(shape.layers)):
        again = _computed_again(plan) if plan.is_recomputed(layer) else 0.0
        owners = {
            "activations": sum(layers[: layer + 1]) + others + again + moving,
            "gradients": max(earlier, done) + late_gradients,
            "logits": its_head.after,
            "buffers": state.gathered(plan, layer),
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
        step = state.stepping(plan)
        sums_whole = plan.stage == 1 and plan.accumulation > 1  # in fp32 already
        if plan.stage and not (plan.fsdp or plan.offloads_optimizer or sums_whole):
            # DeepSpeed's fp32 gradients of its share.
            step += 4 * plan.trained / plan.gpus
            if plan.stage == 3:
                step = min(step, 4 * state.SUB_GROUP)
        step += state.averaged(plan)
        yield STEP, {"gradients": all_gradients + step}


def _kept_for_weights(plan: Plan) -> float:
    """Bytes of a layer between the two parts of its backward pass, as ``zbv`` has them.

    What the layer keeps, computed again or not, and the gradients of its products' outputs.
    """
    outputs = sum(outputs for _, outputs in plan.shape.linears().values())
    return (activations.kept_per_token(plan) + plan.element * outputs) * plan.tokens


def _computed_again(plan: Plan) -> float:
    """Bytes that a recomputed layer has for its own backward pass, besides what it kept."""
    whole: float = activations.kept_per_token(plan) * plan.tokens
    if plan.selective:  # what it kept is a part of them
        kept = activations.kept_selectively(plan) - activations.input_per_token(plan)
        return max(whole - kept * plan.tokens, 0.0)
    return whole


def _kept_by_layer(plan: Plan) -> list[float]:
    """Bytes that each layer keeps from its forward to its backward pass."""
    whole = activations.kept_per_token(plan) * plan.tokens
    slim = activations.input_per_token(plan) * plan.tokens
    if plan.selective:
        slim = activations.kept_selectively(plan) * plan.tokens
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
