"""Full fine-tuning in fp8 on two ranks: trained, resumed, and chosen where weights are sharded."""

import functools

import pytest
from ranks import run_ranks

CASE = "distributed.fp8_cases:train"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    root = tmp_path_factory.mktemp("one")
    return run_ranks(CASE, world_size=1, root=str(root), stage=0, batch=8)[0]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """Train once, by the stage or strategy."""
    root = str(tmp_path_factory.mktemp("two"))

    def train(stage, **more):
        sharded = {"shard": stage} if isinstance(stage, str) else {"stage": stage}
        return run_ranks(CASE, root=root, **sharded, batch=4, save_total_limit=9, **more)

    return functools.cache(train)


@pytest.mark.sample("3", "fsdp2")
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "fsdp2"])
def test_two_ranks_train_what_one_does(stage, one_process, on_two):
    """Each rank quantises the gradients of its own rows: dW is rounded otherwise, and no more."""
    first, second = on_two(stage)
    assert first == second
    assert first["num_fp8"] == 14
    assert first["losses"] == pytest.approx(one_process["losses"], rel=5e-3)
    assert first["grad_norms"][:3] == pytest.approx(one_process["grad_norms"][:3], rel=0.05)


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_resumed_run_is_the_unbroken_one(stage, on_two):
    assert on_two(stage, resume="checkpoint-3") == on_two(stage)


def test_a_sharded_model_is_measured_as_a_whole_one(tmp_path):
    """ZeRO-3's weights are gathered layer by layer, and let go again."""
    first, second = run_ranks("distributed.fp8_cases:choose_sharded", root=str(tmp_path))
    assert first == second
    plain, sharded = first["plain"], first["sharded"]
    assert first["num_left"] == 0
    assert [group["runs"] for group in sharded["groups"]] == [
        group["runs"] for group in plain["groups"]
    ]
    assert {group["runs"] for group in plain["groups"]} == {"fp8", "backward in fp8"}
    assert 0 < plain["loss_increase"] <= 0.000001 * plain["loss"]
    assert sharded["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert sharded["loss_increase"] == pytest.approx(plain["loss_increase"], rel=1e-2)
