"""A packed base on a CPU: int8 against plain peft, and what must not change what training does."""

import importlib.util

import pytest
import torch
from lab import built
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trainkit.errors import ModelError, RecipeError
from trainkit.lora import LoraOptions
from trainkit.lora.quant import refuse_unfit_device


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_package_that_is_missing_is_named_before_data_is_read(quantize, monkeypatch):
    """The environment was said to be broken, and to be installed again."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *at: None if name == "bitsandbytes" else find(name, *at),
    )
    with pytest.raises(RecipeError, match="needs bitsandbytes, which is not installed") as refused:
        refuse_unfit_device(quantize, torch.device("cpu"))
    assert "trainkit[qlora]" in refused.value.fix


@pytest.mark.parametrize("kernels", [False, True], ids=["peft", "fused"])
def test_training_after_an_evaluation_is_as_without_one(kernels, tiny_qwen2):
    pytest.importorskip("bitsandbytes")
    ids = torch.arange(18).reshape(2, 9)
    grads = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        lora = LoraOptions(r=4, init_lora_weights=False)
        model = built(tiny_qwen2, lora=lora, quantize="nf4", kernels=kernels).model
        if evaluates:
            with torch.no_grad():
                model.eval()(input_ids=ids)
        model.train()(input_ids=ids, labels=ids).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    plain, evaluated = grads
    assert all(torch.equal(plain[name], evaluated[name]) for name in plain)


def test_a_dtype_that_is_left_to_the_files_is_that_of_packed_layers_too(tiny_qwen2):
    """Files in fp32 were packed for bf16, and the check of the kernels then failed."""
    pytest.importorskip("bitsandbytes")
    model = built(tiny_qwen2, "auto", lora=LoraOptions(r=4), quantize="nf4").model
    layers = [each for each in model.modules() if type(each).__name__ == "Linear4bit"]
    assert layers
    assert {each.weight.dtype for each in layers} == {torch.float32}


def test_codes_that_look_like_nan_are_no_damaged_weights(tiny_llama):
    """A model that cannot be packed was told that its weights hold NaN: a code of all ones."""
    from trainkit.models.linears import not_finite

    model = built(tiny_llama, lora=LoraOptions(r=4), quantize="nf4").model
    layer = next(each for each in model.modules() if type(each).__name__ == "Linear4bit")
    layer.weight.data.view(torch.uint8).fill_(0xFF)
    assert layer.weight.isnan().any()
    assert not_finite(model) is None
    norm = next(name for name, each in model.named_parameters() if name.endswith("norm.weight"))
    model.get_parameter(norm).data[0] = torch.nan
    assert not_finite(model) == norm


def test_int8_trains_as_peft_over_bitsandbytes_does(tiny_qwen2):
    ids = torch.arange(18).reshape(2, 9)
    theirs = AutoModelForCausalLM.from_pretrained(
        tiny_qwen2,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(load_in_8bit=True),
        attn_implementation="sdpa",
    )
    theirs = get_peft_model(theirs, LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"))
    found = {}
    for name, kernels in (("plain", False), ("kernels", True)):
        given = {"attention": "sdpa", "lora": LoraOptions(r=4), "quantize": "int8"}
        made = built(tiny_qwen2, "float32", kernels=kernels, **given)
        assert made.adapters["storage"]["int8"]["weights"] > 0
        if kernels:
            assert made.report.row("rms_norm").status == "on"
            assert "Linear8bitLt" in made.report.row("lora_linear").reason
        found[name] = made.model
    for number, name in enumerate(n for n, p in theirs.named_parameters() if p.requires_grad):
        value = torch.randn(theirs.get_parameter(name).shape, generator=torch.manual_seed(number))
        for model in (theirs, *found.values()):
            model.get_parameter(name).data = value.clone() / 8
    for is_training in (True, False, True):  # an evaluation rounds its inputs, too
        losses = {}
        for name, model in (("theirs", theirs), *found.items()):
            model.train(is_training).zero_grad()
            losses[name] = model(input_ids=ids, labels=ids).loss
            losses[name].backward()
        assert losses["plain"] == losses["theirs"]
        torch.testing.assert_close(losses["kernels"], losses["theirs"], rtol=1e-4, atol=0)
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(found["plain"].get_parameter(name).grad, parameter.grad), name
                ours = found["kernels"].get_parameter(name).grad
                size = parameter.grad.abs().max().item()
                torch.testing.assert_close(ours, parameter.grad, rtol=2e-2, atol=2e-2 * size)


@pytest.mark.parametrize(("quantize", "head"), [("nf4", False), ("nf4", True), ("int8", False)])
def test_what_stays_in_16_bits_is_what_transformers_is_told_to_leave(quantize, head, tiny_llama):
    ids = torch.arange(18).reshape(2, 9)
    kind = {"load_in_8bit": True}
    if quantize == "nf4":
        kind = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        kind |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    left = ["o_proj", "model.layers.0.mlp", *([] if head else ["lm_head"])]
    theirs = AutoModelForCausalLM.from_pretrained(
        tiny_llama,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(**kind, llm_int8_skip_modules=left),
        attn_implementation="sdpa",
    )
    theirs = get_peft_model(theirs, LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj"]))
    lora = LoraOptions(
        r=4,
        target_modules=["q_proj"],
        quantize=quantize,
        quantize_skip=["o_proj", "layers.0.mlp"],
        quantize_head=head,
    )
    found = {
        kernels: built(tiny_llama, "float32", kernels=kernels, attention="sdpa", lora=lora)
        for kernels in (False, True)
    }
    assert found[True].report.row("linear_cross_entropy").status == "on"
    # Outside training bitsandbytes multiplies in bf16 where a processor has such products.
    models = [theirs.train(), *(each.model.train() for each in found.values())]
    for number, name in enumerate(n for n, p in theirs.named_parameters() if p.requires_grad):
        value = torch.randn(theirs.get_parameter(name).shape, generator=torch.manual_seed(number))
        for model in models:
            model.get_parameter(name).data = value.clone() / 8
    losses = [model(input_ids=ids, labels=ids).loss for model in models]
    for loss in losses:
        loss.backward()
    for loss in losses[1:]:
        # Sums of up to 128 products in fp32 (6e-8 each), in the order that kernels take, or threads
        # by where in memory the two models happen to lie. A layer more in 4 bits is 1e-3 away.
        torch.testing.assert_close(loss, losses[0], rtol=1e-5, atol=0)
    for name, parameter in theirs.named_parameters():
        for model in models[1:] if parameter.requires_grad else ():
            size = parameter.grad.abs().max().item()
            # int8 rounds the inputs of its products, where a last bit may be a code
            bound = 2e-2 if quantize == "int8" else 1e-4
            ours = model.get_parameter(name).grad
            torch.testing.assert_close(ours, parameter.grad, rtol=bound, atol=bound * size)


def test_a_layer_to_leave_that_is_none_is_refused_and_so_is_a_head_that_is_the_embedding(
    tiny_llama, tiny_qwen2
):
    with pytest.raises(ModelError, match="no linear layer of the model has out_proj") as refused:
        built(tiny_llama, lora=LoraOptions(quantize="nf4", quantize_skip=["o_proj", "out_proj"]))
    assert (refused.value.where, "o_proj" in refused.value.fix) == ("lora.quantize_skip", True)
    with pytest.raises(RecipeError, match="the output layer is the embedding"):
        built(tiny_qwen2, lora=LoraOptions(quantize="nf4", quantize_head=True))
