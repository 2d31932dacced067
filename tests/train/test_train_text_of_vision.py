"""Models that also take images, trained on text: loaded, adapted, saved and loaded again."""

import pytest
import torch
from families.family_models import FAMILIES
from lab import built
from tiny import SIZES, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from trainkit.auto_class import auto_class, text_alone
from trainkit.lora import LoraOptions

TEXT = {
    **SIZES,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
}
VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
VISION |= {"patch_size": 4}


@pytest.fixture(scope="module")
def qwen2_vl(tmp_path_factory):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2_vl",
        text_config={**TEXT, "vocab_size": len(make_tokenizer())},
        vision_config=VISION,
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=7,
        vision_end_token_id=8,
    )
    directory = tmp_path_factory.mktemp("qwen2_vl")
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_loaded_by_an_auto_class(family):
    """As the class that has the head, which is what the recipe's model becomes."""
    config = AutoConfig.for_model(family)
    assert auto_class(config)._model_mapping[type(config)].__name__ == FAMILIES[family]


def build(directory, lora):
    return built(directory, "float32", lora=lora, kernels=True)


@pytest.mark.parametrize("lora", [None, LoraOptions(r=4)], ids=["full", "lora"])
def test_text_trains_the_text_model_and_leaves_the_tower(qwen2_vl, lora, tmp_path):
    torch.manual_seed(1)
    built = build(qwen2_vl, lora)
    assert "images" in built.describe()
    ids = torch.randint(20, 200, (2, 9))
    trained = [(n, p) for n, p in built.model.named_parameters() if p.requires_grad]
    assert not [name for name, _ in trained if "visual" in name]
    optimizer = torch.optim.AdamW([p for _, p in trained], lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(3):
        loss = built.model(input_ids=ids, labels=ids).loss
        loss.backward()
        # Nothing waits for a gradient that text does not bring (DDP would hang on it).
        assert all(p.grad is not None for _, p in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    expected = built.model.eval()(input_ids=ids).logits
    built.model.save_pretrained(tmp_path)
    plain = AutoModelForImageTextToText.from_pretrained(qwen2_vl)
    if lora is None:
        again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    else:
        from peft import PeftModel

        again = PeftModel.from_pretrained(plain, tmp_path)
    torch.testing.assert_close(again.eval()(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    before = AutoModelForImageTextToText.from_pretrained(qwen2_vl).state_dict()
    after = (again if lora is None else again.get_base_model()).state_dict()
    towers = [name for name in before if "visual" in name]
    assert towers
    assert all(torch.equal(before[name], after[name]) for name in towers)


def test_plain_causal_models_stay_with_their_auto_class():
    assert auto_class(AutoConfig.for_model("qwen2")) is AutoModelForCausalLM


def test_the_class_of_text_alone_is_taken_where_it_is_asked_for():
    """By pipelines, and for adapters over it: a tower is no part of either."""
    for model_type, other in {"qwen3_5": AutoModelForCausalLM, "qwen2_vl": None}.items():
        config = AutoConfig.for_model(model_type)
        assert auto_class(config) is AutoModelForImageTextToText
        assert auto_class(text_alone(config)) is (other or AutoModelForImageTextToText)
