"""Layers that train in fp8, emulated on a CPU: against plain torch on the same numbers."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from tiny import make_qwen2
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from trainkit.kernels.fp8.reference import FP8
from trainkit.models.fp8.base import PRODUCT_LIMIT
from trainkit.models.fp8.trained import KeptCodes, TrainedFp8, swap_in
from trainkit.models.patch import patch_kernels
from trainkit.models.shared_input import apply_linears
from trainkit.train.callbacks import KeepFp8Codes

BF16 = torch.bfloat16
BOTH, BACKWARD, FORWARD = (True, True), (False, True), (True, False)


def rounded(rows, *, keeps_largest=False):
    """Rows in e4m3 with a scale each, and back, by torch alone; and those scales."""
    largest = rows.double().abs().amax(-1, keepdim=True)
    scale = largest / 256 if keeps_largest else torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return (rows.double() / scale).float().to(FP8).double() * scale, scale


class PlainFp8(torch.autograd.Function):
    """The three products in fp64 of the numbers that the tensor cores see."""

    @staticmethod
    def forward(ctx, x, weight, forward, backward):
        ctx.save_for_backward(x, weight)
        ctx.backward_in_fp8 = backward
        if not forward:
            return x.double() @ weight.double().t()
        return rounded(x, keeps_largest=True)[0] @ rounded(weight)[0].t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        if not ctx.backward_in_fp8:
            return dy @ weight.double(), dy.t() @ x.double(), None, None
        x_codes, x_scale = rounded(x, keeps_largest=True)
        w_codes, w_scale = rounded(weight)
        dy_codes, dy_scale = rounded(dy * w_scale.t())
        dx = dy_codes @ (w_codes / w_scale)
        if x.shape[1] >= 2 * dy.shape[1]:
            dw = rounded((dy * x_scale).t())[0] @ (x_codes / x_scale)
        else:  # x is quantised again instead
            dw = (dy_codes / dy_scale / w_scale.t()).t() @ rounded((x_codes * dy_scale).t())[0].t()
        return dx, dw, None, None


def relative(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("directions", [BOTH, BACKWARD, FORWARD])
@pytest.mark.parametrize("num_rows", [32, 21])
@pytest.mark.parametrize("width", [48, 128])
def test_one_layer_against_plain_torch(directions, num_rows, width):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(width, 64)).to(BF16)
    x = torch.randn(num_rows, width).to(BF16).requires_grad_()
    dy = torch.randn(num_rows, 64).to(BF16)
    swap_in(layer, {"0": directions})
    y = layer(x)
    y.backward(dy)
    other = x.detach().clone().requires_grad_()
    weight = layer[0].weight.detach().clone().requires_grad_()
    exact = PlainFp8.apply(other, weight, *directions) + layer[0].bias.detach().double()
    exact.backward(dy.double())
    # bf16 results of the same codes: half a unit in the last place, and fp32 sums of 64.
    for found, wanted in (
        (y, exact),
        (x.grad, other.grad),
        (layer[0].weight.grad, weight.grad),
        (layer[0].bias.grad, dy.double().sum(0)),
    ):
        assert relative(found, wanted) < 2**-8


@pytest.mark.parametrize("middle", [BOTH, BACKWARD, FORWARD, None])
def test_layers_of_one_input_run_as_one_and_as_alone(middle):
    """Alone each gives its own dx, which autograd adds; together one product does."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(64, n, bias=n == 32) for n in (64, 32, 16)).to(BF16)
    chosen = {"0": BOTH, "1": middle, "2": BACKWARD}
    swap_in(layers, {name: each for name, each in chosen.items() if each})
    x = torch.randn(3, 7, 64).to(BF16)
    results = []
    for run in (lambda leaf: apply_linears(leaf, layers), lambda leaf: [m(leaf) for m in layers]):
        leaf = x.clone().requires_grad_()
        outputs = run(leaf)
        sum(out.float().square().sum() for out in outputs).backward()
        results.append([*outputs, leaf.grad, *(p.grad.clone() for p in layers.parameters())])
        layers.zero_grad()
    together, alone = results
    for index, (one, other) in enumerate(zip(together, alone, strict=True)):
        if index < 3:
            assert torch.equal(one, other)
        else:  # one scale for a row of all three gradients
            assert relative(one, other) < PRODUCT_LIMIT


def losses(model, ids):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), grads


IDS = torch.arange(36).reshape(2, 18) % 29


def fp8_model(kernels=True, dtype=BF16, **sizes):
    model = make_qwen2(32, **sizes).to(dtype).train()
    if kernels:
        patch_kernels(model)
    names = [
        name for name, m in model.named_modules() if type(m) is nn.Linear and name != "lm_head"
    ]
    return model, swap_in(model, dict.fromkeys(names, BOTH))


def test_a_model_evaluates_and_reverts_to_what_it_was():
    plain = make_qwen2(32).to(BF16)
    model, swaps = fp8_model(kernels=False)
    with torch.no_grad():
        assert torch.equal(model.eval()(IDS).logits, plain.eval()(IDS).logits)
        assert not torch.equal(model.train()(IDS).logits, plain(IDS).logits)
    assert {n: p.shape for n, p in model.state_dict().items()} == {
        n: p.shape for n, p in plain.state_dict().items()
    }
    copied = copy.deepcopy(model)
    assert sum(isinstance(each, TrainedFp8) for each in copied.modules()) == 14
    swaps.revert()
    assert not any(isinstance(each, TrainedFp8) for each in model.modules())


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_give_the_same(reentrant):
    model, _ = fp8_model()
    loss, grads = losses(model, IDS)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again, same = losses(model, IDS)
    assert torch.equal(loss, again)
    assert all(torch.equal(grads[name], same[name]) for name in grads)


def test_gradients_are_as_far_from_bf16_as_rounding_explains():
    model, swaps = fp8_model(kernels=False, num_hidden_layers=1)
    loss, grads = losses(model, IDS)
    swaps.revert()
    plain_loss, plain = losses(model, IDS)
    assert abs(loss - plain_loss) < 0.05
    # Seven products forth and seven back, each off by no more than the limit, independently.
    for name, grad in grads.items():
        assert relative(grad, plain[name]) < math.sqrt(14) * PRODUCT_LIMIT, name


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_dtypes_and_autocast(dtype):
    model, _ = fp8_model(dtype=dtype)
    _, grads = losses(model, IDS)
    assert all(grad.dtype == dtype and grad.isfinite().all() for grad in grads.values())
    if dtype == torch.float32:
        with torch.autocast("cpu", BF16):
            _, grads = losses(model, IDS)
        assert all(grad.dtype == dtype and grad.isfinite().all() for grad in grads.values())


def test_codes_are_made_once_until_weights_change():
    model, _ = fp8_model()
    loss, grads = losses(model, IDS)
    kept = KeptCodes(model)
    layer = next(each for each in model.modules() if isinstance(each, TrainedFp8))
    same, alike = losses(model, IDS)
    assert torch.equal(loss, same)
    assert all(torch.equal(grads[name], alike[name]) for name in grads)
    first = layer.codes(layer.weight)[0]
    assert layer.codes(layer.weight)[0] is first
    layer.weight.data.mul_(-1)  # as optimizers and engines write: no version counts it
    assert layer.codes(layer.weight)[0] is first
    kept.weights_changed()
    assert torch.equal(layer.codes(layer.weight)[0].float(), -first.float())
    kept.stop()
    assert layer.kept is None
    assert layer.codes(layer.weight)[0] is not layer.codes(layer.weight)[0]


class _Told(TrainerCallback):
    """Tells a hook what the loop tells it."""

    def __init__(self, model, hook):
        self.loop, self.hook = SimpleNamespace(model=model), hook

    def on_train_begin(self, *_, **__):
        self.hook.begin(self.loop, None)

    def on_pre_optimizer_step(self, *_, **__):
        self.hook.on_pre_optimizer_step(self.loop)

    def on_step_end(self, *_, **__):
        self.hook.on_step_end(self.loop)

    def on_train_end(self, *_, **__):
        self.hook.on_train_end(self.loop)


def test_in_training_codes_are_those_of_the_weights_in_every_step(tmp_path):
    """Bit for bit the run that quantises its weights at each use: none is left from a step ago."""
    found = []
    for callbacks in (lambda model: [_Told(model, KeepFp8Codes())], lambda model: []):
        model, _ = fp8_model()
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, learning_rate=1e-2, use_cpu=True, save_strategy="no",
            per_device_train_batch_size=1, gradient_accumulation_steps=2, report_to="none",
            logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in IDS] * 3
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks(model))
        trainer.train()
        found.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def test_what_is_kept_for_the_backward_pass_is_one_byte_a_number():
    """The input's codes and scales, and the weight itself: no gathered copy of anything."""
    layer = nn.Sequential(nn.Linear(64, 96)).to(BF16)
    swap_in(layer, {"0": BOTH})
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(40, 64).to(BF16))
    weight = layer[0].weight
    others = [each for each in saved if each.data_ptr() != weight.data_ptr()]
    assert sum(each.numel() * each.element_size() for each in others) == 40 * 64 + 40 * 4
    assert len(saved) == 3


@pytest.mark.parametrize("skipped", [None, "down_proj", "gate_proj"])
def test_a_feed_forward_block_keeps_its_input_and_its_gates(skipped):
    """As one function: no h, neither in 16 bits nor in 8. With a plain layer in it, one by one."""
    model = make_qwen2(32).to(BF16).train()
    patch_kernels(model)
    block = model.model.layers[0].mlp
    roles = ("gate_proj", "up_proj", "down_proj")
    swap_in(block, {role: BOTH for role in roles if role != skipped})
    x = torch.randn(2, 8, block.gate_proj.in_features).to(BF16).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = block(x)
    weights = [layer.weight.data_ptr() for layer in block.children() if hasattr(layer, "weight")]
    size = sum(t.numel() * t.element_size() for t in saved if t.data_ptr() not in weights)
    width, tokens = block.gate_proj.out_features, 16
    alone = tokens * (x.shape[-1] + 4) + 2 * tokens * 2 * width + 4 * tokens
    assert (size == alone) is (skipped is None)
    y.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in (x, *block.parameters()))


def test_rows_of_a_batch_do_not_meet():
    """A scale is a token's own: what one document holds does not round another one otherwise."""
    model, _ = fp8_model()
    other = IDS.clone()
    other[1] = torch.flip(other[1], (0,))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits[0], model(other).logits[0])


def test_outlier_channels_and_large_activations():
    """A thousandfold channel, and one number 10^4 times the rest of its token."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(256, 128, bias=False)).to(BF16)
    x = torch.randn(64, 256)
    x[:, :2] *= 1000
    x[5, 9] = 1e4
    layer[0].weight.data[:, :2] /= 1000
    x = x.to(BF16).requires_grad_()
    dy = torch.randn(64, 128).to(BF16)
    swap_in(layer, {"0": BOTH})
    y = layer(x)
    y.backward(dy)
    weight = layer[0].weight
    exact = (x.double() @ weight.double().t(), dy.double() @ weight.double())
    squares = (x.double().square() @ weight.double().square().t()).sqrt()
    assert ((y - exact[0]).norm() / squares.norm()).item() < PRODUCT_LIMIT
    assert relative(x.grad, exact[1]) < PRODUCT_LIMIT
    assert relative(weight.grad, dy.double().t() @ x.double()) < PRODUCT_LIMIT


def test_steps_at_ten_times_the_rate_do_not_diverge():
    """A learnable task at 1e-2, where 1e-3 would do: fp8 ends where bf16 does."""
    ends = []
    for directions in ({}, {"0": BOTH, "2": BOTH}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)).train()
        target = nn.Linear(32, 32)
        swap_in(model, directions)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(400):
            x = torch.randn(32, 32)
            loss = (model(x) - target(x).detach()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        ends.append(sum(losses[-100:]) / 100)
        assert max(losses[200:]) < losses[0]
    assert ends[1] < ends[0] + 0.01 * losses[0]
