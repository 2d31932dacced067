"""Whoever shards the head's weight gathers it by its own hooks, and reduces its gradient."""

import pytest
from ranks import run_ranks


@pytest.mark.sample("ddp-tied", "fsdp-own-unit-untied", "zero2-untied", "zero3-tied")
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        ("ddp", {}),
        ("fsdp", {"own_unit": False}),
        ("fsdp", {"own_unit": True}),
        ("zero", {"stage": 1}),
        ("zero", {"stage": 2}),
        ("zero", {"stage": 3}),
    ],
    ids=["ddp", "fsdp", "fsdp-own-unit", "zero1", "zero2", "zero3"],
)
def test_two_ranks_equal_one_plain_process(case, arguments, tie):
    if tie and arguments.get("own_unit"):
        pytest.skip("fully_shard keeps a tied weight in one unit")
    for differences in run_ranks(f"models.loss_head_cases:{case}", tie=tie, **arguments):
        # fp32, three steps of plain SGD on losses near 4; only orders of sums differ.
        assert differences["loss"] < 2e-5
        assert differences["parameters"] < 2e-6
