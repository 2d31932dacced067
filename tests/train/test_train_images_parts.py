"""Parts of models that see images: packed bases beside them, adapters in them, what is refused."""

import pytest
import torch
from pictures import EVERYTHING, Family

from trainkit.errors import ModelError, RecipeError
from trainkit.models.attention import OF_IMAGES
from trainkit.options import LoraOptions, ModelOptions

TOWERS = {"qwen2_5_vl": ["visual"], "gemma3": ["vision_tower", "multi_modal_projector"]}


@pytest.fixture(scope="module", params=TOWERS)
def family(request, tmp_path_factory):
    return Family(request.param, tmp_path_factory.mktemp(request.param))


def build(family, train=("text",), dtype="float32", **given):
    from lab import built

    source = family.source.replace(train=[*train], dtype=dtype)
    given = {"packing": False, "kernels": False, **given}
    return built(source, sees_images=True, **given).model.train()


def loss_and_gradients(model, batch):
    labels = batch["labels"]
    given = {name: each for name, each in batch.items() if name != "labels"}
    logits = model(**given, use_cache=False).logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_packed_base_is_that_of_peft_and_bitsandbytes(family, quantize):
    """To the bit, adapters of the tower with it; the tower itself stays in 16 bits."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    options = LoraOptions(r=4, quantize=quantize, vision=True)
    mine = build(family, dtype="bfloat16", lora=options)
    towers = [f"model.{name}" for name in TOWERS[family.model_type]]
    in_4_bits = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    }
    packing = BitsAndBytesConfig(
        llm_int8_skip_modules=["lm_head", *towers],
        **(in_4_bits if quantize == "nf4" else {"load_in_8bit": True}),
    )
    plain = AutoModelForImageTextToText.from_pretrained(
        family.directory, dtype=torch.bfloat16, quantization_config=packing, device_map="cpu"
    )
    targets = list(mine.peft_config["default"].target_modules)
    theirs = get_peft_model(plain, LoraConfig(r=4, lora_alpha=32, target_modules=targets)).train()
    generator = torch.Generator().manual_seed(0)
    adapters, others = (
        {name: p for name, p in model.named_parameters() if p.requires_grad}
        for model in (mine, theirs)
    )
    assert adapters.keys() == others.keys()
    assert any(part in name for name in adapters for part in towers)
    for name, parameter in adapters.items():
        value = torch.randn(parameter.shape, generator=generator) * 0.02
        parameter.data.copy_(value)
        others[name].data.copy_(value)
    batch = family.plain_batch(next(one for one in family.data if one.get("images")))
    found, expected = (loss_and_gradients(model, dict(batch)) for model in (mine, theirs))
    assert torch.equal(found[0], expected[0])
    for name, gradient in expected[1].items():
        if gradient is not None:
            assert torch.equal(found[1][name], gradient), name


def test_only_the_text_model_multiplies_in_fp8(family):
    from trainkit.models.fp8.base import Fp8Linear
    from trainkit.models.fp8.choice import find_candidates
    from trainkit.options import Fp8Options

    found = find_candidates(build(family, EVERYTHING), Fp8Options(loss_budget="all"))
    assert found.kept["sees images"] > 0
    assert all("language_model" in name for name in found.layers)
    packed = build(family, lora=LoraOptions(r=4, quantize="fp8"))
    names = [name for name, module in packed.named_modules() if isinstance(module, Fp8Linear)]
    assert names
    assert all("language_model" in name for name in names)


def test_a_tower_attends_as_it_was_told_behind_all_proofs(family):
    """Attention and kernels are proved with others, which a model's configuration passes on."""
    model, (name, *_) = build(family, packing=True, kernels=True), TOWERS[family.model_type]
    tower = model.base_model.get_submodule(name)
    assert tower.config._attn_implementation == (
        OF_IMAGES if family.model_type == "qwen2_5_vl" else "sdpa"
    )


def test_a_projector_that_trains_whole_next_to_adapters_has_gradients(family):
    (name,) = TOWERS[family.model_type][1:] or ["merger"]
    model = build(family, lora=LoraOptions(r=4, modules_to_save=[name]))
    _, found = loss_and_gradients(model, family.plain_batch(family.data[0]))
    saved = {key: each for key, each in found.items() if ".modules_to_save." in key}
    assert saved
    assert all(each is not None and each.abs().max() > 0 for each in saved.values())


@pytest.mark.parametrize("ratio", [0.0, -1.0, 2e-6, 1e4, float("nan")])
def test_a_ratio_that_cannot_be_meant_is_refused(ratio):
    with pytest.raises(RecipeError, match=r"factor of training\.learning_rate"):
        ModelOptions("m", train=EVERYTHING, lr_ratios={"vision": ratio})


def test_rates_of_parts_that_are_not_there_are_refused(family, tiny_qwen2):
    from lab import built

    from trainkit.models.vision import ratio_by_part

    with pytest.raises(RecipeError, match="what all-linear takes"):
        LoraOptions(vision=True, target_modules=["q_proj"])
    with pytest.raises(ModelError, match="nothing of the vision trains"):
        ratio_by_part(build(family), {"vision": 0.1})
    with pytest.raises(ModelError, match="a part of a model that sees images"):
        ratio_by_part(built(ModelOptions(str(tiny_qwen2))).model, {"vision": 0.1})
