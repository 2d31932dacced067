"""Mixture-of-experts models: what all-linear adapts, what is refused, and what the report says."""

from operator import itemgetter
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from trainkit import kernels
from trainkit.errors import ModelError, RecipeError
from trainkit.lora import LoraOptions, attach
from trainkit.lora.report import adapter_lines, describe_adapters
from trainkit.models.proof.compare import Wide
from trainkit.patching import patch

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "pad_token_id": 0,
    "intermediate_size_mlp": 48,
}
FAMILIES = ("gpt_oss", "qwen3_moe", "glm4_moe", "mixtral", "olmoe", "qwen2_moe", "deepseek_v3")
ROUTERS = {"mlp.gate", "mlp.router", "mlp.shared_expert_gate"}


def config(family):
    return AutoConfig.for_model(family, **SIZES)


def make(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family))
    with torch.no_grad():  # gpt_oss leaves its experts' weights uninitialised
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.normal_(0, 0.1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_adapts_the_experts_at_the_recipe_s_rank_and_not_the_router(family, tmp_path):
    model = attach(make(family), LoraOptions(r=4))
    report = describe_adapters(model)
    rows = {row["kind"]: row for row in report["adapted"]}
    assert {row["r"] for row in rows.values()} == {4}
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= rows.keys()
    assert rows["mlp.experts.down_proj"]["what"] == "parameter"
    assert not ROUTERS & rows.keys()
    # Whatever carries no adapter is named; nothing is in both lists.
    assert ROUTERS & report["not_adapted"].keys()
    assert "lm_head" in report["not_adapted"]
    assert not rows.keys() & report["not_adapted"].keys() - {"mlp.gate_proj"}
    text = "\n".join(adapter_lines(report))
    assert "mlp.experts.down_proj" in text
    # It trains, and plain peft puts it over the plain base.
    ids = torch.randint(0, 96, (2, 9))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    moved = [p for n, p in model.named_parameters() if "experts" in n and "lora_B" in n]
    assert all(bool(p.any()) for p in moved)
    trained = model.eval()(input_ids=ids).logits
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(make(family), tmp_path).eval()
    torch.testing.assert_close(again(input_ids=ids).logits, trained)


@pytest.mark.parametrize("options", [{"lora_bias": True}, {"use_dora": True}], ids=str)
def test_what_peft_cannot_do_on_experts_is_refused_with_the_way_out(options):
    with pytest.raises(RecipeError, match="experts: false") as error:
        attach(make("qwen3_moe"), LoraOptions(r=4, **options))
    assert error.value.where == f"lora.{next(iter(options))}"
    rest = attach(make("qwen3_moe"), LoraOptions(r=4, experts=False, **options))
    report = describe_adapters(rest)
    assert {row["what"] for row in report["adapted"]} == {"module"}
    assert "mlp.experts.down_proj" in report["not_adapted"]


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_start_from_the_base_is_refused_on_experts(init):
    with pytest.raises(RecipeError, match="exclude"):
        attach(make("qwen3_moe"), LoraOptions(r=4, init_lora_weights=init))


def adapted_kinds(family="qwen3_moe", **options):
    report = describe_adapters(attach(make(family), LoraOptions(r=4, **options)))
    return {row["kind"]: row["r"] for row in report["adapted"]}


def test_experts_are_adapted_or_not_as_the_recipe_says():
    both = {"mlp.experts.gate_up_proj": 4, "mlp.experts.down_proj": 4}
    one = {"self_attn.q_proj": 4}
    assert adapted_kinds(target_modules=["q_proj"]) == one
    assert adapted_kinds(target_modules=["q_proj"], experts=True) == one | both
    assert adapted_kinds(target_modules=r".*\.q_proj", experts=True) == one | both
    assert not both.keys() & adapted_kinds(experts=False).keys()
    assert both.items() <= adapted_kinds().items()
    assert not both.keys() & adapted_kinds(experts=True, exclude_modules=["experts"]).keys()


OF_EXPERTS = {"experts.gate_up_proj": 8, "experts.down_proj": 8}


def test_experts_have_a_rank_of_their_own(tmp_path):
    kinds = adapted_kinds(rank_pattern=OF_EXPERTS)
    assert kinds.pop("mlp.experts.down_proj") == kinds.pop("mlp.experts.gate_up_proj") == 8
    assert {*kinds.values()} == {4}
    model = attach(make("qwen3_moe"), LoraOptions(r=4, rank_pattern=OF_EXPERTS)).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.1)
    ids = torch.randint(0, 96, (2, 9))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(make("qwen3_moe"), tmp_path).eval()
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_ranks_of_some_are_those_that_peft_makes_of_the_experts_names(tmp_path):
    """Of gate_proj and up_proj peft makes the experts' gate_up_proj, at twice rank and alpha."""
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
    plain = get_peft_model(make("glm4_moe"), config)
    both = ("experts.gate_up_proj", "experts.down_proj")
    doubled = {"rank_pattern": {both[0]: 8}}
    options = LoraOptions(
        r=4, alpha=8, target_modules=["q_proj"], target_parameters=both, **doubled
    )
    model = attach(make("glm4_moe"), options)
    shapes = {n: p.shape for n, p in plain.named_parameters() if p.requires_grad}
    assert {n: p.shape for n, p in model.named_parameters() if p.requires_grad} == shapes
    key = itemgetter("kind")
    adapted = [sorted(describe_adapters(each)["adapted"], key=key) for each in (model, plain)]
    assert adapted[0] == adapted[1]
    assert {row["r"] for row in adapted[0]} == {4, 8}
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(0, 96, (2, 9))
    patch(model)  # trainkit's one op of experts with adapters, and its fused layers
    torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"rank_pattern": {"o_proj": 8}}, "lora.rank_pattern"),
        ({"rank_pattern": {"q_prj": 8}}, "lora.rank_pattern"),
    ],
)
def test_a_rank_of_what_is_not_adapted_is_refused(given, where):
    with pytest.raises(ModelError) as error:
        attach(make("glm4_moe"), LoraOptions(r=4, target_modules=["q_proj"], **given))
    assert error.value.where == where


def test_experts_of_a_dense_model_are_refused():
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SIZES))
    with pytest.raises(ModelError, match="no experts") as error:
        attach(dense, LoraOptions(r=4, experts=True))
    assert error.value.where == "lora.experts"


def test_experts_can_be_named_alone():
    options = LoraOptions(r=4, target_modules=("q_proj",), target_parameters=("experts.down_proj",))
    report = describe_adapters(attach(make("gpt_oss"), options))
    kinds = {row["kind"] for row in report["adapted"]}
    assert kinds == {"self_attn.q_proj", "mlp.experts.down_proj"}


def step(model):
    torch.manual_seed(0)
    ids = torch.randint(0, 96, (2, 40))
    model.zero_grad()
    with Wide():  # Hugging Face's own casts to fp32 would hide what is below 1e-8
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def adapted(family, **options):
    model = attach(make(family), LoraOptions(r=4, alpha=12, **options)).double().train()
    if family != "llama4_text":  # which has one implementation
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {}),
        ("mixtral", {}),
        ("deepseek_v3", {"use_rslora": True}),
        ("gpt_oss", {}),
        ("llama4_text", {}),
        ("olmoe", {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}),
    ],
)
def test_adapters_of_experts_run_in_one_op_as_plain_peft_computes(family, options):
    """Equal in fp64; states that the op does not know run peft's path, and come back."""
    model = adapted(family, **options)
    loss, gradients = step(model)
    report = patch(model)
    assert (report.row("lora_experts").status, report.row("experts").status) == ("on", "on")
    with mock.patch("trainkit.kernels.moe_mlp", wraps=kernels.moe_mlp) as op:
        found, ours = step(model)
        factors = [each for call in op.call_args_list for each in call.args[5:9]]
        num = 2 if "target_parameters" in options else 4
        assert sum(each is not None for each in factors) == num * op.call_count
        assert op.call_count == report.row("lora_experts").num_modules > 0
    assert found == pytest.approx(loss, rel=1e-12)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    with model.disable_adapter():
        off = step_loss(model)
    report.revert()
    with model.disable_adapter():
        assert off == pytest.approx(step_loss(model), rel=1e-12)
    assert off != pytest.approx(loss, rel=1e-6)


@torch.no_grad()
def step_loss(model):
    ids = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(0))
    with Wide():
        return model(input_ids=ids, labels=ids).loss.item()
