"""Adapters over a base in fp8, emulated on a CPU: against plain torch on the same numbers."""

import copy
import math

import lab
import pytest
import torch
from lora.plain_fp8 import PlainFp8
from tiny import make_qwen2
from torch import nn

from trainkit.errors import ModelError, RecipeError
from trainkit.kernels.lora.function import lora_linear, lora_qkv
from trainkit.kernels.lora.mlp import lora_mlp
from trainkit.kernels.lora.products import Projection
from trainkit.lora import LoraOptions
from trainkit.lora.quant import refuse_unfit_device
from trainkit.models.fp8.base import PRODUCT_LIMIT, Fp8Linear, describe_fp8, quantize_to_fp8
from trainkit.models.fp8.decide import Fp8Setup
from trainkit.models.linears import count_parameters, kind_of
from trainkit.options import Fp8Options

BF16 = torch.bfloat16


def layer(n, k, seed, *, bias=True):
    torch.manual_seed(seed)
    linear = nn.Linear(k, n, bias=bias).to(BF16).requires_grad_(False)
    return linear, Fp8Linear(linear, torch.device("cpu"))


def projection(packed, lora_rank=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n, k = packed.out_features, packed.in_features
    a = torch.randn(lora_rank, k, generator=generator) * k**-0.5
    b = torch.randn(n, lora_rank, generator=generator) * 0.3
    weight, unpack = packed.weight, packed.reader()
    return Projection(weight, packed.bias, a.requires_grad_(), b.requires_grad_(), 2.0, unpack)


def relative(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def test_one_layer_against_plain_torch():
    linear, packed = layer(48, 32, 0)
    x = torch.randn(2, 5, 32).to(BF16)
    p = projection(packed)
    ours, wanted = x.clone().requires_grad_(), x.double().requires_grad_()
    a, b = (each.detach().double().requires_grad_() for each in (p.lora_a, p.lora_b))
    y = lora_linear(ours, p)
    rows = wanted.view(-1, 32)
    want = PlainFp8.apply(rows, linear.weight, linear.bias) + (rows @ a.t() @ b.t()) * 2
    dy = torch.randn(y.shape).to(BF16)
    y.backward(dy)
    want.backward(dy.double().view(-1, 48))
    # bf16 results of the same codes: a few roundings of 2^-9.
    for found, exact in (
        (y.view(-1, 48), want),
        (ours.grad, wanted.grad),
        (p.lora_a.grad, a.grad),
        (p.lora_b.grad, b.grad),
    ):
        assert relative(found, exact) < 2**-7
    assert relative(y.view(-1, 48) - rows.detach() @ a.t() @ b.t() * 2, linear(x).view(-1, 48)) < (
        PRODUCT_LIMIT
    )


def test_outlier_channels_and_large_activations_over_a_base_in_fp8():
    """A thousandfold channel, and one number 10^4 times the rest of its token: base and adapter."""
    linear, _ = layer(128, 256, 0)
    linear.weight.data[:, :2] /= 1000
    packed = Fp8Linear(linear, torch.device("cpu"))
    p = projection(packed)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    x[:, :2] *= 1000
    x[5, 9] = 1e4
    x = x.to(BF16).requires_grad_()
    dy = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).to(BF16)
    y = lora_linear(x, p)
    y.backward(dy)
    wide, weight = x.detach().double(), linear.weight.double()
    a, b = p.lora_a.detach().double(), p.lora_b.detach().double()
    exact = wide @ weight.t() + linear.bias.double() + wide @ a.t() @ b.t() * 2
    size = (wide.square() @ weight.square().t()).sqrt() + (wide @ a.t() @ b.t() * 2).abs()
    assert ((y - exact).norm() / size.norm()).item() < PRODUCT_LIMIT
    dx = dy.double() @ weight + dy.double() @ b @ a * 2
    assert relative(x.grad, dx) < PRODUCT_LIMIT
    assert relative(p.lora_a.grad, (dy.double() @ b).t() @ wide * 2) < 2**-6
    assert relative(p.lora_b.grad, dy.double().t() @ (wide @ a.t()) * 2) < 2**-6


def mean_error(function, linears, packed, x):
    """Of outputs and of the gradients of x, A and B: fp8 against the bf16 layers."""
    results = []
    for layers in (linears, packed):
        projections = [
            projection(each, seed=i)
            if isinstance(each, Fp8Linear)
            else Projection(each.weight, each.bias, *_factors(each, i), 2.0)
            for i, each in enumerate(layers)
        ]
        leaf = x.clone().requires_grad_()
        out = function(leaf, *projections)
        outs = out if isinstance(out, tuple) else (out,)
        torch.manual_seed(9)
        torch.autograd.backward(outs, [torch.randn_like(each) for each in outs])
        factors = [t.grad for p in projections for t in (p.lora_a, p.lora_b)]
        results.append([*outs, leaf.grad, *factors])
    return [relative(found, exact) for exact, found in zip(*results, strict=True)]


def _factors(linear, seed):
    made = projection(Fp8Linear(linear, torch.device("cpu")), seed=seed)
    return made.lora_a, made.lora_b


@pytest.mark.parametrize("kind", ["qkv", "mlp", "packed mlp", "qkv with a plain one"])
def test_blocks_are_within_the_formats_error_of_bf16(kind):
    shapes = {
        "qkv": [(64, 64), (32, 64), (16, 64)],
        "mlp": [(96, 64), (96, 64), (64, 96)],
        "packed mlp": [(192, 64), (64, 96)],
        "qkv with a plain one": [(64, 64), (32, 64), (16, 64)],
    }[kind]
    linears, packed = zip(
        *(layer(n, k, i, bias=False) for i, (n, k) in enumerate(shapes)), strict=True
    )
    packed = list(packed)
    if "plain" in kind:
        packed[1] = linears[1]
    function = {
        "mlp": lora_mlp,
        "packed mlp": lambda x, first, down: lora_mlp(x, first, None, down),
    }.get(kind, lora_qkv)
    errors = mean_error(function, linears, packed, torch.randn(3, 11, 64).to(BF16))
    # Up to three products behind each other, whose errors are independent.
    assert max(errors) < math.sqrt(3) * PRODUCT_LIMIT
    assert max(errors) > 0.005


def built(folder, *, kernels=True, checkpointing=False, dtype="bfloat16", **lora):
    torch.manual_seed(0)
    options = LoraOptions(r=4, init_lora_weights=False, **lora)
    made = lab.built(folder, dtype, lora=options, quantize="fp8", kernels=kernels)
    model = made.model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return made, model


def gradients(model, ids):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


IDS = torch.arange(18).reshape(2, 9)


def test_model_is_fused_counted_and_described(tiny_qwen2):
    made, model = built(tiny_qwen2)
    assert {row.op: row.status for row in made.report.rows}["lora_mlp"] == "on"
    packed = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    assert len(packed) == 14
    assert {kind_of(module).name for module in packed} == {"fp8"}
    assert all(module.weight.dtype == torch.uint8 for module in packed)
    assert not any(p.dtype.itemsize == 1 for p in model.parameters() if p.requires_grad)
    assert made.adapters["storage"]["fp8"]["weights"] == sum(m.weight.numel() for m in packed)
    assert count_parameters(model)[1] > sum(m.weight.numel() for m in packed)
    record = made.check_kernels({"input_ids": IDS, "labels": IDS})
    assert sum(row["number"] for row in record["fp8"]["layers"]) == 14
    for row in record["fp8"]["layers"]:
        assert 0.01 < row["forward_error"] < record["fp8"]["product_limit"]


def test_fused_plain_and_checkpointed_train_alike(tiny_qwen2):
    loss, grads = gradients(built(tiny_qwen2)[1], IDS)
    again, same = gradients(built(tiny_qwen2, checkpointing=True)[1], IDS)
    assert torch.equal(loss, again)
    assert all(torch.equal(grads[name], same[name]) for name in grads)
    plain_loss, plain = gradients(built(tiny_qwen2, kernels=False)[1], IDS)
    assert relative(loss, plain_loss) < 2**-6
    # Gradients of random weights decorrelate by rounding alone, in bf16 as well: layers are
    # compared one by one above.
    assert all(grad.isfinite().all() and grad.any() for grad in plain.values())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("quantize", ["fp8", None])
def test_a_new_adapter_changes_no_bit_of_its_base(quantize, device, tmp_path):
    """A reference is the base with the adapter off: what rounding says of both must be the same."""
    size = {"hidden_size": 1024, "intermediate_size": 2816} if device == "cuda" else {}
    make_qwen2(256, **size).save_pretrained(tmp_path / "base")
    options = LoraOptions(r=16, quantize=quantize)
    given = {"quantize": quantize, "device": torch.device(device), "kernels": True}
    model = lab.built(tmp_path / "base", "bfloat16", lora=options, **given).model
    ids = torch.randint(250, (1, 512), device=device, generator=torch.Generator(device))
    logits = model(input_ids=ids, use_cache=False).logits
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, logits)


def test_scales_survive_a_cast_and_a_copy_of_the_model(tiny_qwen2):
    model = built(tiny_qwen2)[1]
    copied = copy.deepcopy(model).to(torch.float16)
    for one, two in zip(model.modules(), copied.modules(), strict=True):
        if isinstance(one, Fp8Linear):
            read = [each.reader()(each.weight, torch.float32) for each in (one, two)]
            assert torch.equal(*read)


def test_weights_that_are_no_numbers_are_named():
    model = nn.Sequential(nn.Linear(16, 16))
    with torch.no_grad():
        model[0].weight[3, 3] = float("nan")
    with pytest.raises(ModelError, match="0 in fp8 is off by"):
        quantize_to_fp8(model, torch.device("cpu"))


def test_shapes_that_do_not_fit_keep_their_bits():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 24))
    quantize_to_fp8(model, torch.device("cpu"))
    assert [type(each) for each in model] == [Fp8Linear, nn.Linear]
    assert describe_fp8(model)["layers"][0]["number"] == 1
    with pytest.raises(ModelError, match="multiples of 16"):
        quantize_to_fp8(nn.Sequential(nn.Linear(16, 24)), torch.device("cpu"))


def test_refused_where_it_cannot_run(monkeypatch):
    refuse_unfit_device("fp8", torch.device("cpu"))
    from trainkit.kernels.fp8 import function

    monkeypatch.setattr(function, "_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "an A100")
    with pytest.raises(RecipeError, match=r"capability 8\.9 .* an A100 has 8\.0"):
        refuse_unfit_device("fp8", torch.device("cuda", 0))
    refuse_unfit_device("nf4", torch.device("cuda", 0))


def within(folder, budget, *, kernels=True, quantize="fp8", **lora):
    """As a recipe builds it: the base's layers chosen within a budget."""
    torch.manual_seed(0)
    rows = ({"input_ids": IDS[:1], "labels": IDS[:1]} for _ in range(1))
    made = lab.built(
        folder,
        lora=LoraOptions(r=4, init_lora_weights=False, **lora),
        quantize=quantize,
        kernels=kernels,
        fp8=None if quantize is None else Fp8Setup(Fp8Options(loss_budget=budget), rows, 64),
    )
    return made, made.model.train()


def test_a_module_that_is_trained_whole_is_recorded_as_in_16_bits(tiny_qwen2):
    made, model = within(
        tiny_qwen2, "all", target_modules=["q_proj"], modules_to_save=["down_proj"]
    )
    assert not any("down_proj" in name for name in made.fp8_base.directions)
    assert made.fp8_base.kept["trained whole (modules_to_save)"] == 2
    packed = {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    assert len(packed) == len(made.fp8_base.directions) == 12
    assert not any("down_proj" in name for name in packed)


@pytest.mark.parametrize("kernels", [True, False])
def test_layers_over_the_budget_keep_16_bits_and_run_backward_in_fp8(kernels, tiny_qwen2):
    made, model = within(tiny_qwen2, 0.0, kernels=kernels)
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())
    assert {group.runs for group in made.fp8_base.groups} == {"backward in fp8"}
    loss, grads = gradients(model, IDS)
    _, plain = within(tiny_qwen2, 0.0, kernels=kernels, quantize=None)
    plain_loss, wanted = gradients(plain, IDS)
    assert torch.equal(loss, plain_loss)
    last = [name for name in grads if "layers.1.mlp.down_proj" in name]
    assert len(last) == 2
    assert all(torch.equal(grads[name], wanted[name]) for name in last)  # nothing rounded so far
    others = [relative(grads[name], wanted[name]) for name in grads if name not in last]
    assert 1e-3 < max(others) < 0.5


def test_a_budget_between_mixes_layers_of_both_kinds(tiny_qwen2):
    made, model = within(tiny_qwen2, 1e-6)
    packed = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    runs = {name for group in made.fp8_base.groups if group.runs == "fp8" for name in group.layers}
    assert 0 < len(packed) == len(runs) < 14
    loss, grads = gradients(model, IDS)
    assert loss.isfinite()
    assert all(grad.isfinite().all() and grad.any() for grad in grads.values())
    record = made.check_kernels({"input_ids": IDS, "labels": IDS})["fp8"]
    assert record["loss_increase"] <= 1e-6 * record["loss"]
    assert sum(row["number"] for row in record["layers"]) == len(packed)
