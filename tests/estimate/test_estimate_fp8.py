"""Which products the estimate expects in fp8: by budget, by what is skipped, and by their sizes."""

from dataclasses import replace

import pytest

from tests.estimate.measured import H200
from trainkit.estimate.job import Adapters, ModelShape
from trainkit.estimate.peak import peak
from trainkit.estimate.plan import TAKEN, Plan, within_budget
from trainkit.estimate.shape import find_shape
from trainkit.estimate.speed import seconds
from trainkit.options import Fp8Options
from trainkit.options.model import ALL

LARGE = find_shape("qwen2-7b")


def shares_of(options: Fp8Options, shape: ModelShape) -> Plan:
    return within_budget(Plan(shape, 1, 1), options)


def test_every_measured_role_has_a_share() -> None:
    assert set(find_shape("qwen2-7b").roles) | set(find_shape("phi-4").roles) <= set(TAKEN)


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2-0.5b", "llama-3.1-8b", "phi-4"])
def test_a_larger_budget_takes_more(name: str) -> None:
    budgets = (0.0, 0.001, 0.004, 0.007, 0.012, 0.5, ALL)
    shares = [shares_of(Fp8Options(loss_budget=each), find_shape(name)).fp8 for each in budgets]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] <= 1


def test_the_default_takes_the_wide_products_that_lose_little() -> None:
    """Two thirds of a 7B's forward products by their numbers: few layers, but the wide ones."""
    found = shares_of(Fp8Options(), LARGE)
    assert found.fp8 == pytest.approx(0.67, abs=0.03)
    assert found.fp8_backward == 1


def test_what_is_skipped_or_narrow_stays_in_16_bits() -> None:
    every = Fp8Options(loss_budget=ALL)
    whole = shares_of(every, LARGE)
    skipped = shares_of(every.model_copy(update={"skip": ["down_proj", "layers.0"]}), LARGE)
    assert skipped.in_16_bits == {"down_proj"}
    down = LARGE.numbers_of(("down_proj",)) / LARGE.matrix_numbers
    assert skipped.fp8 == pytest.approx((whole.fp8 - down) * 27 / 28)
    narrow = shares_of(every.model_copy(update={"min_size": 1024}), LARGE)
    assert narrow.in_16_bits == {"k_proj", "v_proj"}
    assert shares_of(every, find_shape("smollm2-135m")).fp8 == 0


@pytest.mark.parametrize("adapters", [None, Adapters.of()])
def test_the_plan_follows(adapters: Adapters | None) -> None:
    base = "bfloat16" if adapters is None else "fp8"
    plan = Plan(LARGE, 4, 2048, adapters=adapters, base=base)
    some, every = (within_budget(plan, Fp8Options(loss_budget=b)) for b in (0.005, ALL))
    none = within_budget(plan, Fp8Options(skip=list(LARGE.roles)))
    bf16 = replace(plan, base="bfloat16")
    assert seconds(every, H200) < seconds(some, H200) < seconds(none, H200)
    assert seconds(none, H200) == pytest.approx(seconds(bf16, H200), rel=0.02)
    assert peak(none).gib == pytest.approx(peak(bf16).gib, rel=0.002)
    with_head = within_budget(plan, Fp8Options(loss_budget=ALL, head="fp8"))
    assert seconds(with_head, H200) < seconds(every, H200)
    assert peak(with_head).gib > peak(every).gib
