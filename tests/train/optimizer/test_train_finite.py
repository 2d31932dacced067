"""Numbers that are none: caught at their step, held back from the weights, never saved."""

from types import SimpleNamespace

import pytest
import torch
from number_cases import KINDS, STEP, broken_run
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.train.faults.numbers import NumberError, NumberGuard, NumberPolicy, hold_back
from trainkit.train.faults.signals import StopRequest
from trainkit.train.masters import MasterWeightOptimizer
from trainkit.train.saves import Walk, check_weights

SAYS = {
    "loss": f"loss is nan at step {STEP} (in the micro-batch",
    "gradient": f"at step {STEP} (and every loss is finite; the step had train.jsonl:",
    "weights": "NaN or infinite numbers, so checkpoint-6 was not written",
}


def check(result, kind):
    assert SAYS[kind] in result["said"]
    assert "training.learning_rate=0.005" in result["said"]
    # The good one was not evicted by a limit of 1.
    assert result["left"] == ["bad_batches", "checkpoint-3"]
    assert result["sound"] or kind == "weights"
    if kind == "loss":
        assert "train.jsonl:" in result["said"]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_stops_at_the_step(kind, dtype, tmp_path):
    check(broken_run(str(tmp_path), kind, dtype=dtype), kind)


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "sgd"])
def test_any_optimizer_is_held_back(optim, tmp_path):
    result = broken_run(str(tmp_path), "gradient", optim=optim)
    check(result, "gradient")
    assert result["num_updates"] == STEP - 1


def test_what_the_debugger_meets_is_told_like_any_other_number(tmp_path, capfd):
    result = broken_run(str(tmp_path), "loss", debug="underflow_overflow")
    assert "training.debug has met NaN or infinity in the forward pass" in result["said"]
    assert "training.learning_rate=0.005" in result["said"]
    assert "lm_head Linear" in capfd.readouterr().out


def test_without_clipping_the_norm_is_watched_too(tmp_path):
    check(broken_run(str(tmp_path), "gradient", max_grad_norm=0.0, accumulate=2), "gradient")


ENGINES = [
    *[(stage, "bfloat16", "loss") for stage in (0, 1, 2, 3, "fsdp2")],
    *[(stage, None, "gradient") for stage in (0, 1, 2, 3, "fsdp2")],
    *[(stage, "bfloat16", "weights") for stage in (0, 2, 3, "fsdp2")],
]
"""Stage 0 is DDP. All 24 combinations with the dtypes behave the same; these are the fewest that
have each engine with each kind that it treats by itself."""


@pytest.mark.sample("0-bfloat16-loss", "2-None-gradient", "fsdp2-*-gradient", "3-*-weights")
@pytest.mark.parametrize(("stage", "dtype", "kind"), ENGINES)
def test_all_ranks_stop_for_one(stage, dtype, kind, tmp_path):
    """Rank 1 has it, both stop at the step, and both name rank 1's rows."""
    options = {"root": str(tmp_path), "kind": kind, "dtype": dtype}
    options |= {"shard": stage} if stage == "fsdp2" else {"stage": stage}
    results = run_ranks("train.optimizer.number_cases:broken_run", **options, poisoned_rank=1)
    for result in results:
        check(result, kind)
    assert results[0]["said"] == results[1]["said"]


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(function) or "nonzero" in str(function):
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("masters", [True, False])
def test_holding_back_leaves_the_weights_and_waits_for_nothing(masters):
    """The device's own path: NaN gradients of a step that is held back change no weight."""
    layer, optimizer = _layer_and_optimizer(fused=True, masters=masters)
    before = [parameter.clone() for parameter in layer.parameters()]
    _gradients(layer, optimizer, float("nan"))
    with Waits() as waits:
        hold_back(optimizer, torch.ones(()), wait=pytest.fail)
    assert not waits.found
    optimizer.step()
    for parameter, old in zip(layer.parameters(), before, strict=True):
        assert torch.equal(parameter, old)  # nor decayed
    _gradients(layer, optimizer, 1.0)
    hold_back(optimizer, torch.zeros(()), wait=pytest.fail)
    optimizer.step()
    assert not torch.equal(layer.weight, before[0])


@pytest.mark.parametrize("masters", [True, False])
def test_what_cannot_be_held_back_on_the_device_waits_for_the_verdict(masters):
    """Zeros for gradients would not do: momentum and decay go on without any."""
    layer, optimizer = _layer_and_optimizer(fused=False, masters=masters)
    _gradients(layer, optimizer, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    _gradients(layer, optimizer, float("nan"))
    waited = []
    hold_back(optimizer, torch.ones(()), wait=lambda: waited.append(True))
    assert waited


def _layer_and_optimizer(*, fused, masters):
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8).to(torch.bfloat16 if masters else torch.float32)
    groups = [{"params": list(layer.parameters())}]

    def make(groups):
        return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, fused=fused)

    return layer, MasterWeightOptimizer(groups, make) if masters else make(groups)


def _gradients(layer, optimizer, factor):
    (layer(torch.ones(2, 8, dtype=layer.weight.dtype)).sum() * factor).backward()
    if isinstance(optimizer, MasterWeightOptimizer):
        optimizer.gather_gradients()


class OneRank:
    num_processes, process_index = 1, 0
    device = torch.device("cpu")


def guard(**policy):
    args = SimpleNamespace(output_dir="run", learning_rate=1.0)
    return NumberGuard(args, OneRank(), str, StopRequest(), NumberPolicy(**policy), print)


def skip_steps(watch, count):
    for step in range(1, count + 1):
        watch.begin([["a"]])
        watch.add_loss(torch.tensor(1.0))
        watch.close(step, torch.tensor(float("inf")), forgives_gradients=True)


def test_a_skipped_fp16_step_is_counted_and_no_error_until_no_scale_is_left():
    watch = guard()
    skip_steps(watch, 3)
    assert watch.take_skipped() == 3
    assert watch.take_skipped() == 0
    with pytest.raises(NumberError, match="41 steps in a row"):
        skip_steps(watch, 38)


def test_an_fp16_loss_that_is_no_number_is_an_error():
    watch = guard()
    watch.begin([["a"], ["b"]])
    watch.add_loss(torch.tensor(1.0))
    watch.add_loss(torch.tensor(float("inf")))
    with pytest.raises(NumberError, match=r"loss is inf at step 1 \(in the micro-batch with b\)"):
        watch.close(1, torch.tensor(1.0), forgives_gradients=True)


def test_the_optimizers_state_is_looked_through():
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    options = {"what": "checkpoint-1", "fix": "x"}
    check_weights(layer, optimizer, OneRank(), **options)
    optimizer.state[layer.weight]["exp_avg_sq"][0, 0] = float("inf")
    with pytest.raises(NumberError, match="optimizer's exp_avg_sq of weight"):
        check_weights(layer, optimizer, OneRank(), **options)


def test_what_a_model_is_made_with_may_be_infinite():
    """Buffers that are not part of a checkpoint, as masks are."""
    layer = torch.nn.Linear(2, 2)
    layer.register_buffer("mask", torch.tensor(float("-inf")), persistent=False)
    check_weights(layer, None, OneRank(), what="final", fix="x")


@pytest.mark.parametrize("is_quantized", [True, False])
def test_codes_of_a_4_bit_base_are_not_taken_for_numbers(is_quantized):
    """Kept in storage of a floating dtype, their bits may spell NaN."""
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.weight.data.fill_(float("nan"))
    if is_quantized:
        layer.weight.quant_state = SimpleNamespace(shape=torch.Size((4, 8)))
        check_weights(layer, None, OneRank(), what="it", fix="")
    else:
        with pytest.raises(NumberError, match="weight: NaN"):
            check_weights(layer, None, OneRank(), what="it", fix="")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_each_bad_tensor_among_good_ones_is_found(dtype):
    """In one pass; large numbers, whose sum is infinite, are finite all the same."""
    layer = torch.nn.Module()
    for number, bad in enumerate([1.0, float("nan"), 2.0, float("inf"), -float("inf")]):
        row = torch.ones(1000, dtype=dtype)
        row[number * 100] = bad
        layer.register_parameter(f"p{number}", torch.nn.Parameter(row))
    most = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    layer.register_parameter("large", torch.nn.Parameter(most))
    with pytest.raises(NumberError, match=r"^p1, p3, p4: NaN or infinite"):
        check_weights(layer, None, OneRank(), what="it", fix="")


@pytest.mark.parametrize("place", ["weight", "running_mean", "exp_avg"])
def test_a_model_that_is_gone_through_once_is_read_anew_each_time(place):
    """Its places are kept from check to check, and not what was in them."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    walk = Walk(model)
    options = {"what": "it", "fix": "", "walk": walk}
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    check_weights(model, optimizer, OneRank(), **options)
    nan = torch.full((4,), float("nan"))
    if place == "exp_avg":
        optimizer.state[model[0].weight][place] = nan
    elif place == "weight":
        model[0].weight.data = nan
    else:
        model[0].running_mean = nan
    with pytest.raises(NumberError, match=place):
        check_weights(model, optimizer, OneRank(), **options)
