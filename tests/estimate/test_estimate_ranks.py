"""What one rank has where ranks share layers, products or rows, against those who deal it out."""

from dataclasses import replace

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from trainkit.estimate import peak as ranks_module
from trainkit.estimate.gpus import GPUS
from trainkit.estimate.peak import in_flight, peak, peak_of_rank, ranks_of, waiting_for_weights
from trainkit.estimate.plan import Plan
from trainkit.estimate.recipe import plan_of
from trainkit.estimate.shape import find_shape
from trainkit.estimate.speed import seconds
from trainkit.parallel.pipeline.schedule import _TOKENS_STEP
from trainkit.parallel.pipeline.share import SCHEDULES
from trainkit.recipe import Recipe

SHAPE = find_shape("qwen2.5-7b")


def _of(gpus, **parallel) -> Plan:
    recipe = Recipe(
        model={"name_or_path": "Qwen/Qwen2.5-7B"},
        data={"train": ["a.jsonl"], "max_length": 2048},
        parallel=parallel,
        global_batch_size=16,
        training={"per_device_train_batch_size": 1, "gradient_checkpointing": True},
    )
    return plan_of(recipe, gpus)


def _most(schedule, ranks, stages, rank, micro_batches):
    """Forward passes without their backward pass, and without that of the weights, at most."""
    made = object.__new__(get_schedule_class(SCHEDULES[schedule].engine))
    made._num_stages = made.num_stages = ranks * stages
    made.pp_group_size, made.rank, made.n_local_stages = ranks, rank, stages
    made._n_microbatches = micro_batches
    if schedule == "interleaved":
        made.number_of_rounds = max(1, micro_batches // ranks)
        made.microbatches_per_round = micro_batches // made.number_of_rounds
    flying = late = most = most_late = 0
    for action in made._calculate_single_rank_operations(rank):
        if action is None:
            continue
        kind = action.computation_type.name
        flying += (kind == "FORWARD") - (kind in ("BACKWARD_WEIGHT", "FULL_BACKWARD"))
        late += (kind == "BACKWARD_INPUT") - (kind == "BACKWARD_WEIGHT")
        most, most_late = max(most, flying), max(most_late, late)
    return most, most_late


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "micro_batches"),
    [
        ("interleaved", 2, 2, 2),
        ("interleaved", 2, 2, 16),
        ("interleaved", 4, 3, 12),
        ("zbv", 2, 2, 4),
        ("zbv", 4, 2, 8),
        ("zbv", 8, 2, 32),
    ],
)
def test_micro_batches_on_their_way_are_the_schedules(schedule, ranks, stages, micro_batches):
    for rank in range(ranks):
        most = _most(schedule, ranks, stages, rank, micro_batches)
        assert most == (
            in_flight(schedule, ranks, stages, rank, micro_batches),
            waiting_for_weights(schedule, rank),
        )


def test_1f1b_keeps_as_many_as_there_are_ranks_behind():
    assert [in_flight("1f1b", 4, 1, rank, 8) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight("1f1b", 4, 1, 0, 2) == 2


def test_padding_is_the_pipelines():
    assert ranks_module.WIRE_TOKENS == _TOKENS_STEP


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", [True, False])
def test_ranks_of_a_pipeline_have_the_model_once(schedule, tied):
    plan = _of(4, pipeline=4, schedule=schedule)
    plan = replace(plan, shape=replace(SHAPE, tied=tied))
    shares = ranks_of(plan)
    parameters = sum(share.shape.parameters for share in shares)
    both_ends = schedule == "zbv"  # of a tied model one more rank has the embeddings
    assert parameters == plan.shape.parameters + (tied and not both_ends) * SHAPE.table
    assert sum(share.shape.layers for share in shares) == SHAPE.layers
    assert peak(plan).gib == max(peak_of_rank(share).gib for share in shares)
    assert plan.ranks == 4
    assert peak(plan).gib < peak(_of(1)).gib / 2


def test_ranks_that_split_products_have_the_model_once():
    (share,) = ranks_of(_of(2, tensor=2, shard="zero1"))
    assert share.shape.matrix_numbers == SHAPE.matrix_numbers / 2
    assert share.shape.outside == SHAPE.outside


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"tensor": 4, "shard": "zero1"}, {"tensor": 2, "shard": "zero1"}),
        ({"pipeline": 4}, {"pipeline": 2}),
        ({"pipeline": 2, "shard": "fsdp2"}, {"pipeline": 2}),
        ({"pipeline": 2}, {"pipeline": 2, "schedule": "interleaved"}),
        ({"pipeline": 2, "schedule": "interleaved"}, {"pipeline": 2, "schedule": "zbv"}),
        ({"shard": "fsdp2"}, {"shard": "zero3"}),
        ({"shard": "zero2"}, {"shard": "zero1"}),
        ({"sequence": 4, "shard": "fsdp2"}, {"sequence": 2, "shard": "fsdp2"}),
    ],
    ids=str,
)
def test_what_ranks_share_they_hold_once(less, more):
    assert peak(_of(4, **less)).gib < peak(_of(4, **more)).gib


def test_times_know_of_waiting_and_of_exchanging():
    gpu = GPUS["h200"]
    fast = seconds(_of(4, pipeline=4), gpu)
    assert seconds(_of(4, pipeline=4, schedule="interleaved"), gpu) < fast
    slow_link = replace(gpu, link=32)
    for parallel in ({"tensor": 2, "shard": "zero1"}, {"sequence": 2, "shard": "zero1"}):
        assert seconds(_of(2, **parallel), slow_link) > seconds(_of(2, **parallel), gpu)
