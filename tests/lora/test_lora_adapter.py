"""Attaching, saving and reloading adapters."""

import copy
import json

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file, save_file
from tiny import make_qwen2
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from trainkit.errors import CheckpointError, ModelError, RecipeError
from trainkit.lora import LoraOptions, attach, load_adapter, quantization_config
from trainkit.lora.report import adapter_lines, describe_adapters, merge_warning
from trainkit.options.model import OTHER_ADAPTERS


def make_model(*, tied=True, dtype=torch.float32, seed=0):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "tie_word_embeddings": tied}
    return make_qwen2(96, seed=seed, **sizes).to(dtype)


def train_a_little(model, steps=3):
    torch.manual_seed(1)
    ids = torch.randint(0, 96, (2, 9))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return ids, losses


@pytest.mark.parametrize("adapter_dtype", ["float32", "model"])
def test_adapter_dtype_and_the_base_stays_as_it_was(adapter_dtype):
    model = attach(make_model(dtype=torch.bfloat16), LoraOptions(r=4, adapter_dtype=adapter_dtype))
    expected = torch.float32 if adapter_dtype == "float32" else torch.bfloat16
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {expected}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize(
    "options",
    [
        LoraOptions(r=4),
        LoraOptions(r=4, use_rslora=True),
        LoraOptions(r=4, use_dora=True),
        LoraOptions(r=4, target_modules=("q_proj", "down_proj")),
        LoraOptions(r=4, modules_to_save=("embed_tokens",)),
    ],
    ids=["plain", "rslora", "dora", "subset", "modules_to_save"],
)
def test_a_trained_adapter_reloads_bit_for_bit(options, tmp_path):
    model = attach(make_model(), options)
    ids, losses = train_a_little(model)
    assert losses[-1] < losses[0]
    model.eval()
    expected = model(input_ids=ids).logits
    model.save_pretrained(tmp_path / "adapter")
    again = load_adapter(make_model(), tmp_path / "adapter").eval()
    assert torch.equal(again(input_ids=ids).logits, expected)
    again.save_pretrained(tmp_path / "second")
    first, second = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "second")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "targets",
    [("q_proj", "lm_head"), ("embed_tokens",), ("embed_tokens", "lm_head"), ".*(q_proj|lm_head)"],
)
def test_an_adapter_on_a_tied_end_is_the_same_over_every_base(targets, dtype, tmp_path):
    """peft's adapters of both ends share a storage in one dtype, and are apart in another."""
    model = attach(make_model(tied=True, dtype=dtype), LoraOptions(r=4, target_modules=targets))
    train_a_little(model)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    for other in (torch.float32, torch.bfloat16):
        again = load_adapter(make_model(tied=True, dtype=other), tmp_path)
        held = get_peft_model_state_dict(again, save_embedding_layers=False)
        assert held.keys() == saved.keys()
        assert all(torch.equal(held[name], saved[name]) for name in saved)


@pytest.mark.parametrize("targets", [("q_proj", "lm_head"), ".*(q_proj|lm_head)"])
def test_an_adapter_on_the_other_end_of_a_weight_that_trains_whole_is_refused(targets):
    options = LoraOptions(r=4, target_modules=targets, modules_to_save=("embed_tokens",))
    with pytest.raises(RecipeError, match="lm_head, which trains whole with its other end"):
        attach(make_model(tied=True), options)
    attach(make_model(tied=False), options)


def test_tied_embeddings_stay_tied_when_one_end_is_trained():
    model = attach(make_model(tied=True), LoraOptions(r=4, modules_to_save=("embed_tokens",)))
    train_a_little(model)
    base = model.get_base_model()
    embedding = base.get_input_embeddings().weight
    assert base.get_output_embeddings().weight is embedding
    assert embedding.requires_grad


@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("key", ["modules_to_save", "target_modules"])
def test_what_was_asked_for_stays_as_it_was_written(key, end):
    """peft moves the ends of a tied embedding in its lists; a resumed run is compared with ours."""
    options = LoraOptions.model_validate({"r": 4, key: ["q_proj", end]})
    before = copy.deepcopy(options)
    attach(make_model(tied=True), options)
    assert options == before


def test_the_saved_configuration_has_its_names_in_order(tmp_path):
    """Sets have another order in every process, and a continued run ends with the same bytes."""
    names = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    options = LoraOptions(r=2, target_modules=names[:5], exclude_modules=names[5:])
    attach(make_model(), options).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["target_modules"] == sorted(names[:5])
    assert saved["exclude_modules"] == sorted(names[5:])


def test_a_resized_vocabulary_trains_and_reloads(tmp_path):
    base = make_model()
    base.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(104)
    model = attach(base, LoraOptions(r=4, modules_to_save=("embed_tokens",)))
    ids, _ = train_a_little(model)
    expected = model.eval()(input_ids=ids).logits
    model.save_pretrained(tmp_path / "adapter")
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    fresh.resize_token_embeddings(104)
    again = load_adapter(fresh, tmp_path / "adapter").eval()
    assert torch.equal(again(input_ids=ids).logits, expected)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"target_modules": ("q_proj", "kproj")}, "lora.target_modules"),
        ({"target_modules": "nothing.*"}, "lora.target_modules"),
        ({"modules_to_save": ("head",)}, "lora.modules_to_save"),
    ],
)
def test_a_name_that_matches_nothing_is_refused(options, key):
    with pytest.raises(ModelError) as error:
        attach(make_model(), LoraOptions(r=4, **options))
    assert error.value.where == key


def test_a_directory_without_an_adapter_and_an_unknown_quantisation_are_refused(tmp_path):
    with pytest.raises(CheckpointError):
        load_adapter(make_model(), tmp_path)
    with pytest.raises(RecipeError):
        quantization_config("int3")


@pytest.mark.parametrize(
    ("keep", "targets", "word"),
    [
        ("q_proj", ["q_proj", "v_proj"], "no weights in it: model.layers.0.self_attn.v_proj"),
        ("", ["q_proj"], "weights of 4 modules, and its configuration adapts 2"),
    ],
)
def test_an_adapter_of_which_a_part_would_be_ignored_is_refused(tmp_path, keep, targets, word):
    options = LoraOptions(r=2, target_modules=["q_proj", "v_proj"])
    attach(make_model(), options).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if keep in name}, file)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "target_modules": targets}))
    with pytest.raises(CheckpointError, match=word):
        load_adapter(make_model(), tmp_path)


@pytest.mark.parametrize(
    ("targets", "word"),
    [(["q_proj", "v_proj"], None), ("all-linear", r"self_attn.o_proj x2, mlp.gate_proj x2")],
)
def test_biases_that_no_merge_can_keep_are_named_before_training(targets, word):
    """Qwen2 has biases in q, k and v alone."""
    model = attach(make_model(), LoraOptions(r=4, target_modules=targets, lora_bias=True))
    warning = merge_warning(describe_adapters(model))
    assert (warning is None) == (word is None)
    assert word is None or word in warning


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules"])
def test_a_pattern_that_is_none_is_refused(key):
    with pytest.raises(ModelError, match=rf"the pattern of {key} \(\(\(q\) is no regular"):
        attach(make_model(), LoraOptions(**{key: "((q"}))


def test_an_adapter_that_repeats_layers_is_refused(tmp_path):
    """peft builds it over a base whose configuration, and so its cache, has fewer layers."""
    attach(make_model(), LoraOptions()).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "layer_replication": [[0, 1]] * 3}))
    with pytest.raises(CheckpointError, match=r"layer_replication: \[\[0, 1\], "):
        load_adapter(make_model(), tmp_path)


OTHERS: dict = {"oft": {"oft_block_size": 8}, "boft": {"boft_block_size": 8}}
OTHERS |= {"loha": {"r": 4, "alpha": 8}, "fourierft": {"n_frequency": 64}}


@pytest.mark.parametrize("kind", OTHER_ADAPTERS)
def test_adapters_of_another_kind_are_pefts_own(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("peft.tuners.boft.layer._FBD_CUDA", False)  # not compiled, for a GPU
    given = OTHERS.get(kind, {"r": 8})
    model = attach(make_model(), LoraOptions(peft={"peft_type": kind, **given})).eval()
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind.upper()]
    config = config(target_modules="all-linear", task_type="CAUSAL_LM", **given)
    plain = get_peft_model(make_model(), config).eval()
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.05)
    plain.load_state_dict(model.state_dict())
    logits = model(input_ids=(ids := torch.arange(18).reshape(2, 9))).logits
    assert torch.equal(logits, plain(input_ids=ids).logits)
    assert not torch.allclose(logits, make_model()(input_ids=ids).logits, atol=1e-4)
    report = describe_adapters(model)
    assert {*report["not_adapted"]} <= {"lm_head"}
    assert f"({kind})" in adapter_lines(report)[0]
    model.save_pretrained(tmp_path)
    again = load_adapter(make_model(), tmp_path).eval()
    torch.testing.assert_close(again(input_ids=ids).logits, logits)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [{"r": 8}, {"use_dora": True}, {"quantize": "fp8"}])
def test_what_adapters_of_another_kind_have_no_part_of_is_refused(given):
    LoraOptions(peft={"peft_type": "oft"}, quantize="nf4")
    with pytest.raises(RecipeError, match=f"have no {next(iter(given))}"):
        LoraOptions(peft={"peft_type": "oft"}, **given)
    with pytest.raises(RecipeError, match="peft_type is none, and can be oft, boft"):
        LoraOptions(peft={"r": 8})
    with pytest.raises(RecipeError, match="bloft_block_size is no key of peft's BOFTConfig"):
        attach(make_model(), LoraOptions(peft={"peft_type": "boft", "bloft_block_size": 8}))


def test_adapters_of_another_kind_of_experts_are_refused():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3MoeConfig(vocab_size=32, hidden_size=32, num_experts=2, head_dim=16, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    options = LoraOptions(peft={"peft_type": "oft"})
    with pytest.raises(RecipeError, match="experts: false"):
        attach(model, options)
    attach(model, options.replace(experts=False))
