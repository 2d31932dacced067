"""``new`` writes only what ``sft`` takes of a model; lists of names and sizes are held as well."""

import copy
import json

import lab
import pytest
import tiny_classes
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from trainkit.cli.app import main
from trainkit.errors import ModelError, PatchError, RecipeError, TrainkitError
from trainkit.lora import attach
from trainkit.models import loading, tokenizer
from trainkit.models.linears import LINEARS, kind_of
from trainkit.models.packed_experts import quantize_with_experts
from trainkit.options import Fp8Options, LoraOptions, ModelOptions
from trainkit.options.parallel import RecomputeOptions
from trainkit.recipe import Recipe, load_recipe
from trainkit.train import images, model
from trainkit.train.fit import refuse_unfit_model, settings_for

QWEN2 = Qwen2Config(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def test_a_run_reads_the_model_s_configuration_once(tiny_llama, monkeypatch):
    source = ModelOptions(str(tiny_llama), dtype="float32")
    recipe = Recipe(model=source, data={"train": ["rows.jsonl"]})
    config = tokenizer.load_config(source)
    before = config.to_dict()
    for module in (images, loading, model, tokenizer):
        monkeypatch.setattr(module, "load_config", None)
    options = images.data_options(recipe, cache_dir=None, config=config)
    assert options.num_embeddings == config.vocab_size
    assert images.vision_of(source, None, recipe.data.images, config) is None
    refuse_unfit_model(config, packing=False, kernels=False, lora=LoraOptions())
    trained = lab.built(source, config=config, lora=LoraOptions(r=2)).model
    assert trained.config is not config
    assert config.to_dict() == before


TYPES = sorted(tiny_classes.classes())


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules"])
def test_an_endless_pattern_of_a_recipe_is_tried_where_it_can_be_stopped(key):
    lora = LoraOptions(**{key: "([a-z0-9_.]+)+,"})
    with pytest.raises(ModelError, match=f"pattern of {key} .* takes for ever"):
        refuse_unfit_model(QWEN2, packing=False, kernels=False, lora=lora)


@pytest.mark.sample("gpt2", "llama", "musicgen", "qwen3_next")
@pytest.mark.parametrize("model_type", TYPES)
def test_what_new_writes_for_a_model_type_is_taken(model_type, tmp_path, monkeypatch, capsys):
    try:
        config = tiny_classes.tiny_config(tiny_classes.classes()[model_type][0], {})
    except Exception as unknown:
        pytest.skip(f"its configuration is not built small here: {unknown!r}"[:90])
    config.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for method in ("full", "lora"):
        said = main(["new", "--model", "./model", "-o", f"{method}.yaml", "--method", method])
        if said:
            assert "fix:" in capsys.readouterr().err
            continue
        recipe = load_recipe(tmp_path / f"{method}.yaml").recipe
        refuse_unfit_model(
            AutoConfig.from_pretrained(tmp_path / "model"),
            packing=recipe.data.packing, kernels=recipe.kernels, lora=recipe.lora,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "off"),
    [
        ("qwen2", set()),
        ("olmo2", set()),
        ("gemma3_text", set()),
        ("qwen3_moe", set()),
        ("blt", {"data.packing"}),
        ("falcon_h1", {"data.packing"}),
        ("qwen3_next", {"data.packing"}),
    ],
)
def test_what_a_model_does_not_take_is_switched_off(model_type, off):
    config = tiny_classes.tiny_config(tiny_classes.classes()[model_type][0], {})
    assert settings_for(config, "lora").keys() == off


SHARES = {"preference.share_prompts": True}


@pytest.mark.parametrize(
    ("model_type", "taken"),
    [
        *(("qwen2", SHARES), ("gemma3_text", SHARES), ("qwen3_moe", SHARES)),
        ("deepseek_v32", {}),  # chooses its keys by an index
        ("gpt_neox_japanese", {}),  # has its attention written out
        ("qwen3_next", {"data.packing": False}),
    ],
)
def test_pairs_share_prompts_where_attention_can(model_type, taken):
    config = tiny_classes.tiny_config(tiny_classes.classes()[model_type][0], {})
    assert settings_for(config, "dpo") == taken
    assert settings_for(config, "kto") == {k: v for k, v in taken.items() if k == "data.packing"}


@pytest.mark.parametrize("name", ["adapter", "run", "damaged"])
def test_no_recipe_is_written_for_a_directory_that_is_no_model(name, tmp_path, monkeypatch, capsys):
    """`new` wrote one for an adapter and for a run, which `sft` then refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    file = {"adapter": "adapter_config.json", "run": "status.json", "damaged": "config.json"}[name]
    (tmp_path / name / file).write_text("{" if name == "damaged" else "{}")
    assert main(["new", "--model", f"./{name}", "-o", "new.yaml"]) == 2
    said = capsys.readouterr().err
    assert {"adapter": "this is an adapter", "run": "a run directory", "damaged": "config.json"}[
        name
    ] in said
    assert not (tmp_path / "new.yaml").exists()


def fits(**lora):
    refuse_unfit_model(QWEN2, packing=False, kernels=False, lora=LoraOptions(**lora))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_modules", ["q_porj"]),
        ("exclude_modules", ["down_porj"]),
        ("exclude_modules", ".*down_porj"),
        ("modules_to_save", ["embed_token"]),
        ("target_parameters", ["experts.down_proj"]),
    ],
)
def test_a_name_that_matches_nothing_is_refused(key, value):
    with pytest.raises(ModelError) as refused:
        fits(**{key: value})
    assert f"lora.{key}" in str(refused.value)
    fits(exclude_modules=["down_proj"], modules_to_save=["embed_tokens"])


@pytest.mark.parametrize("projected", ["all-linear", r".*\.(q|v)_proj", ["q_proj", "mlp"]])
def test_projected_layers_and_those_that_keep_16_bits_are_looked_up(projected):
    def hold(skip, names):
        fp8 = Fp8Options(skip=skip)
        refuse_unfit_model(QWEN2, packing=False, kernels=False, lora=None, fp8=fp8, projected=names)

    hold(["down_proj", "layers.0"], projected)
    with pytest.raises(ModelError, match=r"model\.fp8\.skip(.|\n)*did you mean down_proj"):
        hold(["down_porj"], projected)
    with pytest.raises(ModelError, match=r"training\.optim_target_modules"):
        hold([], ["q_proj", "v_porj"])
    with pytest.raises(
        ModelError, match=r"training\.optim_target_modules(.|\n)*fix: the layers are"
    ):
        hold([], "no.*such")


def test_a_rank_that_no_layer_can_use_is_refused():
    fits(r=64, rank_pattern={"q_proj": 64})
    with pytest.raises(RecipeError, match="a rank of 65 is more"):
        fits(rank_pattern={"q_proj": 65})
    with pytest.raises(RecipeError, match="rank 64 at most"):
        fits(r=65)
    with pytest.raises(RecipeError, match=r"lora\.r"):
        fits(r=100_000_000)


@pytest.mark.parametrize(
    "override",
    [
        "training.learning_rate=2e4",
        "training.learning_rate=0",
        "training.warmup_steps=500",
        "lora.lora_plus_ratio=1e7",
        "lora.alpha=1e9",
        "training.weight_decay=10",
        "training.adam_epsilon=10",
        "training.adam_beta2=1.0",
        "training.neftune_noise_alpha=1000",
        "training.per_device_train_batch_size=1000000",
        "training.gradient_accumulation_steps=1000000",
        "training.save_steps=0",
        "global_batch_size=1000000000",
        "data.num_workers=100000",
        "data.train=[{path: d.jsonl, epochs: 1e9}]",
        "data.train=[{path: d.jsonl, weight: 1e12}]",
    ],
)
def test_numbers_that_cannot_be_meant_are_asked_back(override, tmp_path):
    file = tmp_path / "r.yaml"
    text = {"model": {"name_or_path": "m"}, "data": {"train": ["d.jsonl"]}, "lora": {}}
    file.write_text(json.dumps({**text, "training": {"max_steps": 2}}))
    load_recipe(file)
    with pytest.raises(TrainkitError, match=override.partition("=")[0].replace(".", r"\.")):
        load_recipe(file, [override])
    load_recipe(file, ["training.learning_rate=2e4", "training.optim=sgd"])
    load_recipe(file, ["training.weight_decay=10", "training.optim=lion_32bit"])
    load_recipe(file, ["lora.alpha=4096", "lora.r=16"])


def test_a_kernel_that_is_named_is_proved_before_data_is_read():
    config = tiny_classes.tiny_config(tiny_classes.classes()["olmo2"][0], {})
    refuse_unfit_model(config, packing=False, kernels={"rope": True}, lora=None)
    with pytest.raises(PatchError, match="add_rms_norm cannot be switched on for olmo2"):
        refuse_unfit_model(config, packing=False, kernels={"add_rms_norm": True}, lora=None)


def tiny(model_type):
    return tiny_classes.tiny_config(tiny_classes.classes()[model_type][0], {})


@pytest.mark.parametrize("model_type", ["mamba"])
def test_a_layer_whose_weight_the_model_reads_itself_is_not_packed(model_type):
    lora = LoraOptions(quantize="nf4")
    refuse_unfit_model(tiny(model_type), packing=False, kernels=False, lora=LoraOptions())
    with pytest.raises(RecipeError, match=r"dt_proj, and .*Mixer multiplies by its weight"):
        refuse_unfit_model(tiny(model_type), packing=False, kernels=False, lora=lora)
    with pytest.raises(RecipeError, match="dt_proj"):
        settings_for(tiny(model_type), "qlora")


PACKED = ["llama", "mamba2", "bamba", "falcon_h1", "bloom", "gemma3", "jamba", "falcon_mamba"]


@pytest.mark.parametrize("model_type", PACKED)
def test_a_weight_that_only_a_missing_kernel_or_an_unused_branch_reads_is_packed(model_type):
    lora = LoraOptions(quantize="nf4")
    refuse_unfit_model(tiny(model_type), packing=False, kernels=False, lora=lora)


@pytest.mark.parametrize("model_type", ["jamba", "falcon_mamba"])
def test_a_layer_that_is_read_by_itself_where_it_is_packed_gives_what_its_codes_stand_for(
    model_type,
):
    """The two orders of adding dt_proj's bias differ by some roundings of fp32."""
    torch.manual_seed(0)
    config = tiny(model_type)
    config.num_experts = 1  # of Jamba: layers that are no mixture
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain = copy.deepcopy(model)
    quantize_with_experts(model, torch.device("cpu"), LoraOptions(quantize="nf4"))
    packed = {
        name: module for name, module in model.named_modules() if kind_of(module) is LINEARS["nf4"]
    }
    assert any(name.endswith("dt_proj") for name in packed)
    with torch.no_grad():
        for name, module in packed.items():
            weight = LINEARS["nf4"].unpacker(module)(module.weight, torch.float32)
            plain.get_submodule(name).weight.copy_(weight)
    ids = torch.arange(24).reshape(2, 12)
    wanted = plain(input_ids=ids, labels=ids).loss
    model.requires_grad_(False)
    adapted = attach(model, LoraOptions(r=2, target_modules=["dt_proj"], experts=False))
    found = adapted(input_ids=ids, labels=ids).loss
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    found.backward()
    assert any(p.grad is not None and p.grad.any() for p in adapted.parameters())


def test_an_adapter_that_would_never_act_is_refused():
    jamba = tiny("jamba")
    fits = {"packing": False, "kernels": False}
    with pytest.raises(ModelError, match="dt_proj cannot be adapted"):
        refuse_unfit_model(jamba, **fits, lora=LoraOptions(target_modules=["x_proj", "dt_proj"]))
    refuse_unfit_model(jamba, **fits, lora=LoraOptions(target_modules=["x_proj", "in_proj"]))
    model = attach(AutoModelForCausalLM.from_config(jamba), LoraOptions(r=2))
    ids = torch.arange(12).reshape(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    passed_by = [
        name
        for name, each in model.named_parameters()
        if each.requires_grad and each.grad is None and "experts" not in name
    ]
    assert not passed_by


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_so_many_layers_is_no_more_than_there_are(every):
    fits = {"packing": False, "kernels": False, "lora": None}
    asked = RecomputeOptions(every=every)
    if every <= QWEN2.num_hidden_layers:
        refuse_unfit_model(QWEN2, **fits, recompute=asked)
        return
    with pytest.raises(RecipeError, match=r"recompute\.every.*the model has 2"):
        refuse_unfit_model(QWEN2, **fits, recompute=asked)
