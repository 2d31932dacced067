"""What an adapter may be besides plain: fused all the same, or left to peft with the reason."""

import pytest
import torch
from families.family_models import DEVICE, exact, like_model, make, make_batch, run
from lora.lora_models import adapt, largest_difference, lively
from lora_layers import adapted_layers
from torch import nn

from trainkit.errors import PatchError
from trainkit.lora import LoraOptions, fuse
from trainkit.lora.adapter import to_peft
from trainkit.lora.fused import why_unfused
from trainkit.lora.targets import Targets
from trainkit.models.patch import patch_kernels
from trainkit.models.proof.replica import make_replica
from trainkit.models.self_check import self_check


def add_second(model):
    torch.manual_seed(7)
    model.add_adapter("second", to_peft(LoraOptions(r=2), Targets("all-linear")))
    lively(model)
    model.base_model.set_adapter(["default", "second"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.merge_adapter(), "merged"),
        (add_second, "2 adapters are active"),
    ],
    ids=["merged", "several"],
)
@pytest.mark.parametrize("fused_first", [True, False])
def test_states_that_take_pefts_path(change, reason, fused_first):
    model = adapt(make("qwen2")).eval()
    ids = make_batch("qwen2")["input_ids"].to(DEVICE)
    if fused_first:
        fuse(model)
        change(model)
        layer = next(iter(adapted_layers(model).values()))
        assert reason in why_unfused(layer)
    else:
        change(model)
        report = fuse(model)
        assert all(row.status == "off" and reason in row.reason for row in report.rows[:1])
    reference = adapt(make("qwen2")).eval()
    change(reference)
    with torch.enable_grad():
        assert torch.equal(model(input_ids=ids).logits, reference(input_ids=ids).logits)


def test_adapters_that_are_off_leave_the_base_alone():
    """In the fused functions, whose adapters move the logits."""
    model = exact(adapt(make("qwen2"))).eval()
    ids = make_batch("qwen2")["input_ids"].to(DEVICE)
    with model.disable_adapter():
        base = model(input_ids=ids).logits
    fuse(model)
    with model.disable_adapter():
        torch.testing.assert_close(model(input_ids=ids).logits, base, rtol=0, atol=1e-12)
    assert (model(input_ids=ids).logits - base).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"use_dora": True}, "variant of LoRA"),
        ({"lora_bias": True, "target_modules": ("q_proj", "k_proj")}, "lora_bias"),
    ],
)
def test_adapters_that_take_pefts_path(options, reason):
    model = adapt(make("qwen2"), **options)
    patch_kernels(model)
    torch.manual_seed(5)
    expected = run(model, make_batch("qwen2"))
    report = fuse(model)
    assert report.row("lora_linear").status == "off"
    assert reason in report.row("lora_linear").reason
    torch.manual_seed(5)
    found = run(model, make_batch("qwen2"))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_dropout_that_comes_after_fusing_takes_pefts_path():
    model = adapt(make("qwen2"))
    fuse(model)
    layer = next(iter(adapted_layers(model).values()))
    assert why_unfused(layer) is None
    layer.lora_dropout["default"] = torch.nn.Dropout(0.5)
    assert "dropout" in why_unfused(layer.train())
    assert why_unfused(layer.eval()) is None


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
def test_adapters_on_the_head_and_the_embeddings_take_pefts_path(patched):
    targets = ("q_proj", "lm_head", "embed_tokens")
    model = adapt(make("qwen2", tie_word_embeddings=False), target_modules=targets)
    expected = run(model, make_batch("qwen2"))
    if patched:
        patch_kernels(model)
    before = type(model.get_base_model().lm_head)
    report = fuse(model)
    row = report.row("lora_linear")
    assert row.num_modules == 2  # the two q_proj
    assert "1 on peft's path: adapters on the output layer" in row.reason
    assert "1 on peft's path: adapters on Embedding layers" in row.reason
    assert type(model.get_base_model().lm_head) is before
    assert largest_difference(run(model, make_batch("qwen2")), expected) < 1e-5  # fp32


@pytest.mark.parametrize(
    "targets", [("q_proj", "v_proj"), ("gate_proj", "down_proj"), ("up_proj",), ("o_proj",)]
)
def test_each_projection_is_optional(targets):
    model = exact(adapt(make("qwen2"), target_modules=targets))
    patch_kernels(model, {"rms_norm": False, "add_rms_norm": False})
    expected = run(model, make_batch("qwen2"))
    fuse(model)
    assert largest_difference(run(model, make_batch("qwen2")), expected) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"modules_to_save": ("embed_tokens",)},
        {"modules_to_save": ("embed_tokens",), "tie_word_embeddings": True},
        {"modules_to_save": ("embed_tokens", "lm_head"), "tie_word_embeddings": False},
    ],
    ids=["rslora", "modules_to_save", "tied", "both ends"],
)
def test_options_that_are_fused(options):
    options = dict(options)
    tied = options.pop("tie_word_embeddings", False)
    model = exact(adapt(make("qwen2", tie_word_embeddings=tied), **options))
    expected = run(model, make_batch("qwen2"))
    report = fuse(model)
    assert report.row("lora_linear").status == "on"
    assert largest_difference(run(model, make_batch("qwen2")), expected) < 1e-12


@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_vocabulary_is_fused_too(tied):
    """The patched, fused model trains the resized embeddings as peft's own path does."""

    def resized():
        base = make("qwen2", tie_word_embeddings=tied)
        base.resize_token_embeddings(136, mean_resizing=False)
        return adapt(base, modules_to_save=("embed_tokens",))

    torch.manual_seed(4)
    model = resized()
    batch = make_batch("qwen2")
    batch["input_ids"][:, 2] = 130  # a token that the old vocabulary did not have
    expected = run(model, batch, want_logits=False)
    patch_kernels(model)
    fuse(model)
    found = run(model, batch, want_logits=False)
    assert any("embed_tokens" in key for key in found)
    assert largest_difference(found, expected) < 2e-5  # fp32, through two layers and the loss


def test_under_torch_compile_pefts_path_runs(monkeypatch):
    """The refusal for torch_compile: a compiler fuses peft's graph, so that is what it gets."""
    from trainkit.lora import fused

    model = adapt(make("qwen2"))
    expected = run(model, make_batch("qwen2"))
    fuse(model)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(fused, "lora_mlp", None)
    found = run(model, make_batch("qwen2"))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_ops_can_be_chosen():
    model = adapt(make("qwen2"))
    patch_kernels(model)
    report = fuse(model, {"lora_mlp"})
    assert [row.status for row in report.rows] == ["on", "off", "off", "off"]
    assert report.row("lora_qkv").reason == "switched off"
    with pytest.raises(PatchError, match="unknown op"):
        fuse(adapt(make("qwen2")), {"lora_everything"})


def test_an_unknown_family_still_gets_its_linear_layers():
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.two(torch.relu(self.one(x)))

    from peft import LoraConfig, get_peft_model

    model = lively(get_peft_model(Tiny(), LoraConfig(r=2, target_modules=["one", "two"])))
    x = torch.randn(3, 8)
    expected = model(x)
    report = fuse(model)
    assert report.row("lora_mlp").status == "off"
    assert report.row("lora_linear").num_modules == 2
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("options", [None, {}, {"modules_to_save": ("embed_tokens",)}])
def test_the_self_check_wants_no_gradient_of_frozen_embeddings(options):
    """Those of a large vocabulary, in two dtypes, would not fit next to a 4-bit base."""
    model = make("qwen2", tie_word_embeddings=False)
    model = model if options is None else adapt(model, **options)
    replica = make_replica(model)
    frozen = {name for name, parameter in replica.named_parameters() if not parameter.requires_grad}
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    assert frozen == (ends if options == {} else set())
    batch = like_model(make_batch("qwen2"), model)
    rows = self_check(model, patch_kernels(model), batch)
    assert {row["status"] for row in rows} <= {"ok", "off", "reference", "skipped"}
