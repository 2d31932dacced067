"""A family that nobody listed is served as the others are; "add an op" in CONTRIBUTING.md."""

import os

import pytest
import test_families_parity as generated
import torch
from families.family_cases import add_silu_mul
from families.family_models import DEVICE, MORE, OFF, make, make_batch
from ranks import run_ranks

import trainkit
from trainkit.kernels.contract import measure
from trainkit.models.self_check import self_check
from trainkit.options.model import OPS

calls = generated.calls


@pytest.mark.sample("olmo2")
@pytest.mark.parametrize("name", MORE)
def test_a_family_needs_no_line_and_its_tests_are_the_generated_ones(name, calls, monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        calls.clear()
        generated.test_logits_loss_and_every_gradient(name, dtype, calls)
    generated.test_norms_have_hugging_faces_bits(name)
    generated.test_under_autocast(name)
    generated.test_every_op_alone(name)
    for reentrant in (True, False):
        generated.test_checkpointing_recomputes_every_layer_once(name, reentrant)
    with monkeypatch.context() as patches:
        generated.test_the_attention_function_gets_what_it_got(name, patches)
    generated.test_patch_before_and_after_peft(name)
    generated.test_norms_trained_through_peft(name)
    generated.test_revert_leaves_the_plain_model(name)
    calls.clear()
    generated.test_generation_with_a_cache_is_unchanged(name, calls)
    generated.test_accumulation_is_invariant_to_how_a_batch_is_cut(name)
    model = make(name)
    report = trainkit.patch(model)
    for op in OPS:
        reason = OFF.get(name, {}).get(op, "")
        assert report.row(op).status == ("off" if reason else "on")
        assert reason in report.row(op).reason
    rows = self_check(model, report, make_batch(name))
    assert rows[-1]["status"] == "ok"


def test_an_op_is_a_folder_a_line_in_the_registry_a_switch_and_a_proof(monkeypatch):
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
    assert trainkit.patch(make("gemma")).row("silu_mul").reason == "the model has no SiLU gate"


def test_the_new_op_passes_the_contract_and_the_self_check_in_triton():
    (found,) = run_ranks("families.family_cases:new_op", world_size=1, interpret=True)
    assert found == {"bad": [], "status": "ok"}


@pytest.mark.sample("glm4", "gemma", "qwen2_vl")
@pytest.mark.parametrize("name", ["qwen2", "glm4", "gemma", "qwen2_vl"])
def test_the_kernels_themselves_through_the_interpreter(name):
    """Each kernel of the table at least once: on a CPU tensor the ops are their references."""
    (bad,) = run_ranks("families.family_cases:interpreted", world_size=1, interpret=True, name=name)
    assert bad == {}
