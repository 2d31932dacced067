"""Adapters on a 4-bit base: against a plain model that holds the dequantised weights."""

import dataclasses

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from families.family_models import DEVICE, exact, excess_errors, like_model, make, make_batch, run
from transformers import AutoModelForCausalLM

from trainkit.lora import LoraOptions, attach, fuse, quantization_config
from trainkit.models.linears import LINEARS, count_parameters
from trainkit.models.patch import patch_kernels
from trainkit.train.log import training_flops_per_token


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    make("qwen2").save_pretrained(path)
    return path


def load_quantized(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization_config("nf4", dtype), dtype=dtype
    ).train()


def with_dequantised_weights(quantized, dtype):
    """The plain model whose weights are exactly those that the 4-bit ones stand for."""
    plain = make("qwen2").to(dtype)
    values = {}
    for name, module in quantized.named_modules():
        if isinstance(module, Linear4bit):
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
            values[f"{name}.weight"] = weight.view(module.out_features, module.in_features)
    left = {k: v for k, v in quantized.state_dict().items() if k in plain.state_dict()}
    missing = plain.load_state_dict({**left, **values}, strict=False)
    assert not missing.missing_keys
    assert len(values) == 14
    return plain


def adapt(model):
    model = attach(model, LoraOptions(r=4))
    torch.manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_A" in key:
                parameter.normal_(std=0.1)
            if "lora_B" in key:
                parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_loss_and_gradients_equal_a_plain_model_with_dequantised_weights(folder, dtype):
    quantized = load_quantized(folder, dtype)
    truth = run(exact(adapt(with_dequantised_weights(quantized, dtype))), make_batch("qwen2"))
    plain = run(adapt(with_dequantised_weights(quantized, dtype)), make_batch("qwen2"))
    model = adapt(quantized)
    patch_kernels(model)
    report = fuse(model)
    assert report.row("lora_mlp").num_modules == 2
    assert report.row("lora_qkv").num_modules == 2
    found = run(model, make_batch("qwen2"))
    for results in (plain, found, truth):  # one number, whose error may happen to cancel
        results["loss"] = results["loss"].to(dtype)
    assert not excess_errors(plain, found, {key: truth[key] for key in plain})


def test_a_weight_is_unpacked_straight_into_the_dtype_and_once_a_use(folder, monkeypatch):
    model = adapt(load_quantized(folder, torch.bfloat16))
    patch_kernels(model)
    fuse(model)
    unpacked = []

    nf4 = LINEARS["nf4"]

    def counting(linear):
        unpack = nf4.unpacker(linear)

        def call(storage, dtype):
            weight = unpack(storage, dtype)
            unpacked.append(weight.dtype)
            assert weight.shape == (linear.out_features, linear.in_features)
            return weight

        return call

    table = {**LINEARS, "nf4": dataclasses.replace(nf4, unpacker=counting)}
    monkeypatch.setattr("trainkit.models.linears.LINEARS", table)
    model(**like_model(make_batch("qwen2"), model)).loss.backward()
    # 14 layers, forward and backward; the first layer's q, k, v see an input without gradient.
    assert len(unpacked) == 2 * 14 - 3
    assert set(unpacked) == {torch.bfloat16}


def test_nothing_of_the_base_is_upcast(folder):
    model = adapt(load_quantized(folder, torch.bfloat16))
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}  # packed weights are stored in bf16 for ZeRO-3
    trainable, total = count_parameters(model)
    assert total == sum(p.numel() for p in adapt(make("qwen2")).parameters())
    assert trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_flops_count_a_packed_weight_as_what_it_stands_for(folder):
    packed = training_flops_per_token(adapt(load_quantized(folder, torch.bfloat16)), 16)
    assert packed == training_flops_per_token(adapt(make("qwen2", dtype=torch.bfloat16)), 16)


def test_unpacking_to_another_dtype_makes_no_copy_in_between(folder):
    model = load_quantized(folder, torch.bfloat16)
    layer = next(m for m in model.modules() if isinstance(m, Linear4bit))
    weight = LINEARS["nf4"].unpacker(layer)(layer.weight, torch.float32)
    assert weight.dtype == torch.float32
    assert layer.weight.quant_state.dtype == torch.bfloat16  # the state itself is left alone
    assert torch.equal(
        weight.to(torch.bfloat16), LINEARS["nf4"].unpacker(layer)(layer.weight, torch.bfloat16)
    )


def test_the_adapter_reloads_on_a_four_bit_base(folder, tmp_path):
    model = adapt(load_quantized(folder, torch.float32)).eval()
    fuse(model)
    ids = make_batch("qwen2")["input_ids"].to(DEVICE)
    expected = model(input_ids=ids).logits
    model.save_pretrained(tmp_path)
    from trainkit.lora import load_adapter

    again = load_adapter(load_quantized(folder, torch.float32), tmp_path).eval()
    fuse(again)
    assert torch.equal(again(input_ids=ids).logits, expected)
