"""flat_adamw is AdamW: held against fp64, its state goes either way, no gradient slips past it."""

import copy
import sys

import pytest
import torch
from distributed import zero_cases
from ranks import run_ranks
from torch import nn

from trainkit.errors import ModelError
from trainkit.train.flat import FlatAdamW
from trainkit.train.masters import MasterWeightOptimizer

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(33, 70), nn.Tanh(), nn.LayerNorm(70), nn.Linear(70, 5))
    return layers.to(dtype)


def groups(layers):
    matrices = [p for p in layers.parameters() if p.ndim > 1]
    vectors = [p for p in layers.parameters() if p.ndim == 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 3e-2},
    ]


def backward(layers, number, optimizer=None):
    if isinstance(optimizer, FlatAdamW):
        optimizer.begin_micro_batch(layers, accumulates=False)
    x = torch.randn(8, 33, generator=torch.Generator().manual_seed(number))
    p = next(layers.parameters())
    layers(x.to(p.dtype)).square().mean().backward()


def train(layers, optimizer, numbers, max_norm=0.05):
    norms = []
    for number in numbers:
        backward(layers, number, optimizer)
        if isinstance(optimizer, FlatAdamW):
            norms.append(optimizer.clip(max_norm))
        else:
            has_masters = isinstance(optimizer, MasterWeightOptimizer)
            parameters = (optimizer.gather_gradients() if has_masters else layers).parameters()
            norms.append(nn.utils.clip_grad_norm_(parameters, max_norm))
        optimizer.step()
        layers.zero_grad()  # as transformers does: the views are let go of
    return torch.stack([norm.detach().double() for norm in norms])


def weights(layers):
    return [parameter.detach().double() for parameter in layers.parameters()]


def distance(some, others):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(some, others, strict=True))


def test_it_is_as_near_to_fp64_as_torchs_own():
    exact, plain, flat = model(torch.float64), model(), model()
    norms = [
        train(exact, torch.optim.AdamW(groups(exact), **OPTIONS), range(20)),
        train(plain, torch.optim.AdamW(groups(plain), fused=True, **OPTIONS), range(20)),
        train(flat, FlatAdamW(groups(flat), **OPTIONS), range(20)),
    ]
    assert (norms[0] > 0.05).any(), "nothing was clipped"
    torch.testing.assert_close(norms[2], norms[0], rtol=1e-5, atol=0.0)
    # Both compute in fp32, each in its own order: 20 steps of a few units of 2**-24.
    error = distance(weights(flat), weights(exact))
    assert error <= 1.5 * distance(weights(plain), weights(exact)) + 20 * 2**-23


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flat_first", [True, False])
def test_either_goes_on_with_the_others_state(dtype, flat_first):
    def ordinary(layers):
        def make(some):
            return torch.optim.AdamW(some, **OPTIONS)

        if dtype is torch.float32:
            return make(groups(layers))
        return MasterWeightOptimizer(groups(layers), make)

    def flat(layers):
        return FlatAdamW(groups(layers), **OPTIONS)

    first, second = (flat, ordinary) if flat_first else (ordinary, flat)
    begun = model(dtype)
    begun_with = first(begun)
    train(begun, begun_with, range(3))
    other = model(dtype)
    other_with = second(other)
    other.load_state_dict(begun.state_dict())
    other_with.load_state_dict(copy.deepcopy(begun_with.state_dict()))
    assert [g["lr"] for g in other_with.param_groups] == [1e-2, 3e-2]
    for each, optimizer in ((begun, begun_with), (other, other_with)):
        train(each, optimizer, range(3, 6))
    # bf16 weights differ where fp32 masters straddle the middle of two neighbours.
    assert distance(weights(other), weights(begun)) <= (1e-5 if dtype is torch.float32 else 2**-8)
    assert int(begun_with.state_dict()["state"][0]["step"]) == 6


@pytest.mark.parametrize("count", [1, 16])
def test_gradients_of_micro_batches_are_summed_in_fp32(count):
    layers = model(torch.bfloat16)
    optimizer = FlatAdamW(groups(layers), accumulates=count > 1, **OPTIONS)
    wanted = [torch.zeros(p.shape) for p in layers.parameters()]
    for number in range(count):
        twin = copy.deepcopy(layers).requires_grad_()
        backward(twin, number)
        for total, parameter in zip(wanted, twin.parameters(), strict=True):
            total += parameter.grad.float()
        backward(layers, number, optimizer)
    optimizer.gather_gradients()
    for total, parameter in zip(wanted, layers.parameters(), strict=True):
        assert torch.equal(parameter.grad.float(), total)


def test_a_held_step_changes_nothing_and_clears_the_gradients():
    layers = model(torch.bfloat16)
    optimizer = FlatAdamW(groups(layers), **OPTIONS)
    train(layers, optimizer, range(2))
    before = copy.deepcopy([*weights(layers), *optimizer.state_dict()["masters"]])
    moments = [entry["exp_avg"].clone() for entry in optimizer.state.values()]
    backward(layers, 2, optimizer)
    layers[0].weight.grad.fill_(float("nan"))
    assert optimizer.clip(1.0).isnan()
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for old, new in zip(
        before, [*weights(layers), *optimizer.state_dict()["masters"]], strict=True
    ):
        assert torch.equal(old, new)
    for old, entry in zip(moments, optimizer.state.values(), strict=True):
        assert torch.equal(old, entry["exp_avg"])
    assert not any(buffer.any() for buffer in optimizer._gradients.values())


@pytest.mark.parametrize("how", ["none", "zeroed", "replaced"])
def test_a_gradient_outside_the_buffers_is_not_lost(how):
    """After ``zero_grad(set_to_none=True)`` the next gradient would be in no buffer."""
    layers, plain = model(), model()
    optimizer = FlatAdamW(groups(layers), **OPTIONS)
    reference = torch.optim.AdamW(groups(plain), **OPTIONS)
    for number in range(3):
        if how == "zeroed":
            optimizer.zero_grad()
        backward(layers, number, optimizer if how != "replaced" else None)
        backward(plain, number)
        if how == "replaced":
            for parameter in layers.parameters():
                parameter.grad = parameter.grad.clone()
        optimizer.step()
        reference.step()
        reference.zero_grad()
        if how != "zeroed":
            layers.zero_grad()
    assert distance(weights(layers), weights(plain)) < 1e-6


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_parameter_without_a_gradient_or_out_of_its_buffer_is_refused(is_idle):
    layers = model()
    more = [{"params": [nn.Parameter(torch.ones(3))]}] if is_idle else []
    optimizer = FlatAdamW([*groups(layers), *more], **OPTIONS)
    if not is_idle:
        layers[0].weight.data = layers[0].weight.data.clone()
    backward(layers, 0, optimizer)
    said = "1 of the trained parameters" if is_idle else "moved out of the buffer"
    with pytest.raises(ModelError, match=said):
        optimizer.step()


def test_states_that_do_not_fit_are_refused():
    optimizer = FlatAdamW(groups(model()), **OPTIONS)
    with pytest.raises(ValueError, match="other trained weights"):
        optimizer.load_state_dict(
            FlatAdamW([{"params": nn.Linear(2, 2).parameters()}], **OPTIONS).state_dict()
        )
    plain = model()
    uneven = torch.optim.AdamW(groups(plain), **OPTIONS)
    train(plain, uneven, range(1))
    state = uneven.state_dict()
    state["state"][0]["step"] += 1
    with pytest.raises(ValueError, match="all parameters together"):
        optimizer.load_state_dict(state)


def test_two_ranks_average_with_one_reduction():
    """And step as one process on all rows does."""
    case = "train.optimizer.flat_cases:trained"
    (one, two), (alone,) = (run_ranks(case, world_size=size) for size in (2, 1))
    assert one["weights"] == two["weights"]
    assert (one["reductions"], alone["reductions"]) == (1, 0)
    for got, want in zip(one["weights"], alone["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-6)


@pytest.mark.sample("None")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_ranks_of_a_run_train_as_one_process_with_torchs_adamw(dtype, tmp_path):
    """Trainer, clipping, micro-batches and a resume included; only sums in fp32 differ in order.

    In bfloat16 each rank's rows give other roundings of activations: 2**-8 of a loss near 5.
    """
    common = {"dtype": dtype, "max_grad_norm": 0.5}
    case, root = "distributed.zero_cases:train", str(tmp_path)
    alone = zero_cases.train(str(tmp_path / "alone"), batch=4, **common)
    flat = {**common, "batch": 1, "accumulate": 2, "optim": "flat_adamw"}
    one, two = run_ranks(case, root=root, stage=0, **flat)
    assert one["losses"] == two["losses"]
    loss, norm = (2e-4, 2e-3) if dtype is None else (2**-8, 0.1)
    assert one["losses"] == pytest.approx(alone["losses"], rel=loss)
    assert one["grad_norms"] == pytest.approx(alone["grad_norms"], rel=norm)
    assert min(alone["grad_norms"]) > 0.5  # every step is clipped
    again, _ = run_ranks(case, root=root, stage=0, resume="checkpoint-6", **flat)
    assert again["losses"] == one["losses"]
    assert again["eval_loss"] == one["eval_loss"]


def test_a_step_calls_nothing_for_each_parameter_but_its_address():
    """Views of hundreds of tensors, made three times a step, took longer than their update."""

    def calls(count):
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(count)]
        optimizer = FlatAdamW([{"params": parameters}], lr=1e-3)
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        made = 0

        def count_one(frame, event, argument):
            nonlocal made
            made += event in ("call", "c_call")

        optimizer._unseen.clear()
        optimizer.step()  # lets go of what watches the first one
        optimizer.zero_grad()
        before = sys.getprofile()
        sys.setprofile(count_one)
        try:
            optimizer.begin_micro_batch(nn.Module(), accumulates=False)
            optimizer.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            sys.setprofile(before)
        return made

    assert calls(300) - calls(100) <= 200
