"""Rounding by chance is right on average, follows from the step alone, and keeps small updates."""

import pytest
import torch
from torch import nn

from trainkit.train import masters as rounding
from trainkit.train.masters import Arrivals, RoundedWeightOptimizer, round_by_chance


def rounded(values, *chance):
    target = torch.empty(values.shape, dtype=torch.bfloat16)
    round_by_chance(target, values.clone(), rounding.seed_of(*chance))
    return target


@pytest.mark.parametrize("value", [1.001, -1.001, 3.1415927, 1e-30, -65000.0, 1e-39])
def test_the_mean_is_the_number_itself(value):
    """Of n draws, each a step u with probability p, the mean is within 5 u sqrt(p (1 - p) / n)."""
    count = 100_000
    values = torch.full((count,), value)
    got = rounded(values, 1).double()
    low, high = got.min(), got.max()
    assert low <= values[0] <= high
    neighbours = torch.unique(got)
    assert len(neighbours) == 2
    unit = high - low
    share = (values[0].double() - low) / unit
    spread = 5 * unit * (share * (1 - share) / count) ** 0.5
    assert abs(got.mean() - values[0].double()) <= spread


def test_what_bfloat16_has_stays():
    values = torch.tensor([1.0, -0.0, 0.0, 2.5, float("inf"), float("-inf"), float("nan"), 1e38])
    values = values.to(torch.bfloat16).float()
    assert torch.equal(rounded(values, 3).view(torch.int16), values.bfloat16().view(torch.int16))


def test_the_noise_follows_from_seed_step_and_place():
    values = torch.full((4096,), 1.001)
    assert torch.equal(rounded(values, 1, 2, 3), rounded(values, 1, 2, 3))
    others = [rounded(values, *chance) for chance in ((2, 2, 3), (1, 3, 3), (1, 2, 4))]
    assert not any(torch.equal(rounded(values, 1, 2, 3), other) for other in others)


def run(weight, *, in_pieces, steps=100, arrivals=None, make=None):
    layer = nn.Linear(8, weight.shape[0], bias=False).to(torch.bfloat16)
    layer.weight.data = weight.clone()
    optimizer = RoundedWeightOptimizer(
        [{"params": list(layer.parameters())}],
        make or (lambda groups: torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.0)),
        seed=1, in_pieces=in_pieces, arrivals=arrivals,
    )  # fmt: skip
    for _ in range(steps):
        layer(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum().backward()
        optimizer.step()
        layer.zero_grad()
    return layer.weight.detach(), optimizer


def test_updates_below_the_resolution_of_bf16_add_up_on_average():
    """100 updates of 1e-4, each far below half the distance to 1's neighbour."""
    got, _ = run(torch.ones(512, 8, dtype=torch.bfloat16), in_pieces=True)
    # 4096 weights, each 100 draws of at most 2**-8: a standard error below 2**-8 / 64 * 0.5 * 2.
    assert got.float().mean().item() == pytest.approx(0.99, abs=2**-8 / 64 * 5)
    # 100 independent draws with a probability of 0.0256 spread by 0.0062; one draw 100 times, 0.06.
    assert got.float().std().item() < 0.01


def test_in_pieces_and_in_the_backward_pass_are_the_same_step(monkeypatch):
    """The noise of a piece is its own, so the pieces are compared with one another."""
    monkeypatch.setattr(rounding, "PIECE", 1024)
    start = torch.randn(300, 8).bfloat16()
    late, optimizer = run(start, in_pieces=True, steps=5)
    assert [piece.shape for piece in optimizer._pieces[next(iter(optimizer._pieces))]] == [
        (1024,), (1024,), (352,)
    ]  # fmt: skip
    early, _ = run(start, in_pieces=True, steps=5, arrivals=Arrivals(torch.device("cpu")))
    assert torch.equal(late, early)
    masters = torch.optim.AdamW([exact := start.float().requires_grad_()], 1e-4, weight_decay=0.0)
    for _ in range(5):
        masters.zero_grad()
        (torch.ones(2, 8) @ exact.T).square().sum().backward()
        masters.step()
    # Five roundings, each by less than a unit in the last place.
    assert ((late.float() - exact).abs() <= 6 * 2**-7 * exact.abs().clamp(min=1e-2)).all()


def test_between_steps_no_fp32_copy_is_kept():
    _, optimizer = run(torch.ones(64, 8, dtype=torch.bfloat16), in_pieces=True, steps=1)
    kept = sum(piece.untyped_storage().nbytes() for piece in optimizer.parameters())
    assert kept == 4


def test_a_state_with_masters_is_another():
    _, optimizer = run(torch.ones(4, 8, dtype=torch.bfloat16), in_pieces=True, steps=1)
    with pytest.raises(ValueError, match="masters"):
        optimizer.load_state_dict(optimizer.inner.state_dict())
