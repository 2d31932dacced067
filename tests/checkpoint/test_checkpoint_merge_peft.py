"""Adapters whose parts are not those of the base's files: experts, and models that take images."""

import pytest
import torch
from lora.test_lora_experts import make
from peft import PeftModel
from safetensors.torch import load_file
from tiny import make_tokenizer
from train.test_train_text_of_vision import TEXT, VISION
from transformers import AutoConfig, AutoModelForImageTextToText

from trainkit.auto_class import auto_class
from trainkit.cli.app import main
from trainkit.lora import LoraOptions, attach

IDS = torch.randint(20, 90, (2, 9), generator=torch.Generator().manual_seed(3))


def qwen2_vl():
    torch.manual_seed(0)
    tokens = {"image": 5, "video": 6, "vision_start": 7, "vision_end": 8}
    config = AutoConfig.for_model(
        "qwen2_vl",
        text_config={**TEXT, "vocab_size": len(make_tokenizer())},
        vision_config=VISION,
        **{f"{name}_token_id": token for name, token in tokens.items()},
    )
    return AutoModelForImageTextToText.from_config(config)


def load(directory):
    config = AutoConfig.from_pretrained(directory)
    return auto_class(config).from_pretrained(directory, dtype=torch.float32).eval()


# One that stores its experts in one tensor, one that stores them one by one, one with shared ones.
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "deepseek_v3", "qwen2_vl"])
def test_merged_equals_adapter_under_the_names_of_the_base(family, tmp_path, capsys):
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    model = qwen2_vl() if family == "qwen2_vl" else make(family)
    model.to(torch.bfloat16).save_pretrained(base)
    wrapped = attach(load(base), LoraOptions(r=4))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "lora_B" in name:
                parameter.normal_(0, 0.1)
    wrapped.save_pretrained(adapter)
    plain = ["merge", str(adapter), str(merged), "--base-model", str(base)]
    no_parity = ["--no-verify"] if family in ("gpt_oss", "deepseek_v3") else []
    assert main([*plain, "--dtype", "float32", *no_parity]) == 0, capsys.readouterr().err
    expected = PeftModel.from_pretrained(load(base), adapter).eval()(input_ids=IDS).logits
    # The same sums in float32, in another order.
    torch.testing.assert_close(load(merged)(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)
    before, after = (load_file(each / "model.safetensors") for each in (base, merged))
    assert before.keys() == after.keys()
    changed = {n for n in before if not torch.equal(before[n].float(), after[n].float())}
    assert changed
    assert not [name for name in changed if "norm" in name or "visual" in name]
    # In the base's dtype each weight is rounded once.
    rounded = tmp_path / "rounded"
    assert main([*plain[:2], str(rounded), *plain[3:], "--no-verify"]) == 0
    bf16 = load_file(rounded / "model.safetensors")
    assert all(torch.equal(bf16[name], after[name].bfloat16()) for name in after)


def test_experts_over_fewer_layers_are_refused(tmp_path, capsys):
    base, adapter, other = (tmp_path / name for name in ("base", "adapter", "other"))
    model = make("qwen3_moe")
    model.save_pretrained(base)
    attach(load(base), LoraOptions(r=4)).save_pretrained(adapter)
    del model.model.layers[1]
    model.config.num_hidden_layers = 1
    model.save_pretrained(other)
    arguments = ["merge", str(adapter), str(tmp_path / "merged"), "--base-model", str(other)]
    assert main([*arguments, "--any-base", "--no-verify"]) == 1
    assert "do not agree on base_model.model.model.layers.1." in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
