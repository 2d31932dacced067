"""The steps of "add a family" and "add an op" in CONTRIBUTING.md, followed with new ones."""

import dataclasses
import os

import pytest
import test_families_parity as generated
import torch
from families.family_cases import add_silu_mul
from families.family_models import DEVICE, make, make_batch
from ranks import run_ranks

import trainkit
from trainkit.errors import PatchError
from trainkit.kernels.contract import measure
from trainkit.models import rope_forwards
from trainkit.models.families import FAMILIES, row
from trainkit.models.self_check import self_check

calls = generated.calls


@pytest.fixture
def ministral(monkeypatch):
    """The one row that a new family takes."""
    new = row("ministral", "Ministral", rope={"window": "module"})
    monkeypatch.setitem(FAMILIES, new.name, new)
    return new.name


def test_a_family_is_one_row_and_its_tests_are_the_generated_ones(ministral, calls):
    for dtype in (torch.float32, torch.bfloat16):
        calls.clear()
        generated.test_logits_loss_and_every_gradient(ministral, dtype, calls)
    generated.test_under_autocast(ministral)
    generated.test_every_op_alone(ministral)
    for reentrant in (True, False):
        generated.test_checkpointing_recomputes_every_layer_once(ministral, reentrant)
    generated.test_patch_before_and_after_peft(ministral)
    generated.test_norms_trained_through_peft(ministral)
    generated.test_revert_leaves_the_plain_model(ministral)
    calls.clear()
    generated.test_generation_with_a_cache_is_unchanged(ministral, calls)
    generated.test_accumulation_is_invariant_to_how_a_batch_is_cut(ministral)
    model = make(ministral)
    rows = self_check(model, trainkit.patch(model), make_batch(ministral))
    assert rows[-1]["status"] == "ok"


@pytest.mark.parametrize(
    ("name", "prefix", "step"),
    [
        ("smollm3", "SmolLM3", "SmolLM3Attention.forward also uses use_rope"),
        ("granite", "Granite", "GraniteDecoderLayer.forward also uses residual_multiplier"),
        ("seed_oss", "SeedOss", "SeedOssAttention.forward also uses .*residual_dropout"),
    ],
)
def test_a_row_for_a_family_that_does_more_is_refused_with_the_step(
    name, prefix, step, monkeypatch
):
    rope = {"window": "module"} if name == "smollm3" else {}
    monkeypatch.setitem(FAMILIES, name, row(name, prefix, rope=rope))
    with pytest.raises(PatchError, match=step):
        trainkit.patch(make(name))


def test_a_wrong_row_turns_the_generated_tests_red(monkeypatch, calls):
    """glm turns neighbours; a row that forgets it must not pass."""
    assert FAMILIES["glm"].ops["rope"][0].settings == {"interleaved": True}
    plain_rope = dataclasses.replace(FAMILIES["glm"].ops["rope"][0], settings={})
    assert plain_rope.forward is rope_forwards.Attention
    wrong = {**FAMILIES["glm"].ops, "rope": (plain_rope,)}
    monkeypatch.setitem(FAMILIES, "glm", dataclasses.replace(FAMILIES["glm"], ops=wrong))
    with pytest.raises(AssertionError):
        generated.test_logits_loss_and_every_gradient("glm", torch.float32, calls)


def test_an_op_is_a_folder_a_line_in_the_registry_and_a_swap(monkeypatch):
    spec = add_silu_mul(monkeypatch)
    for case in spec.cases:
        for dtype in (torch.bfloat16, torch.float32):
            assert all(error.ok for error in measure(spec, case, dtype, DEVICE))
    model = make("llama")
    report = trainkit.patch(model)
    assert report.row("silu_mul").status == "on"
    assert report.row("silu_mul").num_modules == 2
    rows = {row["op"]: row for row in self_check(model, report, make_batch("llama"))}
    runs_kernel = DEVICE != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"
    assert rows["silu_mul"]["status"] == ("ok" if runs_kernel else "reference")
    assert rows["replica"]["status"] == "ok"
    other = trainkit.patch(make("qwen2"))
    assert other.row("silu_mul").reason == "swiglu does the same"


@pytest.mark.slow
def test_the_new_op_passes_the_contract_and_the_self_check_in_triton():
    (found,) = run_ranks("families.family_cases:new_op", world_size=1, interpret=True)
    assert found == {"bad": [], "status": "ok"}
