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
from trainkit.models.checks.op_check import NORM_OPS
from trainkit.models.checks.self_check import SelfCheckError, self_check
from trainkit.models.families import FAMILIES, Unsupported, row
from trainkit.models.forwards import rope as rope_forwards

calls = generated.calls


NEW = {
    "ministral": row("ministral", "Ministral", rope={"window": "module"}),
    # No shipped family has its order of layers: each norm stands after its block.
    "olmo2": row(
        "olmo2",
        "Olmo2",
        norm={"cast": "gemma"},
        layer=Unsupported("its norms stand after the blocks, where there is nothing to add yet"),
        attention=Unsupported("its norms of q and k span all heads"),
    ),
}


@pytest.fixture(params=NEW)
def new_family(request, monkeypatch):
    """The one row that a new family takes."""
    monkeypatch.setitem(FAMILIES, request.param, NEW[request.param])
    return request.param


def test_a_family_is_one_row_and_its_tests_are_the_generated_ones(new_family, calls, monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        calls.clear()
        generated.test_logits_loss_and_every_gradient(new_family, dtype, calls)
    for op in NORM_OPS:
        generated.test_norms_have_hugging_faces_bits(new_family, op)
    generated.test_under_autocast(new_family)
    generated.test_every_op_alone(new_family)
    for reentrant in (True, False):
        generated.test_checkpointing_recomputes_every_layer_once(new_family, reentrant)
    with monkeypatch.context() as patches:
        generated.test_the_attention_function_gets_what_it_got(new_family, patches)
    generated.test_patch_before_and_after_peft(new_family)
    generated.test_norms_trained_through_peft(new_family)
    generated.test_revert_leaves_the_plain_model(new_family)
    calls.clear()
    generated.test_generation_with_a_cache_is_unchanged(new_family, calls)
    generated.test_accumulation_is_invariant_to_how_a_batch_is_cut(new_family)
    model = make(new_family)
    report = trainkit.patch(model)
    for op, entry in FAMILIES[new_family].ops.items():
        unsupported = isinstance(entry, Unsupported)
        assert report.row(op).status == ("off" if unsupported else "on")
        assert not unsupported or report.row(op).reason == entry.reason
    rows = self_check(model, report, make_batch(new_family))
    assert rows[-1]["status"] == "ok"


@pytest.mark.parametrize("part", ["norm", "layer", "attention", "mlp", "loss"])
def test_every_part_of_a_row_can_be_unsupported(part, monkeypatch):
    new = row("llama", "Llama", **{part: Unsupported("not here")})
    monkeypatch.setitem(FAMILIES, "llama", new)
    generated.test_every_op_alone("llama")
    off = {each.op for each in trainkit.patch(make("llama")).rows if each.reason == "not here"}
    assert (
        off
        == {
            "norm": {"rms_norm", "add_rms_norm"},
            "layer": {"add_rms_norm"},
            "attention": {"rope"},
            "mlp": {"swiglu"},
            "loss": {"linear_cross_entropy"},
        }[part]
    )


@pytest.mark.parametrize("op", NORM_OPS)
@pytest.mark.parametrize("name", [*FAMILIES, *NEW])
def test_a_wrong_rounding_is_noticed(name, op, monkeypatch):
    """By the generated test and by the check at the start of a run, in whichever dtype."""
    family = FAMILIES.get(name) or NEW[name]
    if isinstance(family.ops[op], Unsupported):
        pytest.skip(family.ops[op].reason)
    (swap,) = family.ops[op]
    other = "llama" if swap.settings.get("cast") == "gemma" else "gemma"
    wrong = dataclasses.replace(swap, settings={**swap.settings, "cast": other})
    family = dataclasses.replace(family, ops={**family.ops, op: (wrong,)})
    monkeypatch.setitem(FAMILIES, name, family)
    with pytest.raises(AssertionError):
        generated.test_norms_have_hugging_faces_bits(name, op)
    model = make(name, dtype=torch.bfloat16)
    with pytest.raises(SelfCheckError, match="rounds elsewhere"):
        self_check(model, trainkit.patch(model), make_batch(name))


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
