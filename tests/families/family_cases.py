"""What other processes run for the family tests; each function returns plain JSON values."""

import os
from dataclasses import replace

import torch
from families.family_models import exact, excess_errors, make, make_batch, run
from lab import zero_engine

import trainkit
from trainkit.options.model import OPS

STEPS = 2
LEARNING_RATE = 0.1


def zero(names, stage):
    """Per family the largest difference of a parameter to one plain process after two steps."""
    import deepspeed

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deepspeed.init_distributed("gloo")
    return {name: _zero_difference(name, stage, rank, world_size) for name in names}


def _zero_difference(name, stage, rank, world_size):
    import deepspeed

    batch = make_batch(name, rows=2 * world_size)
    batch["attention_mask"].fill_(1)  # as many trained tokens on every rank
    batch["labels"][:, 4:] = batch["input_ids"][:, 4:]
    plain = make(name, device="cpu")
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        plain(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model = make(name, device="cpu")
    trainkit.patch(model)
    engine = zero_engine(model, stage, micro_batch=2, learning_rate=LEARNING_RATE)
    part = {key: value.chunk(world_size)[rank] for key, value in batch.items()}
    for _ in range(STEPS):
        engine.backward(engine(**part).loss)
        engine.step()
    largest = 0.0
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([found], enabled=stage == 3):
            largest = max(largest, (found - expected).abs().max().item())
    engine.destroy()
    return largest


def fsdp2(names):
    """The same for FSDP2."""
    from trainkit.parallel.fsdp import Fsdp2

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo")
    found = {}
    for name in names:
        batch = make_batch(name, rows=2 * world_size)
        batch["attention_mask"].fill_(1)
        batch["labels"][:, 4:] = batch["input_ids"][:, 4:]
        plain, model = make(name, device="cpu"), make(name, device="cpu")
        trainkit.patch(model)
        engine = Fsdp2()
        engine.place(model, torch.device("cpu"))
        part = {key: value.chunk(world_size)[rank] for key, value in batch.items()}
        for each, rows in ((plain, batch), (model, part)):
            optimizer = torch.optim.SGD(each.parameters(), lr=LEARNING_RATE)
            for _ in range(STEPS):
                each(**rows).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        whole = engine.whole_weights(model, keep=True, adapters_only=False)
        expected = plain.state_dict()
        assert whole.keys() == expected.keys()
        found[name] = max((whole[key] - expected[key]).abs().max().item() for key in whole)
    return found


def interpreted(name):
    """The family's excess errors with its Triton kernels, fp32, under the interpreter."""
    from trainkit.kernels import interpreter

    interpreter.install()
    model = make(name)
    plain = run(model, make_batch(name))
    truth = run(exact(make(name)), make_batch(name))
    trainkit.patch(model)
    return excess_errors(plain, run(model, make_batch(name)), truth)


def new_op():
    """The new op's kernel through the contract suite and in a model, under the interpreter."""
    import kernels.test_kernel_contract as contract_suite
    import pytest

    from trainkit.kernels.contract import measure
    from trainkit.models.self_check import self_check

    with pytest.MonkeyPatch.context() as monkeypatch:
        spec = add_silu_mul(monkeypatch)
        bad = [
            f"{case.label} {dtype} {error}"
            for case in spec.cases
            for dtype in (torch.bfloat16, torch.float32)
            for error in measure(spec, case, dtype, "cpu")
            if not error.ok
        ]
        contract_suite.test_gradients_are_the_derivatives(spec, "cpu", None)
        contract_suite.test_a_second_backward_equals_the_first_and_nothing_is_mutated(
            spec, spec.cases[0], "cpu"
        )
        model = make("llama")
        batch = make_batch("llama")
        report = trainkit.patch(model, dict.fromkeys(OPS, False))  # which leaves the new one on
        checks = self_check(model, report, batch)
        return {"bad": bad, "status": {row["op"]: row["status"] for row in checks}["silu_mul"]}


def add_silu_mul(monkeypatch):
    """What a change that adds the op ``silu_mul`` does besides its folder; returns its spec."""
    from families.silu_mul.spec import SILU_MUL

    from trainkit import kernels
    from trainkit.models import patch, self_check
    from trainkit.models.proof import gates, plan

    class SiluMulMLP(gates.SplitMLP):
        """A forward that says which ops it uses."""

        uses = ("silu_mul",)

        def gate(self, gate, up):
            return kernels.silu_mul(gate, up)

    # The registry, the public name, the switch.
    monkeypatch.setitem(kernels.ops.OPS, "silu_mul", SILU_MUL)
    monkeypatch.setattr(kernels, "silu_mul", SILU_MUL.function, raising=False)
    for module in (patch, self_check, plan):
        monkeypatch.setattr(module, "OPS", (*OPS, "silu_mul"))
    # Which modules it is for: the proof that finds a SiLU gate hands them to the new op.
    find = gates.find_gate

    def find_gate(module, x, result):
        found = find(module, x, result)
        if found is None or found.forward is not gates.SplitMLP:
            return found
        return replace(found, op="silu_mul", forward=SiluMulMLP)

    monkeypatch.setattr(plan, "find_gate", find_gate)
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setitem(plan.WHY_NOTHING, "silu_mul", "the model has no SiLU gate")
    return SILU_MUL
