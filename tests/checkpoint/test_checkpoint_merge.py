"""Adapters merged into plain weights do what base and adapter do."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from tiny import SIZES, make_adapter, make_qwen2
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trainkit.checkpoint.merge.merge import MergeOptions, merge_adapter
from trainkit.checkpoint.weights.adapter import read_adapter
from trainkit.checkpoint.whole.atomic import verify_directory
from trainkit.errors import CheckpointError

IDS = torch.arange(1, 33)[None]
# Float32 throughout; base and update are added in another order: a few rounding steps of logits
# of about 1.
TOLERANCE = 1e-5


def make_base(directory: Path, tokenizer, *, dtype=torch.float32, **overrides) -> Path:
    model = make_qwen2(len(tokenizer), **overrides).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(0.1 * torch.randn(parameter.shape))  # drawn in 16 bits some are 0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_tokenizer) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "model", tiny_tokenizer)


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(input_ids=IDS).logits


def adapter_logits(base: Path, adapter: Path) -> torch.Tensor:
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))


def merge(adapter: Path, base_model: Path, target: Path, **options):
    return merge_adapter(read_adapter(adapter), base_model, target, MergeOptions(**options))


KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 8},
        "alpha_pattern": {"v_proj": 3},
    },
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "bias": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    "ends": {"target_modules": ["embed_tokens", "lm_head"]},
    "dora of ends": {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    "tied head": {"target_modules": ["lm_head"]},
    "tied head in full": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_equals_adapter(base, tmp_path, tiny_tokenizer, kind):
    """A tied embedding that is adapted at one end is untied."""
    if "ends" in kind:
        base = make_base(tmp_path / "base", tiny_tokenizer, tie_word_embeddings=False)
    adapter = make_adapter(base, tmp_path / "adapter", **KINDS[kind])
    result = merge(adapter, base, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.config.tie_word_embeddings is ("ends" not in kind and "tied" not in kind)
    ours, theirs = logits(model), adapter_logits(base, adapter)
    plain = logits(AutoModelForCausalLM.from_pretrained(base))
    assert (theirs - plain).abs().max() > 0.1  # the adapter does something
    assert (ours - theirs).abs().max() <= TOLERANCE
    assert result.parity.num_same == 4
    assert result.parity.divergence < 1e-9
    verify_directory(tmp_path / "merged")


def test_update_is_rounded_once(tmp_path, tiny_tokenizer):
    """In bfloat16, against float64: half a unit in the last place, which peft's merge exceeds."""
    base = make_base(tmp_path / "base", tiny_tokenizer, dtype=torch.bfloat16)
    adapter = make_adapter(base, tmp_path / "a", dtype=torch.bfloat16)
    merge(adapter, base, tmp_path / "merged", verify=False)
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    weights = load_file(base / "model.safetensors")
    parts = load_file(adapter / "adapter_model.safetensors")
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16),
        adapter,
        autocast_adapter_dtype=False,
    ).merge_and_unload()
    peft_state = plain.state_dict()
    num_worse = 0
    for name in ours:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in parts:
            assert torch.equal(ours[name], weights[name])
            continue
        a, b = (parts[f"{module}.lora_{half}.weight"].double() for half in "AB")
        exact = weights[name].double() + 2.0 * (b @ a)
        assert torch.equal(ours[name], exact.to(torch.bfloat16))
        num_worse += int((peft_state[name] != exact.to(torch.bfloat16)).sum())
    assert num_worse > 100


def test_shards_and_dtype(base, tmp_path):
    adapter = make_adapter(base, tmp_path / "a")
    merge(adapter, base, tmp_path / "m", dtype="bfloat16", max_shard_bytes=50_000, verify=False)
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 2
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert "dtype" not in config
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert model.dtype == torch.bfloat16


def test_record(base, tmp_path):
    adapter = make_adapter(base, tmp_path / "a")
    merge(adapter, base, tmp_path / "m")
    record = json.loads((tmp_path / "m" / "merge.json").read_text())
    assert len(record["changes"]) == 14
    assert all(0 < change["relative_update"] < 10 for change in record["changes"])
    prompt = record["parity"]["prompts"][0]
    assert prompt["adapter"] == prompt["merged"]
    assert prompt["effect"] > 1e-3 > prompt["divergence"]


def test_tokenizer_of_the_run_goes_before_that_of_the_base(base, tmp_path):
    adapter = make_adapter(base, tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ 'trained with this' }}"
    tokenizer.save_pretrained(adapter)
    merge(adapter, base, tmp_path / "m", verify=False)
    merged = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert merged.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("where", ["original", "dequantized"])
def test_qlora_both_bases(tmp_path, tiny_tokenizer, where):
    base = make_base(tmp_path / "base", tiny_tokenizer, dtype=torch.bfloat16)
    adapter = make_adapter(base, tmp_path / "a")
    result = merge(adapter, base, tmp_path / "m", quantize="nf4", base=where, dtype="float32")
    changed = [change for change in result.changes if change.error_original is not None]
    assert len(changed) == 14
    for change in changed:
        assert change.error_dequantized < 1e-6  # stored in float32
        assert 0.02 < change.error_original < 0.2  # nf4 is off by about 9 % of a Gaussian
    parity = result.parity.prompts[0]
    chosen, other = parity.divergence, parity.other_divergence
    dequantized, original = (chosen, other) if where == "dequantized" else (other, chosen)
    assert dequantized < 1e-4 < original


def test_untouched_layers_are_unpacked_too(tmp_path, tiny_tokenizer):
    """A 4-bit run saw every linear weight through 4 bits, not only the adapted ones."""
    base = make_base(tmp_path / "base", tiny_tokenizer, dtype=torch.bfloat16)
    adapter = make_adapter(base, tmp_path / "a", target_modules=["q_proj"])
    merge(adapter, base, tmp_path / "m", quantize="nf4", base="dequantized", verify=False)
    ours = load_file(tmp_path / "m" / "model.safetensors")
    weights = load_file(base / "model.safetensors")
    same = {name for name in ours if torch.equal(ours[name], weights[name])}
    assert "model.layers.0.mlp.up_proj.weight" not in same
    assert "model.embed_tokens.weight" in same
    assert "model.norm.weight" in same


def test_no_op_is_refused(base, tmp_path):
    adapter = make_adapter(base, tmp_path / "a", size=0.0)
    with pytest.raises(CheckpointError, match="changes nothing"):
        merge(adapter, base, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_update_below_the_resolution_is_refused(tmp_path, tiny_tokenizer):
    base = make_base(tmp_path / "base", tiny_tokenizer, dtype=torch.bfloat16)
    adapter = make_adapter(base, tmp_path / "a", size=1e-11)
    with pytest.raises(CheckpointError, match="below the resolution"):
        merge(adapter, base, tmp_path / "m")


@pytest.mark.parametrize(
    ("overrides", "word"),
    [({"hidden_size": 32}, "in the base and"), ({"num_hidden_layers": 1}, "the base has no")],
)
def test_mismatched_base_is_refused(base, tmp_path, tiny_tokenizer, overrides, word):
    adapter = make_adapter(base, tmp_path / "a")
    other = make_base(tmp_path / "other", tiny_tokenizer, **overrides)
    with pytest.raises(CheckpointError, match=word):
        merge(adapter, other, tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"peft_type": "IA3"}, "not a LoRA"),
        ({"bias": "all"}, "biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"r": 8}, "has rank 4"),
        ({"use_dora": True}, "magnitude vector is missing"),
    ],
)
def test_adapter_of_an_unknown_kind_is_refused(base, tmp_path, change, word):
    adapter = make_adapter(base, tmp_path / "a")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=word):
        read_adapter(adapter)


MISFITS = {
    "none": ({"target_modules": []}, "cannot be put over the model"),
    "pattern": ({"target_modules": "x["}, "is no regular expression"),
    "fewer": ({"target_modules": ["q_proj"]}, "do not agree on"),
    "excluded": ({"exclude_modules": ["q_proj"]}, "do not agree on"),
    "saved": ({"modules_to_save": ["lm_head"]}, "cannot be put over the model"),
    "dropout": ({"lora_dropout": "a"}, "cannot be put over the model"),
    "bias": ({"lora_bias": True}, "do not agree on"),
    "arrow": ({"arrow_config": {"x": 1}}, "arrow_config: {"),
    "megatron": ({"megatron_config": {"x": 1}}, "megatron_config: {"),
}


@pytest.mark.parametrize(("change", "word"), MISFITS.values(), ids=MISFITS)
def test_a_configuration_that_is_not_that_of_the_weights(base, tmp_path, change, word):
    """Each ended in a traceback of peft's, or in a model that says it was proved."""
    adapter = make_adapter(base, tmp_path / "a")
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=word):
        merge(adapter, base, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_adapters_of_each_expert_by_itself_are_of_the_stack(tmp_path, tiny_tokenizer):
    """As peft wrote them over models whose experts were layers."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    config = Qwen3MoeConfig(vocab_size=len(tiny_tokenizer), **SIZES, **sizes)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "base")
    tiny_tokenizer.save_pretrained(tmp_path / "base")
    hidden, tensors = config.hidden_size, {}
    for layer, expert in itertools.product(range(config.num_hidden_layers), range(4)):
        for name in ("gate_proj", "up_proj", "down_proj"):
            ins, outs = (16, hidden) if name == "down_proj" else (hidden, 16)
            place = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
            tensors[f"{place}.lora_A.weight"] = 0.1 * torch.randn(2, ins)
            tensors[f"{place}.lora_B.weight"] = 0.1 * torch.randn(outs, 2)
    targets = ["gate_proj", "up_proj", "down_proj"]
    given = LoraConfig(r=2, target_modules=targets, base_model_name_or_path=str(tmp_path / "base"))
    given.save_pretrained(tmp_path / "a")
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    merge(tmp_path / "a", tmp_path / "base", tmp_path / "m")
    del tensors[f"{place}.lora_A.weight"], tensors[f"{place}.lora_B.weight"]
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError):
        merge(tmp_path / "a", tmp_path / "base", tmp_path / "less")


def test_adapter_with_a_missing_half_or_nan(base, tmp_path):
    adapter = make_adapter(base, tmp_path / "a")
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
    with pytest.raises(CheckpointError, match="do not fit"):
        read_adapter(adapter)
    save_file({**tensors, name: torch.full_like(tensors[name], math.nan)}, path)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        merge(adapter, base, tmp_path / "m", verify=False)


def test_parity_refuses_a_wrong_merge(base, tmp_path, monkeypatch):
    from trainkit.checkpoint.weights.adapter import ModuleAdapter

    adapter = make_adapter(base, tmp_path / "a")
    exact = ModuleAdapter.delta
    monkeypatch.setattr(ModuleAdapter, "delta", lambda self: -exact(self))
    with pytest.raises(CheckpointError, match="nats a token"):
        merge(adapter, base, tmp_path / "m")
    assert not (tmp_path / "m").exists()
