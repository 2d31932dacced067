"""fp32 masters: small updates are not lost, and the state survives a checkpoint."""

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from trainkit.errors import ModelError
from trainkit.train.masters import MasterWeightOptimizer
from trainkit.train.optimizer import make_schedule, needs_master_weights, parameter_groups


def make(model, learning_rate=1e-4):
    return MasterWeightOptimizer(
        [{"params": list(model.parameters())}],
        lambda groups: torch.optim.AdamW(groups, lr=learning_rate, weight_decay=0.0),
    )


def step(model, optimizer):
    model(torch.ones(2, 8, dtype=next(model.parameters()).dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_updates_below_the_resolution_of_bf16_add_up():
    """100 updates of 1e-4: plain bf16 weights of 1 stay 1 (the next number below is 0.996)."""
    plain, kept = (nn.Linear(8, 1, bias=False).to(torch.bfloat16) for _ in range(2))
    for model in (plain, kept):
        nn.init.ones_(model.weight)
    naive = torch.optim.AdamW(plain.parameters(), lr=1e-4, weight_decay=0.0)
    masters = make(kept)
    for _ in range(100):
        step(plain, naive)
        step(kept, masters)
    assert torch.all(plain.weight == 1)
    # Adam moves each weight by the learning rate per step for a constant gradient; 0.99 in bf16.
    assert torch.all(kept.weight == torch.tensor(0.99).to(torch.bfloat16))


def test_it_equals_the_inner_optimizer_on_fp32_weights_to_the_bit():
    torch.manual_seed(0)
    half, full = nn.Linear(8, 8).to(torch.bfloat16), nn.Linear(8, 8)
    full.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    masters, plain = make(half, 1e-3), torch.optim.AdamW(full.parameters(), 1e-3, weight_decay=0.0)
    for _ in range(5):
        for parameter, twin in zip(half.parameters(), full.parameters(), strict=True):
            gradient = torch.randn(parameter.shape).to(torch.bfloat16)
            parameter.grad, twin.grad = gradient, gradient.float()
        masters.step()
        plain.step()
    for parameter, twin in zip(half.parameters(), full.parameters(), strict=True):
        assert torch.equal(parameter, twin.to(torch.bfloat16))


def test_a_restored_state_continues_exactly(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(torch.bfloat16)
    optimizer = make(model)
    step(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    twin = nn.Linear(8, 8).to(torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    restored = make(twin)
    restored.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for _ in range(50):
        step(model, optimizer)
        step(twin, restored)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_a_state_of_another_model_is_refused():
    state = make(nn.Linear(8, 8).to(torch.bfloat16)).state_dict()
    with pytest.raises(ValueError, match="other trained weights"):
        make(nn.Linear(8, 4).to(torch.bfloat16)).load_state_dict(state)


def test_schedulers_reach_the_inner_optimizer():
    optimizer = make(nn.Linear(8, 8).to(torch.bfloat16), 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    optimizer.step()
    scheduler.step()
    assert optimizer.inner.param_groups[0]["lr"] == 0.5


def test_masters_are_needed_for_trained_half_precision_only():
    model = nn.Linear(8, 8).to(torch.bfloat16)
    assert needs_master_weights(model)
    assert not needs_master_weights(model.requires_grad_(False))
    assert not needs_master_weights(nn.Linear(8, 8))


def test_lora_plus_gives_b_matrices_their_own_rate():
    model = nn.ModuleDict(
        {"lora_A": nn.Linear(4, 2), "x": nn.ModuleDict({"lora_B": nn.Linear(2, 4)})}
    )
    groups = parameter_groups(
        model,
        decay_names={"x.lora_B.weight"},
        weight_decay=0.1,
        learning_rate=1e-4,
        lora_plus_ratio=16.0,
    )
    by_size = {sum(p.numel() for p in group["params"]): group for group in groups}
    assert by_size[8]["lr"] == pytest.approx(1.6e-3)  # x.lora_B.weight, decayed
    assert by_size[8]["weight_decay"] == 0.1
    assert "lr" not in by_size[10]  # lora_A
    assert sum(by_size) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("count", [1, 8, 64])
def test_gradients_of_micro_batches_are_summed_in_fp32(count):
    """Each is rounded to bf16 once; in bf16 the sum of 64 would lose its last bits."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16).to(torch.bfloat16)
    optimizer = make(layer)
    wanted = {parameter: torch.zeros(parameter.shape) for parameter in layer.parameters()}
    for _ in range(count):
        loss = layer(torch.randn(4, 16, dtype=torch.bfloat16)).square().sum()
        gradients = torch.autograd.grad(loss, list(wanted), retain_graph=True)
        for parameter, gradient in zip(wanted, gradients, strict=True):
            wanted[parameter] += gradient.float()
        loss.backward()
        assert all(parameter.grad is None for parameter in wanted)  # not kept twice
    optimizer.gather_gradients()
    for master, total in zip(optimizer.parameters(), wanted.values(), strict=True):
        assert torch.equal(master.grad, total)


def test_a_loss_scaler_works_on_the_masters_of_float16_weights():
    """torch's own scaler refuses float16 gradients; the masters have them in fp32."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).to(torch.float16)
    optimizer = MasterWeightOptimizer(
        [{"params": list(layer.parameters())}],
        lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=100)
    before, skipped, norms = layer.weight.clone(), 0, []
    for _ in range(40):
        loss = layer(torch.ones(2, 8, dtype=torch.float16)).float().mean() * 1e-6
        scaler.scale(loss).backward()
        optimizer.gather_gradients()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(optimizer.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not norms[-1].isfinite():
            skipped += 1
            assert torch.equal(layer.weight, before)
    assert 0 < skipped < 30
    assert not torch.equal(layer.weight, before)
    assert layer.weight.isfinite().all()
    # d mean / d weight = 1/8 each, times 1e-6, which float16 cannot hold: 72 entries.
    assert norms[-1].item() == pytest.approx(1e-6 / 8 * 72**0.5, rel=1e-2)


def test_float16_weights_without_a_scaler_are_refused(lab):
    with pytest.raises(ModelError, match=r"model\.dtype: bfloat16"):
        lab.trainer("run", dtype="float16", max_steps=1).train()


@pytest.mark.parametrize("lora_plus_ratio", [None, 4.0])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_norms_and_biases_do_not_decay(lab, dtype, lora_plus_ratio):
    lora = None if lora_plus_ratio is None else {"lora_plus_ratio": lora_plus_ratio}
    trainer = lab.trainer("run", dtype=dtype, weight_decay=0.1, given={"lora": lora})
    optimizer = trainer.create_optimizer()
    pairs = [] if dtype is None else optimizer._pairs
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    names |= {id(master): names[id(parameter)] for parameter, master in pairs}
    seen = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            is_spared = "norm" in name or name.endswith("bias")
            assert group["weight_decay"] == (0.0 if is_spared else 0.1), name
            seen.add(is_spared)
    assert seen == {True, False}


def test_the_gradients_of_masters_are_clipped(lab):
    """Plain SGD moves by its rate times the clipped norm; the masters hold the gradients."""
    trainer = lab.trainer(
        "run", dtype="bfloat16", optim="sgd", learning_rate=1.0, max_grad_norm=1e-3, max_steps=1,
        lr_scheduler_type="constant", weight_decay=0.0, save_strategy="no",
    )  # fmt: skip
    before = [master.detach().clone() for master in trainer.create_optimizer().parameters()]
    trainer.train()
    (row,) = [row for row in trainer.state.log_history if "grad_norm" in row]
    assert row["grad_norm"] > 0.1
    moved = [
        new.detach() - old for new, old in zip(trainer.optimizer.parameters(), before, strict=True)
    ]
    norm = torch.linalg.vector_norm(torch.cat([each.flatten() for each in moved]))
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_a_warm_up_can_be_bent_and_the_course_behind_it_stays(name, tmp_path):
    """2 is axolotl's lr_quadratic_warmup: (step / warm-up) squared, and the plain course then."""
    given = {"output_dir": str(tmp_path), "lr_scheduler_type": name, "warmup_steps": 4}
    rates = {}
    for own in ({}, {"warmup_power": 2}):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        args = TrainingArguments(**given, lr_scheduler_kwargs=own)
        schedule = make_schedule(args, optimizer, 12)
        rates[bool(own)] = []
        for _ in range(12):
            rates[bool(own)].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    assert rates[True][:5] == [0, 1 / 16, 1 / 4, 9 / 16, 1]
    assert rates[True][4:] == rates[False][4:]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("cosine_with_restarts", {"num_cycles": 1e9}),
        ("cosine_with_restarts", {"num_cycles": -1}),
        ("cosine", {"num_cycles": float("nan")}),
        ("polynomial", {"power": 1e9, "lr_end": 0.0}),
        ("polynomial", {"lr_end": -1.0}),
        ("cosine_with_min_lr", {"min_lr": 5}),
        ("cosine_with_min_lr", {"min_lr_rate": 7}),
        ("inverse_sqrt", {"timescale": -5}),
        ("warmup_stable_decay", {"num_decay_steps": 1000}),
        ("warmup_stable_decay", {"num_decay_steps": 2, "min_lr_ratio": 9}),
        ("reduce_lr_on_plateau", {"patience": -3}),
    ],
)
def test_a_schedule_that_cannot_be_meant_is_refused(name, own, tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    given = {"lr_scheduler_type": name, "lr_scheduler_kwargs": own, "eval_strategy": "steps"}
    args = TrainingArguments(output_dir=str(tmp_path), warmup_steps=1, **given)
    with pytest.raises(ValueError, match=r"number from 0 on|the run has|learning.rate"):
        make_schedule(args, optimizer, 12)


def test_a_warm_up_of_a_schedule_without_one_is_refused(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    given = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}
    own = {"lr_scheduler_kwargs": {"warmup_power": 2}}
    args = TrainingArguments(output_dir=str(tmp_path), **given, **own)
    with pytest.raises(ValueError, match="above 0"):
        make_schedule(args, optimizer, 12)
