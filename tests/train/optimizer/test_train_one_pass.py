"""bitsandbytes' AdamW without masters: its own states, stepped without it."""

import pytest
import torch
from optimizer_cases import Plan, Run

from trainkit.kernels.adamw.function import add_square_sum_
from trainkit.kernels.adamw_8bit.reference import dequantize_reference
from trainkit.options.optimizers import SERVED, optimizer_row
from trainkit.train import optimizer as make
from trainkit.train.masters import takes_one_pass

ROUNDED = Plan(in_backward=True, keeps_masters=False)
BLOCKWISE = [n for n in SERVED if (p := optimizer_row(n).package) and p.module == "bitsandbytes"]


def moments(optimizer):
    """What the states of every parameter stand for."""
    for parameter in optimizer.parameters():
        state = optimizer.state[parameter]
        for number, signed in ((1, True), (2, False)):
            codes = state[f"state{number}"].flatten()
            if codes.dtype == torch.uint8:
                scales = state[f"absmax{number}"]
                yield dequantize_reference(codes, scales, signed=signed), scales
            else:
                yield codes, codes.abs().amax()[None]


@pytest.mark.parametrize("name", BLOCKWISE)
def test_the_table_says_whose_steps_are_taken_so(name, tmp_path):
    run = Run(name, tmp_path, ROUNDED)
    assert run.optimizer.takes_one_pass == optimizer_row(name).one_pass
    assert not takes_one_pass(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))


@pytest.mark.parametrize("name", [n for n in BLOCKWISE if optimizer_row(n).one_pass])
@pytest.mark.parametrize("in_backward", [True, False])
def test_the_steps_are_those_of_bitsandbytes(name, in_backward, tmp_path):
    """The same gradients, of weights that do not move: only what is kept in 8 bits may differ.

    Either has the nearest code of nearly the same number, and does it twice: a step of the map is
    at most 0.9 / 64 of a signed scale, 0.9 / 128 of one without a sign, and half of it is lost.
    """
    plan = Plan(in_backward=in_backward, keeps_masters=False)
    ours, theirs = (Run(name, tmp_path, plan) for _ in range(2))
    theirs.optimizer.takes_one_pass = False
    ours.optimizer.inner.step = lambda: pytest.fail("the step of bitsandbytes is not asked for")
    for each in (ours, theirs):
        for group in each.optimizer.param_groups:
            group["lr"] = 0.0
        each.step(0)
        each.step(1)
    for (one, scales), (other, _) in zip(
        moments(ours.optimizer), moments(theirs.optimizer), strict=True
    ):
        most = scales.repeat_interleave(256)[: one.numel()] if scales.numel() > 1 else scales
        assert ((one - other).abs() <= 0.9 / 64 * most).all()
        assert (one - other).norm() <= 5e-3 * other.norm()
    for state in map(ours.optimizer.state.get, ours.optimizer.parameters()):
        assert state["step"] == 2


def test_weights_are_as_near_to_those_with_masters_as_bitsandbytes_own_are(tmp_path):
    """Ten steps from the same weights: what differs is chance, over 15,000 weights."""
    ours, theirs = (Run("adamw_8bit", tmp_path, ROUNDED) for _ in range(2))
    exact = Run("adamw_8bit", tmp_path, Plan())
    theirs.optimizer.takes_one_pass = False
    for number in range(10):
        for run in (ours, theirs, exact):
            run.step(number)
    here, there, truth = (
        torch.cat([each.flatten().float() for each in run.weights()])
        for run in (ours, theirs, exact)
    )
    assert (here - truth).norm() < 1.05 * (there - truth).norm()


def test_states_are_taken_from_and_given_to_bitsandbytes(tmp_path):
    """A checkpoint of its own steps goes on here, and the other way round."""
    for first_is_ours in (True, False):
        run, other = (Run("adamw_8bit", tmp_path, ROUNDED) for _ in range(2))
        (other if first_is_ours else run).optimizer.takes_one_pass = False
        saved = run.step(0).step(1).saved()
        other.resumed(saved).step(2)
        for parameter in other.optimizer.parameters():
            assert other.optimizer.state[parameter]["step"] == 3
        assert all(each.isfinite().all() for each in other.weights())


def test_a_gradient_that_is_bad_is_told_without_asking():
    total, is_bad = torch.zeros(()), torch.zeros(())
    add_square_sum_(torch.full((3, 4), 2.0), total, is_bad)
    add_square_sum_(torch.full((5,), 1.0, dtype=torch.bfloat16), total, is_bad)
    assert (float(total), float(is_bad)) == (53.0, 0.0)
    for bad in (float("nan"), float("inf")):
        total, is_bad = torch.zeros(()), torch.zeros(())
        add_square_sum_(torch.tensor([1.0, bad]), total, is_bad)
        add_square_sum_(torch.ones(3), total, is_bad)
        assert (total.isfinite(), float(is_bad)) == (torch.tensor(False), 1.0)


def test_pages_stay_pages_when_a_run_is_resumed(tmp_path, monkeypatch):
    """Loaded states lie where the optimizer itself would have made them."""
    monkeypatch.setattr(make, "SMALLEST", 4096)
    run = Run("paged_adamw_8bit", tmp_path, ROUNDED)
    saved = run.step(0).saved()
    fresh = Run("paged_adamw_8bit", tmp_path, ROUNDED)
    inner, made = fresh.optimizer.inner, []
    plain = inner.get_state_buffer

    def buffer(parameter, dtype=torch.float32):
        made.append(plain(torch.empty(parameter.shape), dtype=dtype))
        return made[-1]

    monkeypatch.setattr(inner, "get_state_buffer", buffer)
    fresh.resumed(saved)
    held = [
        value
        for state in inner.state.values()
        for key, value in state.items()
        if key.startswith("state") and value.numel() >= 4096
    ]
    assert len(held) == 6  # of the embedding, the hidden matrix and the head
    assert {id(each) for each in held} == {id(each) for each in made}
    pairs = zip(run.optimizer.parameters(), fresh.optimizer.parameters(), strict=True)
    for parameter, twin in pairs:
        for key, value in run.optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, inner.state[twin][key])


@pytest.mark.gpu
def test_the_host_does_not_wait(tmp_path):
    run = Run("adamw_8bit", tmp_path, ROUNDED, device="cuda")  # states are made where weights are
    ids = torch.randint(80, (4, 9), device="cuda")

    def step():
        run.model(ids).float().logsumexp(-1).mean().backward()
        run.optimizer.step()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
