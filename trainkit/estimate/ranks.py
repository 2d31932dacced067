"""What one rank has where ranks share a model's layers (a pipeline) or its matrix products.

A rank's share is a plan again, of a smaller model: fewer layers, perhaps without an end of the
model; or fewer heads and a narrower feed-forward block.
"""

from __future__ import annotations

from dataclasses import replace

from trainkit.estimate.plan import Plan
from trainkit.estimate.shape import ModelShape

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
