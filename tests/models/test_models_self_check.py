"""The self-check passes for every family, and names what is broken."""

import json

import pytest
import torch
from families.family_models import DEVICE, FAMILIES, NOT_THERE, make, make_batch
from families.survey import build
from torch.nn import functional as F

from trainkit import kernels
from trainkit.kernels import linear_cross_entropy_counted
from trainkit.lora import LoraOptions, attach, fuse
from trainkit.models import self_check as self_check_module
from trainkit.models import swap
from trainkit.models.patch import patch_kernels
from trainkit.models.proof import gates, rewritten
from trainkit.models.proof.plan import plan_for
from trainkit.models.self_check import SelfCheckError, self_check
from trainkit.options.model import OPS


def batch(name="llama"):
    return {"input_ids": make_batch(name, rows=2, length=40)["input_ids"].clamp(max=119)}


ON = [op for op in OPS if op not in NOT_THERE]


def check(name, dtype=torch.float32, breaks=lambda: None):
    """What breaks behind the proofs, on the model's own weights too, is the check's to find."""
    model = make(name, dtype=dtype)
    report = patch_kernels(model)
    breaks()
    return self_check(model, report, batch())


@pytest.mark.sample("*-bf16", "llama-fp32", "qwen2_vl-fp32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_passes_and_says_whether_kernels_ran(name, dtype):
    rows = check(name, dtype)
    assert [row["op"] for row in rows] == [*OPS, "replica", "model"]
    assert {row["family"] for row in rows} == {name}
    ran = "reference" if DEVICE == "cpu" else "ok"
    ops_on = {*ON, *(("layer_norm", "add_layer_norm") if name == "qwen2_vl" else ())}  # its tower's
    assert [row["status"] for row in rows] == [
        *(ran if op in ops_on else "off" for op in OPS),
        "ok",
        "ok",
    ]
    on = [row for row in rows if row["op"] in ops_on]
    assert all((row["speedup"] is None) == (DEVICE == "cpu") for row in on)
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt2", "qwen3_moe", "falcon_h1"])
def test_types_of_other_structure_pass(model_type):
    """What is on is called: gpt_neox has an addition before a norm in lines that it never runs."""
    model = build(model_type)
    rows = self_check(model, patch_kernels(model), {"input_ids": torch.arange(80).view(2, 40)})
    assert {row["status"] for row in rows} <= {
        "off",
        "reference" if DEVICE == "cpu" else "ok",
        "ok",
    }


@pytest.mark.parametrize("size", [384, 512, 768])
def test_a_small_vocabulary_whose_labels_all_round_alike_passes(size):
    # 1/V - 1 in bf16: no other vocabularies are rounded so badly, and in an untrained model no row
    # is rounded otherwise.
    model = make("llama", dtype=torch.bfloat16, vocab_size=size)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0**-6)
    long = {"input_ids": make_batch("llama", rows=1, length=128)["input_ids"]}
    rows = {row["op"]: row for row in self_check(model, patch_kernels(model), long)}
    assert rows["linear_cross_entropy"]["status"] in ("ok", "reference")


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's kernels are checked at the model's sizes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_cpu_checks_a_part_of_a_large_vocabulary_and_says_so(dtype):
    model = make("llama", dtype=dtype, vocab_size=20_000, pad_token_id=19_999)
    tokens = {"input_ids": torch.arange(100)[None] * 199, "labels": torch.arange(100)[None] * 199}
    tokens["labels"][:, :50] = -100
    rows = {row["op"]: row for row in self_check(model, patch_kernels(model), tokens)}
    assert "weight (4096, " in rows["linear_cross_entropy"]["detail"]
    assert "labels (1, 64)" in rows["linear_cross_entropy"]["detail"]
    assert "4,096 tokens" in rows["replica"]["detail"]
    assert rows["model"]["status"] == "ok"
    assert model.config.vocab_size == 20_000


def broken_rms_norm(x, weight, eps, **options):
    return kernels.rms_norm(x, weight, 2 * eps + 1e-3, **options)


def broken_rope(q, k, cos, sin, *, interleaved):
    return kernels.apply_rope(q, k, cos, -sin, interleaved=interleaved)


def broken_swiglu(gate, up):
    return 1.002 * F.silu(gate) * up


class Crooked(torch.autograd.Function):
    """Right forward, a gradient that is off by 0.1 %."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return 1.001 * dx


def broken_backward(x, residual, weight, eps, **options):
    return kernels.add_rms_norm(Crooked.apply(x), residual, weight, eps, **options)


def broken_loss(hidden, weight, labels, **options):
    return linear_cross_entropy_counted(hidden, weight, labels.roll(1), **options)


BREAKS = {
    "rms_norm": (kernels, "rms_norm", broken_rms_norm),
    "add_rms_norm": (kernels, "add_rms_norm", broken_backward),
    "apply_rope": (kernels, "apply_rope", broken_rope),
    "swiglu": (kernels, "swiglu", broken_swiglu),
    "linear_cross_entropy": (kernels, "linear_cross_entropy_counted", broken_loss),
}


@pytest.mark.parametrize(("room", "known"), [(100, 64), (20, 16), (10, None)])
def test_a_gpu_without_room_for_the_truth_checks_fewer_words(room, known, monkeypatch):
    # A stand-in for a full GPU: an 8B takes 16 GiB, and its output layer in fp64 four more.
    def measured(call):
        if call.spec.name == "linear_cross_entropy" and call.tensors["weight"].shape[0] > room:
            raise torch.OutOfMemoryError
        return measure(call)

    measure = self_check_module.errors_of
    monkeypatch.setattr(self_check_module, "errors_of", measured)
    monkeypatch.setattr(self_check_module, "WORDS", (64, 16))
    rows = {row["op"]: row for row in check("llama")}
    assert rows["model"]["status"] == "ok"
    if known is None:
        assert rows["replica"]["status"] == "skipped"
        assert "no room" in rows["replica"]["detail"]
        assert not set(ON) & set(rows)
    else:
        assert rows["replica"]["status"] == "ok"
        assert f", {known} tokens" in rows["replica"]["detail"]


@pytest.mark.parametrize("kernel", BREAKS)
def test_a_broken_kernel_is_caught_and_named(kernel, monkeypatch):
    plan_for(make("llama"))
    module, attribute, broken = BREAKS[kernel]
    healthy = getattr(module, attribute)

    def call(*args, **options):
        with monkeypatch.context() as inner:  # the broken one calls the healthy one
            inner.setattr(module, attribute, healthy)
            return broken(*args, **options)

    with pytest.raises(SelfCheckError, match=f"the self-check failed: {kernel} is off by") as info:
        check("llama", breaks=lambda: monkeypatch.setattr(module, attribute, call))
    failed = [row["kernel"] for row in info.value.rows if row["status"] == "failed"]
    assert failed[0] == kernel
    assert len(info.value.rows) == len(OPS) + 2


def test_nan_is_a_failure(monkeypatch):
    plan_for(make("llama"))
    healthy = kernels.swiglu

    def broken(gate, up):
        return healthy(gate, up) * float("nan")

    with pytest.raises(SelfCheckError, match="swiglu is off by nan"):
        check("llama", breaks=lambda: monkeypatch.setattr(kernels, "swiglu", broken))


def test_right_ops_put_together_wrongly_are_caught(monkeypatch):
    def forward(self, x):  # gate and up the wrong way round
        return self.down_proj(kernels.swiglu(self.up_proj(x), self.gate_proj(x)))

    model = make("llama")
    report = patch_kernels(model)  # proved, and broken since
    monkeypatch.setattr(gates.SplitMLP, "forward", forward)
    with pytest.raises(SelfCheckError, match="the patched replica is off by") as info:
        self_check(model, report, batch())
    assert {row["op"] for row in info.value.rows if row["status"] == "failed"} == {
        "replica",
        "model",
    }


def test_an_op_that_is_on_and_never_runs_is_a_failure(monkeypatch):
    model = make("llama")
    report = patch_kernels(model)
    monkeypatch.setattr(rewritten, "kernel_for", lambda function, turn: function)
    monkeypatch.setattr(swap, "_generated", {})  # classes are made anew, now without the kernel
    with pytest.raises(SelfCheckError, match="apply_rope was never called"):
        self_check(model, report, batch())


def test_the_check_leaves_no_trace():
    model = make("qwen2")
    report = patch_kernels(model)
    model.model.layers[0].eval()
    classes = [type(module) for module in model.modules()]
    flags = [module.training for module in model.modules()]
    tokens = batch()
    random = torch.random.get_rng_state()
    self_check(model, report, tokens)
    assert [type(module) for module in model.modules()] == classes
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_after_fused_adapters_and_with_an_op_switched_off():
    model = make("qwen2")
    adapted = attach(model, LoraOptions(r=4))
    report = patch_kernels(adapted, {"rope": False})
    fuse(adapted)
    classes = [type(module) for module in adapted.modules()]
    rows = {row["op"]: row for row in self_check(adapted, report, batch())}
    assert rows["rope"]["status"] == "off"
    assert rows["model"]["status"] == "ok"
    assert [type(module) for module in adapted.modules()] == classes


def test_labels_without_a_trained_token_still_check_the_loss():
    model = make("qwen2")
    report = patch_kernels(model)
    masked = batch() | {"labels": torch.full((2, 40), -100)}
    rows = {row["op"]: row for row in self_check(model, report, masked)}
    assert not rows["model"]["detail"].startswith("loss 0.0")


def test_a_model_of_experts_passes():
    """Grouped products take no fp64, and in 16 bits other experts may be chosen."""
    from tiny_classes import classes, make_tiny

    model = make_tiny(*classes()["qwen3_moe"], num_local_experts=32).to(torch.bfloat16)
    rows = {row["op"]: row for row in self_check(model, patch_kernels(model), batch())}
    assert [rows[op]["status"] for op in ("replica", "model", "swiglu")] == ["ok", "ok", "off"]
    assert (
        "gate_up (4, " in rows["experts"]["detail"]
    )  # a layer with all would take more than training
