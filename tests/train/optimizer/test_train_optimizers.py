"""Every row of the table of optimizers: it resumes exactly, in every way that it can be run."""

import gc
import importlib.util
import weakref
from pathlib import Path

import pytest
import torch
from optimizer_cases import Plan, Run

from trainkit.errors import RecipeError
from trainkit.options.optimizers import OPTIMIZERS, OURS, SERVED
from trainkit.parallel.engine import snapshot
from trainkit.recipe.schema import accumulates_in_backward
from trainkit.train import saves as watched
from trainkit.train.prepare import refuse_unfit_optimizer

WAYS = {
    "masters": Plan(lora_plus_ratio=4.0),
    "rounded": Plan(keeps_masters=False),
    "in backward": Plan(in_backward=True),
    "rounded in backward": Plan(in_backward=True, keeps_masters=False),
}


def runs_here(row):
    is_there = row.package is None or importlib.util.find_spec(row.package.module) is not None
    return is_there and (torch.cuda.is_available() or not row.needs_gpu)


HERE = [row for row in map(OPTIMIZERS.get, SERVED) if runs_here(row)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_every_name_of_transformers_has_a_row():
    from transformers.training_args import OptimizerNames

    assert {name.value for name in OptimizerNames} | set(OURS) == set(OPTIMIZERS)


def test_an_optimizer_is_freed_with_its_model(tmp_path):
    """A second run in the same process, or a retry with fewer rows, needs the memory."""
    known = {}
    for row in HERE:
        for way, plan in WAYS.items():
            if row.name not in (*FEW, "flat_adamw") or (row.name, way) == ("flat_adamw", "rounded"):
                continue
            if plan.in_backward and not row.steps_alone:
                continue
            for steps in (0, 1):  # a run may end before its first step, too
                run = Run(row.name, tmp_path, plan)
                for number in range(steps):
                    run.step(number)
                known[row.name, way, steps] = weakref.ref(run.model.hidden.weight)
    del run
    gc.collect()
    assert len(known) > 20
    assert not [name for name, each in known.items() if each() is not None]


@pytest.mark.parametrize("row", HERE, ids=lambda row: row.name)
def test_the_first_step_of_a_part_is_as_long_as_its_rate(row, tmp_path):
    def moved(ratio):
        plan = Plan(part_ratio=lambda each: ratio if each.shape == (72, 64) else None)
        run = Run(row.name, tmp_path, plan, torch.float32)
        before = run.weights()
        return [now - was for now, was in zip(run.step(0).weights(), before, strict=True)]

    for whole, half in zip(moved(None), moved(0.5), strict=True):
        share = 0.5 if whole.shape == (72, 64) else 1.0
        torch.testing.assert_close(half, share * whole, rtol=1e-3, atol=1e-6)
        assert whole.abs().max() > 1e-5


FEW = ("adamw_torch_fused", "adamw_8bit", "adafactor", "muon")
"""One of each kind: the others go the two ways that differ most."""


@pytest.mark.parametrize(
    ("row", "way"),
    [
        pytest.param(row, way, id=f"{row.name}-{way}")
        for row in HERE
        for way in WAYS
        if row.name in FEW or way in ("masters", "rounded in backward")
    ],
)
def test_a_resumed_run_has_the_same_bytes(row, way, tmp_path):
    plan = WAYS[way]
    if plan.in_backward and not row.steps_alone:
        pytest.skip("refused: it steps all parameters together")
    if row.name == "flat_adamw" and way != "masters":
        pytest.skip("it has masters of its own")
    run = Run(row.name, tmp_path, plan)
    before = run.weights()
    for number in range(3):
        run.step(number)
    assert not same(run.weights(), before)
    twin = Run(row.name, tmp_path, plan).resumed(run.saved())
    for number in range(3, 5):
        run.step(number)
        twin.step(number)
        assert same(run.weights(), twin.weights())
    assert torch.equal(
        *(torch.tensor([g["lr"] for g in r.optimizer.param_groups]) for r in (run, twin))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "row",
    [row for row in HERE if row.steps_alone and "paged" not in row.name],
    ids=lambda row: row.name,
)
def test_a_step_in_the_backward_pass_is_the_same_step(row, dtype, tmp_path):
    plain, early = (Run(row.name, tmp_path, Plan(in_backward=way), dtype) for way in (False, True))
    for number in range(3):
        plain.step(number)
        early.step(number)
        assert all(parameter.grad is None for parameter in early.model.parameters())
    assert same(plain.weights(), early.weights())
    # Either goes on with the other's state.
    state = plain.optimizer.state_dict()
    early.optimizer.load_state_dict(state)
    if dtype is torch.float32:
        plain.optimizer.load_state_dict(early.optimizer.state_dict())


def test_the_norm_is_that_of_all_gradients(tmp_path):
    run = Run("sgd", tmp_path, Plan(in_backward=True), torch.float32)
    twin = Run("sgd", tmp_path, Plan(), torch.float32)
    for each in (run, twin):
        each.optimizer.step = lambda: None
        each.model.zero_grad = lambda: None
        each.step(0)
    want = torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 1e9)
    torch.testing.assert_close(run.optimizer.clip(0.0), want)


@pytest.mark.parametrize("keeps_masters", [True, False])
def test_a_bad_gradient_takes_no_step_and_lets_none_follow(keeps_masters, tmp_path):
    run = Run("adamw_8bit", tmp_path, Plan(in_backward=True, keeps_masters=keeps_masters))
    run.step(0)
    before = dict(zip(dict(run.model.named_parameters()), run.weights(), strict=True))
    run.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    end, run.optimizer.step = run.optimizer.step, lambda: None
    run.step(1)
    assert not run.optimizer.clip(0.0).isfinite()
    moved = {n for n, p in run.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved <= {"head.weight", "norm.bias"}  # their gradients were there before
    end()
    del run.optimizer.step
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())


@pytest.mark.parametrize("name", [n for n in SERVED if OPTIMIZERS[n].package])
def test_a_missing_package_is_named_with_its_command(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RecipeError) as info:
        refuse_unfit_optimizer(name, on_gpu=True)
    assert f'pip install "{OPTIMIZERS[name].package.pip}"' in str(info.value)


def test_what_needs_a_gpu_is_refused_without_one(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    for row in map(OPTIMIZERS.get, SERVED):
        if row.needs_gpu:
            with pytest.raises(RecipeError, match="GPU"):
                refuse_unfit_optimizer(row.name, on_gpu=False)
        else:
            refuse_unfit_optimizer(row.name, on_gpu=False)


class Packed(torch.Tensor):
    """A state without memory of its own, made of two tensors, as torchao's are."""

    @staticmethod
    def __new__(cls, codes, scales):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self):
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size, stride):
        return cls(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes.detach(), args[0].scales.clone())  # as torchao does it
        raise NotImplementedError(func)


def test_states_that_are_made_of_tensors_are_copied_and_looked_through():
    states = [Packed(torch.full((4,), n, dtype=torch.uint8), torch.ones(256) * n) for n in (1, 2)]
    copies = snapshot({"a": states[0], "b": states[1]})
    states[0].codes.zero_()
    # Neither is the other, though what detach made of the first was gone before the second's.
    assert [int(copies[key].codes[0]) for key in "ab"] == [1, 2]
    assert [float(copies[key].scales[0]) for key in "ab"] == [1, 2]
    names = [name for name, _ in watched._numbers("exp_avg", states[0])]
    assert names == ["exp_avg (scales)"]


OTHER = {float: "0.37", int: "6", bool: "true", str: ""}
"""A value that no argument has by itself."""


def told(name, folder, **settings):
    """What an optimizer and its parts were told: of their groups, and for all."""
    optimizer = Run(name, folder, Plan(), torch.float32, **settings).optimizer
    parts = [optimizer, *(getattr(optimizer, part, None) for part in ("_muon", "_adamw", "args"))]
    said = []
    for part in filter(None, parts):
        groups = getattr(part, "param_groups", [])
        own = {k: v for k, v in vars(part).items() if isinstance(v, int | float | str)}
        said += [own, getattr(part, "defaults", None), *({**g, "params": 0} for g in groups)]
    return repr(said)


@pytest.mark.parametrize("row", HERE, ids=lambda row: row.name)
def test_every_setting_that_a_row_takes_reaches_the_optimizer_and_no_other(row, tmp_path):
    base = {"optim_args": "momentum=0.5"} if row.name == "sgd" else {}  # nesterov needs one
    plain = told(row.name, tmp_path, **base)
    assert told(row.name, tmp_path, **base) == plain
    for field, value in (("adam_beta1", 0.37), ("adam_beta2", 0.87), ("adam_epsilon", 3e-5)):
        acts = told(row.name, tmp_path, **base, **{field: value}) != plain
        assert acts == (field in row.reads), field
    for argument in row.arguments:
        values = argument.words or (("false", "true") if argument.kind is bool else ())
        for value in values or (OTHER[argument.kind],):
            given = ",".join((*base.values(), f"{argument.name}={value}"))
            if row.name == "sgd" and argument.name == "momentum":
                given = f"momentum={value}"
            said = told(row.name, tmp_path, optim_args=given)
            name = "" if argument.name.startswith("beta") else f"'{argument.name}': "
            assert f"{name}{argument.read(value)!r}" in said, argument


def test_the_guide_has_every_row():
    guide = (Path(__file__).parents[3] / "docs/guides/memory.md").read_text(encoding="utf-8")
    assert not [name for name in SERVED if f"`{name}`" not in guide]


def test_one_micro_batch_is_all_that_a_step_in_backward_has():
    assert not list(accumulates_in_backward(1))
    ((_, what, _),) = accumulates_in_backward(3)
    assert "3 micro-batches" in what
