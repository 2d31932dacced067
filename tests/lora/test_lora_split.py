"""Gate and up of each expert with adapters of their own, as in tools whose experts are layers."""

import copy
import re

import pytest
import torch
from lora.test_lora_experts import make
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from trainkit.errors import ModelError, RecipeError
from trainkit.lora import LoraOptions, attach, load_adapter
from trainkit.lora.adapter import _of_layers
from trainkit.lora.report import describe_adapters
from trainkit.models.proof.compare import Wide
from trainkit.patching import patch

NAMES = ["o_proj", "gate_proj", "up_proj", "down_proj"]
FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3", "qwen2_moe")
"""The first without layers next to the experts, the others with shared ones or dense ones."""


class Expert(nn.Module):
    def __init__(self, gate_up, down):
        super().__init__()
        weights = {"gate_proj": gate_up.chunk(2)[0], "up_proj": gate_up.chunk(2)[1]}
        for name, weight in (weights | {"down_proj": down}).items():
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
            layer.weight.data.copy_(weight)
            setattr(self, name, layer)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.ModuleList):
    """Linear layers one by one, in place of a family's stacks."""

    def __init__(self, stacks):
        super().__init__(map(Expert, stacks.gate_up_proj, stacks.down_proj))

    def forward(self, x, index, scale):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self):
            token, place = (index == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * scale[token, place, None])
        return out


def base(family):
    model = make(family).double()
    model.set_experts_implementation("eager")
    return model


def apart(family, **options):
    """The family with experts of linear layers, and peft's adapters on each of these names."""
    model = base(family)
    for name, module in list(model.named_modules()):
        if hasattr(module, "gate_up_proj") and name.endswith("experts"):
            model.set_submodule(name, Experts(module))
    config = LoraConfig(target_modules=NAMES, task_type="CAUSAL_LM", **options)
    with _of_layers(True):
        return get_peft_model(model, config)


def split(family, **options):
    names = NAMES[:1] if family == "qwen3_moe" else NAMES  # which has no such layers
    options = {"r": 4, "alpha": 12, "target_modules": names} | options
    return attach(base(family), LoraOptions(experts="split", **options)).double()


def factors(name, parameter, number=4):
    """(name in the model of linear layers, its part of a tensor) for each expert's adapters."""
    if ".experts." not in name:
        yield name, parameter
        return
    at, _, side = name.replace(".base_layer", "").partition(".lora_")
    both = ".base_layer" in name  # the inner wrapper is that of gate and up
    if side.startswith("A"):
        each = parameter.view(number, -1, parameter.shape[1])
        parts = each.chunk(2, 1) if both else (each,)
    else:
        each = parameter.view(parameter.shape[0], -1, number).permute(2, 0, 1)
        first, second = each.chunk(2, 1) if both else (each, each)
        parts = (first.chunk(2, 2)[0], second.chunk(2, 2)[1]) if both else (each,)
    for leaf, part in zip(("gate_proj", "up_proj") if both else ("down_proj",), parts, strict=True):
        for expert in range(number):
            yield f"{at}.{expert}.{leaf}.lora_{side}", part[expert]


def of_layers(named):
    return {name: part for at, each in named for name, part in factors(at, each)}


def outside(model):
    """The blocks of B that belong to no layer."""
    for name, parameter in model.named_parameters():
        if ".experts." in name and ".base_layer.lora_B" in name:
            rows, columns = (size // 2 for size in parameter.shape)
            yield from (parameter[:rows, columns:], parameter[rows:, :columns])


def step(model, seed):
    ids = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(seed))
    with Wide():
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item()


def trained(model):
    return [(name, each) for name, each in model.named_parameters() if each.requires_grad]


def equal(ours, theirs, **limits):
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        torch.testing.assert_close(each, theirs[name], msg=name, **limits)


@pytest.mark.parametrize("fused", [False, True], ids=["peft", "op"])
@pytest.mark.parametrize(
    ("family", "rslora"), [*((each, False) for each in FAMILIES), ("qwen3_moe", True)]
)
def test_it_trains_as_linear_layers_with_adapters_do(family, rslora, fused, tmp_path):
    """Losses, gradients and steps of AdamW in fp64; nothing outside the two blocks ever."""
    ours = split(family, use_rslora=rslora)
    plain = apart(family, r=4, lora_alpha=12, use_rslora=rslora)
    assert of_layers(trained(ours)).keys() == dict(trained(plain)).keys()
    with torch.no_grad():
        for name, parameter in of_layers(trained(ours)).items():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
            plain.get_parameter(name).copy_(parameter)
    if fused:
        report = patch(ours)
        assert report.row("lora_experts").status == "on"
    models = (ours, plain)
    optimizers = [
        torch.optim.AdamW([each for _, each in trained(model)], lr=1e-2, weight_decay=0.1, eps=1e-3)
        for model in models
    ]
    limits = {"rtol": 1e-8, "atol": 1e-10}
    for number in range(3):
        first, second = (step(model, number) for model in models)
        assert first == pytest.approx(second, rel=1e-11)
        grads = [of_layers((n, p.grad) for n, p in trained(ours))]
        grads.append({name: each.grad for name, each in trained(plain)})
        equal(*grads, **limits)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        equal(of_layers(trained(ours)), dict(trained(plain)), **limits)
        assert not any(bool(each.any()) for each in outside(ours))
    # Saved, it is read by peft as it is, and by this package; merged it is the same model.
    ours.eval().save_pretrained(tmp_path)
    ids = torch.randint(0, 96, (2, 20))
    with Wide(), torch.no_grad():
        answer = plain.eval()(input_ids=ids).logits
        for load in (PeftModel.from_pretrained, load_adapter):
            again = load(base(family), tmp_path).double().eval()
            torch.testing.assert_close(again(input_ids=ids).logits, answer, rtol=1e-6, atol=1e-6)
        merged = copy.deepcopy(again).merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, answer, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("init", [True, "gaussian"])
def test_each_begins_as_the_adapter_of_a_linear_layer(family, init):
    """A's are drawn as peft draws those of a layer of rank r; B's are zeros."""
    ours = of_layers(trained(split(family, r=8, alpha=8, init_lora_weights=init)))
    plain = dict(trained(apart(family, r=8, lora_alpha=8, init_lora_weights=init)))
    assert ours.keys() == plain.keys()
    for kind in ("experts.*gate_proj.lora_A", "experts.*up_proj.lora_A", "experts.*down.*A"):
        found, wanted = (
            torch.cat([each.flatten() for name, each in named.items() if re.search(kind, name)])
            for named in (ours, plain)
        )
        assert found.std().item() == pytest.approx(wanted.std().item(), rel=0.12)
        assert found.abs().max().item() == pytest.approx(wanted.abs().max().item(), rel=0.3)
    assert not any(bool(each.any()) for name, each in ours.items() if "lora_B" in name)


def test_names_are_of_linear_layers_and_all_linear_takes_those_next_to_experts():
    named = {row["kind"]: row["r"] for row in describe_adapters(split("glm4_moe"))["adapted"]}
    next_to = {f"mlp.{place}{leaf}" for place in ("", "shared_experts.") for leaf in NAMES[1:]}
    both = {"mlp.experts.gate_up_proj": 8, "mlp.experts.down_proj": 4}
    assert named == dict.fromkeys(next_to, 4) | {"self_attn.o_proj": 4} | both
    every = describe_adapters(split("glm4_moe", target_modules="all-linear"))
    assert named.items() <= {row["kind"]: row["r"] for row in every["adapted"]}.items()
    assert every["not_adapted"].keys() == {"lm_head", "mlp.gate"}
    without = attach(make("glm4_moe"), LoraOptions(r=4, target_modules=NAMES, experts=False))
    kinds = {row["kind"] for row in describe_adapters(without)["adapted"]}
    assert kinds == next_to | {"self_attn.o_proj"}


@pytest.mark.parametrize(
    "name", ["gate_up_proj", "experts.gate_up_proj", "mlp.experts.gate_up_proj"]
)
@pytest.mark.parametrize("rslora", [False, True])
def test_a_rank_of_their_own_is_that_of_gate_and_that_of_up(name, rslora):
    ranks = {"rank_pattern": {name: 6}, "use_rslora": rslora}
    models = attach(make("qwen3_moe"), LoraOptions(r=4, **ranks)), split("qwen3_moe", **ranks)
    one, both = (
        next(row for row in describe_adapters(model)["adapted"] if row["r"] in (6, 12))
        for model in models
    )
    assert (one["r"], both["r"]) == (6, 12)
    assert both["scaling"] == pytest.approx(one["scaling"] * 12 / 32)


@pytest.mark.parametrize("targets", [NAMES, r".*\.(o|gate|up)_proj", "all-linear"], ids=str)
@pytest.mark.parametrize("experts", [True, False, "split"])
def test_layers_next_to_experts_load_again_as_they_were_trained(targets, experts, tmp_path):
    """Also where some have another rank, or are left out; and saved again by who loaded it."""
    options = LoraOptions(
        r=4,
        target_modules=targets,
        experts=experts,
        exclude_modules=["layers.1.self_attn"],
        rank_pattern={"shared_experts.gate_proj": 2},
    )
    model = attach(make("glm4_moe"), options).eval()
    for name, parameter in trained(model):
        if "lora_B" in name:
            nn.init.normal_(parameter, 0, 0.1)
    for each in outside(model) if experts == "split" else ():
        each.data.zero_()
    ids = torch.randint(0, 96, (2, 9))
    answer = model(input_ids=ids).logits
    model.save_pretrained(tmp_path / "first")
    again = load_adapter(make("glm4_moe"), tmp_path / "first", trainable=True).eval()
    assert describe_adapters(again)["adapted"] == describe_adapters(model)["adapted"]
    again.save_pretrained(tmp_path / "second")
    for each in ("first", "second"):
        found = PeftModel.from_pretrained(make("glm4_moe"), tmp_path / each).eval()
        torch.testing.assert_close(found(input_ids=ids).logits, answer)
        torch.testing.assert_close(again(input_ids=ids).logits, answer)


def test_what_has_no_gate_above_up_is_refused():
    for family, match in (("gpt_oss", "gate above up"), ("llama4_text", "gate above up")):
        with pytest.raises(ModelError, match=match) as error:
            split(family, target_modules=["o_proj"])
        assert error.value.where == "lora.experts"
    with pytest.raises(RecipeError, match=r"lora\.experts"):
        LoraOptions(experts="split", init_lora_weights=False)
